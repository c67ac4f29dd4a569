"""Producer sessions of a topic: one per producer name, epoch and connection.

    OPEN --> FAILED   a group could not be stored: it and all later ones of this epoch are refused
    OPEN, FAILED --> CLOSED   closed by its connection, or fenced by a newer epoch

Rule 33: a newer session of the same name is let in only when nothing that was queued under the old one can still land, so
that groups which are sent again never fall behind stale ones: `Producers.open` waits until the old session's groups are
confirmed or failed. A session that is alive on another connection, which is asked, gives way only to a higher epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import Callable, Iterator
from typing import Protocol

from magnetar.proto.errors import (
    MagnetarError,
    ProducerBusy,
    ProducerFenced,
    QuorumLost,
    TopicNotServed,
)

from ..dispatch.core.consumer import Peer
from .probing import probe

_log = logging.getLogger(__name__)

ReceiptFields = tuple[int, int, int, int, int]


class ProducerPort(Protocol):
    """What a listener implements for one session."""

    @property
    def peer(self) -> Peer:
        """Whose producer it is."""

    def receipts(self, rows: list[ReceiptFields]) -> None:
        """Groups that are durable, as the fields of a RECEIPT_ROW in sequence order; one call per wake-up."""

    def send_failed(self, sequence_id: int, error: MagnetarError) -> None:
        """The group that starts with `sequence_id` and all after it were not stored; called once per session."""

    def send_delayed(self, error: MagnetarError) -> None:
        """What was sent waits for this reason."""

    def producer_closed(self, error: MagnetarError) -> None:
        """The broker ended the session; if the error may pass, to be opened again where the topic is then."""


class SessionState(enum.Enum):
    """See the module docstring."""

    OPEN = "open"
    FAILED = "failed"
    CLOSED = "closed"


class ProducerSession:
    """One epoch of one producer."""

    __slots__ = ("_drained", "epoch", "name", "outstanding", "port", "rows", "state")

    def __init__(self, name: str, epoch: int, port: ProducerPort) -> None:
        self.name = name
        self.epoch = epoch
        self.port = port
        self.state = SessionState.OPEN
        # Receipt runs queued or appended, neither confirmed nor failed yet.
        self.outstanding = 0
        # Rows of this wake-up, collected by the topic.
        self.rows: list[ReceiptFields] = []
        self._drained: asyncio.Future[None] | None = (
            None  # resolved when `outstanding` is 0; None: nobody waits
        )

    def finished(self, runs: int) -> None:
        """`runs` were confirmed or failed."""
        self.outstanding -= runs
        if not self.outstanding and self._drained is not None:
            self._drained.set_result(None)
            self._drained = None

    async def drained(self, timeout_ms: int) -> bool:
        """True once nothing queued under this session can land any more; False if that takes longer than the timeout."""
        if self.outstanding:
            if self._drained is None:
                self._drained = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._drained], timeout=timeout_ms / 1000)
        return not self.outstanding

    def receipts(self, rows: list[ReceiptFields]) -> None:
        """Sends receipts. A port that fails costs its own producer only: it opens again, and sends again (rule 48)."""
        try:
            self.port.receipts(rows)
        except Exception as failure:
            _log.exception("producer %s: its receipts could not be sent, so that it is closed", self.name)
            self.close()
            with contextlib.suppress(Exception):
                self.port.producer_closed(TopicNotServed(f"receipts could not be sent: {failure!r}"))

    def delay(self, error: MagnetarError) -> None:
        """Tells the producer why it has no receipts yet, if it waits for any."""
        if self.outstanding and self.state is SessionState.OPEN:
            self.port.send_delayed(error)

    def fail(self, sequence_id: int, error: MagnetarError) -> None:
        """Tells the producer once; what it sends later in this epoch is dropped."""
        if self.state is SessionState.OPEN:
            self.state = SessionState.FAILED
            self.port.send_failed(sequence_id, error)

    def close(self) -> None:
        """Its connection ended, or it was closed: nothing more is taken, what is queued still lands."""
        self.state = SessionState.CLOSED


class Producers:
    """The sessions of one topic by producer name."""

    def __init__(self, topic: str, drain_timeout_ms: int) -> None:
        """`drain_timeout_ms`: how long a newer session of a name waits for the older one's groups."""
        self._topic = topic
        self._drain_timeout_ms = drain_timeout_ms
        self._by_name: dict[str, ProducerSession] = {}
        self._closed: MagnetarError | None = None

    def __len__(self) -> int:
        return sum(session.state is not SessionState.CLOSED for session in self._by_name.values())

    def __iter__(self) -> Iterator[ProducerSession]:
        return iter(list(self._by_name.values()))

    async def open(self, name: str, epoch: int, new_port: Callable[[int], ProducerPort]) -> ProducerSession:
        """A session under `name`; `new_port` gets its epoch. Raises ProducerBusy, QuorumLost; waits as rule 33 wants."""
        # Several may wait for one old session: the first of them is the old session of the next.
        while (old := self._by_name.get(name)) is not None:
            if old.state is not SessionState.CLOSED and epoch <= old.epoch:
                await probe([old.port.peer], new_port(epoch).peer)
                if self._by_name.get(name) is not old:
                    continue
            if old.state is not SessionState.CLOSED:
                if epoch <= old.epoch:
                    raise self._closed or ProducerBusy(
                        f"producer name {name!r} is in use on topic {self._topic}; "
                        "choose another name or close the other producer"
                    )
                old.close()
                old.port.producer_closed(
                    ProducerFenced(f"producer {name!r} was opened again with epoch {epoch}")
                )
            if not await old.drained(self._drain_timeout_ms):
                raise QuorumLost(
                    f"what producer {name!r} of topic {self._topic} sent under epoch {old.epoch} was neither stored nor "
                    f"refused within producer_drain_timeout_ms={self._drain_timeout_ms}: look whether enough bookies can be "
                    "written to, and try again; a producer of another name does not wait"
                )
            epoch = max(epoch, old.epoch + 1)
            if self._by_name.get(name) is old:
                break
        if self._closed is not None:
            raise self._closed
        session = self._by_name[name] = ProducerSession(name, epoch, new_port(epoch))
        return session

    def forget(self, session: ProducerSession) -> None:
        """Closes the session; what it queued still lands, and its name is free after that."""
        session.close()
        if not session.outstanding and self._by_name.get(session.name) is session:
            del self._by_name[session.name]

    def sweep(self) -> None:
        """Forgets closed sessions of which nothing is queued any more; called when groups of one are done."""
        for name in [
            name
            for name, session in self._by_name.items()
            if session.state is SessionState.CLOSED and not session.outstanding
        ]:
            del self._by_name[name]

    def stop(self, error: MagnetarError) -> None:
        """Nothing more is taken from anybody, nor anybody let in; what is queued still lands and is receipted."""
        self._closed = error if error.retryable else TopicNotServed(error.message)
        for session in self._by_name.values():
            if session.state is SessionState.OPEN:
                session.state = SessionState.FAILED

    def close_all(self, error: MagnetarError) -> None:
        """The topic ends here: every producer has to look it up again."""
        self.stop(error)
        for session in list(self._by_name.values()):
            if session.state is not SessionState.CLOSED:
                session.close()
                session.port.producer_closed(error)
        self._by_name.clear()

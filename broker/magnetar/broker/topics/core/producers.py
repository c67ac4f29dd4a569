"""The producers of one topic, by name; without I/O.

A session is one epoch of a name on one connection. Whoever wants a name has a `Claim`, and calls `open` until it has a
session; what `open` says to do first depends on the session that the name has:

    its session             a claim with a higher epoch       a claim with the same or a lower epoch
    none                    a new session                     a new session
    OPEN, FAILED            it is fenced, then as CLOSED      Ask its connection; if it is still there: ProducerBusy
    CLOSED, groups queued   Wait for them; too long: QuorumLost
    CLOSED                  a new session, whose epoch is higher

    OPEN --> FAILED   a group could not be stored: it and all later ones of this epoch are refused
    OPEN, FAILED --> CLOSED   closed by its connection, or fenced by a newer epoch

Rule 33: a newer session of a name is let in only when nothing that was queued under the old one can still land, so that
groups which are sent again never fall behind stale ones. A name outlives its connection for that: it is forgotten when its
session is closed and nothing of it is queued any more.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from magnetar.proto.errors import (
    MagnetarError,
    ProducerBusy,
    ProducerFenced,
    QuorumLost,
    TopicNotServed,
)

from ...dispatch.core.consumer import Peer

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

    __slots__ = ("epoch", "name", "outstanding", "port", "rows", "state", "when_drained")

    def __init__(self, name: str, epoch: int, port: ProducerPort) -> None:
        self.name = name
        self.epoch = epoch
        self.port = port
        self.state = SessionState.OPEN
        # Receipt runs queued or appended, neither confirmed nor failed yet.
        self.outstanding = 0
        # Rows of this wake-up, collected by the topic.
        self.rows: list[ReceiptFields] = []
        # Called once when `outstanding` is 0: nothing that was queued under this session can land any more.
        self.when_drained: list[Callable[[], None]] = []

    def receipts(self, rows: list[ReceiptFields]) -> None:
        """Sends receipts. A port that fails costs its own producer only: it opens again, and sends again (rule 48)."""
        try:
            self.port.receipts(rows)
        except Exception as failure:
            _log.exception("producer %s: its receipts could not be sent, so that it is closed", self.name)
            self.end(TopicNotServed(f"receipts could not be sent: {failure!r}"))

    def delay(self, error: MagnetarError) -> None:
        """Tells the producer why it has no receipts yet, if it waits for any."""
        if self.outstanding and self.state is SessionState.OPEN:
            self.port.send_delayed(error)

    def fail(self, sequence_id: int, error: MagnetarError) -> None:
        """Tells the producer once; what it sends later in this epoch is dropped."""
        if self.state is SessionState.OPEN:
            self.state = SessionState.FAILED
            try:
                self.port.send_failed(sequence_id, error)
            except Exception:  # as in `end`
                _log.exception("producer %s does not learn that its messages failed", self.name)

    def close(self) -> None:
        """Its connection ended, or it was closed: nothing more is taken, what is queued still lands."""
        self.state = SessionState.CLOSED

    def end(self, error: MagnetarError) -> None:
        """The broker closes it, and says why. A port that fails keeps neither the others nor the topic from ending."""
        self.close()
        try:
            self.port.producer_closed(error)
        except Exception:
            _log.exception("producer %s does not learn that it was closed", self.name)


@dataclass(slots=True)
class Claim:
    """Somebody wants to be the producer of a name."""

    name: str
    epoch: int  # rises above that of every session that was in the way
    asked: ProducerSession | None = None  # the last one whose connection was asked
    awaited: ProducerSession | None = None  # the last one whose groups were waited for


class Ask(NamedTuple):
    """The session's connection may be dead: ask it, then `open` again."""

    session: ProducerSession


class Wait(NamedTuple):
    """Wait until the session is drained, at most `drain_timeout_ms`, then `open` again."""

    session: ProducerSession


class Producers:
    """The sessions of one topic by producer name."""

    def __init__(self, topic: str, drain_timeout_ms: int) -> None:
        """`drain_timeout_ms`: how long a newer session of a name waits for the older one's groups."""
        self._topic = topic
        self.drain_timeout_ms = drain_timeout_ms
        self._by_name: dict[str, ProducerSession] = {}
        self.stopped: MagnetarError | None = None  # why nobody is let in any more

    def __len__(self) -> int:
        return sum(session.state is not SessionState.CLOSED for session in self._by_name.values())

    def __iter__(self) -> Iterator[ProducerSession]:
        return iter(list(self._by_name.values()))

    def open(self, claim: Claim, new_port: Callable[[int], ProducerPort]) -> ProducerSession | Ask | Wait:
        """See the module docstring; `new_port` gets the epoch. Raises ProducerBusy, QuorumLost, or why it is `stopped`."""
        if self.stopped is not None:
            raise self.stopped
        name, old = claim.name, self._by_name.get(claim.name)
        if old is not None:
            if old.state is not SessionState.CLOSED:
                if claim.epoch <= old.epoch and claim.asked is old:
                    raise ProducerBusy(
                        f"producer name {name!r} is in use on topic {self._topic}; "
                        "choose another name or close the other producer"
                    )
                if claim.epoch <= old.epoch:
                    claim.asked = old
                    return Ask(old)
                old.end(ProducerFenced(f"producer {name!r} was opened again with epoch {claim.epoch}"))
            if old.outstanding and claim.awaited is old:
                raise QuorumLost(
                    f"what producer {name!r} of topic {self._topic} sent under epoch {old.epoch} was neither stored nor "
                    f"refused within producer_drain_timeout_ms={self.drain_timeout_ms}: look whether enough bookies can be "
                    "written to, and try again; a producer of another name does not wait"
                )
            claim.epoch = max(claim.epoch, old.epoch + 1)
            if old.outstanding:
                claim.awaited = old
                return Wait(old)
        session = self._by_name[name] = ProducerSession(name, claim.epoch, new_port(claim.epoch))
        return session

    def forget(self, session: ProducerSession) -> None:
        """Closes the session; what it queued still lands, and its name is free after that."""
        session.close()
        self.finished(session, 0)

    def finished(self, session: ProducerSession, runs: int) -> None:
        """So many receipt runs of the session were confirmed or failed."""
        session.outstanding -= runs
        if session.outstanding:
            return
        if session.state is SessionState.CLOSED and self._by_name.get(session.name) is session:
            del self._by_name[session.name]
        waiting, session.when_drained = session.when_drained, []
        for drained in waiting:
            drained()

    def stop(self, error: MagnetarError) -> None:
        """Nothing more is taken from anybody, nor anybody let in; what is queued still lands and is receipted."""
        self.stopped = error if error.retryable else TopicNotServed(error.message)
        for session in self._by_name.values():
            if session.state is SessionState.OPEN:
                session.state = SessionState.FAILED

    def close_all(self, error: MagnetarError) -> None:
        """The topic ends here: every producer has to look it up again."""
        self.stop(error)
        for session in self:
            if session.state is not SessionState.CLOSED:
                session.end(error)
        self._by_name.clear()

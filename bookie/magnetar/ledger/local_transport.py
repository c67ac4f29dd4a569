"""The transport to bookies of the same process: standalone, tests, the simulation.

`cli` wires it, which sees both rooms; here a bookie is anything with the methods of `LocalBookie`.

Over TCP a bookie without room stops reading, and adds wait in the connection. Here nothing would hold them back: the
bookie's own queue is small, and it refuses what does not fit. The entries are in the memory of their writers anyway; here
they are held, in order, until the bookie has room. Otherwise the rules are those of a connection: one clock, one bound, and
all adds fail together. Then a new link is made, so a late answer to an add of the old one has no effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from magnetar.proto.commands import ADD_ACCEPTED, Command
from magnetar.proto.errors import (
    BookieUnavailable,
    ConnectionLost,
    MagnetarError,
    RequestTimeout,
    TooManyRequests,
)
from magnetar.runtime.timeouts import TimeLimit

from .add_clock import AddClock
from .core.outstanding_adds import AddCallback, AddOutcome, OutstandingAdds, Waited
from .transport import Answer, BookieTransport

_SEND, _REFUSED = AddOutcome.SEND, AddOutcome.REFUSED


class LocalBookie(Protocol):
    """What is needed of a bookie (bookie.Bookie has it). `add` never calls `done` from within."""

    # Called when `accepting` becomes true again.
    on_accepting: list[Callable[[], None]]

    @property
    def accepting(self) -> bool:
        """False while adds wait for room in its write cache."""
        ...

    @property
    def waits_for_room(self) -> bool:
        """Adds wait for room, and the disk makes progress: the bookie is slow, not hung (rule 21)."""
        ...

    def add(
        self,
        entry: bytes,
        *,
        recovery: bool,
        done: Callable[[int, int, int], None],
        deferred: bool = False,
    ) -> None:
        """Stores an entry. A deferred one is answered with ADD_ACCEPTED as well."""
        ...

    def request_force(self, ledger_id: int) -> None:
        """Deferred adds of the ledger shall become durable."""
        ...

    async def answer(self, command: Command) -> tuple[Any, Sequence[bytes]]:
        """Result and payload of what is answered to a request; entries one by one, rows in one piece."""
        ...


class LocalLink:
    """From its first add until all fail. `recovery`: the adds pass the fence. An add and its answer take 0.9 us."""

    __slots__ = ("_adds", "_answered", "_clock", "_loop", "_recovery", "bookie", "failed", "target")

    def __init__(
        self, bookie: str, target: LocalBookie, recovery: bool, add_timeout_s: float, limit_bytes: int
    ) -> None:
        self.bookie = bookie
        self.target = target
        self.failed = False  # takes no more adds
        self._recovery = recovery
        self._loop = asyncio.get_running_loop()
        self._adds = OutstandingAdds(limit_bytes)
        self._clock = AddClock(self._adds, add_timeout_s, self._ticked)
        self._answered = self._on_answer  # one bound method for all adds
        target.on_accepting.append(self._send_held)

    def add(self, entry: bytes, ledger_id: int, entry_id: int, done: AddCallback, deferred: bool) -> None:
        outcome = self._adds.add(ledger_id, entry_id, entry, done, deferred, self.target.accepting)
        if outcome is _SEND:
            self._send(ledger_id, entry_id, entry, deferred)
        elif outcome is _REFUSED:
            self._loop.call_soon(done, self.bookie, ledger_id, entry_id, TooManyRequests.code)
        if not self._clock.running:
            self._clock.start()

    def force(self, ledger_id: int) -> None:
        if self._adds.force(ledger_id):
            self.target.request_force(ledger_id)
            if not self._clock.running:
                self._clock.start()

    def fail(self, code: int) -> None:
        """Fails what is outstanding."""
        self.failed = True
        self.target.on_accepting.remove(self._send_held)
        self._clock.end(self.bookie, code)

    def _send(self, ledger_id: int, entry_id: int, entry: bytes, deferred: bool) -> None:
        try:
            if deferred:
                self.target.add(entry, recovery=self._recovery, done=self._answered, deferred=True)
            else:
                self.target.add(entry, recovery=self._recovery, done=self._answered)
        except MagnetarError as error:  # bytes that are no entry
            self._loop.call_soon(self._answered, ledger_id, entry_id, error.code)

    def _send_held(self) -> None:
        """The bookie has room: it takes adds until it has none."""
        while self.target.accepting and (held := self._adds.next_held()) is not None:
            self._send(*held)

    def _on_answer(self, ledger_id: int, entry_id: int, code: int) -> None:
        adds = self._adds
        find = adds.accepted if code == ADD_ACCEPTED else adds.answered
        if (done := find(ledger_id, entry_id)) is not None:
            done(self.bookie, ledger_id, entry_id, code)

    def _ticked(self) -> bool:
        if self.target.waits_for_room:
            self._adds.heard()
        waited = self._adds.tick()
        if waited is Waited.IN_TIME:
            return True
        if waited is not Waited.FOR_NOTHING:
            self.fail(RequestTimeout.code)
        return False


class LocalTransport(BookieTransport):
    """BookieTransport over bookies of this process, which it does not own.

    Adds fail as over TCP (see `core.outstanding_adds`), a request after `read_timeout_s` (rule 21).
    """

    def __init__(
        self,
        bookies: Mapping[str, LocalBookie],
        *,
        add_timeout_s: float = 5.0,
        read_timeout_s: float = 5.0,
        max_outstanding_bytes: int = 256 << 20,
    ) -> None:
        self._bookies = bookies
        self._add_timeout_s = add_timeout_s
        self._read_timeout_s = read_timeout_s
        self._max_outstanding_bytes = max_outstanding_bytes
        # Re-adds of recoveries apart: an answer does not say which of two adds of an entry it belongs to.
        self._links: dict[str, LocalLink] = {}
        self._recovery_links: dict[str, LocalLink] = {}
        self._closed = False

    def add(
        self,
        bookie: str,
        entry: bytes,
        ledger_id: int,
        entry_id: int,
        *,
        recovery: bool,
        done: AddCallback,
        deferred: bool = False,
    ) -> None:
        target = self._bookies.get(bookie)
        if target is None or self._closed:
            code = ConnectionLost.code if self._closed else BookieUnavailable.code
            asyncio.get_running_loop().call_soon(done, bookie, ledger_id, entry_id, code)
            return
        link = (self._recovery_links if recovery else self._links).get(bookie)
        if link is None or link.failed or link.target is not target:
            link = self._link(bookie, target, recovery)
        link.add(entry, ledger_id, entry_id, done, deferred)

    def force(self, bookie: str, ledger_id: int) -> None:
        link = self._links.get(bookie)
        if link is not None and not link.failed:
            link.force(ledger_id)

    def reset_backoff(self, bookie: str) -> None:
        """See BookieTransport: nothing to reach here."""

    def _link(self, bookie: str, target: LocalBookie, recovery: bool) -> LocalLink:
        links = self._recovery_links if recovery else self._links
        earlier = links.get(bookie)
        if earlier is not None and not earlier.failed:  # another bookie goes by this name now
            earlier.fail(ConnectionLost.code)
        link = LocalLink(bookie, target, recovery, self._add_timeout_s, self._max_outstanding_bytes)
        links[bookie] = link
        return link

    async def ask(self, bookie: str, command: Command, longer_s: float = 0.0) -> Answer:
        if self._closed:
            raise ConnectionLost("the transport to the bookies is closed")
        target = self._bookies.get(bookie)
        if target is None:
            raise BookieUnavailable(
                f"bookie {bookie} is not one of this process ({', '.join(self._bookies)})"
            )
        late = f"bookie {bookie} did not answer within read_timeout_s={self._read_timeout_s:g} s"
        async with TimeLimit(self._read_timeout_s + longer_s, lambda: RequestTimeout(late)):
            return Answer(*await target.answer(command))

    async def close(self) -> None:
        """Refuses further calls; the bookies stay open."""
        self._closed = True
        for link in (*self._links.values(), *self._recovery_links.values()):
            if not link.failed:
                link.fail(ConnectionLost.code)

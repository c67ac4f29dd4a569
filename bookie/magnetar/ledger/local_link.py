"""The adds at one bookie of this process: the shell of `core.outstanding_adds` where there is no connection.

Over TCP a bookie without room stops reading, and adds wait in the connection. Here nothing would hold them back: the
bookie's own queue is small, and it refuses what does not fit. The entries are in the memory of their writers anyway; here
they are held, in order, until the bookie has room. Otherwise the rules are those of a connection: one clock, one bound, and
all adds fail together. Then a new link is made, so a late answer to an add of the old one has no effect.
"""

from __future__ import annotations

import asyncio

from magnetar.proto.commands import ADD_ACCEPTED
from magnetar.proto.errors import MagnetarError, RequestTimeout, TooManyRequests

from .add_clock import AddClock
from .core.outstanding_adds import AddCallback, AddOutcome, OutstandingAdds, Waited
from .local_bookie import LocalBookie

_SEND, _REFUSED = AddOutcome.SEND, AddOutcome.REFUSED


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

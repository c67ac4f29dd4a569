"""Adds that wait in this process while its bookie has no room in its write cache.

Over TCP the bookie stops reading, and adds wait in the connection. In one process nothing would hold them back: the bookie's
own queue is small, and it refuses what does not fit. The entries are in the memory of their writers anyway; here they wait
in order, and for a bounded time, so that a bookie that never gets room counts as failed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from magnetar.proto.errors import TooManyRequests

__all__ = ["WaitingAdds"]

# add(entry, recovery=..., done=...) of a bookie.
_Done = Callable[[int, int, int], None]
_WaitingAdd = tuple[float, bytes, int, int, bool, _Done, bool]
_MAX_WAITING_BYTES = 256 << 20


class WaitingAdds:
    """The waiting adds of one bookie, oldest first. `give` sends one to the bookie, which takes it while `accepting()`."""

    def __init__(
        self,
        give: Callable[[bytes, int, int, bool, _Done, bool], None],
        accepting: Callable[[], bool],
        wait_s: float,
    ) -> None:
        self._give = give
        self._accepting = accepting
        self._wait_s = wait_s
        self._waiting: deque[_WaitingAdd] = deque()
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(
        self, entry: bytes, ledger_id: int, entry_id: int, recovery: bool, done: _Done, deferred: bool = False
    ) -> None:
        """Holds an add until `release`, or answers TooManyRequests after `wait_s`."""
        loop = asyncio.get_running_loop()
        if self._bytes + len(entry) > _MAX_WAITING_BYTES:
            loop.call_soon(done, ledger_id, entry_id, TooManyRequests.code)
            return
        deadline = loop.time() + self._wait_s
        self._waiting.append((deadline, entry, ledger_id, entry_id, recovery, done, deferred))
        self._bytes += len(entry)
        if self._timer is None:
            self._timer = loop.call_at(deadline, self._waited_too_long)

    def force(self, ledger_id: int) -> None:
        """Turns the waiting adds of a ledger into ordinary ones: they are not deferred any more."""
        self._waiting = deque((*add[:6], add[6] and add[2] != ledger_id) for add in self._waiting)

    def release(self) -> None:
        """The bookie has room: sends adds in order while it takes them."""
        while self._waiting and self._accepting():
            self._give(*self._take()[1:])
        if not self._waiting:
            self._stop_timer()

    def fail(self, code: int) -> None:
        """Answers all of them, in a later turn of the loop."""
        self._stop_timer()
        loop = asyncio.get_running_loop()
        while self._waiting:
            _, _, ledger_id, entry_id, _, done, _ = self._take()
            loop.call_soon(done, ledger_id, entry_id, code)

    def _take(self) -> _WaitingAdd:
        add = self._waiting.popleft()
        self._bytes -= len(add[1])
        return add

    def _waited_too_long(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        # A timer may fire up to its resolution early.
        now = loop.time() + 0.002
        while self._waiting and self._waiting[0][0] <= now:
            _, _, ledger_id, entry_id, _, done, _ = self._take()
            done(ledger_id, entry_id, TooManyRequests.code)
        if self._waiting:
            self._timer = loop.call_at(self._waiting[0][0], self._waited_too_long)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

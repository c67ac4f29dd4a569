"""Adds that wait in this process while its bookie has no room in its write cache.

Over TCP the bookie stops reading, and adds wait in the connection. In one process nothing would hold them back: the bookie's
own waiting room is small, and refuses what does not fit. Their memory is their writers' already; here they are kept in
order, and for a bounded time, so that a bookie that never gets room is a failed one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from magnetar.proto.errors import TooManyRequests

__all__ = ["HeldAdds"]

# add(entry, recovery=..., done=...) of a bookie.
_Done = Callable[[int, int, int], None]
_Held = tuple[float, bytes, int, int, bool, _Done, bool]
_MAX_HELD_BYTES = 256 << 20


class HeldAdds:
    """Those of one bookie, oldest first. `give` hands one on; `accepting` says whether it is taken now."""

    def __init__(
        self,
        give: Callable[[bytes, int, int, bool, _Done, bool], None],
        accepting: Callable[[], bool],
        wait_s: float,
    ) -> None:
        self._give = give
        self._accepting = accepting
        self._wait_s = wait_s
        self._held: deque[_Held] = deque()
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(
        self, entry: bytes, ledger_id: int, entry_id: int, recovery: bool, done: _Done, deferred: bool = False
    ) -> None:
        """Keeps it until `release`, or answers TooManyRequests after a while."""
        loop = asyncio.get_running_loop()
        if self._bytes + len(entry) > _MAX_HELD_BYTES:
            loop.call_soon(done, ledger_id, entry_id, TooManyRequests.code)
            return
        deadline = loop.time() + self._wait_s
        self._held.append((deadline, entry, ledger_id, entry_id, recovery, done, deferred))
        self._bytes += len(entry)
        if self._timer is None:
            self._timer = loop.call_at(deadline, self._waited_too_long)

    def force(self, ledger_id: int) -> None:
        """Those of the ledger are deferred no more."""
        self._held = deque((*add[:6], add[6] and add[2] != ledger_id) for add in self._held)

    def release(self) -> None:
        """There is room: hands them on in order, until there is none again."""
        while self._held and self._accepting():
            self._give(*self._take()[1:])
        if not self._held:
            self._stop_timer()

    def fail(self, code: int) -> None:
        """Answers all of them, in a later turn of the loop."""
        self._stop_timer()
        loop = asyncio.get_running_loop()
        while self._held:
            _, _, ledger_id, entry_id, _, done, _ = self._take()
            loop.call_soon(done, ledger_id, entry_id, code)

    def _take(self) -> _Held:
        held = self._held.popleft()
        self._bytes -= len(held[1])
        return held

    def _waited_too_long(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        # A timer may fire up to its resolution early.
        now = loop.time() + 0.002
        while self._held and self._held[0][0] <= now:
            _, _, ledger_id, entry_id, _, done, _ = self._take()
            done(ledger_id, entry_id, TooManyRequests.code)
        if self._held:
            self._timer = loop.call_at(self._held[0][0], self._waited_too_long)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

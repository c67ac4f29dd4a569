"""Long polls: requests that wait until a ledger's last add confirmed rises.

A waiter is woken once. A ledger without waiters costs nothing: an add that
raises the last add confirmed looks at `by_ledger`, which is empty most of the time, and no further.
"""

from __future__ import annotations

import asyncio

from magnetar.proto.errors import MagnetarError, TooManyRequests

_Waiting = asyncio.Future[bool]


class Waiters:
    """At most `limit` wait at a time."""

    def __init__(self, limit: int) -> None:
        # Always the same dictionary; it has the waiters of each ledger, in order of arrival.
        self.by_ledger: dict[int, dict[_Waiting, None]] = {}
        self._limit = limit
        self._count = 0

    def __len__(self) -> int:
        return self._count

    async def wait(self, ledger_id: int, deadline: float) -> bool:
        """Until `wake`; False when the loop's time reached `deadline` before. TooManyRequests, or why it stops."""
        if self._count >= self._limit:
            raise TooManyRequests(
                f"{self._count} long polls wait at this bookie already (max_long_polls); poll again later"
            )
        loop = asyncio.get_running_loop()
        waiting: _Waiting = loop.create_future()
        timer = loop.call_at(deadline, _time_is_over, waiting)
        self._count += 1
        self.by_ledger.setdefault(ledger_id, {})[waiting] = None
        try:
            return await waiting
        finally:
            timer.cancel()
            self._count -= 1
            others = self.by_ledger.get(ledger_id)
            if others is not None:
                others.pop(waiting, None)
                if not others:
                    del self.by_ledger[ledger_id]

    def wake(self, ledger_id: int) -> None:
        """Wakes the waiters of a ledger; they run in a later turn of the loop."""
        for waiting in self.by_ledger.pop(ledger_id, {}):
            if not waiting.done():
                waiting.set_result(True)

    def fail_all(self, error: MagnetarError) -> None:
        """Fails all waiters."""
        for ledger_id in list(self.by_ledger):
            for waiting in self.by_ledger.pop(ledger_id):
                if not waiting.done():
                    # One of its own for each, since raising one adds a traceback to it.
                    waiting.set_exception(type(error)(error.message))


def _time_is_over(waiting: _Waiting) -> None:
    if not waiting.done():
        waiting.set_result(False)

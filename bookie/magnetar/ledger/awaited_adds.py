"""Outstanding adds at a bookie of this process, with the add timeout (rule 21).

The same clock as for a connection (`bookie_connection`): a coarse timer looks at the oldest add ten times per add timeout. A
bookie that answers others, or says that adds wait for room in its write cache, is slow, not hung, and gets four add timeouts
for one add.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from magnetar.proto.commands import ADD_ACCEPTED
from magnetar.proto.errors import RequestTimeout

from .settings import MAX_ADD_TIMEOUTS
from .transport import AddCallback

_TICKS_PER_TIMEOUT = 10


class _Add:
    """One add, as the callback that its bookie gets. `done` is None once it was answered."""

    __slots__ = ("adds", "done", "entry_id", "ledger_id", "tick")

    def __init__(self, adds: AwaitedAdds, ledger_id: int, entry_id: int, done: AddCallback) -> None:
        self.adds = adds
        self.ledger_id = ledger_id
        self.entry_id = entry_id
        self.done: AddCallback | None = done
        self.tick = adds.tick

    def __call__(self, ledger_id: int, entry_id: int, code: int) -> None:
        done, self.done = self.done, None
        if done is not None:
            adds = self.adds
            adds.heard_tick = adds.tick
            done(adds.bookie, ledger_id, entry_id, code)


class _DeferredAdd(_Add):
    """One that is answered twice. While it is accepted and not forced it is in `adds.accepted`, and no clock runs for it."""

    __slots__ = ("forced", "later")

    def __init__(self, adds: AwaitedAdds, ledger_id: int, entry_id: int, done: AddCallback) -> None:
        super().__init__(adds, ledger_id, entry_id, done)
        self.forced = False
        self.later: AddCallback | None = None  # while it is accepted

    def __call__(self, ledger_id: int, entry_id: int, code: int) -> None:
        adds, done = self.adds, self.done
        adds.heard_tick = adds.tick
        if code != ADD_ACCEPTED:
            if self.later is not None:
                done, self.later = self.later, None
                del adds.accepted[ledger_id][entry_id]
                if not adds.accepted[ledger_id]:
                    del adds.accepted[ledger_id]
            self.done = None
        elif done is not None and not self.forced:
            self.later, self.done = done, None
            adds.accepted.setdefault(ledger_id, {})[entry_id] = self
        if done is not None:
            done(adds.bookie, ledger_id, entry_id, code)

    def force(self) -> None:
        """The clock runs again."""
        self.forced = True
        if self.later is not None:
            self.done, self.later = self.later, None
            self.tick = self.adds.tick


class AwaitedAdds:
    """Those of one bookie, oldest first; answered ones leave at the next tick. 0.6 us for an add."""

    def __init__(self, bookie: str, timeout_s: float, full: Callable[[], bool]) -> None:
        self.bookie = bookie
        self._full = full
        self.tick = 0
        self.heard_tick = 0  # in which an answer came last
        self._tick_s = timeout_s / _TICKS_PER_TIMEOUT
        self._loop = asyncio.get_running_loop()
        self._adds: deque[_Add] = deque()
        self.accepted: dict[int, dict[int, _DeferredAdd]] = {}  # by ledger and entry
        self._timer: asyncio.TimerHandle | None = None

    def add(self, ledger_id: int, entry_id: int, done: AddCallback) -> Callable[[int, int, int], None]:
        """The callback to give to the bookie."""
        add = _Add(self, ledger_id, entry_id, done)
        self._adds.append(add)
        if self._timer is None:
            self._timer = self._loop.call_later(self._tick_s, self._ticked)
        return add

    def add_deferred(
        self, ledger_id: int, entry_id: int, done: AddCallback
    ) -> Callable[[int, int, int], None]:
        """The same; `done` comes twice."""
        add = _DeferredAdd(self, ledger_id, entry_id, done)
        self._adds.append(add)
        if self._timer is None:
            self._timer = self._loop.call_later(self._tick_s, self._ticked)
        return add

    def force(self, ledger_id: int) -> None:
        """What was accepted of the ledger is awaited again."""
        for add in self._adds:
            if isinstance(add, _DeferredAdd) and add.ledger_id == ledger_id:
                add.forced = True
        for add in self.accepted.pop(ledger_id, {}).values():
            add.force()
            self._adds.append(add)
        if self._adds and self._timer is None:
            self._timer = self._loop.call_later(self._tick_s, self._ticked)

    def fail(self, code: int) -> None:
        """Answers all of them."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        adds, self._adds = self._adds, deque()
        accepted = [add for ledger in self.accepted.values() for add in ledger.values()]
        for add in (*accepted, *adds):
            add(add.ledger_id, add.entry_id, code)

    def _ticked(self) -> None:
        self._timer = None
        self.tick += 1
        adds = self._adds
        while adds and adds[0].done is None:
            adds.popleft()
        if not adds:
            return  # the next add arms it again
        if self._full():
            self.heard_tick = self.tick
        waited = self.tick - adds[0].tick
        silent = min(waited, self.tick - self.heard_tick)
        if silent > _TICKS_PER_TIMEOUT or waited > MAX_ADD_TIMEOUTS * _TICKS_PER_TIMEOUT:
            self.fail(RequestTimeout.code)
        else:
            self._timer = self._loop.call_later(self._tick_s, self._ticked)

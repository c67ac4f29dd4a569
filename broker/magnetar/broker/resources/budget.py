"""Byte budgets of the publish path: who fills one stops reading from its sockets until it has drained.

Whoever stops waits with `wait`, whose callback `release` calls once the charge is at most 50 % of the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable


class ByteBudget:
    """Counts bytes against a limit; a parent budget (the broker's, over all topics) is charged along."""

    __slots__ = ("_low", "_parent", "_waiting", "limit", "used")

    def __init__(self, limit: int, parent: ByteBudget | None = None) -> None:
        self.limit = limit
        self.used = 0
        self._low = limit // 2
        self._parent = parent
        # Insertion-ordered; a waiter registers once however often it asks.
        self._waiting: dict[Hashable, Callable[[], None]] = {}

    @property
    def full(self) -> bool:
        """True if charging should stop here or above."""
        return self.used >= self.limit or (self._parent is not None and self._parent.full)

    @property
    def waiting(self) -> int:
        """Callbacks registered here."""
        return len(self._waiting)

    def charge(self, size: int) -> None:
        """Adds `size` bytes; the limit may be overshot by what one socket read holds."""
        self.used += size
        if self._parent is not None:
            self._parent.charge(size)

    def release(self, size: int) -> None:
        """Takes `size` bytes off and wakes those who wait if there is room again."""
        self.used -= size
        if self._waiting and self.used <= self._low:
            waiting, self._waiting = self._waiting, {}
            for resume in waiting.values():
                resume()
        if self._parent is not None:
            self._parent.release(size)

    def wait(self, key: Hashable, resume: Callable[[], None]) -> None:
        """Calls `resume` once there is room in the budget that is full. `resume` looks again: the other may be full."""
        if self.used >= self.limit or self._parent is None:
            self._waiting[key] = resume
        else:
            self._parent.wait(key, resume)

    def forget(self, key: Hashable) -> None:
        """Nobody waits under this key any more."""
        self._waiting.pop(key, None)
        if self._parent is not None:
            self._parent.forget(key)

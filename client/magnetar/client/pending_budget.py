"""The bytes that all producers of a client share: what they have sent, and what is not confirmed yet.

limit 64 MiB    a producer takes what a batch may become when it opens one, gives back what is left over when it closes it,
                and the rest when the batch is confirmed or fails
                who finds no room waits, first come first served; meanwhile nobody else opens a batch

Nobody holds bytes that only a turn here would free: who waits has closed its batches, or they close by themselves.
"""

from __future__ import annotations

import asyncio

UNLIMITED = 1 << 62


class PendingBudget:
    """`used`: of all producers. `waiting`: how many wait for a turn, each with one message or batch."""

    __slots__ = ("_changed", "_turn", "limit", "used", "waiting")

    def __init__(self, limit: int | None) -> None:
        self.limit = UNLIMITED if limit is None else limit
        self.used = 0
        self.waiting = 0
        self._turn = asyncio.Lock()  # first come, first served
        self._changed = asyncio.Event()

    def fits(self, size: int) -> bool:
        """True if so many bytes are free. Something larger than the limit goes alone."""
        return self.used == 0 or self.used + size <= self.limit

    @property
    def share(self) -> int:
        """What a batch that is opened may take in advance: a part of what is free, so that it leaves room for others."""
        return (self.limit - self.used) >> 2

    def change(self, by: int) -> None:
        """A producer holds so many bytes more, or less."""
        self.used += by
        if by < 0:
            self._changed.set()

    async def wait(self, size: int) -> None:
        """Returns when it fits. The caller takes the room in the same step, before anybody else can."""
        self.waiting += 1
        try:
            async with self._turn:
                while not self.fits(size):
                    self._changed.clear()
                    await self._changed.wait()
        finally:
            self.waiting -= 1

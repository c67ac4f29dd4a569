"""A byte budget for reads from disk, so that many readers with large answers cannot fill the memory."""

from __future__ import annotations

import asyncio
from collections import deque


class ReadBudget:
    """Grants bytes in order of the requests. A request above the capacity is granted when no other grant is out."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self.taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """Reads that wait."""
        return len(self._waiting)

    def try_take(self, size: int) -> bool:
        """Takes bytes if there is room and nobody waits; False otherwise."""
        if self._waiting or (self.taken and self.taken + size > self._capacity):
            return False
        self.taken += size
        return True

    async def take(self, size: int) -> None:
        """Takes bytes, after those that asked before."""
        if self.try_take(size):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn came in the same moment
                self.give_back(size)
            else:
                self._let_in()  # those behind it may fit
            raise

    def give_back(self, size: int) -> None:
        """Returns bytes to the budget."""
        self.taken -= size
        self._let_in()

    def _let_in(self) -> None:
        waiting = self._waiting
        while waiting:
            size, turn = waiting[0]
            if turn.done():  # cancelled
                waiting.popleft()
                continue
            if self.taken and self.taken + size > self._capacity:
                return
            waiting.popleft()
            self.taken += size
            turn.set_result(None)


class ReadGrant:
    """The bytes that one read has taken of the budget."""

    __slots__ = ("_budget", "taken")

    def __init__(self, budget: ReadBudget) -> None:
        self._budget = budget
        self.taken = 0

    def take_now(self, size: int) -> bool:
        """False if there is no room now."""
        if not self._budget.try_take(size):
            return False
        self.taken += size
        return True

    async def take(self, size: int) -> bool:
        """Waits at the first call. A later call returns False instead of waiting: two reads could wait for each other."""
        if self.taken:
            return False
        await self._budget.take(size)
        self.taken = size
        return True

    def give_back(self) -> int:
        """Returns everything, and says how much it was."""
        size, self.taken = self.taken, 0
        if size:
            self._budget.give_back(size)
        return size

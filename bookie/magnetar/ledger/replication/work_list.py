"""What there is to repair, page by page: the queue of under-replicated ledgers, then the reports of damage.

One round goes through both once, in an order of its own for each process, so that workers seldom meet at the same lock. Only
one page is in memory. A ledger that was postponed by this process is left out until its time has come.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import NamedTuple

from magnetar.metadata.damage import DAMAGED_PATH
from magnetar.metadata.store import MetadataStore

from .queue import RepairQueue

_PAGE = 1000
# Ledgers whose back-off is remembered; others are tried once in every round.
_MAX_POSTPONED = 100_000


class Task(NamedTuple):
    """One thing to repair. `damaged`: the bookie whose copies are reported; "": the queue of under-replicated ledgers."""

    ledger_id: int
    damaged: str = ""


class _Postponed(NamedTuple):
    until_s: float
    attempts: int


class WorkList:
    """Shared by the workers of a process."""

    def __init__(
        self,
        store: MetadataStore,
        queue: RepairQueue,
        rng: random.Random,
        backoff_s: float,
        backoff_max_s: float,
    ) -> None:
        self._store = store
        self._queue = queue
        self._rng = rng
        self._backoff_s = backoff_s
        self._backoff_max_s = backoff_max_s
        self._postponed: dict[Task, _Postponed] = {}
        # Of the round that runs and of the last one that ended: ledgers in the queue, reports of damage.
        self._counting = [0, 0]
        self.queued_ledgers = 0
        self.damaged_ledgers = 0

    async def round(self) -> AsyncIterator[Task]:
        """Everything that can be tried now, once. Raises what the store raises."""
        self._counting = [0, 0]
        async for task in self._all():
            self._counting[bool(task.damaged)] += 1
            if self._is_due(task):
                yield task
        self.queued_ledgers, self.damaged_ledgers = self._counting

    def done(self, task: Task) -> None:
        """It needs no repair any more, or its next attempt is a new one."""
        self._postponed.pop(task, None)

    def postpone(self, task: Task, until_s: float | None = None) -> None:
        """Not again before `until_s` (loop time); None: after a pause that doubles with each attempt."""
        before = self._postponed.pop(task, None)
        attempts = 0 if before is None else before.attempts
        if until_s is None:
            pause_s = min(self._backoff_s * 2.0 ** min(attempts, 30), self._backoff_max_s)
            until_s = asyncio.get_running_loop().time() + pause_s
            attempts += 1
        if len(self._postponed) < _MAX_POSTPONED:
            self._postponed[task] = _Postponed(until_s, attempts)

    def forget_postponed(self) -> None:
        """The cluster changed: what could not be done may be possible now."""
        self._postponed.clear()

    @property
    def postponed(self) -> int:
        """Tasks that wait for their next attempt."""
        return len(self._postponed)

    def next_due_s(self, after_s: float) -> float:
        """Loop time of the first attempt that is due after the round that began at `after_s`; inf: none is."""
        due = (postponed.until_s for postponed in self._postponed.values())
        return min((until_s for until_s in due if until_s > after_s), default=float("inf"))

    def _is_due(self, task: Task) -> bool:
        known = self._postponed.get(task)
        return known is None or known.until_s <= asyncio.get_running_loop().time()

    async def _all(self) -> AsyncIterator[Task]:
        pages = await self._queue.pages()
        self._rng.shuffle(pages)
        for page in pages:
            ledgers = await self._queue.ledgers(page)
            self._rng.shuffle(ledgers)
            for number, ledger_id in enumerate(ledgers, 1):
                if number % _PAGE == 0:
                    await asyncio.sleep(0)
                yield Task(ledger_id)
        for bookie in await self._store.children(DAMAGED_PATH):
            folder, after = f"{DAMAGED_PATH}/{bookie}", ""
            while names := await self._store.children(folder, after=after, limit=_PAGE):
                after = names[-1]
                for name in names:
                    if name.isascii() and name.isdigit():
                        yield Task(int(name), bookie)

"""Reading a range of a striped ledger: each of few bookies gives its share of it at once, and they are merged in order.

    residues of the ids by E  ──shares──>  a request per bookie  ──answered──> found, up to where its answer ends
                                ^                 │ failed, denied the first entry, or silent for speculative_read_s
                                └── the others ───┘

What a bookie that failed was asked for is shared out anew among the others; so is that of a slow one, but its answer counts
if it comes first. An answer that ends early, because its bookie lacks an entry, has it damaged or has no room for it, leaves
the rest to the next round (or read), in which that entry is the first: only what is then said of it counts.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from magnetar.proto.errors import MagnetarError
from magnetar.proto.stripe import Stripe
from magnetar.runtime.tasks import awaited, end_all

from .core.metadata import Bookies
from .core.quorum import Striping
from .core.shares import shares

# (bookie, first, last, max_bytes, stripe): verified entries of the stripe, `first` at least.
Ask = Callable[[str, int, int, int, Stripe], Coroutine[Any, Any, list[bytes]]]


class _Request(NamedTuple):
    """One that is under way."""

    residues: int
    first: int
    bookie: str
    slow_at: float  # loop time


class StripedRead:
    """One range of one ensemble, read once. `slow` hears of bookies that were silent for `slow_s` (0: waits for them)."""

    def __init__(
        self,
        striping: Striping,
        bookies: Bookies,
        ask: Ask,
        *,
        begin: int,
        suspected: Callable[[str], bool],
        far: Callable[[str], bool],
        slow_s: float,
        slow: Callable[[str], None],
    ) -> None:
        self.errors: list[MagnetarError] = []  # why the lowest entry that is missing could not be had
        self._striping = striping
        self._size = striping.ensemble_size
        self._bookies = bookies
        self._ask = ask
        self._begin = begin
        self._suspected = suspected
        self._far = far
        self._slow_s = slow_s
        self._slow = slow
        self._loop = asyncio.get_running_loop()
        self._found: dict[int, bytes] = {}
        # By residue: the lowest id that is not found; of the range all below it are.
        self._next: list[int] = []
        self._last = 0
        self._residue_bytes = 0  # what the entries of one residue may take; 0: as much as a bookie gives
        self._asked: list[int] = []  # by residue: positions that were asked in this round
        self._open = 0  # residues without an answer in this round
        self._running: dict[asyncio.Future[list[bytes]], _Request] = {}

    async def read(self, first: int, last: int, max_bytes: int) -> list[bytes]:
        """Entries from `first` on without a gap: with `max_bytes` about as many as fit, else all that can be had.

        None if `first` itself cannot be had: `errors` has what the bookies of its write set said.
        """
        self._last = last
        self._next = [first + (residue - first) % self._size for residue in range(self._size)]
        # A quarter more: where sizes differ, an answer that ends before the others makes what they have behind it useless.
        self._residue_bytes = -(-max_bytes * 5 // (4 * min(self._size, last - first + 1)))
        missing = first
        while True:
            await self._round(missing)
            before, missing = missing, min(self._next)
            if max_bytes or missing > last or missing == before:
                return self._merged(first, max_bytes)

    async def _round(self, missing: int) -> None:
        """Asks for what is missing, from the entry `missing` on, each bookie once."""
        self.errors.clear()
        self._asked = [0] * self._size
        self._open = sum(
            1 << residue for residue, entry_id in enumerate(self._next) if entry_id <= self._last
        )
        try:
            self._share_out(self._open)
            while any(request.residues & self._open for request in self._running.values()):
                done, _ = await asyncio.wait(
                    self._running, timeout=self._patience_s(), return_when=asyncio.FIRST_COMPLETED
                )
                for task in [task for task in self._running if task in done]:
                    self._ended(task, missing)
                self._find_slow()
        finally:
            await end_all(self._running)
            self._running.clear()

    def _share_out(self, residues: int) -> None:
        """Asks those who have not been asked."""
        suspected = sum(1 << place for place, bookie in enumerate(self._bookies) if self._suspected(bookie))
        far = sum(1 << place for place, bookie in enumerate(self._bookies) if self._far(bookie))
        for position, share in shares(self._striping, residues, self._begin, self._asked, suspected, far):
            bookie, mine = self._bookies[position], self._residues(share)
            for residue in mine:
                self._asked[residue] |= 1 << position
            first = min(self._next[residue] for residue in mine)
            ask = self._ask(
                bookie, first, self._last, self._residue_bytes * len(mine), Stripe(self._size, share)
            )
            self._running[awaited(ask)] = _Request(
                share, first, bookie, self._loop.time() + self._slow_s if self._slow_s else math.inf
            )

    def _ended(self, task: asyncio.Future[list[bytes]], missing: int) -> None:
        request = self._running.pop(task)
        try:
            entries = task.result()
        except MagnetarError as error:
            if request.residues >> missing % self._size & 1:
                self.errors.append(error)
            self._share_out(request.residues & self._open)
            return
        ids = Stripe(self._size, request.residues).ids(request.first, self._last, len(entries))
        self._found.update(zip(ids, entries, strict=True))
        following = ids[-1] + 1
        for residue in self._residues(request.residues):
            self._next[residue] = max(self._next[residue], following + (residue - following) % self._size)
        self._open &= ~request.residues

    def _find_slow(self) -> None:
        now = self._loop.time()
        for task, request in list(self._running.items()):
            if request.slow_at <= now:
                self._running[task] = request._replace(slow_at=math.inf)
                self._slow(request.bookie)
                self._share_out(request.residues & self._open)

    def _patience_s(self) -> float | None:
        slow_at = min(request.slow_at for request in self._running.values())
        return None if slow_at == math.inf else max(0.0, slow_at - self._loop.time())

    def _residues(self, share: int) -> list[int]:
        return [residue for residue in range(self._size) if share >> residue & 1]

    def _merged(self, first: int, max_bytes: int) -> list[bytes]:
        entries: list[bytes] = []
        size = 0
        for entry_id in range(first, min(self._last + 1, min(self._next))):
            entry = self._found[entry_id]
            size += len(entry)
            if max_bytes and size > max_bytes and entries:
                break
            entries.append(entry)
        return entries

"""A writer of ledgers at a steady rate that lives through the loss of bookies, and what it was promised.

It does what a broker's managed ledger does: appends to one ledger, goes to a new one when that fails, and appends again
what was not confirmed. Payloads are functions of a running number, so that every byte can be checked afterwards.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque

from magnetar.ledger import LedgerClient, LedgerWriter
from magnetar.proto.errors import MagnetarError

TICK_S = 0.005
RETRY_S = 0.02
CLOSE_S = 30.0
_NOISE = random.Random(4).randbytes(1 << 16)


def payload_of(number: int, size: int) -> bytes:
    """Different for every number."""
    start = number * 7 % (len(_NOISE) - size)
    return number.to_bytes(8, "big") + _NOISE[start : start + size - 8]


class LoadedLedger:
    """What was appended to one ledger: `numbers[entry id]`, of which the first `acknowledged` were confirmed."""

    def __init__(self, load: LedgerLoad, writer: LedgerWriter) -> None:
        self.writer = writer
        self.numbers: list[int] = []
        self.sent_at: list[float] = []
        self.acknowledged = 0
        self.error: MagnetarError | None = None
        self._load = load

    def append(self, number: int) -> None:
        """One entry; back to those that are to be appended again if the ledger takes no more."""
        entry_id = self.writer.append(payload_of(number, self._load.size), self.confirmed)
        if entry_id < 0:
            self._load.again.append(number)
            self._load.outstanding -= 1
        else:
            assert entry_id == len(self.numbers)
            self.numbers.append(number)
            self.sent_at.append(self._load.loop.time())

    def confirmed(self, entry_id: int, _entry: bytes, error: MagnetarError | None) -> None:
        """In entry order; after an error never again without one."""
        load = self._load
        if error is not None:
            self.error = self.error or error
            if entry_id >= 0:
                load.again.append(self.numbers[entry_id])
                load.outstanding -= 1
            return
        assert self.error is None, "confirmed after a failure"
        assert entry_id == self.acknowledged, "confirmed out of order"
        self.acknowledged += 1
        load.confirmed(load.loop.time(), self.sent_at[entry_id])


class LedgerLoad:
    """`rate` entries of `size` bytes a second until `stop`; at most `limit` are outstanding."""

    def __init__(self, client: LedgerClient, *, rate: int, size: int, limit: int = 20_000) -> None:
        self.client = client
        self.rate = rate
        self.size = size
        self.limit = limit
        self.loop = asyncio.get_running_loop()
        self.ledgers: list[LoadedLedger] = []
        self.again: deque[int] = deque()  # failed, to be appended to the next ledger
        self.outstanding = 0
        self.acknowledged = 0
        self.failovers = 0  # ledgers that failed
        # Since `take`: the longest time without a confirmation, and the longest that an entry waited for its own.
        self.longest_s = self.slowest_s = 0.0
        self._last_at = 0.0
        self._changing = asyncio.Lock()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    @property
    def current(self) -> LoadedLedger:
        """The ledger that is written to."""
        return self.ledgers[-1]

    async def start(self) -> None:
        """Returns with the first ledger made."""
        await self._open()
        self._last_at = self.loop.time()
        self._task = self.loop.create_task(self._run(), name="ledger load")

    async def roll(self) -> None:
        """Goes to a new ledger, and closes the one before: as after enough entries."""
        async with self._changing:
            old = self.current
            await self._open()
        try:
            async with asyncio.timeout(CLOSE_S):
                await old.writer.close()
        except TimeoutError:
            waits = f"{old.writer.last_add_confirmed + 1} of {len(old.numbers)} entries are confirmed"
            raise AssertionError(f"ledger {old.writer.ledger_id} cannot be closed: {waits}") from None

    def take(self) -> tuple[float, float]:
        """Longest stall and slowest entry, seconds, since it was asked last."""
        longest, slowest = max(self.longest_s, self.loop.time() - self._last_at), self.slowest_s
        self.longest_s = self.slowest_s = 0.0
        return longest, slowest

    async def stop(self) -> None:
        """Appends no more; adds are left outstanding, and the ledger open. Raises what went wrong."""
        self._stopping = True
        assert self._task is not None
        await self._task

    def confirmed(self, now: float, sent_at: float) -> None:
        """Called for each entry."""
        self.outstanding -= 1
        self.acknowledged += 1
        self.longest_s = max(self.longest_s, now - self._last_at)
        self.slowest_s = max(self.slowest_s, now - sent_at)
        self._last_at = now

    async def _open(self) -> None:
        while True:
            try:
                self.ledgers.append(LoadedLedger(self, await self.client.create()))
                return
            except MagnetarError as error:
                if not error.retryable:
                    raise
                await asyncio.sleep(RETRY_S)

    async def _run(self) -> None:
        began, number = self.loop.time(), 0
        while not self._stopping:
            if self.current.error is not None:
                async with self._changing:
                    if self.current.error is not None:
                        self.failovers += 1
                        await self.current.writer.close()
                        await self._open()
            ledger = self.current
            # A machine that has fallen behind gets short turns: one that appends all that is due would hear nobody for
            # seconds, and take bookies for lost.
            left = max(20, int(self.rate * TICK_S * 8))
            while self.again and left and ledger.error is None and self.outstanding < self.limit:
                self.outstanding += 1
                left -= 1
                ledger.append(self.again.popleft())
            due = int((self.loop.time() - began) * self.rate)
            while number < due and left and ledger.error is None and self.outstanding < self.limit:
                self.outstanding += 1
                left -= 1
                ledger.append(number)
                number += 1
            await asyncio.sleep(TICK_S)

"""Room for messages that are not confirmed, within the bounds of their producer and its client, and whose turn it is.

Who finds no room waits for its turn, first come first served. Until all who wait have sent nobody else sends: what is
smaller must not overtake a message that waits. A message in chunks has the turn until its source has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from magnetar.proto.errors import MagnetarError, ProducerQueueFull, SendTimeout
from magnetar.runtime.timeouts import TimeLimit

from ..options import ProducerOptions
from ..pending_budget import PendingBudget
from ..receipts import copy_of
from .open_batch import OpenBatch
from .outbox import Outbox


class Room:
    """See the module docstring. waiting: how many calls have the turn or wait for it."""

    def __init__(
        self, options: ProducerOptions, budget: PendingBudget, outbox: Outbox, batch: OpenBatch
    ) -> None:
        self.max_pending_bytes = options.max_pending_bytes
        self._topic = options.topic
        self._send_timeout = options.send_timeout
        self._budget = budget
        self._outbox = outbox
        self._batch = batch
        self._held = 0  # of the budget
        self._turn = asyncio.Lock()
        self.waiting = 0
        self.streaming = False  # who has the turn sends a message in chunks
        self._limit: asyncio.Timeout | None = None  # of who has the turn
        self._ended: MagnetarError | None = None  # why it has expired
        self._changed = asyncio.Event()  # pending bytes fell, or nothing is to be waited for any more

    @property
    def pending_bytes(self) -> int:
        """Of all messages that are not confirmed."""
        return self._outbox.bytes + self._batch.bytes

    def fits(self, size: int, *, waited: bool = False) -> bool:
        """True if it can be sent now. `waited`: its turn has come."""
        return self._fits_here(size) and self._budget.fits(size) and (waited or not self._budget.waiting)

    def _fits_here(self, size: int) -> bool:
        pending = self.pending_bytes
        # Something larger than the whole bound goes alone.
        return pending == 0 or pending + size <= self.max_pending_bytes

    @property
    def for_batch(self) -> int:
        """What a batch that is opened may take."""
        return min(self.max_pending_bytes - self._outbox.bytes, self._budget.share)

    def changed(self) -> None:
        """The outbox or the batch holds more or less than before."""
        held = self._outbox.bytes + self._batch.bytes_held
        if held == self._held:
            return
        self._budget.change(held - self._held)
        if held < self._held:
            self._changed.set()
        self._held = held

    def queue_full(self, size: int = 0) -> ProducerQueueFull:
        """`size`: of what does not fit; 0: it is not its turn."""
        if self.streaming and not size:
            return ProducerQueueFull(
                f"a message in chunks is being sent to {self._topic}, and others come behind it: use `send`, which waits"
            )
        if self._budget.waiting or (size and self._fits_here(size)):
            sent = f"{self._budget.used} bytes sent by all producers of this client"
            limit = f"max_pending_bytes of the client is {self._budget.limit}"
        else:
            sent = f"{self.pending_bytes} bytes sent to {self._topic}"
            limit = f"max_pending_bytes is {self.max_pending_bytes}"
        return ProducerQueueFull(
            f"{sent} are not confirmed yet, and {limit}; await receipts or flush(), or raise it"
        )

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Behind those who wait already. Who leaves it sends in the same step, before anybody else can."""
        self.waiting += 1
        self._batch.slow_down()
        try:
            async with self._turn:
                limit = self._limit = asyncio.timeout(None)
                try:
                    async with limit:
                        yield
                except TimeoutError:
                    if self._ended is not None and limit.expired():
                        raise copy_of(self._ended) from None
                    raise
                finally:
                    self._limit = self._ended = None
        finally:
            self.waiting -= 1

    def end_turn(self, error: MagnetarError) -> None:
        """Whoever has the turn waits for nothing more, be it room or the rest of a source."""
        if self._limit is not None:
            self._ended = error
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def wait(self, size: int) -> None:
        """In the caller's turn. Raises SendTimeout."""

        def late() -> SendTimeout:
            no_room = f"no room came free within send_timeout={self._send_timeout:g} s"
            return SendTimeout(f"{no_room}: {self.queue_full(size).message}{self._outbox.why_delayed}")

        async with TimeLimit(self._send_timeout, late):
            while not self._fits_here(size):
                self._changed.clear()
                await self._changed.wait()
            await self._budget.wait(size)

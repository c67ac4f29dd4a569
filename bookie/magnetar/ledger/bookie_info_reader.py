"""Asks the bookies of a static list for BookieInfo, in the background: such bookies do not register.

    unknown ──answers──> known (labels, free space, read-only) <──answers── lost
       └──────silent───────────────────────────> lost <──silent, suspected──┘ (not writable)

A bookie that answers while its journal has made nothing durable for half an add timeout, although adds wait, is as good as
silent: its process lives, and takes adds that it cannot keep. It is lost too, until its journal goes on.

One task for each bookie asks with BookieInfo, one question at a time; `wake` (a writer suspects the bookie) makes the next
one come sooner, at most once in `_PAUSE_S`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from functools import partial

from magnetar.proto.errors import MagnetarError, WrongBookie
from magnetar.runtime.tasks import LongTask

from .directory import BookieFacts, StaticBookies
from .settings import LedgerSettings
from .transport import BookieTransport

_log = logging.getLogger(__name__)

_RETRY_S = 1.0  # a bookie that does not answer is asked again after so long at most
_PAUSE_S = 0.2


class BookieInfoReader:
    """Owns its tasks; neither directory nor transport. Close it before the transport."""

    def __init__(
        self,
        bookies: StaticBookies,
        transport: BookieTransport,
        settings: LedgerSettings,
        rng: random.Random,
    ) -> None:
        self._bookies = bookies
        self._transport = transport
        self._interval_s = settings.bookie_info_interval_s
        self._first_s = settings.connect_timeout_s
        self._stall_s = settings.add_timeout_s / 2
        self._rng = rng
        self._wakes = {name: asyncio.Event() for name in bookies.names}
        self._silent: dict[str, str] = {}  # bookie that placement avoids -> the reason that was logged
        self._tasks: list[LongTask] = []

    async def start(self) -> None:
        """Asks all of them once, for the connect timeout at most, and goes on until `close`."""
        loop = asyncio.get_running_loop()
        asked = {name: loop.create_future() for name in self._bookies.names}
        self._bookies.on_suspected = self._wake
        self._tasks = [
            LongTask(f"the info of bookie {name}", partial(self._follow, name, first), retry_max_s=_RETRY_S)
            for name, first in asked.items()
        ]
        try:
            if asked:
                await asyncio.wait(list(asked.values()), timeout=self._first_s)
        except asyncio.CancelledError:
            await self.close()
            raise

    def problems(self) -> dict[str, str]:
        """For /health: bookies that new ledgers avoid, and why."""
        return {f"bookie {name}": f"{text}; new ledgers pass it by" for name, text in self._silent.items()}

    async def close(self) -> None:
        """Ends the tasks."""
        self._bookies.on_suspected = None
        tasks, self._tasks = self._tasks, []
        await asyncio.gather(*(task.close() for task in tasks))

    def _wake(self, bookie: str) -> None:
        self._wakes[bookie].set()

    async def _follow(self, bookie: str, first: asyncio.Future[None]) -> None:
        wake = self._wakes[bookie]
        while True:
            wake.clear()
            answered = await self._ask(bookie)
            if not first.done():
                first.set_result(None)
            delay_s = self._interval_s if answered else min(self._interval_s, _RETRY_S)
            await asyncio.sleep(min(_PAUSE_S, delay_s))
            try:
                # Spread a little, so that many brokers that started together do not go on asking together.
                async with asyncio.timeout(delay_s * self._rng.uniform(0.9, 1.1)):
                    await wake.wait()
            except TimeoutError:
                pass

    async def _ask(self, bookie: str) -> bool:
        """Whether it takes adds, or says that it is read-only: whether it will do to ask it again later."""
        try:
            facts = BookieFacts.of(await self._transport.info(bookie))
        except Exception as error:
            self._bookies.lost(bookie)
            if not isinstance(error, MagnetarError):  # our own bug
                raise
            refused = isinstance(error, WrongBookie)
            self._log_change(bookie, f"is refused: {error}" if refused else f"does not answer: {error}")
            return False
        if facts.journal_stalled_s > self._stall_s:
            self._bookies.answered(bookie, facts, hung=True)
            self._log_change(
                bookie,
                f"answers, but its journal hangs: nothing became durable there for {facts.journal_stalled_s:.1f} s while "
                "adds wait",
            )
            return False
        self._bookies.answered(bookie, facts)
        if bookie in self._silent:
            del self._silent[bookie]
            _log.info("bookie %s answers again", bookie)
        return True

    def _log_change(self, bookie: str, text: str) -> None:
        # One line for each reason; what a refusal says does not change until somebody repairs it.
        reason = text.partition(":")[0]
        if self._silent.get(bookie, "").partition(":")[0] != reason:
            level = logging.ERROR if text.startswith("is refused") else logging.WARNING
            _log.log(level, "bookie %s %s; new ledgers pass it by", bookie, text)
        self._silent[bookie] = text

"""Work on the ledger list that wants no ledger to be open: attaching ledgers that others wrote.

Whoever asks waits in line; a roll-over of the managed ledger does what is in line after it closed the old ledger and before
it makes the next one. Work that was begun is done, even when the roll-over is cancelled: its compare-and-set has an outcome,
and somebody waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from magnetar.proto.errors import LedgerFenced, MagnetarError, ServiceNotReady, VersionConflict

_log = logging.getLogger(__name__)

R = TypeVar("R")
Work = Callable[[], Coroutine[Any, Any, Any]]


class BetweenLedgers:
    """The line. It is bounded by the requests that a connection may have under way."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Work, asyncio.Future[Any]]] = deque()

    def __bool__(self) -> bool:
        """True while somebody waits."""
        return bool(self._waiting)

    def add(self, work: Callable[[], Coroutine[Any, Any, R]]) -> asyncio.Future[R]:
        """Joins the line; the future gets the outcome. Cancelling it before its turn leaves the line."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, future))
        return future

    async def run(self) -> bool:
        """Does all that is in line now; False if there was nothing. Raises VersionConflict or LedgerFenced: another owner.

        Who joins meanwhile waits for the next roll-over, so that publishers have their turn.
        """
        count = len(self._waiting)
        for _ in range(count):
            work, future = self._waiting.popleft()
            if not future.done():
                await self._run_one(work, future)
        return count > 0

    async def _run_one(self, work: Work, future: asyncio.Future[Any]) -> None:
        task = asyncio.get_running_loop().create_task(work())
        cancelled = False
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
            await asyncio.wait([task])
        error = task.exception()
        if error is not None and not isinstance(error, MagnetarError):
            _log.error("work on a ledger list failed", exc_info=error)
            error = ServiceNotReady(f"the request failed here: {error!r}")
        if future.done():
            pass
        elif error is None:
            future.set_result(task.result())
        elif isinstance(error, (VersionConflict, LedgerFenced)):
            future.set_exception(ServiceNotReady(f"the topic was taken over: {error}; look it up again"))
        else:
            future.set_exception(error)
        if cancelled:
            raise asyncio.CancelledError
        if isinstance(error, (VersionConflict, LedgerFenced)):
            raise error

    def fail(self, error: MagnetarError) -> None:
        """Nobody's turn will come any more."""
        waiting, self._waiting = self._waiting, deque()
        for _, future in waiting:
            if not future.done():
                future.set_exception(type(error)(error.message, **error.details))

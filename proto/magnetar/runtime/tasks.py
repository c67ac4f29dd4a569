"""Work that runs for as long as its owner does: its end is never silent (rule 46).

running ──ends or raises──> the reason is logged, counted and remembered ──back-off──> running
   └──close()──> cancelled, and awaited
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from magnetar.proto.errors import MagnetarError

__all__ = ["LongTask"]

_log = logging.getLogger(__name__)


class LongTask:
    """Runs `work` in the running loop for ever, and begins it anew after a back-off that doubles when it ends.

    Once `work` has run for longer than the longest back-off, the next one is the first again.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], Coroutine[Any, Any, object]],
        *,
        retry_s: float = 1.0,
        retry_max_s: float = 30.0,
    ) -> None:
        self.failures = 0  # how often it has ended
        self.last_error = ""  # why it ended last
        self.trouble = ""  # why it does not run at this moment; "" while it runs
        self._name = name
        self._work = work
        self._retry_s = retry_s
        self._retry_max_s = retry_max_s
        self._task = asyncio.get_running_loop().create_task(self._run(), name=name)

    async def close(self) -> None:
        """Cancels the work and waits for its end. May be called again."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = self._retry_s
        while True:
            began = loop.time()
            try:
                await self._work()
                error: BaseException | None = None
            except asyncio.CancelledError as cancelled:
                if self._closing():
                    raise
                error = cancelled
            except Exception as raised:
                error = raised
            if loop.time() - began > self._retry_max_s:
                pause_s = self._retry_s
            defect = None if isinstance(error, MagnetarError) else error
            self.failures += 1
            reason = "it returned" if error is None else f"{type(error).__name__}: {error}"
            self.last_error = self.trouble = reason
            _log.error(
                "%s has ended, and begins anew in %g s: %s", self._name, pause_s, reason, exc_info=defect
            )
            await asyncio.sleep(pause_s)
            self.trouble = ""
            pause_s = min(pause_s * 2, self._retry_max_s)

    def _closing(self) -> bool:
        """Whether this task itself is cancelled, not only something that the work waits for."""
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0

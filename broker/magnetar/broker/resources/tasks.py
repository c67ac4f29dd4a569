"""Work that goes on to its end although its caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


async def finish(work: Coroutine[Any, Any, R]) -> R:
    """Awaits `work`, which goes on to its end even if the caller is cancelled; only then the cancellation is raised."""
    task = asyncio.get_running_loop().create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        task.exception()  # nobody is left who could handle it
        raise cancelled
    return task.result()

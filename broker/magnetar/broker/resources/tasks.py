"""Work that goes on to its end although its caller is cancelled, and work that is under way at most once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from magnetar.runtime.tasks import awaited, begin, end_all

R = TypeVar("R")


async def finish(work: Coroutine[Any, Any, R]) -> R:
    """Awaits `work`, which goes on to its end even if the caller is cancelled; only then the cancellation is raised."""
    task = awaited(work)
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


class Jobs:
    """Regular work, by name: what is still under way is not begun again. What fails is logged with the owner's name."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    def begin(self, name: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Unless it is under way."""
        if name not in self._tasks:
            self._tasks[name] = begin(self._run(name, work), f"{self._owner}: {name}")

    async def _run(self, name: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        try:
            await work()
        finally:
            self._tasks.pop(name, None)

    async def wait(self, name: str = "") -> None:
        """Returns when the work, or all of it, is not under way any more."""
        tasks = [task for other, task in self._tasks.items() if name in ("", other)]
        if tasks:
            await asyncio.wait(tasks)

    async def cancel(self) -> None:
        """All of it."""
        tasks, self._tasks = self._tasks, {}
        await end_all(tasks.values())

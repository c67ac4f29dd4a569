"""Many calls of which some are under way at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

TOGETHER = 64  # as many topics as a broker loads at a time


async def together(count: int, work: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    """`work(0)` to `work(count - 1)`, TOGETHER at a time."""
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await work(number)

    await asyncio.gather(*(worker() for _ in range(TOGETHER)))

"""How long the turns of an event loop are: what else the process serves waits for the longest one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import NamedTuple, TypeVar

T = TypeVar("T")
# Between two looks. uvloop's timers are no finer; how late a look is counts as a turn.
_LOOK_EVERY_S = 0.001


class Turns(NamedTuple):
    """Seconds that something took and the CPU of this thread meanwhile; the longest turn by the clock, and by its CPU."""

    seconds: float
    cpu_s: float
    longest_s: float
    longest_cpu_s: float


async def longest_turn(work: Awaitable[T]) -> tuple[T, Turns]:
    """Awaits the work, and says how long the turns of the loop were meanwhile.

    A turn that another process's work on the same core prolongs is longer by the clock than by its CPU; one that waits for
    the disk is so as well.
    """
    loop = asyncio.get_running_loop()
    longest = longest_cpu = 0.0
    began, began_cpu = time.perf_counter(), time.thread_time()
    at, at_cpu = began, began_cpu
    timer: asyncio.TimerHandle | None = None

    def look() -> None:
        nonlocal longest, longest_cpu, at, at_cpu, timer
        now, now_cpu = time.perf_counter(), time.thread_time()
        longest, longest_cpu = max(longest, now - at - _LOOK_EVERY_S), max(longest_cpu, now_cpu - at_cpu)
        at, at_cpu = now, now_cpu
        timer = loop.call_later(_LOOK_EVERY_S, look)

    look()
    try:
        result = await work
        # One more look, at the last turn.
        await asyncio.sleep(2 * _LOOK_EVERY_S)
    finally:
        assert timer is not None
        timer.cancel()
    seconds = time.perf_counter() - began - 2 * _LOOK_EVERY_S
    return result, Turns(seconds, time.thread_time() - began_cpu, longest, longest_cpu)

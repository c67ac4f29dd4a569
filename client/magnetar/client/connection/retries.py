"""When to try again: pauses that grow, and a limit in time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from magnetar.proto.errors import MagnetarError, RequestTimeout, VersionConflict

from ..options import ClientOptions

T = TypeVar("T")


def backoff(first: float, longest: float, rng: random.Random) -> Iterator[float]:
    """Pauses in seconds: up to twice `first`, then `first`, doubling up to `longest`; half more or less at random.

    So much chance, that ten thousand clients of a broker that fails do not come to the next one at the same moment.
    """
    yield 2 * first * rng.random()
    pause = first
    while True:
        yield pause * rng.uniform(0.5, 1.5)
        pause = min(pause * 2, longest)


async def until_answered(
    attempt: Callable[[], Awaitable[T]], options: ClientOptions, rng: random.Random, what: str
) -> T:
    """Repeats `attempt` after retryable errors, with pauses; RequestTimeout when operation_timeout is over.

    `what` says what failed then. VersionConflict is raised at once: the same compare-and-set can only fail again.
    """
    pauses = backoff(options.backoff_first, options.backoff_max, rng)
    last: MagnetarError | None = None
    try:
        async with asyncio.timeout(options.operation_timeout):
            while True:
                try:
                    return await attempt()
                except MagnetarError as error:
                    if not error.retryable or isinstance(error, VersionConflict):
                        raise
                    last = error
                await asyncio.sleep(next(pauses))
    except TimeoutError:
        reason = last.message if last is not None else "no answer"
        raise RequestTimeout(
            f"{what} within operation_timeout={options.operation_timeout:g} s: {reason}"
        ) from last

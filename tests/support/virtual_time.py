"""Tests whose subject is time: in virtual time a pause of 30 s costs nothing and is measured to the microsecond.

    @in_virtual_time
    async def test_a_pause() -> None: ...

The test must make what it uses itself: async fixtures live on another loop.
"""

import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from support.sim import SimLoop

Arguments = ParamSpec("Arguments")


def in_virtual_time(
    test: Callable[Arguments, Coroutine[Any, Any, None]],
) -> Callable[Arguments, None]:
    """Runs an async test on a simulated loop of its own, always with the same seed."""

    @functools.wraps(test)
    def run(*args: Arguments.args, **named: Arguments.kwargs) -> None:
        loop = SimLoop(seed=1)
        try:
            loop.run(test(*args, **named))
        finally:
            loop.close()

    return run

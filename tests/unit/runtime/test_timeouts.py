"""A limit in time says what was waited for, and leaves the errors of its body alone."""

import asyncio

import pytest

from magnetar.proto.errors import RequestTimeout, ServiceNotReady
from magnetar.runtime.timeouts import TimeLimit


async def test_its_end_is_the_error_that_was_given() -> None:
    with pytest.raises(ServiceNotReady, match="too late"):
        async with TimeLimit(0.001, lambda: ServiceNotReady("too late")):
            await asyncio.sleep(10)


async def test_a_timeout_of_the_body_is_not_its_end() -> None:
    with pytest.raises(RequestTimeout, match="no answer"):
        async with TimeLimit(10, lambda: ServiceNotReady("too late")):
            raise RequestTimeout("no answer")


async def test_a_cancellation_stays_one() -> None:
    async def wait() -> None:
        async with TimeLimit(10, lambda: ServiceNotReady("too late")):
            await asyncio.sleep(10)

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

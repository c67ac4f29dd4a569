"""Long-lived work has an owner that notices its end."""

from __future__ import annotations

import asyncio
import logging

import pytest

from magnetar.proto.errors import StorageFailed
from magnetar.runtime.tasks import LongTask
from support.virtual_time import in_virtual_time


@in_virtual_time
async def test_rule_46_work_that_raises_is_begun_anew_ever_more_slowly() -> None:
    loop = asyncio.get_running_loop()
    began: list[float] = []
    origin = loop.time()

    async def work() -> None:
        began.append(round(loop.time() - origin, 3))
        if len(began) == 6:
            await asyncio.sleep(100)  # it works for a while: the next back-off is the first one again
        if len(began) == 8:
            await asyncio.Event().wait()
        raise ValueError(f"run {len(began)}")

    task = LongTask("the work", work, retry_s=1, retry_max_s=8)
    await asyncio.sleep(7.5)
    assert began == [0, 1, 3, 7]
    assert (task.failures, task.last_error, task.trouble) == (4, "ValueError: run 4", "ValueError: run 4")
    await asyncio.sleep(1000)
    assert began == [0, 1, 3, 7, 15, 23, 124, 126]
    assert (task.failures, task.last_error, task.trouble) == (7, "ValueError: run 7", "")
    await task.close()
    await task.close()


@in_virtual_time
async def test_rule_46_work_that_returns_or_is_cancelled_from_elsewhere_is_begun_anew() -> None:
    runs = 0

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            return
        if runs == 2:
            raise asyncio.CancelledError  # something that it waited for was cancelled
        if runs == 3:
            raise StorageFailed("no disk")
        await asyncio.Event().wait()

    task = LongTask("the work", work, retry_s=1)
    await asyncio.sleep(0.5)
    assert task.last_error == "it returned"
    await asyncio.sleep(10)
    assert (runs, task.failures, task.last_error) == (4, 3, "StorageFailed: no disk")
    await task.close()
    await asyncio.sleep(100)
    assert runs == 4


def test_rule_46_the_end_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    @in_virtual_time
    async def run() -> None:
        async def work() -> None:
            raise KeyError("ledger")

        task = LongTask("the list of bookies", work)
        await asyncio.sleep(0.1)
        await task.close()

    run()
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage() == "the list of bookies has ended, and begins anew in 1 s: KeyError: 'ledger'"
    assert record.exc_info is not None

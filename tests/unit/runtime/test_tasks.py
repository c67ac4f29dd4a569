"""Long-lived work has an owner that notices its end."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import pytest

from magnetar.proto.errors import StorageFailed
from magnetar.runtime.tasks import LongTask, TaskSet, begin, finish, long_tasks, on_change
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


@pytest.mark.parametrize("swallows", [False, True], ids=["fails", "returns"])
@in_virtual_time
async def test_rule_46_work_that_ends_otherwise_when_it_is_cancelled_is_not_begun_anew(
    swallows: bool,
) -> None:
    runs = 0

    async def work() -> None:
        nonlocal runs
        runs += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not swallows:
                raise StorageFailed("its session cannot be closed") from None

    task = LongTask("the work", work, retry_s=1)
    await asyncio.sleep(0.5)
    async with asyncio.timeout(100):
        await task.close()
    await asyncio.sleep(100)
    assert runs == 1


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


@in_virtual_time
async def test_long_tasks_of_a_process_are_listed_until_they_are_closed() -> None:
    first, second = LongTask("first", asyncio.Event().wait), LongTask("second", asyncio.Event().wait)
    assert [task.name for task in long_tasks()] == ["first", "second"]
    await first.close()
    assert long_tasks() == [second]
    second.stop()
    assert long_tasks() == []
    await asyncio.sleep(0)


@in_virtual_time
async def test_what_is_followed_is_read_at_each_change_and_again_after_a_failure() -> None:
    loop = asyncio.get_running_loop()
    origin = loop.time()
    changed = asyncio.Event()
    read: list[float] = []

    async def act() -> None:
        read.append(round(loop.time() - origin, 3))
        if len(read) == 1:
            raise StorageFailed("no disk")

    task = LongTask("the list", partial(on_change, changed, act, poll_s=30), retry_max_s=4)
    await asyncio.sleep(5)
    assert read == []
    changed.set()
    await asyncio.sleep(10)
    assert read == [5, 6], "the change that could not be read is not forgotten"
    await asyncio.sleep(30)
    assert read == [5, 6, 36], "and without a change after a while"
    await task.close()


@in_virtual_time
async def test_rule_46_what_nobody_waits_for_says_why_it_failed(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(error: BaseException) -> None:
        raise error

    tasks = TaskSet("the sweep")
    begin(fail(StorageFailed("no disk")), "the copy")
    tasks.begin(fail(KeyError("ledger")))
    begin(fail(asyncio.CancelledError()), "the cancelled one")
    assert len(tasks) == 1
    await asyncio.sleep(0.1)
    assert len(tasks) == 0
    assert [(one.levelname, one.getMessage()) for one in caplog.records if one.name.endswith(".tasks")] == [
        ("WARNING", "the copy failed: no disk"),
        ("ERROR", "the sweep failed by a defect"),
    ]


@in_virtual_time
async def test_tasks_of_a_set_end_with_it_and_one_of_them_may_end_it() -> None:
    ended: list[str] = []
    tasks = TaskSet("request")

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("wait")

    async def close() -> None:
        await tasks.close()
        ended.append("close")

    tasks.begin(wait())
    task = tasks.begin(close(), ended=lambda task: ended.append(task.get_name()))
    await task
    await asyncio.sleep(0)
    assert ended == ["wait", "close", "request"]
    await tasks.close()


async def test_a_task_that_is_handed_over_twice_leaves_once() -> None:
    tasks, loop = TaskSet("work"), asyncio.get_running_loop()
    failures: list[object] = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    work = loop.create_task(asyncio.sleep(0))
    tasks.add(work)
    tasks.add(work)
    await tasks.wait()
    await asyncio.sleep(0)
    assert (len(tasks), failures) == (0, [])


@pytest.mark.parametrize("error", [None, StorageFailed("full")])
async def test_work_that_is_finished_goes_on_and_its_caller_is_cancelled_all_the_same(
    error: StorageFailed | None,
) -> None:
    going, done = asyncio.Event(), []

    async def work() -> str:
        await going.wait()
        done.append("all of it")
        if error is not None:
            raise error
        return "result"

    caller = asyncio.create_task(finish(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done(), "it waits for the end"
    going.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done == ["all of it"]

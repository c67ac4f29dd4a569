"""The simulated loop keeps asyncio's promises, is the same under one seed, and forgets dead processes."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from support.sim import ProcessKilled, SimClock, SimLoop, SimulationDeadlock, SimulationFailed


@pytest.fixture
def loop() -> Any:
    made = SimLoop(seed=1)
    yield made
    made.close()


def test_time_is_virtual_and_timers_are_not_early(loop: SimLoop) -> None:
    async def main() -> tuple[float, float]:
        start = asyncio.get_running_loop().time()
        await asyncio.sleep(3000)
        return start, asyncio.get_running_loop().time()

    start, end = loop.run(main())
    assert 3000 <= end - start < 3000.01


def test_call_soon_is_first_in_first_out_across_turns(loop: SimLoop) -> None:
    seen: list[int] = []

    async def main() -> None:
        for number in range(100):
            loop.call_soon(seen.append, number)
        await asyncio.sleep(0.1)

    loop.run(main())
    assert seen == list(range(100))


def test_order_of_equal_timers_depends_on_the_seed() -> None:
    def order(seed: int) -> list[int]:
        loop = SimLoop(seed)
        seen: list[int] = []

        async def main() -> None:
            when = loop.time() + 1
            for number in range(20):
                loop.call_at(when, seen.append, number)
            await asyncio.sleep(2)

        loop.run(main())
        loop.close()
        return seen

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(order(1)) == list(range(20))


def test_cancelled_timer_does_not_run(loop: SimLoop) -> None:
    async def main() -> None:
        loop.call_later(0.5, pytest.fail, "ran").cancel()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.sleep(60)

    loop.run(main())
    assert loop.time() < 3


def test_executor_runs_later_and_hands_back_result_and_error(loop: SimLoop) -> None:
    async def main() -> None:
        before = loop.time()
        assert await loop.run_in_executor(None, lambda: 7) == 7
        assert loop.time() > before
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)

    loop.run(main())


def test_cancelled_job_of_an_executor_may_have_begun() -> None:
    ran: list[int] = []

    async def main(loop: SimLoop) -> None:
        job = loop.run_in_executor(None, ran.append, loop.seed)
        job.cancel()
        await asyncio.sleep(1)
        assert job.cancelled()
        await loop.run_in_executor(None, lambda: None)  # and one that fails when nobody waits any more
        loop.run_in_executor(None, lambda: 1 // 0).cancel()
        await asyncio.sleep(1)

    for seed in range(20):
        loop = SimLoop(seed)
        loop.run(main(loop))
        loop.close()
    assert 0 < len(ran) < 20


def test_call_soon_gives_no_timer(loop: SimLoop) -> None:
    """Production code may ask which of the two it holds."""
    assert not isinstance(loop.call_soon(str), asyncio.TimerHandle)
    assert isinstance(loop.call_later(1, str), asyncio.TimerHandle)


def late_by(seed: int) -> list[float]:
    """How late the timers of a process run, each set for a moment of its own; negative: early."""
    loop = SimLoop(seed)
    process = loop.start_process("p")
    late: list[float] = []

    async def wait() -> None:
        for number in range(200):
            when, ran = loop.time() + number * 0.00013, loop.create_future()
            loop.call_at(when, ran.set_result, None)
            await ran
            late.append(loop.time() - when)

    loop.run(process.spawn(wait()))  # type: ignore[arg-type]
    loop.close()
    return late


def test_timers_of_a_loop_that_counts_milliseconds_may_be_early_and_swap_places() -> None:
    assert min(late_by(2)) >= 0.0
    assert -0.00051 < min(late_by(3)) < -0.0003
    loop = SimLoop(3)
    order: list[str] = []

    async def main() -> None:
        assert loop.time() == loop.time() == round(loop.time(), 3)
        for _ in range(20):
            order.clear()
            loop.call_later(0.0014, order.append, "later")
            loop.call_later(0.0006, order.append, "earlier")
            await asyncio.sleep(0.01)
            if order == ["later", "earlier"]:
                return
        pytest.fail("they never did")

    loop.run(loop.start_process("p").spawn(main()))  # type: ignore[arg-type]
    loop.close()


def test_each_process_counts_its_seconds_from_a_moment_of_its_own(loop: SimLoop) -> None:
    async def wait() -> tuple[float, float]:
        start = loop.time()
        await asyncio.sleep(3)
        async with asyncio.timeout(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout_at(loop.time() + 1):
                    await asyncio.sleep(60)
        return start, loop.time()

    async def main() -> None:
        clocks = [await loop.start_process(name).spawn(wait()) for name in "ab"]
        assert [round(end - start, 2) for start, end in clocks] == [4.0, 4.0]
        assert abs(clocks[0][0] - clocks[1][0]) > 10

    loop.run(main())


def test_failing_callback_fails_the_run(loop: SimLoop) -> None:
    async def main() -> None:
        loop.call_soon(lambda: 1 // 0)
        await asyncio.sleep(60)

    with pytest.raises(SimulationFailed, match="ZeroDivisionError"):
        loop.run(main())


def test_unwatched_task_that_failed_fails_the_run(loop: SimLoop) -> None:
    async def broken() -> None:
        raise ValueError("nobody looks")

    async def main() -> None:
        asyncio.create_task(broken())  # noqa: RUF006 - dropping it is the point
        await asyncio.sleep(1)

    with pytest.raises(SimulationFailed, match="nobody looks"):
        loop.run(main())


def test_deadlock_is_told_with_the_place_that_waits(loop: SimLoop) -> None:
    async def main() -> None:
        await loop.create_future()

    with pytest.raises(SimulationDeadlock, match="test_loop"):
        loop.run(main())


def test_no_finally_of_a_killed_process_runs(loop: SimLoop) -> None:
    cleaned: list[str] = []
    process = loop.start_process("victim")

    async def generator() -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.sleep(60)
            yield 2
        finally:
            cleaned.append("generator")

    async def victim() -> None:
        try:
            async with asyncio.timeout(100):
                async for _ in generator():
                    pass
        finally:
            cleaned.append("task")

    async def main() -> None:
        process.spawn(victim())
        process.call(loop.call_later, 5.0, cleaned.append, "timer")
        await asyncio.sleep(1)
        process.kill()
        await asyncio.sleep(10)
        assert cleaned == []

    loop.run(main())
    assert cleaned == []


def test_children_of_a_process_belong_to_it(loop: SimLoop) -> None:
    ticks: list[float] = []
    process = loop.start_process("parent")

    async def ticking() -> None:
        while True:
            await asyncio.sleep(0.1)
            ticks.append(loop.time())

    async def parent() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(ticking())
            await loop.run_in_executor(None, lambda: loop.call_later(0.05, ticks.append, 0.0))

    async def main() -> None:
        process.spawn(parent())
        await asyncio.sleep(1.05)
        process.kill()
        count = len(ticks)
        assert count == 11
        await asyncio.sleep(5)
        assert len(ticks) == count

    loop.run(main())


def test_kill_from_inside_ends_the_running_callback(loop: SimLoop) -> None:
    reached: list[str] = []
    process = loop.start_process("suicide")

    async def suicide() -> None:
        try:
            process.kill()
        except Exception:  # an ordinary handler must not survive a kill
            reached.append("except")
        reached.append("after")

    async def main() -> None:
        process.spawn(suicide())
        await asyncio.sleep(1)

    loop.run(main())
    assert reached == []
    assert not process.alive
    assert not issubclass(ProcessKilled, Exception)


def test_pause_delays_and_keeps_the_order(loop: SimLoop) -> None:
    seen: list[tuple[int, float]] = []
    process = loop.start_process("slow")

    async def main() -> None:
        for number in range(5):
            process.call(
                loop.call_later, 0.1 * number, lambda number=number: seen.append((number, loop.time()))
            )
        process.pause(10)
        await asyncio.sleep(20)

    loop.run(main())
    assert [number for number, _ in seen] == list(range(5))
    assert seen[0][1] > 10
    assert loop.trace.faults["pause"] == 1


def test_pause_of_a_busy_process_is_as_long_as_asked_for(loop: SimLoop) -> None:
    process = loop.start_process("slow")
    seen: list[float] = []

    async def main() -> None:
        process.busy(0.001)
        process.pause(10)
        process.pause(1)
        process.call(loop.call_soon, lambda: seen.append(loop.now))
        await asyncio.sleep(20)

    loop.run(main())
    assert 11 <= seen[0] < 11.1
    assert not process.paused


def test_signal_reaches_the_handler_of_its_process(loop: SimLoop) -> None:
    got: list[str] = []
    one, two = loop.start_process("one"), loop.start_process("two")
    for process in (one, two):
        process.call(loop.add_signal_handler, 15, got.append, process.name)

    async def main() -> None:
        loop.deliver_signal(two, 15)
        await asyncio.sleep(0.1)

    loop.run(main())
    assert got == ["two"]


def test_sets_of_tasks_iterate_in_the_order_of_their_numbers(loop: SimLoop) -> None:
    async def main() -> list[str]:
        tasks = [asyncio.create_task(asyncio.sleep(0.001), name=str(n)) for n in range(50)]
        done, _ = await asyncio.wait(tasks)
        return [task.get_name() for task in done]

    first = loop.run(main())
    other = SimLoop(seed=1)
    junk = [object() for _ in range(1000)]  # other addresses
    assert other.run(main_again(other)) == first
    other.close()
    del junk


async def main_again(loop: SimLoop) -> list[str]:
    tasks = [loop.create_task(asyncio.sleep(0.001), name=str(n)) for n in range(50)]
    done, _ = await asyncio.wait(tasks)
    return [task.get_name() for task in done]


def test_clock_follows_virtual_time(loop: SimLoop) -> None:
    clock = SimClock(loop)

    async def main() -> int:
        before = clock.now_ms()
        await asyncio.sleep(1.5)
        return clock.now_ms() - before

    assert loop.run(main()) == 1500


def test_clock_that_is_set_now_and_then_also_goes_back_and_ends_with_its_process(loop: SimLoop) -> None:
    clock, process = SimClock(loop), loop.start_process("p")
    clock.set_now_and_then(process)
    seen: list[int] = []

    async def main() -> None:
        for _ in range(200):
            await asyncio.sleep(0.5)
            seen.append(clock.now_ms())
        process.kill()
        times = loop.trace.faults["clock_set"]
        await asyncio.sleep(100)
        assert loop.trace.faults["clock_set"] == times

    loop.run(main())
    steps = [later - earlier for earlier, later in itertools.pairwise(seen)]
    assert min(steps) < -1000
    assert max(steps) > 10_000
    assert steps.count(500) > 100


def test_same_seed_same_trace() -> None:
    def hash_of(seed: int) -> str:
        loop = SimLoop(seed)
        process = loop.start_process("p")

        async def busy() -> None:
            while True:
                await loop.run_in_executor(None, lambda: None)
                loop.trace.record("tick")

        async def main() -> None:
            process.spawn(busy())
            await asyncio.sleep(1)
            process.kill()

        with contextlib.closing(loop):
            loop.run(main())
        return loop.trace.hexdigest()

    assert hash_of(3) == hash_of(3)
    assert hash_of(3) != hash_of(4)


def test_what_a_dead_process_starts_in_its_last_moment_never_runs(loop: SimLoop) -> None:
    ran: list[str] = []
    process = loop.start_process("last words")

    async def late() -> None:
        ran.append("late")

    def die(create: Callable[..., Any]) -> None:
        with contextlib.suppress(BaseException):
            process.kill()
        create(late())

    async def main() -> None:
        process.call(die, loop.create_task)
        await asyncio.sleep(1)

    loop.run(main())
    assert ran == []

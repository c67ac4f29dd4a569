"""The owners of tasks: nothing runs in the background whose end nobody notices (rule 46).

`LongTask`     work that runs for as long as its owner does; `long_tasks` lists all of a process
`begin`        work that nobody waits for: what it raises is logged
`awaited`      work whose result somebody awaits, or looks at; `end_all` cancels several, and waits for their end
`finish`       work that goes on to its end although its caller is cancelled
`TaskSet`      any number of short ones, which end with their owner
`Jobs`         the same by name: what is still under way is not begun again

A long task:

    running ──ends or raises──> the reason is logged, counted and remembered ──back-off──> running
       └──close()──> cancelled, and awaited
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, Final, TypeVar

from magnetar.proto.errors import MagnetarError

_log = logging.getLogger(__name__)

T = TypeVar("T")
_Ended = Callable[[asyncio.Task[T]], object]


class LongTask:
    """Runs `work` in the running loop for ever, and begins it anew after a back-off that doubles when it ends.

    Once `work` has run for longer than the longest back-off, the next one is the first again.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], Coroutine[Any, Any, object]],
        *,
        retry_s: float = 1.0,
        retry_max_s: float = 30.0,
    ) -> None:
        self.name = name
        self.failures = 0  # how often it has ended
        self.last_error = ""  # why it ended last
        self._work = work
        self._retry_s = retry_s
        self._retry_max_s = retry_max_s
        self._loop = asyncio.get_running_loop()
        self._well_at = 0.0  # loop time: if it still runs then, the last end is over
        self._task = self._loop.create_task(self._run(), name=name)
        _running[self] = None

    @property
    def trouble(self) -> str:
        """Why it ended, until it has run again for as long as the back-off was; "" for one that runs."""
        return self.last_error if self.failures and self._loop.time() < self._well_at else ""

    def stop(self) -> asyncio.Task[None]:
        """Cancels the work; returns the task, which ends in a moment."""
        _running.pop(self, None)
        self._task.cancel()
        return self._task

    async def close(self) -> None:
        """Cancels the work and waits for its end. May be called again."""
        await asyncio.gather(self.stop(), return_exceptions=True)

    async def _run(self) -> None:
        loop = self._loop
        pause_s = self._retry_s
        while True:
            began = loop.time()
            error: BaseException | None = None
            try:
                await self._work()
            except (Exception, asyncio.CancelledError) as raised:
                error = raised
            if self._closing():  # whatever became of the cancellation within the work
                if error is not None:
                    raise error
                return
            if loop.time() - began > self._retry_max_s:
                pause_s = self._retry_s
            defect = None if isinstance(error, MagnetarError) else error
            self.failures += 1
            self.last_error = "it returned" if error is None else f"{type(error).__name__}: {error}"
            self._well_at = loop.time() + 2 * pause_s
            _log.log(
                logging.WARNING if isinstance(error, MagnetarError) and error.retryable else logging.ERROR,
                "%s has ended, and begins anew in %g s: %s", self.name, pause_s, self.last_error,
                exc_info=defect,
            )  # fmt: skip
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, self._retry_max_s)

    def _closing(self) -> bool:
        """Whether this task itself is cancelled, not only something that the work waits for."""
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0


_running: Final[weakref.WeakKeyDictionary[LongTask, None]] = weakref.WeakKeyDictionary()


def long_tasks() -> list[LongTask]:
    """Those of the running loop that are not closed, in the order in which they began: for /health and /metrics."""
    loop = asyncio.get_running_loop()
    return [task for task in list(_running) if task._loop is loop]


async def on_change(
    changed: asyncio.Event, act: Callable[[], Coroutine[Any, Any, object]], *, poll_s: float | None = None
) -> None:
    """The work of a LongTask: acts whenever `changed` is set, and after `poll_s` without.

    What `act` raises ends it, and leaves `changed` set: the next run acts at once.
    """
    while True:
        await wait_at_most(changed, poll_s)
        changed.clear()
        try:
            await act()
        except BaseException:
            changed.set()
            raise


async def wait_at_most(event: asyncio.Event, timeout_s: float | None) -> None:
    """Returns when the event is set, or after `timeout_s`.

    Not by wait_for, which until Python 3.12 forgets a cancellation that comes with the event.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


def begin(work: Coroutine[Any, Any, T], name: str, ended: _Ended[T] | None = None) -> asyncio.Task[T]:
    """A task that nobody waits for: `ended` is called at its end, and looks at it. Without it, what it raises is logged."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(ended or report)
    return task


def awaited(work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
    """A task whose result its owner awaits, or looks at. asyncio logs an error that nobody looked at."""
    return asyncio.get_running_loop().create_task(work, name=name)


async def finish(work: Coroutine[Any, Any, T] | asyncio.Task[T]) -> T:
    """Awaits `work`, which goes on to its end even if the caller is cancelled; only then the cancellation is raised."""
    task = work if isinstance(work, asyncio.Task) else awaited(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        _seen(task)  # nobody is left who could handle it
        raise cancelled
    return task.result()


async def end_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels them, and waits for their end. What they raise is left out."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


def report(task: asyncio.Task[Any]) -> None:
    if task.cancelled() or (error := task.exception()) is None:
        return
    if isinstance(error, MagnetarError):
        _log.warning("%s failed: %s", task.get_name(), error)
    else:
        _log.error("%s failed by a defect", task.get_name(), exc_info=error)


def _seen(task: asyncio.Task[Any]) -> None:
    """Whoever awaits it gets what it raised, or has left."""
    if not task.cancelled():
        task.exception()


class TaskSet:
    """Tasks that end with their owner; each leaves the set at its end."""

    def __init__(self, name: str) -> None:
        """`name`: of a task that is given none, in what is logged of it."""
        self._name = name
        self._tasks: dict[asyncio.Task[Any], _Ended[Any]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(list(self._tasks))

    def begin(
        self, work: Coroutine[Any, Any, T], name: str = "", ended: _Ended[T] | None = None
    ) -> asyncio.Task[T]:
        """Like the function `begin`; `ended` is called when the task has left the set."""
        task = asyncio.get_running_loop().create_task(work, name=name or self._name)
        self.add(task, ended)
        return task

    async def run(self, work: Coroutine[Any, Any, T], name: str = "") -> T:
        """Awaits `work`, which goes on in the set if the caller is cancelled, who does not wait for its end."""
        return await asyncio.shield(self.begin(work, name, _seen))

    def add(self, task: asyncio.Task[T], ended: _Ended[T] | None = None) -> None:
        """Takes over a task that has begun already; one that it has stays as it is."""
        if task not in self._tasks:
            self._tasks[task] = ended or report
            task.add_done_callback(self._leave)

    def _leave(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task)(task)

    async def wait(self) -> None:
        """Returns when those that are under way now have ended, but for one that calls this itself."""
        if tasks := self._others():
            await asyncio.wait(tasks)

    def cancel(self) -> None:
        """All; they leave the set as they end."""
        for task in self:
            task.cancel()

    async def close(self) -> None:
        """Cancels them, and waits for their end, but for one that calls this itself. May be called again."""
        await end_all(self._others())

    def _others(self) -> list[asyncio.Task[Any]]:
        me = asyncio.current_task()
        return [task for task in self._tasks if task is not me]


class Jobs:
    """Regular work, by name: what is still under way is not begun again. What fails is logged with the owner's name."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

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

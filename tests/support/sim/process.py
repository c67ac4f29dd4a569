"""Simulated processes: who owns a callback, and what a crash takes away.

Every callback, task, transport and timer belongs to the process that was current when it was made; the tag travels in
a context variable, as asyncio copies contexts into tasks and callbacks anyway. Killing a process drops all of these:
nothing of it runs again, not even a `finally`, exactly as after kill -9. What belongs to no process (the test itself)
survives everything.

A dead process's coroutines must not be collected while the run lasts, since closing a coroutine would run its `finally`
blocks. `Graveyard` collects them and closes them, muted, when the loop is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import warnings
import weakref
from asyncio.tasks import _unregister_task
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from support.sim.callbacks import Handle, SimTask
    from support.sim.loop import SimLoop

_process: contextvars.ContextVar[SimProcess | None] = contextvars.ContextVar("sim_process", default=None)


class ProcessKilled(BaseException):
    """Raised inside a process that was killed while it ran (a crash in the middle of a disk call).

    It unwinds the stack of the one running callback; whatever `except` and `finally` do on the way reaches neither disk
    nor network, because both refuse a dead process.
    """


def current_process() -> SimProcess | None:
    """The process in whose name the running code runs, or None for the test itself."""
    return _process.get()


def owner_of(context: contextvars.Context) -> SimProcess | None:
    """The process to which callbacks with this context belong."""
    return context.get(_process)


class SimProcess:
    """One incarnation of a process. Made by `SimLoop.start_process`."""

    def __init__(self, loop: SimLoop, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self.generators: weakref.WeakSet[AsyncGenerator[Any, Any]] = weakref.WeakSet()
        self.stalled: list[Handle] = []  # callbacks that became due while paused, in order
        # Of its loop's time, as an uptime. Not drawn from the loop's `rng`, which is there for what happens.
        self.time_offset = float(random.Random(f"{loop.seed} {name} {loop.now}").randrange(1_000_000))
        self._paused_until = 0.0
        self._stands_still_s = 0.0  # in all its pauses, to the end of the one under way
        self._loop = loop
        self._context = contextvars.copy_context()
        self._context.run(_process.set, self)
        self._at_death: list[Callable[[], None]] = []

    def spawn(self, coroutine: Coroutine[Any, Any, Any], *, name: str | None = None) -> asyncio.Task[Any]:
        """Starts a task that belongs to this process."""
        return self._loop.create_task(coroutine, name=name, context=self._context.copy())

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function in the name of this process."""
        return self._context.copy().run(function, *arguments)

    def at_death(self, callback: Callable[[], None]) -> None:
        """Registers what the outside world does when this process dies (a lock is free)."""
        self._at_death.append(callback)

    def kill(self, *, power: bool = False) -> None:
        """Ends the process at once: none of its code runs again. Raises ProcessKilled when called from inside it.

        `power`: its machine loses its power, so that nobody closes its sockets, until a process of this name is started.
        The disk has a `lose_power` of its own.
        """
        if not self.alive:
            return
        self.alive = False
        self._loop.trace.record("kill", self.name)
        self._loop.network.process_died(self, power=power)
        self._loop.graveyard.bury(self, self._loop.tasks())
        self.stalled.clear()  # of a paused process; after the burial, since these may be all that holds a task
        for callback in self._at_death:
            callback()
        if current_process() is self:
            raise ProcessKilled(self.name)

    def pause(self, seconds: float) -> None:
        """Nothing of the process runs for `seconds` (a stopped or starved process); then it goes on where it was."""
        if self.alive:
            self._loop.trace.fault("pause", self.name, f"{seconds:.3f}")
            self.busy(seconds)

    def busy(self, seconds: float) -> None:
        """The process blocks in a call for so long: the running callback ends, then nothing runs until it is over."""
        until = self._loop.now + seconds
        if self.alive and until > self._paused_until:
            self.paused = True
            self._stands_still_s += until - max(self._loop.now, self._paused_until)
            self._paused_until = until
            self._loop.call_precisely(until, self._resume, context=contextvars.Context())

    @property
    def awake_s(self) -> float:
        """A clock of the seconds in which it did not stand still."""
        return max(self._loop.now, self._paused_until) - self._stands_still_s

    def _resume(self) -> None:
        if self._loop.now < self._paused_until:  # it was paused once more
            return
        self.paused = False
        if self.alive:
            stalled, self.stalled = self.stalled, []
            self._loop.requeue(stalled)


class Graveyard:
    """Keeps what dead processes were in the middle of."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []
        self._generators: list[AsyncGenerator[Any, Any]] = []

    def bury(self, process: SimProcess, tasks: Sequence[SimTask]) -> None:
        """Takes over the generators, and those of the tasks that belonged to a process that has just died."""
        for task in tasks:
            if task.owner is process:
                self.keep(task)
        self._generators += list(process.generators)

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Takes over one task; nobody shall hear of how it ended."""
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        if task.done():
            task._log_traceback = False
        _unregister_task(task)
        self._tasks.append(task)

    def close(self) -> None:
        """Closes the coroutines; what their `finally` blocks do or raise no longer matters to anybody."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # coroutines that a finally makes and can no longer await
            for task in self._tasks:
                coroutine = task.get_coro()
                with contextlib.suppress(BaseException):  # a finally of a dead process has no say
                    if isinstance(coroutine, Coroutine):
                        coroutine.close()
            self._tasks.clear()
            self._generators.clear()

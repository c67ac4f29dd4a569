"""A deterministic event loop: virtual time, simulated sockets and executors, processes that can be killed.

What asyncio promises holds (callbacks of call_soon run in order; timers run when due). What it does not promise is drawn
from the seed: the order of timers that are due at the same moment, network latency and the size of what one read returns,
when an executor's job is done. Time moves only here: to the next timer when nothing is ready, by `CALLBACK_SECONDS` with
every callback, and by `consume` when simulated code blocks (a sync of the disk).

Of the real loops, asyncio's runs no timer early. uvloop's time stands still for a millisecond, and it rounds delays to
whole ones: a timer may run 0.5 ms before its time, and after one that was set for later. So do the processes of
a loop with `whole_milliseconds`. Each process counts its seconds from a moment of its own, as the monotonic clock of a
machine does. What belongs to no process has exact times, from `now`.

Sets of tasks (asyncio.wait, TaskGroup) are a leak of memory addresses into order; so tasks hash by their number.

Worked case:

    loop = SimLoop(seed=7)
    server = loop.start_process("server")
    server.spawn(serve())
    loop.run(client())          # raises what client() raises, SimulationFailed when any callback failed
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import heapq
import itertools
import random
import sys
import traceback
from asyncio import events
from asyncio.tasks import _all_tasks  # type: ignore[attr-defined]
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any

from support.sim.callbacks import Handle, SimFuture, SimHandle, SimTask, SimTimerHandle
from support.sim.network import SimNetwork
from support.sim.process import Graveyard, ProcessKilled, SimProcess, current_process, owner_of
from support.sim.trace import Trace
from support.sim.unsimulated import UnsimulatedParts

CALLBACK_SECONDS = 2e-6
EXECUTOR_SECONDS = (20e-6, 2e-3)


class SimulationFailed(AssertionError):
    """A callback or an unwatched task raised; the message has each traceback and the end of the trace."""


class SimulationDeadlock(AssertionError):
    """Nothing is ready, no timer is set, and what the test waits for is not done."""


class SimLoop(UnsimulatedParts):
    """The loop of one simulated run. `rng` is the source of all chance; `trace` of all truth."""

    def __init__(
        self,
        seed: int,
        *,
        trace: Trace | None = None,
        limit_seconds: float = 3600.0,
        whole_milliseconds: bool = False,
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self._chance = self.rng.random
        self.trace = trace if trace is not None else Trace()
        self.trace.now = lambda: (self.now, self.steps)
        self.numbers = itertools.count(1)
        self.steps = 0  # callbacks run so far
        self.limit_seconds = limit_seconds
        self.whole_milliseconds = whole_milliseconds
        self.graveyard = Graveyard()
        self.network = SimNetwork(self)
        self.failures: list[str] = []  # what callbacks and unwatched tasks raised
        self.processes: dict[str, SimProcess] = {}  # name -> latest incarnation
        self.now = 1.0  # virtual seconds
        self._ready: deque[Handle] = deque()
        # (when, tie broken by the seed, number, what); cancelled handles are skipped when they come up
        self._timers: list[tuple[float, float, int, SimTimerHandle | Callable[[], None]]] = []
        self._signals: dict[tuple[SimProcess | None, int], SimHandle] = {}
        self._readers: dict[int, SimHandle] = {}
        self._owner: SimProcess | None = None  # of the callback that runs
        self._running = False
        self._stopping = False
        self._closed = False

    # --- processes, time ---------------------------------------------------------------------------------------

    def start_process(self, name: str) -> SimProcess:
        """Makes a process. An older one of the same name must be dead."""
        old = self.processes.get(name)
        assert old is None or not old.alive, f"process {name} is still alive"
        process = self.processes[name] = SimProcess(self, name)
        self.trace.record("start", name)
        self.network.power_returned(name)
        return process

    def time(self) -> float:
        """Virtual seconds, as the process that asks counts them."""
        process = current_process()
        if process is None:
            return self.now
        seconds = self.now + process.time_offset
        return int(seconds * 1000) / 1000 if self.whole_milliseconds else seconds

    def consume(self, seconds: float) -> None:
        """Simulated code has blocked for so long: everything else that became due is delayed."""
        self.now += seconds

    # --- callbacks ---------------------------------------------------------------------------------------------

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> SimHandle:
        """First in, first out; dropped when the owning process is dead."""
        if self._closed:
            self._check_closed()
        if context is None:
            context = contextvars.copy_context()
        owner = owner_of(context)
        handle = SimHandle(callback, args, context, owner)
        if owner is None or owner.alive:
            self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> SimTimerHandle:
        """`delay` in virtual seconds."""
        if self.whole_milliseconds:
            return self.call_at(self.time() + max(delay, 0.0), callback, *args, context=context)
        return self.call_precisely(
            self.now + delay if delay > 0.0 else self.now, callback, *args, context=context
        )

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> SimTimerHandle:
        """`when` in the time of the process that calls."""
        process = current_process()
        if process is not None:
            if self.whole_milliseconds:
                # A little behind the millisecond, so that `time` shows it whichever way the division is rounded.
                milliseconds = int((self.now + process.time_offset) * 1000)
                when = (milliseconds + max(0, round(when * 1000 - milliseconds)) + 1e-3) / 1000
            when -= process.time_offset
        return self.call_precisely(when, callback, *args, context=context)

    def call_precisely(
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> SimTimerHandle:
        """As `call_at`, and exactly then: for what the world does to a process."""
        if self._closed:
            self._check_closed()
        if context is None:
            context = contextvars.copy_context()
        owner = owner_of(context)
        handle = SimTimerHandle(when, callback, args, context, owner)
        if owner is None or owner.alive:
            heapq.heappush(self._timers, (when, self._chance(), next(self.numbers), handle))
        return handle

    def call_outside(self, delay: float, callback: Callable[..., Any], *args: Any) -> SimTimerHandle:
        """A timer that belongs to no process: what the network, the disk or the test does."""
        return self.call_precisely(self.now + max(delay, 0.0), callback, *args, context=contextvars.Context())

    def happens_at(self, when: float, event: Callable[[], None]) -> None:
        """What a kernel does at this moment, by the way: no callback of anybody, and it cannot be taken back.

        It may make callbacks ready and set timers, and must not run code of a process.
        """
        heapq.heappush(self._timers, (when, self._chance(), next(self.numbers), event))

    def requeue(self, handles: list[Handle]) -> None:
        """Callbacks of a process that goes on after a pause."""
        self._ready.extend(handles)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # skipped when due

    def _turn(self) -> None:
        """One turn: due timers become ready, then what was ready at the start of the turn runs."""
        ready, timers = self._ready, self._timers
        if not ready:
            self._wait()
        while timers and timers[0][0] <= self.now:
            due = heapq.heappop(timers)[3]
            if not isinstance(due, SimTimerHandle):
                due()
            elif not due._cancelled:
                ready.append(due)
        for _ in range(len(ready)):
            handle = ready.popleft()
            owner = handle.owner
            if handle._cancelled:
                continue
            if owner is not None and (owner.paused or not owner.alive):
                if owner.alive:
                    owner.stalled.append(handle)
                continue
            self.steps += 1
            self.now += CALLBACK_SECONDS
            self._owner = owner
            try:
                handle._context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": f"exception in {handle!r}", "exception": error})

    def _wait(self) -> None:
        """Time goes on to the next timer that anybody still waits for."""
        timers = self._timers
        while timers:
            when, _, _, due = timers[0]
            if isinstance(due, SimTimerHandle):
                owner = due.owner
                if due._cancelled or (owner is not None and not owner.alive):
                    heapq.heappop(timers)
                    continue
            if when > self.now:
                self.now = when
                if when > self.limit_seconds:
                    raise SimulationDeadlock(
                        f"still busy after {self.limit_seconds} virtual seconds\n{self._waiting()}"
                    )
            return
        raise SimulationDeadlock(f"nothing is left that could happen\n{self._waiting()}")

    def _waiting(self) -> str:
        lines = []
        for task in self.tasks():
            if task.done():
                continue
            owner = task.owner
            frames = traceback.extract_stack(task.get_stack(limit=1)[-1], limit=1) if task.get_stack() else []
            where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
            if owner is None or owner.alive:
                lines.append(f"  waits: {task.get_name()} at {where}")
        return "\n".join(lines) + f"\n{self.trace.tail()}"

    # --- running -----------------------------------------------------------------------------------------------

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Runs to the end of `main` and returns its result; raises SimulationFailed when anything else failed."""
        result = self.run_until_complete(main)
        self.check()
        return result

    def check(self) -> None:
        """Raises SimulationFailed when a callback or an unwatched task has raised."""
        if self.failures:
            raise SimulationFailed("\n".join(self.failures) + f"\n{self.trace.tail()}")

    def run_until_complete(self, future: Any) -> Any:
        """See asyncio. Stops early, with SimulationFailed, at the first callback that fails."""
        task = future if isinstance(future, asyncio.Future) else self.create_task(future, name="main")
        # A finished test must not wait for what was still ready behind it, so no done callback is needed.
        self._run_until(task.done)
        if not task.done():
            raise RuntimeError("the loop was stopped before the future was done")
        return task.result()

    def run_forever(self) -> None:
        """See asyncio."""
        self._run_until(lambda: self._stopping)
        self._stopping = False

    def _run_until(self, done: Callable[[], bool]) -> None:
        self._check_closed()
        assert not self._running, "this loop is running already"
        old_hooks = sys.get_asyncgen_hooks()
        collecting = gc.isenabled()
        gc.disable()  # the cyclic collector would run finalizers at moments that differ between processes
        sys.set_asyncgen_hooks(firstiter=self._generator_started, finalizer=self._generator_dropped)
        events._set_running_loop(self)
        self._running = True
        try:
            while not done():
                self._turn()
                if self.failures:
                    self.check()
        finally:
            self._running = False
            events._set_running_loop(None)
            sys.set_asyncgen_hooks(*old_hooks)
            if collecting:
                gc.enable()

    def _generator_started(self, generator: AsyncGenerator[Any, Any]) -> None:
        process = current_process()
        if process is not None:
            process.generators.add(generator)

    def _generator_dropped(self, generator: AsyncGenerator[Any, Any]) -> None:
        process = current_process()
        if not self._closed and (process is None or process.alive):
            self.create_task(generator.aclose(), name="aclose")

    def stop(self) -> None:
        """See asyncio."""
        self._stopping = True

    def is_running(self) -> bool:
        """See asyncio."""
        return self._running

    def is_closed(self) -> bool:
        """See asyncio."""
        return self._closed

    def close(self) -> None:
        """Forgets everything that is left, without running any of it for the simulated world."""
        if self._closed:
            return
        for process in self.processes.values():
            process.alive = False
            self.graveyard.bury(process, [])
        for task in self.tasks():
            self.graveyard.keep(task)
        self._ready.clear()
        self._timers.clear()
        self._closed = True
        self.graveyard.close()

    def _check_closed(self) -> None:
        if self._closed:
            raise RuntimeError("Event loop is closed")

    async def shutdown_asyncgens(self) -> None:
        """Nothing to do: generators end with their process."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Nothing to do: there is no executor."""

    # --- futures, tasks, executor --------------------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        """See asyncio."""
        return SimFuture(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, Any] | Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
        **_: Any,
    ) -> asyncio.Task[Any]:
        """See asyncio. The task belongs to the process of its context."""
        owner = owner_of(context) if context is not None else current_process()
        task = SimTask(coro, loop=self, name=name or "task", context=context)
        task.loop, task.owner = self, owner
        if owner is not None and not owner.alive:
            self.graveyard.keep(task)
        return task

    def tasks(self) -> list[SimTask]:
        """All tasks that anybody holds, done or not, in the order in which they were made.

        asyncio keeps a weak set of them anyway; one more of our own would cost a twentieth of a run. Those of dead
        processes are in the graveyard and not here.
        """
        return sorted((task for task in list(_all_tasks) if getattr(task, "loop", None) is self), key=hash)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Runs the function inline, a little later; jobs that run at the same time may finish in any order."""
        future = self.create_future()

        def work() -> None:
            if future.cancelled() and self.rng.random() < 0.5:
                return  # it had not begun; one that had cannot be taken back
            try:
                result = func(*args)
            except ProcessKilled:
                raise
            except BaseException as error:
                if not future.cancelled():
                    future.set_exception(error)
            else:
                if not future.cancelled():
                    future.set_result(result)

        self.call_precisely(self.now + self.rng.uniform(*EXECUTOR_SECONDS), work)
        return future

    def set_default_executor(self, executor: Any) -> None:
        """There is none to replace."""

    def set_task_factory(self, factory: Any) -> None:
        """Not in the simulation: tasks must be of its own kind."""
        raise NotImplementedError

    def get_task_factory(self) -> Any:
        """See asyncio."""
        return None

    # --- network -------------------------------------------------------------------------------------------------

    async def create_server(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.Protocol],
        host: Any = None,
        port: int | None = None,
        **_: Any,
    ) -> asyncio.AbstractServer:
        """Listens in the simulated network; port 0 takes a free one."""
        return self.network.listen(protocol_factory, host, port or 0)

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.Protocol], host: str, port: int, **_: Any
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """Connects through the simulated network. ConnectionRefusedError when nobody listens."""
        return await self.network.connect(protocol_factory, host, port)

    # --- signals, readers ----------------------------------------------------------------------------------------

    def _handle(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> SimHandle:
        return SimHandle(callback, args, contextvars.copy_context(), current_process())

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Stored until `deliver_signal`; per process."""
        self._signals[current_process(), sig] = self._handle(callback, args)

    def remove_signal_handler(self, sig: int) -> bool:
        """See asyncio."""
        return self._signals.pop((current_process(), sig), None) is not None

    def deliver_signal(self, process: SimProcess, sig: int) -> None:
        """What `kill -sig` would do to a process that handles it."""
        self.trace.record("signal", process.name, int(sig))
        self._ready.append(self._signals[process, sig])

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """`notify_readable` runs the callback."""
        number = fd if isinstance(fd, int) else fd.fileno()
        self._readers[number] = self._handle(callback, args)

    def remove_reader(self, fd: Any) -> bool:
        """See asyncio."""
        return self._readers.pop(fd if isinstance(fd, int) else fd.fileno(), None) is not None

    def notify_readable(self, fd: int) -> None:
        """A simulated descriptor has become readable."""
        handle = self._readers.get(fd)
        if handle is not None:
            self._ready.append(handle)

    # --- errors, debugging ---------------------------------------------------------------------------------------

    # Always off. Each future and task asks when it is made, so this is a call without a frame: `bool()` is False.
    get_debug = staticmethod(bool)

    def set_debug(self, enabled: bool) -> None:
        """Ignored."""

    def set_exception_handler(self, handler: Any) -> None:
        """Ignored: whatever production code does with a failure, the run must know of it."""

    def get_exception_handler(self) -> Any:
        """See asyncio."""
        return None

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """See `call_exception_handler`."""
        self.call_exception_handler(context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keeps the failure; the run ends with it. Dead processes have nothing more to say."""
        error = context.get("exception")
        process = self._owner
        if isinstance(error, ProcessKilled) or self._closed or (process is not None and not process.alive):
            return
        text = str(context.get("message", "failure"))
        if error is not None:
            with contextlib.suppress(Exception):
                text += "\n" + "".join(traceback.format_exception(error))
        if (task := context.get("task")) is not None:
            text += f": {task!r}"
        where = process.name if process is not None else "outside"
        self.failures.append(f"[{where} at {self.now:.6f}] {text}")

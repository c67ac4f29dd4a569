"""A deterministic event loop: virtual time, simulated sockets and executors, processes that can be killed.

What asyncio promises is kept (callbacks of call_soon run in order; timers run when due, not before). What it does not
promise is drawn from the seed: the order of timers that are due at the same moment, network latency and the size of what
one read returns, when an executor's job is done. Time moves only here: to the next timer when nothing is ready, by
`CALLBACK_SECONDS` with every callback, and by `consume` when simulated code blocks (a sync of the disk).

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
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, cast

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


class SimFuture(asyncio.Future[Any]):
    """A future whose place in a set does not depend on its address."""

    number: int

    def __new__(cls, *, loop: SimLoop) -> SimFuture:
        future = super().__new__(cls)
        future.number = next(loop.numbers)
        return future

    def __hash__(self) -> int:
        return self.number


class SimTask(asyncio.Task[Any]):
    """A task whose place in a set does not depend on its address."""

    number: int
    owner: SimProcess | None = None

    def __new__(cls, coroutine: Any, *, loop: SimLoop, **_: Any) -> SimTask:
        task = super().__new__(cls)
        task.number = next(loop.numbers)
        return task

    def __hash__(self) -> int:
        return self.number


class SimLoop(UnsimulatedParts):
    """The loop of one simulated run. `rng` is the source of all chance; `trace` of all truth."""

    def __init__(self, seed: int, *, trace: Trace | None = None, limit_seconds: float = 3600.0) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.trace = trace if trace is not None else Trace()
        self.trace.now = lambda: (self._now, self.steps)
        self.numbers = itertools.count(1)
        self.steps = 0  # callbacks run so far
        self.limit_seconds = limit_seconds
        self.graveyard = Graveyard()
        self.network = SimNetwork(self)
        self.failures: list[str] = []  # what callbacks and unwatched tasks raised
        self.processes: dict[str, SimProcess] = {}  # name -> latest incarnation
        self._now = 1.0
        self._ready: deque[tuple[asyncio.Handle, SimProcess | None]] = deque()
        # (when, tie broken by the seed, number, handle); cancelled handles are skipped when they come up
        self._timers: list[tuple[float, float, int, asyncio.Handle, SimProcess | None]] = []
        self._signals: dict[tuple[SimProcess | None, int], asyncio.Handle] = {}
        self._readers: dict[int, asyncio.Handle] = {}
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
        process.at_death(lambda: self.network.process_died(process))
        self.trace.record("start", name)
        return process

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def consume(self, seconds: float) -> None:
        """Simulated code has blocked for so long: everything else that became due runs late."""
        self._now += seconds

    # --- callbacks ---------------------------------------------------------------------------------------------

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """First in, first out; dropped when the owning process is dead."""
        self._check_closed()
        if context is None:
            context = contextvars.copy_context()
        handle = asyncio.Handle(callback, args, self, context)
        owner = owner_of(context)
        if owner is None or owner.alive:
            self._ready.append((handle, owner))
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """`delay` in virtual seconds."""
        return self.call_at(self._now + max(delay, 0.0), callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """`when` in the loop's time."""
        self._check_closed()
        if context is None:
            context = contextvars.copy_context()
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        owner = owner_of(context)
        if owner is None or owner.alive:
            heapq.heappush(self._timers, (when, self.rng.random(), next(self.numbers), handle, owner))
        return handle

    def call_outside(self, delay: float, callback: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
        """A timer that belongs to no process: what the network, the disk or the test does."""
        return self.call_later(delay, callback, *args, context=contextvars.Context())

    def requeue(self, handles: list[asyncio.Handle]) -> None:
        """Callbacks of a process that goes on after a pause."""
        for handle in handles:
            self._ready.append((handle, owner_of(cast(Any, handle)._context)))

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # skipped when due

    def _turn(self) -> None:
        """One turn: due timers become ready, then what was ready at the start of the turn runs."""
        if not self._ready:
            self._wait()
        while self._timers and self._timers[0][0] <= self._now:
            _, _, _, handle, owner = heapq.heappop(self._timers)
            if not handle.cancelled():
                self._ready.append((handle, owner))
        for _ in range(len(self._ready)):
            handle, owner = self._ready.popleft()
            if handle.cancelled() or (owner is not None and not owner.alive):
                continue
            if owner is not None and owner.paused:
                owner.stalled.append(handle)
                continue
            self.steps += 1
            self._now += CALLBACK_SECONDS
            self._owner = owner
            handle._run()

    def _wait(self) -> None:
        while self._timers:
            when, _, _, handle, owner = self._timers[0]
            if handle.cancelled() or (owner is not None and not owner.alive):
                heapq.heappop(self._timers)
                continue
            self._now = max(self._now, when)
            if self._now > self.limit_seconds:
                raise SimulationDeadlock(
                    f"still busy after {self.limit_seconds} virtual seconds\n{self._waiting()}"
                )
            return
        raise SimulationDeadlock(f"nothing is left that could happen\n{self._waiting()}")

    def _waiting(self) -> str:
        lines = []
        for task in sorted(asyncio.all_tasks(self), key=hash):
            owner = task.owner if isinstance(task, SimTask) else None
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
        self._run_while(lambda: not task.done())
        if not task.done():
            raise RuntimeError("the loop was stopped before the future was done")
        return task.result()

    def run_forever(self) -> None:
        """See asyncio."""
        self._run_while(lambda: not self._stopping)
        self._stopping = False

    def _run_while(self, going_on: Callable[[], bool]) -> None:
        self._check_closed()
        assert not self._running, "this loop is running already"
        old_hooks = sys.get_asyncgen_hooks()
        collecting = gc.isenabled()
        gc.disable()  # the cyclic collector would run finalizers at moments that differ between processes
        sys.set_asyncgen_hooks(firstiter=self._generator_started, finalizer=self._generator_dropped)
        events._set_running_loop(self)
        self._running = True
        try:
            while going_on():
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
            self.graveyard.bury(process)
        for task in sorted(asyncio.all_tasks(self), key=hash):
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
        task = SimTask(coro, loop=self, name=name or f"task-{self.steps}", context=context)
        task.owner = owner
        if owner is not None:
            if owner.alive:
                owner.tasks.add(task)
            else:
                self.graveyard.keep(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Runs the function inline, a little later; jobs that run at the same time may finish in any order."""
        future = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                result = func(*args)
            except ProcessKilled:
                raise
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_later(self.rng.uniform(*EXECUTOR_SECONDS), work)
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

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> list[Any]:
        """Every name stands for itself."""
        return [(2, 1, 6, "", (host, port))]

    # --- signals, readers ----------------------------------------------------------------------------------------

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Kept until `deliver_signal`; per process."""
        self._signals[current_process(), sig] = asyncio.Handle(
            callback, args, self, contextvars.copy_context()
        )

    def remove_signal_handler(self, sig: int) -> bool:
        """See asyncio."""
        return self._signals.pop((current_process(), sig), None) is not None

    def deliver_signal(self, process: SimProcess, sig: int) -> None:
        """What `kill -sig` would do to a process that handles it."""
        self.trace.record("signal", process.name, int(sig))
        self._ready.append((self._signals[process, sig], process))

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """`notify_readable` runs the callback."""
        number = fd if isinstance(fd, int) else fd.fileno()
        self._readers[number] = asyncio.Handle(callback, args, self, contextvars.copy_context())

    def remove_reader(self, fd: Any) -> bool:
        """See asyncio."""
        return self._readers.pop(fd if isinstance(fd, int) else fd.fileno(), None) is not None

    def notify_readable(self, fd: int) -> None:
        """A simulated descriptor has become readable."""
        handle = self._readers.get(fd)
        if handle is not None:
            self._ready.append((handle, owner_of(cast(Any, handle)._context)))

    # --- errors, debugging ---------------------------------------------------------------------------------------

    def get_debug(self) -> bool:
        """Always off."""
        return False

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
        self.failures.append(f"[{where} at {self._now:.6f}] {text}")

"""One run of a simulated service: load, a storm of faults, healing, and everything at rest within a minute.

A backend says how the daemon is started and what a power loss does; see sim.scenarios. What must hold is checked by
sim.history while it happens, and at the end by reading the whole topic again after one more power loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from magnetar.client import Client
from magnetar.proto.errors import MagnetarError
from sim.consuming import TOPIC
from sim.deliveries import Violation
from sim.history import History
from sim.load import Load
from support.sim import SimLoop, SimProcess, Trace

PORT = 7650
STORM_S = 12.0
CONVERGED_WITHIN_S = 60.0
MINIMUM_CONFIRMED = 100
MINIMUM_RECEIPTS = 30


class Backend(Protocol):
    """The daemon of a scenario, and the machine that it runs on."""

    async def serve(self, process: SimProcess) -> None:
        """Runs in the process: opens what survived, listens on PORT, goes on until it fails, or until SIGTERM stops it."""
        ...

    def stop(self, process: SimProcess) -> bool:
        """SIGTERM, after which `serve` returns; False if it has not started yet."""
        ...

    def crashed(self, *, power: bool) -> None:
        """The process is dead; with `power` what was not synced is lost as well."""
        ...

    def crash_during_disk_call(self, crash: Callable[[], None]) -> bool:
        """Has `crash` called in one of the next disk calls; False if this backend has none."""
        ...

    def break_disk(self) -> bool:
        """Has one of the next disk calls fail, so that the daemon must stop by itself; False if it has none."""
        ...

    def heal(self) -> None:
        """The storm is over: nothing planted fires any more."""
        ...


class Service:
    """The daemon with its supervisor, which starts it again after each end."""

    def __init__(self, loop: SimLoop, backend: Backend, history: History) -> None:
        self._loop = loop
        self._backend = backend
        self._history = history
        self._process: SimProcess | None = None
        self.starts = 0
        self._stopping = False  # it was told to
        self.disk_broken = False  # a fault was planted: the daemon may end by itself

    def start(self) -> None:
        """Starts a process for the daemon."""
        self.starts += 1
        process = self._process = self._loop.start_process("daemon")
        process.spawn(self._run(process), name="daemon")

    async def _run(self, process: SimProcess) -> None:
        try:
            await self._backend.serve(process)
        except MagnetarError as error:
            if not self.disk_broken:
                raise
            self._loop.trace.record("fail_stop", type(error).__name__)
        else:
            if not self._stopping:
                raise AssertionError("the daemon ended by itself")
            self._loop.trace.record("stopped")
            if not self.disk_broken:
                self._loop.call_outside(0.0, self._end, False)
                return
        self._loop.call_outside(0.0, self.crash, False)

    def stop(self) -> None:
        """SIGTERM: it makes everything durable and ends; started again a little later."""
        if self._process is not None and self._backend.stop(self._process):
            self._stopping = True
            self._loop.trace.fault("stop")

    def crash(self, power: bool) -> None:
        """kill -9, or the power fails; started again a little later."""
        if self._process is not None:
            self._history.crashed(self._loop.now)
            self._loop.trace.fault("crash_power" if power else "crash_process")
            self._end(power)

    def _end(self, power: bool) -> None:
        """The process is over."""
        process = self._process
        if process is None:
            return
        self._process, self._stopping = None, False
        try:
            process.kill(power=power)
        finally:  # killed from inside a disk call: the rest happens outside of it
            self._loop.call_outside(0.0, self._after_crash, power)

    def _after_crash(self, power: bool) -> None:
        self._backend.crashed(power=power)
        self._loop.call_outside(self._loop.rng.uniform(0.05, 1.0), self.start)

    def pause(self, seconds: float) -> None:
        """The daemon stands still."""
        if self._process is not None:
            self._process.pause(seconds)


async def storm(loop: SimLoop, service: Service, backend: Backend) -> None:
    """Faults, one after another, as the seed has them."""
    rng = loop.rng
    end = loop.time() + STORM_S
    while loop.time() < end:
        await asyncio.sleep(rng.expovariate(0.8))
        match rng.choice(
            ("kill", "power", "power", "call", "call", "cut", "cut", "partition", "pause", "disk", "stop")
        ):
            case "kill":
                service.crash(False)
            case "stop":
                service.stop()
            case "power":
                service.crash(True)
            case "call":
                backend.crash_during_disk_call(partial(service.crash, rng.random() < 0.7))
            case "cut":
                loop.network.cut_one()
            case "partition":
                loop.network.partition(rng.uniform(0.1, 5.0))
            case "pause":
                service.pause(rng.uniform(0.1, 5.0))
            case _:
                service.disk_broken = backend.break_disk() or service.disk_broken


async def watch_mark_delete(client: Client, history: History) -> dict[str, int]:
    """Asks for the topic's figures; returns the backlog of each subscription."""
    moves = {name: subscription.moves for name, subscription in history.subscriptions.items()}
    stats = await client.admin.topic_stats(TOPIC)
    backlog: dict[str, int] = {}
    for name, figures in stats["subscriptions"].items():
        if name in history.subscriptions:
            history.subscriptions[name].observed_mark_delete(tuple(figures["mark_delete"]), moves[name])
            backlog[name] = figures["backlog_messages"]
    return backlog


async def retry_backlog(client: Client, load: Load) -> dict[str, int]:
    """What waits in the retry topics, by subscription."""
    backlog: dict[str, int] = {}
    for plan in load.plans:
        if plan.policy is not None and plan.retry:
            stats = await client.admin.topic_stats(plan.policy.retry_letter_topic(TOPIC, plan.name))
            backlog[f"retry of {plan.name}"] = stats["subscriptions"][plan.name]["backlog_messages"]
    return backlog


async def observe(load: Load, history: History) -> None:
    """Mark-delete positions, all the time."""
    client = await load.client("observer")
    while True:
        await asyncio.sleep(0.25)
        try:
            await watch_mark_delete(client, history)
        except MagnetarError as error:
            if not error.retryable:
                raise


async def converge(loop: SimLoop, load: Load, history: History) -> None:
    """Producers confirmed, readers complete, nothing left in any backlog; raises Violation after a minute."""
    deadline = loop.time() + CONVERGED_WITHIN_S
    client = await load.client("judge")
    state: Any = "producers are not done"
    while loop.time() < deadline:
        await asyncio.sleep(0.5)
        failed = [task for task in [*load.producers, *load.tasks] if task.done() and task.exception()]
        if failed:
            failed[0].result()
        if not all(task.done() for task in load.producers):
            continue
        missing = history.missing()
        try:
            backlog = {**await watch_mark_delete(client, history), **await retry_backlog(client, load)}
        except MagnetarError as error:
            state = error
            continue
        state = {who: names[:3] for who, names in missing.items()} or backlog
        if not missing and set(backlog.values()) == {0}:
            break
    else:
        raise Violation(
            f"not converged {CONVERGED_WITHIN_S} s after healing: {state}; counts {history.counts()}"
        )
    await load.finish()
    await client.close()


def check_load(history: History) -> None:
    """A run that did next to nothing proves nothing."""
    counts = history.counts()
    if counts["confirmed"] < MINIMUM_CONFIRMED or counts["ack_receipts"] < MINIMUM_RECEIPTS:
        raise Violation(f"too little happened: {counts}")


def play_storm(seed: int, trace: Trace, make_backend: Callable[[SimLoop], Backend]) -> dict[str, int]:
    """The whole run. Raises Violation or what failed; returns counts."""
    loop = SimLoop(seed, trace=trace, limit_seconds=600.0, whole_milliseconds=bool(seed % 2))
    history = History(trimming=loop.rng.random() < 0.4)
    backend = make_backend(loop)
    service = Service(loop, backend, history)
    load = Load(loop, history, f"magnetar://127.0.0.1:{PORT}")

    async def main() -> None:
        service.start()
        load.start()
        observer = loop.start_process("observer").spawn(observe(load, history), name="observer")
        await storm(loop, service, backend)
        backend.heal()
        load.stop_disturbing()
        await asyncio.sleep(6.0)  # the last partition, pause and restart are over
        service.disk_broken = False  # from here on a daemon that stops by itself is a failure
        trace.record("healed")
        await converge(loop, load, history)
        observer.cancel()
        check_load(history)
        service.crash(True)
        await asyncio.sleep(2.0)
        stored = await load.reread()
        history.check_reread(stored)
        await load.check_letters(stored)
        await check_nothing_comes_back(loop, load, history)

    try:
        loop.run(main())
    finally:
        loop.close()
    counts = {**history.counts(), "dead_letters": load.dead_letters}
    return {**counts, "starts": service.starts, "virtual_seconds": int(loop.time())}


async def check_nothing_comes_back(loop: SimLoop, load: Load, history: History) -> None:
    """New consumers of the drained subscriptions, after a power loss, get nothing that has a receipt."""
    load.start_consumers(" again")
    await asyncio.sleep(5.0)
    await load.finish()

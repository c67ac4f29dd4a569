"""How each kind of fault is carried out, healed, and proved to have fired.

A kind is an async context manager: it strikes when it is entered, its `proof` says what happened, and it is healed when
it is left. The pause in between is the kind's own, in parts of the session timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from magnetar.client import Client, connect
from support.cluster.clocks import WithOwnClock
from support.cluster.lines import CLIENTS, ZOOKEEPER, Link
from support.cluster.processes import ClusterProcesses, Daemon
from support.cluster.schedule import Fault

SLOW_LINK_S = 0.02
STEP_S = 0.02
LEFT_ON_A_FULL_DISK = 4 << 20
JUMP_S = 3600


@dataclass
class Stroke:
    """One fault under way."""

    kind: str
    target: str = ""
    at: float = 0.0
    until: float = 0.0  # healed
    proof: str = ""  # empty: it did not fire
    # Of a rolling restart: who, from when, until when.
    steps: list[tuple[str, float, float]] = field(default_factory=list)
    # Of a full disk, in seconds: until its bookie was read-only, and until it was back when there was space again.
    read_only_s: float = 0.0
    back_s: float = 0.0


Strike = Callable[["Faults", Stroke, Fault], AbstractAsyncContextManager[None]]


class Kind(NamedTuple):
    """`shortest`, `longest`: how long it lasts, in session timeouts. `lines`, `disk`, `clocks`, `brokers`: it needs relays,
    a bookie on a small disk, clocks that can jump, so many brokers."""

    strike: Strike
    shortest: float = 0.0
    longest: float = 0.0
    lines: bool = False
    disk: bool = False
    clocks: bool = False
    brokers: int = 1


class Faults:
    """Carries faults out, one after the other. `strokes` is what came of them."""

    def __init__(self, cluster: ClusterProcesses) -> None:
        self.cluster = cluster
        self.strokes: list[Stroke] = []

    async def strike(self, fault: Fault) -> Stroke:
        """Strikes and heals; returns when the daemons run again."""
        kind = KINDS[fault.kind]
        lasts_s = kind.shortest + fault.lasts * (kind.longest - kind.shortest)
        stroke = Stroke(fault.kind, at=time.monotonic())
        self.strokes.append(stroke)
        async with kind.strike(self, stroke, fault):
            await asyncio.sleep(lasts_s * self.cluster.shape.session_s)
        stroke.until = time.monotonic()
        return stroke

    @staticmethod
    def pick(daemons: Sequence[Daemon], fault: Fault, stroke: Stroke) -> Daemon:
        """The victim."""
        daemon = daemons[int(fault.dice * len(daemons))]
        stroke.target = daemon.name
        return daemon

    # --- processes ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def kill_broker(self, stroke: Stroke, fault: Fault) -> AsyncIterator[None]:
        """kill -9."""
        async with self._killed(self.pick(self.cluster.brokers, fault, stroke), stroke):
            yield

    @asynccontextmanager
    async def kill_bookie(self, stroke: Stroke, fault: Fault) -> AsyncIterator[None]:
        """kill -9."""
        async with self._killed(self.pick(self.cluster.bookies, fault, stroke), stroke):
            yield

    @asynccontextmanager
    async def _killed(self, daemon: Daemon, stroke: Stroke) -> AsyncIterator[None]:
        pid = daemon.process.pid
        stroke.at = time.monotonic()
        async with daemon.down():
            killed = daemon.process.returncode
            yield
        if killed == -signal.SIGKILL and daemon.process.pid != pid:
            stroke.proof = f"process {pid} was killed, {daemon.process.pid} came {daemon.process.ready_after_s:.1f} s after"

    @asynccontextmanager
    async def pause_broker(self, stroke: Stroke, fault: Fault) -> AsyncIterator[None]:
        """SIGSTOP, SIGCONT."""
        async with self._paused(self.pick(self.cluster.brokers, fault, stroke), stroke):
            yield

    @asynccontextmanager
    async def pause_bookie(self, stroke: Stroke, fault: Fault) -> AsyncIterator[None]:
        """SIGSTOP, SIGCONT."""
        async with self._paused(self.pick(self.cluster.bookies, fault, stroke), stroke):
            yield

    @asynccontextmanager
    async def _paused(self, daemon: Daemon, stroke: Stroke) -> AsyncIterator[None]:
        stroke.at = time.monotonic()
        async with daemon.paused() as pid:
            yield
            if _state(pid) == "T":
                stroke.proof = f"process {pid} was stopped"

    @asynccontextmanager
    async def slow_disk(self, stroke: Stroke, fault: Fault) -> AsyncIterator[None]:
        """The journal writer of a bookie is stopped most of the time, so that a sync takes 20 to 40 ms more."""
        daemon = self.pick(self.cluster.bookies, fault, stroke)
        pulses = 0

        async def pulse() -> None:
            nonlocal pulses
            while daemon.process.running:
                async with daemon.paused("journal-writer"):
                    await asyncio.sleep(2 * STEP_S)
                    pulses += 1
                await asyncio.sleep(STEP_S)

        stroke.at = time.monotonic()
        pulsing = asyncio.create_task(pulse())
        try:
            yield
        finally:
            pulsing.cancel()
            await asyncio.gather(pulsing, return_exceptions=True)
        stroke.proof = f"its journal writer was stopped {pulses} times" if pulses > 5 else ""

    @asynccontextmanager
    async def full_disk(self, stroke: Stroke, fault: Fault) -> AsyncIterator[None]:
        """Somebody else's file takes the space of a bookie that has a disk of its own."""
        disks = self.cluster.disks
        daemon = self.pick([self.cluster.daemons[name] for name in disks], fault, stroke)
        disk = disks[daemon.name]
        stroke.at = time.monotonic()
        await asyncio.to_thread(disk.fill, LEFT_ON_A_FULL_DISK)
        try:
            await self._until_state(daemon, "read-only")
            stroke.read_only_s = time.monotonic() - stroke.at
            yield
        finally:
            await asyncio.to_thread(disk.free)
        freed = time.monotonic()
        await self._until_state(daemon, "writable")
        stroke.back_s = time.monotonic() - freed
        stroke.proof = (
            f"read-only after {stroke.read_only_s:.1f} s, back {stroke.back_s:.1f} s after the space was"
        )

    async def _until_state(self, daemon: Daemon, state: str) -> None:
        """Of a bookie, in the status of the cluster."""
        async with asyncio.timeout(60):
            while True:
                found = (await self.cluster.status())["bookies"]
                if {bookie["id"]: bookie["state"] for bookie in found}[daemon.name] == state:
                    return

    @asynccontextmanager
    async def jump_clock_of_broker(self, stroke: Stroke, fault: Fault) -> AsyncIterator[None]:
        """An hour ahead, then an hour behind, then right."""
        async with self._jumped(self.pick(self.cluster.brokers, fault, stroke), stroke):
            yield

    @asynccontextmanager
    async def jump_clock_of_bookie(self, stroke: Stroke, fault: Fault) -> AsyncIterator[None]:
        """An hour ahead, then an hour behind, then right."""
        async with self._jumped(self.pick(self.cluster.bookies, fault, stroke), stroke):
            yield

    @asynccontextmanager
    async def _jumped(self, daemon: Daemon, stroke: Stroke) -> AsyncIterator[None]:
        process = daemon.process
        assert isinstance(process, WithOwnClock), "clocks of this cluster cannot jump"
        pid = process.pid
        await process.ahead()  # its first answer loads its HTTP server, which takes seconds of a busy machine
        stroke.at = time.monotonic()
        ahead = await process.jump(JUMP_S)
        yield
        behind = await process.jump(-JUMP_S)
        await asyncio.sleep(self.cluster.shape.session_s / 3)
        await process.jump(0)
        if process.pid == pid:
            stroke.proof = f"it said {ahead:+.0f} s, then {behind:+.0f} s, and runs on"

    @asynccontextmanager
    async def rolling_restart(self, stroke: Stroke, fault: Fault) -> AsyncIterator[None]:
        """SIGTERM to one after the other, bookies first; each of them must end with 0."""
        stroke.at = time.monotonic()
        stroke.target = "all"
        before = {daemon.name: daemon.process.pid for daemon in self.cluster.daemons.values()}
        for daemon in (*self.cluster.bookies, *self.cluster.brokers):
            began = time.monotonic()
            async with daemon.down("stop"):
                pass
            await self.cluster.healed()
            stroke.steps.append((daemon.name, began, time.monotonic()))
        yield
        if all(daemon.process.pid != before[daemon.name] for daemon in self.cluster.daemons.values()):
            stroke.proof = f"{len(before)} daemons ended with 0"

    # --- planned moves -----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def unload_bundle(self, stroke: Stroke, fault: Fault) -> AsyncIterator[None]:
        """A bundle moves from its owner to another broker."""
        async with connect(self.cluster.service_url) as client:
            before, bundle = await self._owned_bundle(client, fault)
            stroke.target = bundle
            stroke.at = time.monotonic()
            await client.admin.unload_bundle(bundle)
            yield
            async with asyncio.timeout(60):
                while (after := (await owners(client)).get(bundle, "")) in ("", before):
                    await asyncio.sleep(STEP_S)
        stroke.proof = f"from {before} to {after}"

    @asynccontextmanager
    async def split_bundle(self, stroke: Stroke, fault: Fault) -> AsyncIterator[None]:
        """A bundle is divided; its topics stay where they are."""
        async with connect(self.cluster.service_url) as client:
            _, bundle = await self._owned_bundle(client, fault)
            stroke.target = bundle
            stroke.at = time.monotonic()
            parts = await client.admin.split_bundle(bundle)
            yield
        stroke.proof = f"into {' and '.join(parts)}" if len(parts) > 1 else ""

    async def _owned_bundle(self, client: Client, fault: Fault) -> tuple[str, str]:
        """Owner and name of the victim."""
        async with asyncio.timeout(60):
            while not (
                owned := sorted((owner, name) for name, owner in (await owners(client)).items() if owner)
            ):
                await asyncio.sleep(STEP_S)
        return owned[int(fault.dice * len(owned))]

    # --- ZooKeeper ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def zookeeper_leader(self, stroke: Stroke, _: Fault) -> AsyncIterator[None]:
        """kill -9 of the leader; of a lone server SIGSTOP for less than a session."""
        ensemble = self.cluster.zookeeper
        stroke.at = time.monotonic()
        if len(ensemble.servers) == 1:
            stroke.target = "the only server"
            ensemble.servers[0].pause()
            try:
                await asyncio.sleep(self.cluster.shape.session_s / 4)
                stroke.proof = "" if ensemble.servers[0].serving else "it was stopped"
            finally:
                ensemble.servers[0].resume()
            yield
            return
        leader = await asyncio.to_thread(ensemble.leader)
        stroke.target = f"server {leader.address}"
        leader.kill()
        try:
            yield
            async with asyncio.timeout(20):
                while not (successor := await asyncio.to_thread(_leader_of, self.cluster)):
                    await asyncio.sleep(STEP_S)
            stroke.proof = f"{successor} leads now"
        finally:
            leader.start()
            await asyncio.to_thread(ensemble.wait_serving)

    # --- the network -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def isolate_broker(self, stroke: Stroke, fault: Fault) -> AsyncIterator[None]:
        """From ZooKeeper, the bookies and other brokers; its clients still reach it."""
        broker = self.pick(self.cluster.brokers, fault, stroke).name
        async with self._held(both(broker, [*self._others(broker), ZOOKEEPER]), stroke):
            yield

    @asynccontextmanager
    async def isolate_broker_from_metadata(self, stroke: Stroke, fault: Fault) -> AsyncIterator[None]:
        """It reaches clients and bookies."""
        broker = self.pick(self.cluster.brokers, fault, stroke).name
        async with self._held(both(broker, [ZOOKEEPER]), stroke):
            yield

    @asynccontextmanager
    async def broker_unheard(self, stroke: Stroke, fault: Fault) -> AsyncIterator[None]:
        """One way: it hears everybody, and nobody hears it."""
        broker = self.pick(self.cluster.brokers, fault, stroke).name
        async with self._held([(broker, other) for other in (*self._others(broker), ZOOKEEPER)], stroke):
            yield

    @asynccontextmanager
    async def broker_deaf(self, stroke: Stroke, fault: Fault) -> AsyncIterator[None]:
        """One way: everybody hears it, and it hears nobody."""
        broker = self.pick(self.cluster.brokers, fault, stroke).name
        async with self._held([(other, broker) for other in (*self._others(broker), ZOOKEEPER)], stroke):
            yield

    @asynccontextmanager
    async def isolate_bookie(self, stroke: Stroke, fault: Fault) -> AsyncIterator[None]:
        """From everybody."""
        bookie = self.pick(self.cluster.bookies, fault, stroke).name
        async with self._held(both(bookie, [*self._others(bookie), ZOOKEEPER]), stroke):
            yield

    @asynccontextmanager
    async def ring(self, stroke: Stroke, fault: Fault) -> AsyncIterator[None]:
        """Daemons in a ring, ZooKeeper among them: each reaches its two neighbours only."""
        members = [daemon.name for daemon in self.cluster.daemons.values()]
        members.insert(int(fault.dice * len(members)), ZOOKEEPER)
        stroke.target = " - ".join(members)
        size = len(members)
        apart = [
            (one, other)
            for at, one in enumerate(members)
            for its, other in enumerate(members)
            if (at - its) % size not in (0, 1, size - 1)
        ]
        async with self._held(apart, stroke):
            yield

    @asynccontextmanager
    async def slow_network(self, stroke: Stroke, fault: Fault) -> AsyncIterator[None]:
        """Everything from and to a broker takes 20 ms."""
        broker = self.pick(self.cluster.brokers, fault, stroke).name
        lines = self.cluster.lines
        assert lines is not None
        links = both(broker, [*self._others(broker), ZOOKEEPER, CLIENTS])
        before = sum(lines.slowed_down[link] for link in links)
        stroke.at = time.monotonic()
        with lines.slowed(links, SLOW_LINK_S):
            yield
        slowed = sum(lines.slowed_down[link] for link in links) - before
        stroke.proof = f"{slowed} times something came late" if slowed else ""

    def _others(self, name: str) -> list[str]:
        return [other for other in self.cluster.daemons if other != name]

    @asynccontextmanager
    async def _held(self, links: Iterable[Link], stroke: Stroke) -> AsyncIterator[None]:
        lines = self.cluster.lines
        assert lines is not None, "partitions need a cluster with lines"
        links = list(links)
        before = sum(lines.withheld[link] for link in links)
        stroke.at = time.monotonic()
        with lines.held(links):
            yield
        withheld = sum(lines.withheld[link] for link in links) - before
        stroke.proof = f"{withheld} times something was withheld" if withheld else ""


async def owners(client: Client) -> dict[str, str]:
    """Of each bundle of the load's namespace; "" where nobody owns it."""
    return {row["bundle"]: row["broker"] for row in await client.admin.bundles("public/default")}


def both(name: str, others: Iterable[str]) -> list[Link]:
    """The links between one and others, both ways."""
    return [link for other in others for link in ((name, other), (other, name))]


def _state(pid: int) -> str:
    """Of a process: T when it is stopped."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _leader_of(cluster: ClusterProcesses) -> str:
    with contextlib.suppress(StopIteration):
        return cluster.zookeeper.leader().address
    return ""


KINDS: dict[str, Kind] = {
    "kill broker": Kind(Faults.kill_broker),
    "kill bookie": Kind(Faults.kill_bookie),
    "pause broker": Kind(Faults.pause_broker, 0.1, 0.4),
    "pause broker past its session": Kind(Faults.pause_broker, 1.3, 2.0),
    "pause bookie": Kind(Faults.pause_bookie, 0.1, 0.4),
    "pause bookie past its session": Kind(Faults.pause_bookie, 1.3, 2.0),
    "slow disk": Kind(Faults.slow_disk, 0.5, 1.5),
    "full disk": Kind(Faults.full_disk, 1.0, 2.0, disk=True),
    "clock of a broker": Kind(Faults.jump_clock_of_broker, 0.3, 0.6, clocks=True),
    "clock of a bookie": Kind(Faults.jump_clock_of_bookie, 0.3, 0.6, clocks=True),
    "rolling restart": Kind(Faults.rolling_restart),
    "unload a bundle": Kind(Faults.unload_bundle, brokers=2),
    "split a bundle": Kind(Faults.split_bundle),
    "ZooKeeper leader": Kind(Faults.zookeeper_leader),
    "broker isolated": Kind(Faults.isolate_broker, 1.3, 2.0, lines=True),
    "broker without metadata": Kind(Faults.isolate_broker_from_metadata, 1.3, 2.0, lines=True),
    "broker unheard": Kind(Faults.broker_unheard, 1.3, 2.0, lines=True),
    "broker deaf": Kind(Faults.broker_deaf, 1.3, 2.0, lines=True),
    "bookie isolated": Kind(Faults.isolate_bookie, 1.3, 2.0, lines=True),
    "ring": Kind(Faults.ring, 1.3, 2.0, lines=True),
    "slow network": Kind(Faults.slow_network, 0.5, 1.5, lines=True),
}

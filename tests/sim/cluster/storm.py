"""The machines of one run, and what is done to them: faults of brokers, bookies ways between them, and operators' wishes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from magnetar.broker.ownership.bundle_ownership import State
from magnetar.metadata.paths import DRAINING_BROKERS_PATH
from magnetar.proto.errors import MagnetarError
from sim.cluster.brokers import BrokerMachine
from sim.cluster.metadata import SESSION_S, ClusterMetadata
from sim.cluster.rules import Rules
from sim.ledgers import machines
from sim.ledgers.machines import Machine
from sim.ledgers.metadata import SERVICE, Chances
from support.sim import SimLoop, SimProcess

QUORUMS = ((2, 2, 2), (2, 2, 2), (3, 2, 2), (3, 3, 2))
FAULTS = (
    "crash_broker",
    "stop_broker",
    "short_pause",
    "long_pause",
    "session_expired",
    "broker_from_metadata",
    "broker_from_bookie",
    "broker_from_clients",
    "cut",
    "bookie",
    "transfer",
    "transfer",
    "move",
    "split",
    "drain",
)
LONGEST_BLOCK_S = 3.0
BOOKIES = replace(
    machines.SETTINGS,
    journal_file_bytes=1 << 20,
    journal_spare_bytes=1 << 20,
    journal_ring_bytes=2 << 20,
    read_cache_bytes=256 << 10,
    read_ahead_bytes=64 << 10,
    entry_log_bytes=512 << 10,
    max_entry_bytes=128 << 10,
)


@dataclass(frozen=True)
class Plan:
    """Seconds are virtual."""

    brokers: int
    bundles: int
    quorums: tuple[int, int, int]
    faults: tuple[str, ...]
    weights: tuple[float, ...]
    mean_gap_s: float
    storm_s: float
    both_ways: float  # chance of a partition to be one of both ways
    chances: Chances = field(default_factory=Chances)


def draw(rng: random.Random) -> Plan:
    """The plan of a seed."""
    faults = tuple(dict.fromkeys(name for name in FAULTS if rng.random() < 0.6)) or ("crash_broker",)
    return Plan(
        brokers=rng.choice((2, 3, 3)),
        bundles=rng.choice((1, 2, 4)),
        quorums=rng.choice(QUORUMS),
        faults=faults,
        weights=tuple(rng.uniform(0.3, 3.0) for _ in faults),
        mean_gap_s=rng.choice((0.3, 0.6, 1.2)),
        storm_s=rng.uniform(8.0, 12.0),
        both_ways=rng.choice((0.0, 0.5, 1.0)),
        chances=Chances(
            lost_request=rng.choice((0.0, 0.0, 0.02)),
            lost_answer=rng.choice((0.0, 0.04, 0.1)),
            slow=rng.choice((0.0, 0.1)),
        ),
    )


class Cluster:
    """All machines of a run."""

    def __init__(self, loop: SimLoop, plan: Plan) -> None:
        self.loop = loop
        self.plan = plan
        self.metadata = ClusterMetadata(loop)
        self.metadata.chances = plan.chances
        self.bookies = [
            Machine(loop, self.metadata, f"b{number}", may_be_damaged=False, settings=BOOKIES)
            for number in range(3)
        ]
        self.brokers = [
            BrokerMachine(loop, self.metadata, number, plan.quorums, plan.bundles)
            for number in range(plan.brokers)
        ]
        self.rules = Rules(self.metadata, self.brokers)
        self.clients: list[str] = []  # names of processes
        self.wishes = 0  # of operators, carried out
        self._wishing: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        """One URL for all brokers."""
        return "magnetar://" + ",".join(machine.url.removeprefix("magnetar://") for machine in self.brokers)

    def start(self) -> None:
        """All machines."""
        for bookie in self.bookies:
            bookie.start()
        for broker in self.brokers:
            broker.start()

    async def storm(self) -> None:
        """Faults, one after another, as the plan has them."""
        rng, plan = self.loop.rng, self.plan
        end = self.loop.time() + plan.storm_s
        while self.loop.time() < end:
            await asyncio.sleep(rng.expovariate(1 / plan.mean_gap_s))
            (kind,) = rng.choices(plan.faults, plan.weights)
            self._do(kind, rng.choice(self.brokers))

    def _do(self, kind: str, broker: BrokerMachine) -> None:
        rng, loop = self.loop.rng, self.loop
        match kind:
            case "crash_broker":
                broker.crash()
            case "stop_broker":
                broker.stop()
            case "short_pause":
                broker.pause(rng.uniform(0.05, 0.5 * SESSION_S))
            case "long_pause":
                broker.pause(rng.uniform(SESSION_S, 2 * SESSION_S))
            case "session_expired":
                self._expire(broker)
            case "broker_from_metadata":
                self._block(kind, broker, [SERVICE])
            case "broker_from_bookie":
                self._block(kind, broker, [rng.choice(self.bookies).name])
            case "broker_from_clients":
                self._block(kind, broker, rng.sample(self.clients, rng.randint(1, len(self.clients))))
            case "cut":
                loop.network.cut_one()
            case "bookie":
                self._break_bookie(rng.choice(self.bookies))
            case _:
                self._wish(kind, broker)

    def _expire(self, broker: BrokerMachine) -> None:
        session = self.metadata.holders.get(broker.name)
        if session is not None and not session.over:
            self.loop.trace.fault("session_expired", broker.name)
            session.expire()

    def _block(self, kind: str, broker: BrokerMachine, others: Sequence[str]) -> None:
        rng = self.loop.rng
        seconds = rng.uniform(0.2, LONGEST_BLOCK_S)
        self.loop.trace.fault(kind, broker.name)
        both, there = rng.random() < self.plan.both_ways, rng.random() < 0.5
        for other in others:
            if both or there:
                self.loop.network.block(broker.name, other, seconds)
            if both or not there:
                self.loop.network.block(other, broker.name, seconds)

    def _break_bookie(self, bookie: Machine) -> None:
        rng = self.loop.rng
        match rng.choice(("crash", "power", "pause")):
            case "pause":
                bookie.pause(rng.uniform(0.1, 1.5))
            case how:
                bookie.crash(how == "power")

    # --- what operators wish -----------------------------------------------------------------------------------------

    def _wish(self, kind: str, asked: BrokerMachine) -> None:
        """Of any broker: it asks the owner."""
        rng, ownership, process = self.loop.rng, asked.ownership, asked.process
        bundles = sorted(self.rules.owners)
        if ownership is None or process is None or not bundles:
            return
        bundle = str(rng.choice(bundles))
        to = rng.choice(self.brokers).name
        match kind:
            case "transfer":
                self._ask(process.spawn, kind, lambda: ownership.administration.transfer(bundle, to))
            case "move":
                self._ask(process.spawn, kind, lambda: ownership.administration.transfer(bundle, ""))
            case "split" if len(bundles) < 8:
                self._ask(process.spawn, kind, lambda: ownership.administration.split(bundle))
            case "drain":
                wish = self._ask(process.spawn, kind, lambda: ownership.administration.drain(to, undo=False))
                self.loop.call_outside(rng.uniform(0.5, 4.0), self._undo_drain, to, process, wish)

    def _ask(
        self, spawn: Callable[..., asyncio.Task[None]], kind: str, wish: Callable[[], Awaitable[object]]
    ) -> asyncio.Task[None]:
        async def ask() -> None:
            try:
                await wish()
                self.wishes += 1
            except MagnetarError as error:
                self.loop.trace.record("refused", kind, error.message)

        self.loop.trace.fault(kind)
        return spawn(ask(), name=kind)

    def _undo_drain(
        self, name: str, asked: SimProcess, wish: asyncio.Task[None], has_ended: bool = False
    ) -> None:
        """By somebody who has the patience to see it done, though the broker that was asked stood still.

        `has_ended`: nobody was about to drain it any more at the last look, before the longest way of a request.
        """
        ready = [one for one in self.brokers if one.ownership is not None and one.process is not None]
        if name not in self.rules.children(DRAINING_BROKERS_PATH):
            under_way = asked.alive and not wish.done()
            if under_way or not has_ended:
                self.loop.call_outside(0.6, self._undo_drain, name, asked, wish, not under_way)
            return
        if not ready:
            self.loop.call_outside(0.3, self._undo_drain, name, asked, wish)
            return
        one = self.loop.rng.choice(ready)
        ownership, process = one.ownership, one.process
        assert ownership is not None
        assert process is not None
        self._ask(process.spawn, "undo_drain", lambda: ownership.administration.drain(name, undo=True))
        self.loop.call_outside(1.5, self._undo_drain, name, asked, wish)

    # --- healing -----------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """The storm is over."""
        self.loop.network.unblock_all()
        self.metadata.chances = Chances()
        for bookie in self.bookies:
            bookie.heal()
        self.loop.trace.record("healed")

    def states(self) -> list[str]:
        """For whoever reads a failure."""
        return [
            f"{machine.name}: "
            + ", ".join(
                f"{bundle.range} {held.state.value}"
                for bundle, held in (machine.ownership.held.items() if machine.ownership else ())
                if held.state is not State.OWNED
            )
            for machine in self.brokers
        ]

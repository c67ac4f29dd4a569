"""Clusters that repair themselves: machines are lost for good, processes with AutoRecovery die.

Each change of a record by a repair is checked when it becomes true (rule 22): only a bookie that counts as lost is replaced,
never in the last ensemble of an open ledger, and its successor has every entry at that moment. A repair fences a ledger
only when its last ensemble has lacked a bookie for the grace period.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

from magnetar.ledger import LedgerMetadata, RegisteredBookies, StoredIdentities
from magnetar.ledger.core.metadata import LedgerState
from magnetar.ledger.directory import BOOKIES_PATH
from magnetar.ledger.replication.auto_recovery import AutoRecovery
from magnetar.ledger.replication.leftovers import StoredAssignments
from magnetar.ledger.replication.settings import RepairSettings
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.metadata.timed import TimedStore
from magnetar.proto.errors import MagnetarError
from sim.deliveries import Violation
from sim.ledgers.answer_checker import CheckedTransport
from sim.ledgers.cluster import Cluster
from sim.ledgers.machines import CONNECTION, SETTINGS, Machine
from sim.ledgers.metadata import CLUSTER, MetadataService, ServiceClient
from sim.ledgers.plan import Plan
from support.sim import SimClock, SimLoop

REPAIR = RepairSettings(
    lost_bookie_delay_s=1.0,
    open_ledger_grace_s=1.5,
    full_check_interval_s=8.0,
    copy_bytes_per_s=4 << 20,
    copy_bytes_in_flight=64 * 1024,
    retry_backoff_s=0.2,
    retry_backoff_max_s=1.0,
    queue_interval_s=0.5,
    session_timeout_s=0.8,
)
PROCESSES = 2
ROLE = "repair"
# The auditor's view is older than the truth, and a copy takes its time: nothing is concluded from less than this.
STALE_S = 0.3
COPY_S = 8.0
QUORUMS = ((2, 2, 2), (3, 2, 2), (3, 2, 2), (3, 3, 2), (3, 3, 3), (4, 3, 2))


class RepairedMachine(Machine):
    """Drops what metadata gives to other bookies."""

    def __init__(self, loop: SimLoop, metadata: MetadataService, name: str, **options: Any) -> None:
        super().__init__(loop, metadata, name, **options)
        self._settings = replace(self._settings, leftover_interval_s=1.0)

    def assignments(self, metadata: ServiceClient) -> StoredAssignments:
        """As the shipped bookie has them: of the bookie that its cookie names, whatever machine that is on."""
        return StoredAssignments(StoredLedgers(TimedStore(metadata, 1.0)), self.contents.owner)

    _away_until = 0.0

    def start(self) -> None:
        """Not while it is away."""
        if self.loop.now < self._away_until:
            self.loop.call_outside(self._away_until - self.loop.now + 0.001, self.start)
        else:
            super().start()

    def go_away(self, seconds: float) -> None:
        """Down for so long, and then back with all that it had."""
        self.loop.trace.fault("machine_away", self.name)
        self._away_until = self.loop.now + seconds
        self.crash(True)

    def lose(self) -> None:
        """The machine and its disks are gone for good."""
        self.loop.trace.fault("machine_lost", self.name)
        self.lost = True
        self.crash(True)


class Presence:
    """Which bookies are registered, in truth, and which of them counted as lost by rule 22."""

    def __init__(self, loop: SimLoop, names: list[str]) -> None:
        self._loop = loop
        self._absent_since: dict[str, float | None] = dict.fromkeys(names)
        self._counted_at: dict[str, float] = {}  # bookie -> the last time at which it counted as lost
        self._absent_for: dict[
            str, tuple[float, float]
        ] = {}  # bookie -> its last absence: seconds, and its end

    def look(self, registered: list[str]) -> None:
        """Called often."""
        now = self._loop.time()
        for name, since in self._absent_since.items():
            if name in registered:
                if since is not None:
                    self._absent_for[name] = (now - since, now)
                    self._absent_since[name] = None
            elif since is None:
                self._absent_since[name] = now
        absent = {name: since for name, since in self._absent_since.items() if since is not None}
        for name, since in absent.items():
            if len(absent) > 1 or now - since >= REPAIR.lost_bookie_delay_s - STALE_S:
                self._counted_at[name] = now

    def counted_as_lost(self, name: str) -> bool:
        """Whether it does, or did until some seconds ago: copies take their time."""
        return self._loop.time() - self._counted_at.get(name, -COPY_S) < COPY_S

    def absent_s(self, name: str) -> float:
        """How long it is absent, or was until a moment ago."""
        since = self._absent_since[name]
        if since is not None:
            return self._loop.time() - since
        seconds, end = self._absent_for.get(name, (0.0, 0.0))
        return seconds if self._loop.time() - end < 2.0 else 0.0


class RepairCluster(Cluster):
    """A cluster with repair processes; some of its machines are lost for good, one after the other."""

    machine = RepairedMachine

    def __init__(self, loop: SimLoop, plan: Plan) -> None:
        super().__init__(loop, plan)
        self.replaced = 0
        self.presence = Presence(loop, [machine.name for machine in self.machines])
        holds = self.context.answers.holds

        def holds_what_is_its_own(bookie: str, ledger_id: int, entry_id: int) -> bool:
            metadata = self.metadata.ledger(ledger_id)
            dropped = (
                metadata is not None
                and metadata.closed
                and bookie not in metadata.ensemble_of(entry_id).bookies
            )
            return not dropped and holds(bookie, ledger_id, entry_id)

        self.context.answers.holds = holds_what_is_its_own  # type: ignore[method-assign]

    @staticmethod
    def draw(plan: Plan, rng: random.Random) -> Plan:
        """The plan of a seed, with machines to lose."""
        quorums = rng.choice(QUORUMS)
        machines = quorums[0] + rng.choice((2, 3))
        faults = tuple(zip(plan.faults, plan.weights))
        kept = [(fault, weight) for fault, weight in faults if fault != "bit_flip"]
        return replace(
            plan,
            quorums=quorums,
            machines=machines,
            victims=0,
            faults=tuple(fault for fault, _ in kept) or ("cut",),
            weights=tuple(weight for _, weight in kept) or (1.0,),
            storage=tuple(plan.storage[number % len(plan.storage)] for number in range(machines)),
            storm_s=plan.storm_s + 4.0,
            chains=3,
            delete=0.1,
            turn_s=(0.1, 0.8),
        )

    # --- processes ---------------------------------------------------------------------------------------------------

    async def watch_bookies(self) -> None:
        """Sees each registration."""
        while True:
            self.presence.look(await self.metadata.truth.children(BOOKIES_PATH))
            await asyncio.sleep(0.02)

    async def repair_processes(self, number: int) -> None:
        """One after another; most are killed."""
        rng = self.loop.rng
        while self.storming:
            process = self.launch(f"{ROLE}{number}", self._repair(f"{ROLE}-{number}"))
            await asyncio.sleep(rng.choice((rng.uniform(0.3, 2.0), rng.uniform(2.0, 8.0))))
            kind = rng.choice(("kill", "kill", "pause"))
            self.loop.trace.fault(f"repair_{kind}", process.name)
            if kind == "pause":
                seconds = rng.uniform(0.5, 3.0)
                process.pause(seconds)
                await asyncio.sleep(seconds + rng.uniform(0.2, 1.0))
            process.kill()
            await asyncio.sleep(rng.uniform(0.05, 0.8))

    async def _repair(self, owner: str) -> None:
        context = self.context
        metadata = context.metadata.view()
        directory: list[RegisteredBookies] = []

        async def open_directory() -> None:
            directory.append(await RegisteredBookies.open(metadata))

        await context.until_done(open_directory)
        identities = StoredIdentities(metadata, CLUSTER)
        transport = CheckedTransport(context.answers, directory[0], context.settings, CONNECTION, identities)
        rng = random.Random(self.loop.rng.getrandbits(64))
        while True:
            repair = AutoRecovery(
                metadata,
                transport,
                directory[0],
                context.settings,
                REPAIR,
                rng,
                SimClock(self.loop),
                owner=owner,
            )
            try:
                await repair.start()
                break
            except MagnetarError:
                await asyncio.sleep(0.1)
        while True:
            await asyncio.sleep(60.0)

    # --- losses ------------------------------------------------------------------------------------------------------

    async def lose_machines(self) -> None:
        """As many as leave enough for an ensemble and one more, each after the last loss was healed."""
        rng = self.loop.rng
        for _ in range(len(self.machines) - self.plan.quorums[0] - 1):
            # Until clients have forgotten the last one: else they place a ledger on bookies of which none is left.
            await asyncio.sleep(rng.uniform(2.0, 4.0))
            while await self.naming_lost():
                await asyncio.sleep(0.2)
            if not self.storming:
                return
            alive = [machine for machine in self.machines if not machine.lost]
            records = [self.metadata.ledger(ledger_id) for ledger_id in self.history.ledgers]
            named = [b for record in records if record for e in record.ensembles for b in e.bookies]
            machine = max(alive, key=lambda machine: named.count(machine.name))
            assert isinstance(machine, RepairedMachine)
            machine.lose()

    async def machines_away(self) -> None:
        """One after another is down for longer than the delay: what it had is copied, and becomes leftovers."""
        rng = self.loop.rng
        while self.storming:
            await asyncio.sleep(rng.uniform(0.5, 2.0))
            machine = rng.choice([machine for machine in self.machines if not machine.lost])
            assert isinstance(machine, RepairedMachine)
            seconds = rng.uniform(0.8, 4.0)
            machine.go_away(seconds)
            await asyncio.sleep(seconds + rng.uniform(0.2, 2.0))

    async def naming_lost(self) -> list[int]:
        """Ledgers whose record names a machine that is lost, with entries there."""
        lost = {machine.name for machine in self.machines if machine.lost}
        found = []
        for ledger_id in self.history.ledgers:
            metadata = self.metadata.ledger(ledger_id)
            if metadata is not None and any(
                not fragment.empty and lost.intersection(fragment.bookies)
                for fragment in metadata.fragments()
            ):
                found.append(ledger_id)
        return found

    # --- what must hold ----------------------------------------------------------------------------------------------

    def _metadata_changed(
        self, process: str, ledger_id: int, before: LedgerMetadata, after: LedgerMetadata
    ) -> None:
        if before == after:
            return  # the version was raised before leftovers are dropped
        if process.startswith(ROLE):
            if before.state is LedgerState.OPEN and after.state is LedgerState.IN_RECOVERY:
                self._check_fencing(ledger_id, before)
            elif [e.first_entry for e in before.ensembles] == [e.first_entry for e in after.ensembles] and (
                replace(before, ensembles=()) == replace(after, ensembles=())
            ):
                self._check_repair(process, ledger_id, before, after)
                return
        super()._metadata_changed(process, ledger_id, before, after)

    def _check_fencing(self, ledger_id: int, before: LedgerMetadata) -> None:
        absent = {name: self.presence.absent_s(name) for name in before.last_ensemble.bookies}
        if max(absent.values()) < REPAIR.open_ledger_grace_s - STALE_S:
            raise Violation(
                f"ledger {ledger_id} is open, and fenced by a repair; its bookies are absent for {absent}"
            )

    def _check_repair(
        self, process: str, ledger_id: int, before: LedgerMetadata, after: LedgerMetadata
    ) -> None:
        for fragment, old in zip(after.fragments(), before.ensembles, strict=True):
            for position, (bookie, left) in enumerate(zip(fragment.bookies, old.bookies, strict=True)):
                if bookie == left:
                    continue
                self.replaced += 1
                where = f"ledger {ledger_id}: {process} replaced {left} by {bookie} from {fragment.first} on"
                if fragment.last is None:
                    raise Violation(f"{where}, in the last ensemble of an open ledger")
                if not self.presence.counted_as_lost(left):
                    raise Violation(f"{where}, and {left} never counted as lost")
                for entry_id in range(fragment.first, fragment.last + 1):
                    if position in after.striping.write_set(entry_id) and not self.has(
                        bookie, ledger_id, entry_id
                    ):
                        raise Violation(f"{where}, and {bookie} does not have entry {entry_id}")


assert SETTINGS.leftover_interval_s > 1.0, "RepairedMachine drops leftovers more often than others"

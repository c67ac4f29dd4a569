"""A cluster of brokers whose bookies are away for longer than a repair waits, and processes that repair and die."""

from __future__ import annotations

import asyncio
import random

from magnetar.ledger import LedgerMetadata, RegisteredBookies, StoredIdentities, TcpTransport
from magnetar.ledger.replication.auto_recovery import AutoRecovery
from magnetar.proto.errors import MagnetarError
from sim.cluster.brokers import CONNECTION, LEDGERS
from sim.cluster.storm import BOOKIES, Cluster, Plan
from sim.ledgers.metadata import CLUSTER
from sim.ledgers.repair import PROCESSES, REPAIR, ROLE, RepairedMachine
from support.sim import SimClock, SimLoop

MACHINES = 5


class RepairedCluster(Cluster):
    """See the module docstring."""

    def __init__(self, loop: SimLoop, plan: Plan) -> None:
        super().__init__(loop, plan)
        self.away: list[RepairedMachine] = [
            RepairedMachine(loop, self.metadata, f"b{number}", may_be_damaged=False, settings=BOOKIES)
            for number in range(MACHINES)
        ]
        self.bookies = list(self.away)
        self.metadata.on_change = self._ledger_changed
        self._storming = True
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """See Cluster."""
        super().start()
        self._tasks = [self.loop.create_task(self._repair_processes(number)) for number in range(PROCESSES)]
        self._tasks.append(self.loop.create_task(self._machines_away()))

    def heal(self) -> None:
        """See Cluster: two processes that live to the end."""
        self._storming = False
        super().heal()

    def _ledger_changed(
        self, process: str, ledger_id: int, before: LedgerMetadata, after: LedgerMetadata
    ) -> None:
        if process.startswith(ROLE) and before.ensembles != after.ensembles:
            self.loop.trace.fault("replaced", process, ledger_id)
        elif process.startswith(ROLE) and before.state is not after.state:
            self.loop.trace.fault("fenced_by_a_repair", process, ledger_id)

    async def _repair_processes(self, number: int) -> None:
        """One after another; the last one lives to the end."""
        rng, name = self.loop.rng, f"{ROLE}{number}"
        while True:
            process = self.loop.start_process(name)
            process.spawn(self._repair(name), name=name)
            await asyncio.sleep(rng.uniform(1.0, 8.0))
            if not self._storming:
                return
            self.loop.trace.fault("repair_kill", name)
            process.kill()
            await asyncio.sleep(rng.uniform(0.05, 0.8))

    async def _repair(self, owner: str) -> None:
        metadata, loop = self.metadata.view(), self.loop
        rng = random.Random(loop.rng.getrandbits(64))
        while True:
            try:
                directory = await RegisteredBookies.open(metadata)
                transport = TcpTransport(directory, LEDGERS, CONNECTION, StoredIdentities(metadata, CLUSTER))
                repair = AutoRecovery(
                    metadata, transport, directory, LEDGERS, REPAIR, rng, SimClock(loop), owner=owner
                )
                await repair.start()
                break
            except MagnetarError:
                await asyncio.sleep(0.1)
        while True:
            await asyncio.sleep(60.0)

    async def _machines_away(self) -> None:
        """One after another is down for longer than the delay: what it had is copied, and becomes leftovers."""
        rng = self.loop.rng
        while self._storming:
            await asyncio.sleep(rng.uniform(0.5, 2.0))
            seconds = rng.uniform(0.8, 4.0)
            rng.choice(self.away).go_away(seconds)
            await asyncio.sleep(seconds + rng.uniform(0.2, 2.0))

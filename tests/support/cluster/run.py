"""A round: load, faults, healing, draining, the verdict."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from support.cluster.checker import Verdict, check
from support.cluster.faults import Faults, Stroke
from support.cluster.figures import Confirmations
from support.cluster.load import LoadProcess
from support.cluster.processes import ClusterProcesses
from support.cluster.schedule import Fault
from support.cluster.scorecard import RATE
from support.cluster.workload import LoadPlan

# Of what the producers would send without faults, so much is confirmed at least: else the run proves little.
LEAST_LOAD = 0.2
BEFORE_FAULTS_S = 2.0
# Of daemons that end unasked: 70 after a lost session or a failed disk, 1 if a start found no ZooKeeper.
MAY_END_WITH = (1, 70)


class Round:
    """What came of it; filled when the round has ended."""

    def __init__(self, cluster: ClusterProcesses, load: LoadProcess) -> None:
        self.cluster = cluster
        self.load = load
        self.faults = Faults(cluster)
        self.began = time.monotonic()
        self.seconds = 0.0  # of load
        self.verdict = Verdict()
        self.confirmations = Confirmations(())
        self.status: dict[str, Any] = {}

    @property
    def strokes(self) -> Sequence[Stroke]:
        """The faults that there were."""
        return self.faults.strokes

    @property
    def described(self) -> str:
        """Load and faults, for the table."""
        kinds = Counter(stroke.kind for stroke in self.strokes)
        faults = ", ".join(f"{times} {kind}" for kind, times in kinds.items())
        return f"{self.verdict.counts['confirmed']:,} confirmed in {self.seconds:.0f} s; {faults}"

    @property
    def judged(self) -> str:
        """What the checker counted, for the table."""
        found = self.verdict
        refused = found.counts["duplicates refused"]
        return (
            f"{found.findings.total()} findings ({found.findings['lost']} lost), {found.counts['duplicates']} duplicates"
            + (f" ({refused} refused)" if self.load.plan.deduplication else "")
        )

    async def play(self, faults: Sequence[Fault]) -> None:
        """One after the other, each when its time has come and messages are confirmed again after the one before."""
        for fault in faults:
            await asyncio.sleep(max(0.0, self.began + fault.at_s - time.monotonic()))
            await self.faults.strike(fault)
            await self.load.goes_on()

    def check(self) -> None:
        """Asserts that nothing is wrong, that every fault fired, and that there was load."""
        silent = [stroke for stroke in self.strokes if not stroke.proof]
        assert not silent, f"did not fire: {silent}"
        assert self.load.drained, f"not drained: {self.load.progress}"
        assert self.verdict.good, f"seed {self.load.plan.seed}: {self.verdict}"
        wanted = LEAST_LOAD * self.load.plan.rate * self.seconds
        confirmed = self.verdict.counts["confirmed"]
        assert confirmed >= wanted, f"{confirmed} messages were confirmed, and {wanted:.0f} are the least"
        bad = [one for one in self.cluster.restarts if one.code not in MAY_END_WITH]
        assert not bad, f"ended by themselves: {bad}"


def load_plan(url: str, seed: int, **changes: Any) -> LoadPlan:
    """At the rate that the environment asks for."""
    return msgspec.structs.replace(LoadPlan(url=url, seed=seed, rate=RATE), **changes)


@asynccontextmanager
async def round_of(
    cluster: ClusterProcesses, plan: LoadPlan, directory: Path, *, before_s: float = BEFORE_FAULTS_S
) -> AsyncIterator[Round]:
    """Load from a healthy cluster on; the block brings faults. Healed, drained and judged when it is left without error."""
    async with LoadProcess(plan, directory) as load:
        found = Round(cluster, load)
        await load.goes_on()
        await asyncio.sleep(before_s)  # what there is without faults, to compare with
        yield found
        await load.goes_on()
        found.seconds = time.monotonic() - found.began
        found.status = await cluster.healed()
        events = await load.finish()
    found.verdict = await asyncio.to_thread(check, events, deduplication=plan.deduplication)
    found.confirmations = Confirmations(events)

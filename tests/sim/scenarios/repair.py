"""The cluster of `ledgers` with self-repair: machines are lost for good, one after the other, while everything else breaks.

storm: as in `ledgers`; a machine is lost, with its disks; two repair processes, which die and stand still as well; the next
       machine is lost when no record with entries names the last one any more
heal:  a minute at most until everything is as in `ledgers`, and no record names a lost machine
end:   the checks of `ledgers`: no acknowledged entry is lost, no replica says anything else, Qa copies stand where the
       records say
"""

from __future__ import annotations

import asyncio

from sim.deliveries import Violation
from sim.ledgers.plan import draw
from sim.ledgers.repair import PROCESSES, RepairCluster
from sim.scenarios import ledgers
from support.sim import SimLoop, Trace

EXPECTED_FAULTS = (
    *(fault for fault in ledgers.EXPECTED_FAULTS if fault != "bit_flip"),
    "machine_away",
    "machine_lost",
    "repair_kill",
    "repair_pause",
)
HEALED_WITHIN_S = 60.0


async def until_replicated(cluster: RepairCluster) -> None:
    """No record names a machine that is lost; raises Violation after a minute."""
    deadline = cluster.loop.time() + HEALED_WITHIN_S
    while left := await cluster.naming_lost():
        if cluster.loop.time() > deadline:
            notes = [
                await cluster.metadata.truth.get(
                    f"/underreplicated/{ledger_id // 10000:016d}/{ledger_id % 10000:04d}"
                )
                for ledger_id in left
            ]
            raise Violation(
                f"not replicated {HEALED_WITHIN_S} s after healing: ledgers {left}, requests {notes}"
            )
        await asyncio.sleep(0.1)


def play(seed: int, trace: Trace) -> dict[str, int]:
    """See sim.runner."""
    loop = SimLoop(seed, trace=trace, limit_seconds=300.0, whole_milliseconds=bool(seed % 2))
    cluster = RepairCluster(loop, RepairCluster.draw(draw(loop.rng), loop.rng))
    trace.record("plan", cluster.plan)

    async def main() -> None:
        cluster.start()
        background = [loop.create_task(cluster.watch_bookies())]
        await asyncio.sleep(0.3)
        background += [loop.create_task(cluster.repair_processes(number)) for number in range(PROCESSES)]
        background.append(loop.create_task(cluster.machines_away()))
        losses = loop.create_task(cluster.lose_machines())
        chains = [loop.create_task(cluster.chain(name)) for name in "abc"[: cluster.plan.chains]]
        await cluster.storm()
        cluster.heal()
        await asyncio.wait([loop.create_task(asyncio.sleep(ledgers.CALM_S)), *chains])
        for chain in chains:
            chain.result()
        for number in range(PROCESSES):  # these live to the end
            cluster.launch(f"repair-last{number}", cluster._repair(f"last-{number}"))
        cluster.end_of_faults()
        last = await ledgers.converge(cluster)
        await until_replicated(cluster)
        await losses
        await ledgers.check_idle_ledger(cluster, last)
        await ledgers.check_everything(cluster, last)
        for task in background:
            if task.done():
                task.result()
        counts = cluster.history.counts()
        if counts["acknowledged"] < ledgers.MINIMUM_ACKNOWLEDGED:
            raise Violation(f"too little happened: {counts}")

    try:
        loop.run(main())
    finally:
        loop.close()
    return {**cluster.history.counts(), "replaced": cluster.replaced, "virtual_seconds": int(loop.time())}

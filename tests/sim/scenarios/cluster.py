"""The whole cluster: brokers that share topics, three bookies, a metadata service, clients, and a storm of faults.

Real: `Broker`, `ClusterOwnership`, listener, ledger client, bookies, clients with a service URL of all brokers. Simulated:
network, disks, clocks, chance and the metadata service (sim.cluster.metadata).

    storm (8 to 12 s): brokers die, stand still, stop, lose sessions and connections; bundles are moved, divided, drained
    heal: a minute at most until everything is confirmed and delivered, and every bundle that was asked for has an owner
    calm: topics are found at once, and what operators wish is done within seconds (sim.cluster.calm)
    the brokers die once more: every topic is read again, and nothing comes back that was acknowledged with a receipt
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from magnetar.client.options import SUBSCRIPTION_TYPES
from magnetar.proto.errors import MagnetarError
from sim import deliveries
from sim.cluster.calm import Calm
from sim.cluster.storm import LONGEST_BLOCK_S, Cluster, draw
from sim.consuming import plan_of
from sim.deliveries import Violation
from sim.history import History
from sim.load import Load
from support.sim import SimLoop, Trace

EXPECTED_FAULTS = (
    "crash_broker",
    "stop_broker",
    "short_pause",
    "long_pause",
    "session_expired",
    "session_timeout",
    "broker_from_metadata",
    "broker_from_bookie",
    "broker_from_clients",
    "cut",
    "crash_process",
    "crash_power",
    "transfer",
    "move",
    "split",
    "drain",
    "kill_consumer",
    "seek",
    "clock_set",
    "metadata_answer_lost",
)
CONVERGED_WITHIN_S = 60.0
MINIMUM_CONFIRMED = 40
TYPES = SUBSCRIPTION_TYPES


class TopicLoad(Load):
    """Less of everything, as there are several topics."""

    kinds: Sequence[tuple[str, bool]] = (("batched", True), ("paced", True))
    paddings = (0, 10, 100, 300)
    bursts_per_s = 3.0
    bursts = (1, 5, 20)
    paced_per_s = 8.0


def make_loads(loop: SimLoop, cluster: Cluster) -> list[TopicLoad]:
    """Two topics with two subscriptions each, so that all four types are there, and one with one more."""
    rng = loop.rng
    types = rng.sample(TYPES, len(TYPES))
    loads = []
    for number, its in enumerate((types[:2], types[2:], [rng.choice(TYPES)])):
        trimming = rng.random() < 0.4
        plans = [plan_of(rng, type, trimming=trimming) for type in its]
        load = TopicLoad(loop, History(trimming=trimming), cluster.url, plans, f"orders-{number}")
        loads.append(load)
    return loads


async def converge(loop: SimLoop, cluster: Cluster, loads: list[TopicLoad]) -> None:
    """Everything confirmed, delivered and acknowledged, and every bundle in hand; raises Violation after a minute."""
    deadline = loop.time() + CONVERGED_WITHIN_S
    client = await loads[0].client("judge")
    waits: Any = ["producers are not done"]
    while loop.time() < deadline:
        await asyncio.sleep(0.5)
        for load in loads:
            for task in [*load.producers, *load.tasks]:
                if task.done() and task.exception():
                    task.result()
        waits = [
            f"{task.get_name()} of {load.topic} has not ended"
            for load in loads
            for task in load.producers
            if not task.done()
        ]
        for load in loads:
            waits += [
                f"{who} of {load.topic} lacks {names[:3]}" for who, names in load.history.missing().items()
            ]
        waits += cluster.rules.unsettled([load.topic for load in loads])
        if waits:
            continue
        try:
            for load in loads:
                stats = await client.admin.topic_stats(load.topic)
                waits += [
                    f"{name} of {load.topic} has a backlog of {figures['backlog_messages']}"
                    for name, figures in stats["subscriptions"].items()
                    if name in load.history.subscriptions and figures["backlog_messages"]
                ]
        except MagnetarError as error:
            waits = [repr(error)]
        if not waits:
            break
    else:
        raise Violation(
            f"not converged {CONVERGED_WITHIN_S} s after healing: {waits[:6]}; {cluster.states()}"
        )
    await client.close()


async def calm(cluster: Cluster, loads: list[TopicLoad]) -> None:
    """The readers and consumers are still there: so topics are asked for when their broker dies."""
    await Calm(cluster, loads[0].client, [load.topic for load in loads]).play()
    for load in loads:
        await load.finish()


async def check_everything(cluster: Cluster, loads: list[TopicLoad]) -> None:
    """After the death of all brokers: what is stored, and that nothing comes back."""
    for broker in cluster.brokers:
        broker.crash()
    for load in loads:
        load.history.crashed(cluster.loop.now)
    await asyncio.sleep(6.0)
    for load in loads:
        stored = await load.reread()
        load.history.check_reread(stored)
        await load.check_letters(stored)
        load.start_consumers(" again")
    await asyncio.sleep(4.0)
    for load in loads:
        await load.finish()


def play(seed: int, trace: Trace) -> dict[str, int]:
    """See sim.runner."""
    loop = SimLoop(seed, trace=trace, limit_seconds=600.0, whole_milliseconds=bool(seed % 2))
    plan = draw(loop.rng)
    cluster = Cluster(loop, plan)
    trace.record("plan", plan)
    # What a broker sent may be held back on its way to one consumer, and be acknowledged by another meanwhile.
    deliveries.RECEIPT_GRACE_S = 1.0 + LONGEST_BLOCK_S * ("broker_from_clients" in plan.faults)
    loads = make_loads(loop, cluster)

    def loaded() -> None:
        for load in loads:
            load.history.crashed(loop.now)

    cluster.metadata.on_load = loaded

    async def main() -> None:
        cluster.start()
        await asyncio.sleep(0.5)
        watching = loop.create_task(cluster.rules.watch())
        for load in loads:
            load.start()
            names = [name for name, _ in load.kinds] + [place.name for place in load.places] + ["reader"]
            cluster.clients += [f"{load.around.prefix}{name}" for name in names]
        await asyncio.sleep(1.0)
        await cluster.storm()
        cluster.heal()
        await asyncio.sleep(4.0)  # a storm may be so rough that nothing gets done
        for load in loads:
            load.stop_disturbing()
        await asyncio.sleep(3.0)
        for bookie in cluster.bookies:
            bookie.end_of_faults()
        if watching.done():
            watching.result()
        await converge(loop, cluster, loads)
        confirmed = sum(len(load.history.confirmed) for load in loads)
        if confirmed < MINIMUM_CONFIRMED:
            raise Violation(f"too little happened: {confirmed} messages were confirmed")
        await calm(cluster, loads)
        await check_everything(cluster, loads)
        if watching.done():
            watching.result()
        watching.cancel()

    try:
        loop.run(main())
    finally:
        loop.close()
    counts: dict[str, int] = {}
    for load in loads:
        for name, count in load.history.counts().items():
            counts[name] = counts.get(name, 0) + count
    return {
        **counts,
        "starts": sum(machine.starts for machine in cluster.brokers),
        "takeovers": cluster.metadata.takeovers,
        "wishes": cluster.wishes,
        "served_twice": cluster.rules.served_twice,
        "virtual_seconds": int(loop.time()),
    }

"""Power loss at every disk call of a short workload (CORRECTNESS.md, scorecard 7): the seed is the number of the call.

The first start of the service is part of the workload. After the loss it starts again, the producer goes on, and at the end
the topic holds everything that was confirmed, in order, and the subscription is drained.
"""

from __future__ import annotations

import asyncio
from functools import partial

from sim.consuming import TOPIC, SubscriptionPlan
from sim.history import History, value_of
from sim.load import Load
from sim.scenarios.standalone import StandaloneBackend
from sim.storm import PORT, Service, converge
from support.sim import SimLoop, Trace

EXPECTED_FAULTS = ("crash_at_call", "power_loss")
PLANS = [SubscriptionPlan(type="exclusive"), SubscriptionPlan(type="shared", consumers=2, priorities=(0, 0))]
MESSAGES = 40
PADDING = 3000


async def produce(loop: SimLoop, load: Load, history: History) -> None:
    """Messages one after another, each confirmed before the next."""
    client = await load.client("producer")
    producer = await client.create_producer(TOPIC, name="p", send_timeout=300.0)
    for _ in range(MESSAGES):
        name = history.send("p")
        history.confirm(name, await producer.send(value_of(name, PADDING)))
        await asyncio.sleep(0.05)
    await client.close()


def play(seed: int, trace: Trace) -> dict[str, int]:
    """See sim.runner."""
    loop = SimLoop(0, trace=trace, limit_seconds=600.0)  # the same run every time, up to the call
    backend = StandaloneBackend(loop)
    history = History()
    service = Service(loop, backend, history)
    load = Load(loop, history, f"magnetar://127.0.0.1:{PORT}", PLANS)
    backend.disk.at_call(seed, partial(service.crash, True))

    async def main() -> None:
        service.start()
        load.start_readers()
        load.producers.append(loop.start_process("producer").spawn(produce(loop, load, history)))
        await asyncio.wait(load.producers)
        backend.heal()
        await converge(loop, load, history)
        service.crash(True)
        await asyncio.sleep(2.0)
        history.check_reread(await load.reread())

    try:
        loop.run(main())
    finally:
        loop.close()
    return {**history.counts(), "disk_calls": backend.disk.calls}

"""The cluster of `cluster`, whose topics are terminated in the middle of the storm, with delayed messages among the others.

nothing is behind the end   the last message that `terminate_topic` names is and stays the last one of the topic
nobody waits for ever       each consumer and reader is told that nothing comes any more, when all is acknowledged
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from unittest.mock import patch

from magnetar.client import Client
from magnetar.proto.errors import ServiceNotReady, TopicNotFound, TopicTerminated
from magnetar.proto.ids import MessageId
from sim.delayed import DelayedHistory, DueLoad, noted_clocks
from sim.deliveries import Violation
from sim.scenarios import cluster
from sim.scenarios.once_delayed import DelayedCluster
from support.sim import Trace

EXPECTED_FAULTS = (*cluster.EXPECTED_FAULTS, "terminated")
TOLD_WITHIN_S = 10.0
ENOUGH = 20  # messages of a topic


class TerminatedHistory(DelayedHistory):
    """The rules of this module beside the others."""

    def __init__(self, *, trimming: bool = False) -> None:
        super().__init__(trimming=trimming)
        self.end: MessageId | None = None

    def check_reread(self, entries: list[tuple[MessageId, bytes]]) -> None:
        """See History."""
        super().check_reread(entries)
        if entries and (self.end is None or entries[-1][0][:3] != self.end[:3]):
            raise Violation(
                f"the topic was terminated at {self.end}, and its last message is {entries[-1][0]}"
            )


class TopicLoad(DueLoad, cluster.TopicLoad):
    """Of one topic, which an operator terminates."""

    history: TerminatedHistory

    def start(self) -> None:
        """See Load."""
        super().start()
        self.producers.append(self._spawn("operator", self._terminate()))

    async def _produce(self, name: str, batching: bool) -> None:
        with contextlib.suppress(TopicTerminated):  # what was sent before has its receipt, or failed
            await super()._produce(name, batching)

    async def _terminate(self) -> None:
        rng = random.Random(self._loop.rng.getrandbits(64))
        await asyncio.sleep(rng.uniform(3.0, 12.0))
        while len(self.history.confirmed) < ENOUGH:  # a storm may be so rough that nothing gets done
            await asyncio.sleep(0.2)
        client = await self.client("operator")
        for _ in range(2):
            await self.until_done(lambda: self._ask(client))
        self._loop.trace.fault("terminated")
        await client.close()

    async def _ask(self, client: Client) -> None:
        try:
            (end,) = (await client.admin.terminate_topic(self.topic)).values()
        except TopicNotFound as error:
            raise ServiceNotReady("nobody could make it yet") from error
        if self.history.end not in (None, end):
            raise Violation(f"{self.topic} was terminated at {self.history.end}, and then at {end}")
        self.history.end = end

    async def finish(self) -> None:
        """See Load."""
        await self.all_are_told()
        await super().finish()

    async def all_are_told(self) -> None:
        """Raises Violation if one of them is not: of a subscription with nothing left, and without faults."""
        until = self._loop.time() + TOLD_WITHIN_S
        while waits := self._not_told():
            if self._loop.time() > until:
                raise Violation(
                    f"{self.topic} is terminated, and {waits} are not told that nothing comes any more"
                )
            await asyncio.sleep(0.2)

    def _not_told(self) -> list[str]:
        names = [place.name for place in self.places if not place.reached_end]
        return names if self.tail_ended else [*names, "reader"]


async def calm(machines: DelayedCluster, loads: list[TopicLoad]) -> None:
    """Once before their brokers die, and once behind it."""
    for load in loads:
        await load.all_are_told()
    await _calm(machines, loads)  # type: ignore[arg-type]


_calm = cluster.calm


def play(seed: int, trace: Trace) -> dict[str, int]:
    """See sim.runner."""
    with (
        noted_clocks(),
        patch.object(cluster, "Cluster", DelayedCluster),
        patch.object(cluster, "History", TerminatedHistory),
        patch.object(cluster, "TopicLoad", TopicLoad),
        patch.object(cluster, "calm", calm),
    ):
        return cluster.play(seed, trace)

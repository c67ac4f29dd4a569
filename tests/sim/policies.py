"""An operator who changes the policies of a topic in the middle of the storm, and what must hold meanwhile.

    publish rate   set and removed: producers that were held go on, and all that they sent is stored once, as ever
    retention      without a limit, or removed: between two records of the topic that both have it nothing is trimmed
    deduplication  set for the topic and removed again, where the brokers have it as well: it never ceases

Whatever is set is removed when the storm is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

from magnetar.broker.log.records import TopicRecord
from magnetar.broker.topics.core.producers import ProducerSession
from magnetar.proto.policy_table import UNLIMITED
from sim.cluster.metadata import ClusterMetadata
from sim.deliveries import Violation
from sim.load import Load
from support.sim import Trace

# What is set, by the name of its fault; None removes it.
SET: dict[str, dict[str, Any]] = {
    "rate": {"publish_rate_messages": 5},
    "retention": {"retention_ms": UNLIMITED, "retention_bytes": UNLIMITED},
    "deduplication": {"deduplication": True},
}
CHANGE_EVERY_S = 1.0
TOPIC_DEPTH = "/topics/public/default/persistent/orders".count("/")


@contextlib.contextmanager
def noted_holds(trace: Trace) -> Iterator[None]:
    """Producers that are held show as faults."""
    hold = ProducerSession.hold

    def noted(self: ProducerSession, reason: str) -> None:
        if reason:
            trace.fault("held", self.name)
        hold(self, reason)

    with patch.object(ProducerSession, "hold", noted):
        yield


class WatchedMetadata(ClusterMetadata):
    """Looks at each record of a topic when it becomes true."""

    async def put(self, process: str, path: str, value: bytes, version: int) -> int:
        """See MetadataService."""
        node = self.node(path) if path.startswith("/topics/") and path.count("/") == TOPIC_DEPTH else None
        new = await super().put(process, path, value, version)
        if node is not None and node.version == version:
            self._check(path, TopicRecord.decode(node.value, path), TopicRecord.decode(value, path))
        return new

    def _check(self, path: str, before: TopicRecord, after: TopicRecord) -> None:
        if after.trimmed_end == before.trimmed_end:
            return
        if all(record.policies.retention_ms == UNLIMITED for record in (before, after)):
            raise Violation(
                f"{path} was trimmed from {before.trimmed_end} to {after.trimmed_end}, though it is to keep all"
            )
        self.loop.trace.fault("trimmed")


class PolicyLoad(Load):
    """Its topic gets policies and loses them."""

    def start(self) -> None:
        """See Load."""
        super().start()
        self.producers.append(self._spawn("operator", self._change_policies()))

    async def _change_policies(self) -> None:
        rng = random.Random(self._loop.rng.getrandbits(64))
        client = await self.client("operator")
        held: set[str] = set()
        while not self.history.confirmed:  # the topic may not be there yet
            await asyncio.sleep(0.1)

        async def change(changes: Mapping[str, Any]) -> None:
            await self.until_done(lambda: client.admin.update_topic_policies(self.topic, changes))

        while self.producing:
            await asyncio.sleep(rng.expovariate(1 / CHANGE_EVERY_S))
            name = rng.choice(list(SET))
            removed = name in held
            self._loop.trace.fault(f"{name}_{'removed' if removed else 'set'}", self.topic)
            await change(dict.fromkeys(SET[name]) if removed else SET[name])
            held ^= {name}
        await change(dict.fromkeys(one for name in SET for one in SET[name]))
        await client.close()

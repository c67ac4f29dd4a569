"""For tests of the balancer's shells: the nodes of a cluster as its other parts will write them, and counters of bundles.

facts = StoreFacts(store)
await facts.add_broker(session, BrokerFacts("a", cpu=0.6))
await facts.own(session, "t/n/0x00000000_0x7fffffff", "a")
"""

from __future__ import annotations

from collections.abc import Mapping

import msgpack

from magnetar.broker.ownership.balance.core.facts import BrokerFacts, BundleOwner, NamespaceBinding, Transfer
from magnetar.broker.ownership.balance.loads import BundleCounters
from magnetar.metadata.store import MetadataStore, Session
from magnetar.proto.errors import AlreadyExists


class StoreFacts:
    """A ClusterFacts on the nodes of a store (broker/CLUSTER.md), as far as tests need them."""

    def __init__(self, store: MetadataStore) -> None:
        self.bound: dict[str, NamespaceBinding] = {}
        self.requested: list[tuple[str, str, bool]] = []  # requests that were made, in order
        self._store = store

    async def add_broker(self, session: Session, load: BrokerFacts) -> None:
        """Registers it, or changes what it says."""
        path, value = f"/brokers/{load.name}", msgpack.packb(load._asdict())
        node = await self._store.get(path)
        if node is None:
            await self._store.create(path, value, session=session)
        else:
            await self._store.put(path, value, version=node.version)

    async def own(self, session: Session, bundle: str, broker: str) -> None:
        """The bundle's node."""
        await self._store.create(f"/owners/{bundle}", broker.encode(), session=session)

    async def brokers(self) -> list[BrokerFacts]:
        """See ClusterFacts."""
        draining = await self._store.children("/draining")
        found = []
        for name in await self._store.children("/brokers"):
            node = await self._store.get(f"/brokers/{name}")
            if node is not None:
                load = BrokerFacts(**msgpack.unpackb(node.value))._replace(report=node.version)
                found.append(load._replace(state="draining") if name in draining else load)
        return found

    async def owners(self) -> list[BundleOwner]:
        """See ClusterFacts."""
        return [BundleOwner(bundle, value.decode()) for bundle, value in await self._bundles("/owners")]

    async def transfers(self) -> list[Transfer]:
        """See ClusterFacts."""
        rows = await self._bundles("/transfers")
        return [Transfer(bundle, msgpack.unpackb(value)["to"]) for bundle, value in rows]

    async def bindings(self) -> Mapping[str, NamespaceBinding]:
        """See ClusterFacts."""
        return self.bound

    async def request(self, bundle: str, *, to: str, split: bool, reason: str) -> bool:
        """See ClusterFacts."""
        value: bytes = msgpack.packb({"format": 1, "to": to, "split": split, "reason": reason})
        try:
            await self._store.create(f"/transfers/{bundle}", value)
        except AlreadyExists:
            return False
        self.requested.append((bundle, to, split))
        return True

    async def _bundles(self, root: str) -> list[tuple[str, bytes]]:
        found = []
        for tenant in await self._store.children(root):
            for namespace in await self._store.children(f"{root}/{tenant}"):
                for part in await self._store.children(f"{root}/{tenant}/{namespace}"):
                    bundle = f"{tenant}/{namespace}/{part}"
                    if (node := await self._store.get(f"{root}/{bundle}")) is not None:
                        found.append((bundle, node.value))
        return found


class Counting:
    """A LoadSource: `serve` a bundle, then `count` what went through it."""

    def __init__(self) -> None:
        self.bundles: dict[str, BundleCounters] = {}

    def counters(self) -> list[BundleCounters]:
        """See LoadSource."""
        return list(self.bundles.values())

    def serve(self, bundle: str, topics: int = 1) -> None:
        """From now on, from zero."""
        self.bundles[bundle] = BundleCounters(bundle, topics, 0, 0, 0, 0)

    def count(self, bundle: str, messages: int, size: int = 0) -> None:
        """In and out."""
        _, topics, messages_in, bytes_in, messages_out, bytes_out = self.bundles[bundle]
        self.bundles[bundle] = BundleCounters(
            bundle, topics, messages_in + messages, bytes_in + size, messages_out + messages, bytes_out + size
        )

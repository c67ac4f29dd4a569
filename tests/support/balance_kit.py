"""For tests of the balancer's shells: the nodes of a cluster, and counters of bundles.

nodes = ClusterNodes(store)
await nodes.add_broker(session, "a", cpu=0.6)
await nodes.own(session, "t/n/0x00000000_0x7fffffff", "a")
leader = nodes.leader("a", settings)
"""

from __future__ import annotations

from urllib.parse import unquote

from magnetar.broker.ownership.balance.core.facts import ClusterSnapshot
from magnetar.broker.ownership.balance.leader import BalanceLeader
from magnetar.broker.ownership.balance.loads import BundleCounters
from magnetar.broker.ownership.balance.settings import BalanceSettings
from magnetar.broker.ownership.cluster_ownership import ClusterOwnership
from magnetar.broker.ownership.cluster_view import ClusterView
from magnetar.broker.ownership.core.bundles import Bundle
from magnetar.broker.ownership.records import (
    TRANSFERS_PATH,
    BrokerLoad,
    BrokerRecord,
    OwnerRecord,
    TransferRecord,
    broker_path,
    owner_path,
)
from magnetar.metadata.store import MetadataStore, Session
from support.broker_kit import FakeClock


class ClusterNodes:
    """The nodes that brokers make in a store (broker/CLUSTER.md), and what a leader requests there."""

    def __init__(self, store: MetadataStore) -> None:
        self.view = ClusterView(store, 4, lambda: None)
        self._store = store

    async def add_broker(self, session: Session, name: str, *, cpu: float) -> None:
        """Registers it."""
        record = BrokerRecord(f"magnetar://{name}", "", "", "ready", 0, "", BrokerLoad(cpu=cpu), {})
        await self._store.create(broker_path(name), record.encode(), session=session)

    async def own(self, session: Session, bundle: str, broker: str) -> None:
        """The bundle's node."""
        record = OwnerRecord(broker, f"magnetar://{broker}", "", session.session_id)
        await self._store.create(owner_path(Bundle.parse(bundle)), record.encode(), session=session)

    def leader(self, name: str, settings: BalanceSettings) -> BalanceLeader:
        """A contender that sees these nodes."""
        return BalanceLeader(self._store, self.view, settings, name, FakeClock())

    async def requests(self) -> dict[str, TransferRecord]:
        """What owners are asked to do, by bundle."""
        found = {}
        for name in await self._store.children(TRANSFERS_PATH):
            path = f"{TRANSFERS_PATH}/{name}"
            if (node := await self._store.get(path)) is not None:
                found[unquote(name)] = TransferRecord.decode(node.value, path)
        return found

    async def close(self) -> None:
        """Nothing is watched any more."""
        await self.view.close()


async def snapshot_of(ownership: ClusterOwnership) -> ClusterSnapshot:
    """The cluster as its balancer sees it."""
    view, settings = ownership.view, BalanceSettings()
    return await BalanceLeader(ownership.metadata, view, settings, "any", FakeClock()).snapshot()


class Counting:
    """Bundles that are served: `serve` one, then `count` what went through it."""

    def __init__(self) -> None:
        self.bundles: dict[str, BundleCounters] = {}

    def counters(self) -> list[BundleCounters]:
        """Of all that are served."""
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

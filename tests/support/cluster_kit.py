"""Brokers of a cluster in one loop: one metadata store, fake ledgers, real sockets."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from magnetar.broker import Broker, BrokerSettings, listener
from magnetar.broker.ownership.balance import BalanceSettings
from magnetar.broker.ownership.bundle_ownership import OwnershipSettings
from magnetar.broker.ownership.cluster_ownership import ClusterOwnership
from magnetar.broker.ownership.cluster_view import NEW, put_bounds
from magnetar.broker.ownership.core.bundles import Bounds
from magnetar.runtime.connection import ConnectionOptions, FramedServer, start_server
from support.broker_kit import FakeClock
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore
from support.service import held_port


class ClusterBroker:
    """A broker of the cluster and its listener."""

    def __init__(self, broker: Broker, ownership: ClusterOwnership, server: FramedServer, url: str) -> None:
        self.broker = broker
        self.ownership = ownership
        self.server = server
        self.url = url

    @property
    def topics(self) -> list[str]:
        """Short names of those that are loaded, sorted."""
        return sorted(name.name for name in self.broker.loaded())


class Cluster:
    """See the module's docstring. Made by `brokers`."""

    def __init__(self) -> None:
        self.metadata = MemoryMetadataStore()
        self.ledgers = FakeLedgers()
        self.brokers: dict[str, ClusterBroker] = {}
        self.busy: set[str] = set()  # brokers whose process seems to use a core
        self._stops = AsyncExitStack()

    async def start(
        self,
        name: str,
        *,
        zone: str = "",
        group: str = "",
        default_bundles: int = 4,
        balance: BalanceSettings | None = None,
        **settings: Any,
    ) -> ClusterBroker:
        """One more broker."""
        port = held_port(self)
        url = f"magnetar://127.0.0.1:{port}"
        ownership = ClusterOwnership(
            self.metadata,
            OwnershipSettings(
                name=name,
                url=url,
                zone=zone,
                group=group,
                session_timeout_s=1.0,
                default_bundles=default_bundles,
                http=settings.get("http_url", ""),
                pulsar=settings.get("pulsar_url", ""),
            ),
            FakeClock(),
            random.Random(name),
            balance,
            lambda: asyncio.get_running_loop().time() if name in self.busy else 0.0,
        )
        broker = Broker(
            self.metadata,
            self.ledgers,
            BrokerSettings(
                **{
                    "name": name,
                    "service_url": url,
                    "cursor_flush_interval_ms": 1,
                    "min_ledger_age_ms": 0,
                    **settings,
                }
            ),
            FakeClock(),
            ownership=ownership,
        )
        await broker.start()
        server = await start_server("127.0.0.1", port, listener(broker), ConnectionOptions(name=name))
        found = self.brokers[name] = ClusterBroker(broker, ownership, server, url)
        self._stops.push_async_callback(self.stop, name)
        return found

    async def stop(self, name: str) -> None:
        """As SIGTERM does."""
        if (found := self.brokers.pop(name, None)) is not None:
            found.server.stop_accepting()
            await found.broker.close()
            await found.server.close(0.0)

    def expire(self, name: str) -> None:
        """Ends the session of a broker as the store does: its nodes are gone, and it is told in the next turn."""
        session = self.brokers[name].ownership.session
        self.metadata.expire(session.session_id)

    def owner_of(self, topic: str) -> ClusterBroker:
        """The broker that has the topic loaded. Raises ValueError unless it is one."""
        (found,) = [one for one in self.brokers.values() if topic in one.topics]
        return found

    async def close(self) -> None:
        """Stops all."""
        await self._stops.aclose()


@asynccontextmanager
async def brokers(*names: str, **settings: Any) -> AsyncIterator[Cluster]:
    """A cluster of these brokers, with bundles of the namespace public/default; closed in the end."""
    cluster = Cluster()
    bounds = Bounds.even(settings.get("default_bundles", 4))
    try:
        await cluster.metadata.commit([put_bounds("public/default", bounds, NEW)])
        for name in names:
            await cluster.start(name, **settings)
        yield cluster
    finally:
        await cluster.close()

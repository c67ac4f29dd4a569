"""A simulated machine with a broker on it, which a supervisor starts again after each end."""

from __future__ import annotations

import asyncio
import random
import signal
from dataclasses import replace

from magnetar.broker import Broker, BrokerSettings, start_pulsar_listener
from magnetar.broker.ownership.balance import BalanceSettings
from magnetar.broker.ownership.bundle_ownership import OwnershipSettings
from magnetar.broker.ownership.cluster_ownership import ClusterOwnership
from magnetar.ledger import LedgerClient, LedgerSettings, RegisteredBookies, StoredIdentities, TcpTransport
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import MagnetarError, ServiceNotReady
from magnetar.runtime.connection import ConnectionOptions, start_server
from sim.cluster.metadata import SESSION_S, BrokerClient, ClusterMetadata
from sim.cluster.receipts import checked_listener
from sim.ledgers.metadata import CLUSTER
from support.sim import SimClock, SimLoop, SimProcess

PORT = 6650
PULSAR_PORT = 0  # of its Pulsar listener; 0: none
CONNECTION = ConnectionOptions("broker", ping_interval_s=1.0, handshake_timeout_s=1.0)
BROKER = BrokerSettings(
    memory_budget_bytes=8 << 20,
    max_topic_publish_bytes=1 << 20,
    max_outstanding_bytes=512 * 1024,
    max_ledger_entries=60,
    max_entry_bytes=32 * 1024,
    max_cursor_ledger_entries=25,
    max_outstanding_entries=3,
    maintenance_interval_s=3.0,
    min_ledger_age_ms=500,
    max_ledger_age_ms=4_000,
)
BALANCE = BalanceSettings(balance_interval_s=5.0, load_settle_s=10.0, report_interval_s=1.0)
LEDGERS = LedgerSettings(
    ensemble_size=2,
    write_quorum=2,
    ack_quorum=2,
    add_timeout_s=0.5,
    read_timeout_s=0.5,
    connect_timeout_s=0.4,
    reconnect_backoff_s=0.03,
    reconnect_backoff_max_s=0.5,
    suspect_bookie_s=1.0,
)


class BrokerMachine:
    """See the module docstring. `broker` and `ownership` while it serves."""

    def __init__(
        self,
        loop: SimLoop,
        metadata: ClusterMetadata,
        number: int,
        quorums: tuple[int, int, int],
        bundles: int,
    ) -> None:
        """`bundles`: of a namespace that nobody divided yet."""
        self.loop = loop
        self.name = f"k{number}"
        self.host = f"10.0.0.{number + 1}"
        self.url = f"magnetar://{self.host}:{PORT}"
        self.process: SimProcess | None = None
        self.broker: Broker | None = None
        self.ownership: ClusterOwnership | None = None
        self.starts = 0
        self._metadata = metadata
        self._stopping = False
        self.stops = False  # it knows that it is to stop: no bundle is to be taken from then on
        ensemble, write, ack = quorums
        self._broker = replace(
            BROKER,
            name=self.name,
            service_url=self.url,
            pulsar_port=PULSAR_PORT,
            ensemble_size=ensemble,
            write_quorum=write,
            ack_quorum=ack,
        )
        self._ledgers = replace(LEDGERS, ensemble_size=ensemble, write_quorum=write, ack_quorum=ack)
        self._ownership = OwnershipSettings(
            name=self.name,
            url=self.url,
            session_timeout_s=SESSION_S,
            default_bundles=bundles,
            pulsar=self._broker.pulsar_url_for_clients,
        )

    def start(self) -> None:
        """Starts a process for the broker."""
        if self.process is None:
            self.starts += 1
            self._stopping = self.stops = False
            process = self.process = self.loop.start_process(self.name)
            process.spawn(self._run(), name=self.name)

    # --- faults ------------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """kill -9; started again a little later."""
        if self.process is not None:
            self.loop.trace.fault("crash_broker", self.name)
            self._end()

    def stop(self) -> None:
        """SIGTERM: it hands over, and ends; started again a little later."""
        if self.process is not None and self.broker is not None and not self._stopping:
            self._stopping = True
            self.loop.trace.fault("stop_broker", self.name)
            self.loop.deliver_signal(self.process, signal.SIGTERM)

    def pause(self, seconds: float) -> None:
        """It stands still."""
        if self.process is not None:
            self.loop.trace.fault("long_pause" if seconds > SESSION_S else "short_pause", self.name)
            self.process.pause(seconds)

    def _end(self) -> None:
        process, self.process = self.process, None
        self.broker = self.ownership = None
        if process is not None:
            self.loop.call_outside(self.loop.rng.uniform(0.05, 3.0), self.start)
            process.kill()

    # --- the process -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._serve()
        except ServiceNotReady as error:  # it could not be registered
            self.loop.trace.record("not registered", self.name, error.message)
        else:
            assert self._stopping, f"{self.name} ended by itself"
            self.loop.trace.record("stopped", self.name)
        self.loop.call_outside(0.0, self._end)

    async def _serve(self) -> None:
        loop, metadata = self.loop, self._metadata.broker_view()
        clock = SimClock(loop)
        assert self.process is not None
        clock.set_now_and_then(self.process)
        rng = random.Random(loop.rng.getrandbits(64))
        bookies = await self._directory(metadata)
        transport = TcpTransport(bookies, self._ledgers, CONNECTION, StoredIdentities(metadata, CLUSTER))
        ledgers = LedgerClient(StoredLedgers(metadata), transport, bookies, self._ledgers, rng, clock)
        ownership = ClusterOwnership(metadata, self._ownership, clock, rng, BALANCE)
        broker = Broker(metadata, ledgers, self._broker, clock, ownership=ownership)
        await self._begin(broker)
        native = checked_listener(broker, self._metadata, self.name)
        servers = [await start_server(self.host, PORT, native, CONNECTION)]
        if PULSAR_PORT:
            servers.append(await start_pulsar_listener(broker, self.host, PULSAR_PORT, CONNECTION))
        stopping = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, stopping.set)
        self.broker, self.ownership = broker, ownership
        self._metadata.brokers[self.name] = broker
        loop.trace.record("ready", self.name)
        await stopping.wait()
        self.stops = True
        for server in servers:
            server.stop_accepting()
        await broker.close(drain_seconds=1.0)
        await asyncio.gather(*[server.close(0.25) for server in servers])

    async def _directory(self, metadata: BrokerClient) -> RegisteredBookies:
        while True:
            try:
                return await RegisteredBookies.open(metadata)
            except MagnetarError as error:
                if not error.retryable:
                    raise
                await asyncio.sleep(0.1)

    async def _begin(self, broker: Broker) -> None:
        while True:
            try:
                await broker.start()
                return
            except ServiceNotReady:
                raise
            except MagnetarError as error:
                if not error.retryable:
                    raise
                await asyncio.sleep(0.1)

"""Standalone: metadata, one bookie, one broker and their listeners, put together in one event loop.

Settings and components come in, so that the simulation runs this very class on a simulated loop, disk and network. The
bookie serves the ledger client of the same process through `LocalTransport` and everybody else on TCP.

Order: what is started later is stopped earlier. On a stop the broker drains while its clients are still connected, so that
receipts of what was stored reach them; the bookie goes last, since everything above writes to it.

    DATA/LOCK       held by this process alone: a second one is refused at once (the bookie's own lock is shared with its
                    journal writer, and a successor waits for that)
    DATA/metadata   embedded metadata store
    DATA/bookie     the bookie (FORMATS.md)
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

from magnetar.bookie import Bookie, BookieComponents, open_bookie
from magnetar.bookie.gc.existing_ledgers import MetadataLedgers
from magnetar.bookie.layout import DataLayout
from magnetar.bookie.scrub.repair_queue import MetadataRepairQueue
from magnetar.bookie.server import BookieServer
from magnetar.bookie.server.server import InProcessBookie
from magnetar.broker import Broker, BrokerSettings, listener
from magnetar.broker.log.reading import ArchiveReader, NoArchives
from magnetar.broker.ownership.ownership import Ownership
from magnetar.ledger import (
    BookieDirectory,
    BookieInfoReader,
    BookieTransport,
    LedgerClient,
    LedgerSettings,
    LocalTransport,
    RegisteredBookies,
    StaticBookies,
    StoredIdentities,
    TcpTransport,
)
from magnetar.metadata import MetadataStore
from magnetar.metadata.identity import cluster_instance
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.metadata.local import LocalMetadataStore
from magnetar.metadata.paths import COOKIES_PATH
from magnetar.proto.errors import DataDirectoryError, MagnetarError
from magnetar.runtime.clock import Clock
from magnetar.runtime.connection import ConnectionOptions, FramedServer, start_server
from magnetar.runtime.files import FileLock, Files

from .bookie_identity import introduce_bookie
from .settings import ServiceSettings

Address = tuple[str, int]
Failure = Callable[[MagnetarError], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerComponents:
    """What is injected into a broker with bookies elsewhere; see ARCHITECTURE.md, "Seams"."""

    files: Files
    clock: Clock
    rng: random.Random
    # Opens the store in a directory that exists.
    open_metadata: Callable[[str], MetadataStore]
    archives: Callable[[BrokerSettings], ArchiveReader] = lambda settings: NoArchives()


def _local_transport(bookie_id: str, bookie: Bookie, settings: LedgerSettings) -> BookieTransport:
    return LocalTransport(
        {bookie_id: InProcessBookie(bookie)},
        add_timeout_s=settings.add_timeout_s,
        read_timeout_s=settings.read_timeout_s,
        max_outstanding_bytes=settings.max_outstanding_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceComponents(BrokerComponents):
    """What is injected into the whole service."""

    bookie: BookieComponents
    # How the ledger client reaches the bookie of this process.
    transport: Callable[[str, Bookie, LedgerSettings], BookieTransport] = _local_transport


class Addresses(NamedTuple):
    """Where a service listens."""

    broker: Address
    bookie: Address


class _Storage(NamedTuple):
    """What a broker stands on."""

    metadata: MetadataStore
    transport: BookieTransport
    directory: BookieDirectory
    address: Address


class Standalone:
    """One run of the whole service. `start` once, then `close`; `on_failure` means fail-stop: end the process."""

    def __init__(
        self, settings: ServiceSettings, components: ServiceComponents, *, on_failure: Failure | None = None
    ) -> None:
        self.settings = settings
        self.on_failure: Failure = on_failure or _no_listener
        self.bookie: Bookie | None = None
        self.broker: Broker | None = None
        self._components = components
        self._stops = AsyncExitStack()

    async def start(self) -> Addresses:
        """Ready when it returns. When it raises, everything that had been started is stopped.

        DataDirectoryError, StorageFailed: the data; InvalidSetting; ServiceNotReady: a port is taken.
        """
        try:
            storage = await self._start_storage()
            self.broker, server = await start_broker(
                self.settings,
                self._components,
                storage.metadata,
                storage.transport,
                storage.directory,
                self._stops,
            )
            return Addresses(server.addresses[0], storage.address)
        except BaseException:
            await self._stops.aclose()
            raise

    async def start_ledgers(self) -> LedgerClient:
        """Metadata and bookie without a broker, in the place of `start`: for commands on a service that is stopped."""
        try:
            metadata, transport, directory, _ = await self._start_storage()
            return ledger_client(self.settings, self._components, metadata, transport, directory, self._stops)
        except BaseException:
            await self._stops.aclose()
            raise

    async def _start_storage(self) -> _Storage:
        lock_data(self._components.files, self.settings, self._stops)
        metadata = await self._open_metadata()
        repair_queue = MetadataRepairQueue(metadata)
        self._stops.push_async_callback(repair_queue.close)
        bookie = self.bookie = await start_bookie(
            self.settings,
            await self._bookie_components(metadata, repair_queue),
            self._fail,
            self._stops,
        )
        repair_queue.start(bookie.cookie.bookie_id)
        identities = await introduce_bookie(bookie, metadata, bookie.cookie.cluster)
        bookie_server = await serve_bookie(bookie, self.settings, self._stops, "--bookie-port")
        name = bookie.cookie.bookie_id
        transport = self._components.transport(name, bookie, self.settings.ledger)
        self._stops.push_async_callback(transport.close)
        # Clients get this address as well, so it is never a wildcard, to which nobody can connect.
        port = bookie_server.addresses[0][1]
        directory = StaticBookies({name: (self.settings.daemon.host_for_clients, port)})
        directory.identity = identities.known
        # The directory learns from it when the bookie is read-only, and why: no ledger is made in vain then.
        info_reader = BookieInfoReader(directory, transport, self.settings.ledger, self._components.rng)
        self._stops.push_async_callback(info_reader.close)
        await info_reader.start()
        return _Storage(metadata, transport, directory, bookie_server.addresses[0])

    async def _open_metadata(self) -> MetadataStore:
        """The embedded store, if it and the bookie's data are both there or both new. DataDirectoryError.

        A bookie whose metadata was lost would be given its ledger ids a second time, and answer reads of a new topic with
        entries of an old one. On a first start the metadata is made before the cookie, and the cookie before any ledger.
        """
        files, metadata_directory = self._components.files, self.settings.metadata_directory
        bookie_directory = self.settings.bookie.data_directory
        has_bookie = files.exists(DataLayout.at(bookie_directory).cookie)
        if has_bookie and not files.exists(metadata_directory):
            raise DataDirectoryError(
                f"{metadata_directory} is missing although {bookie_directory} holds a bookie's data; restore both from "
                "one backup, or start with another data directory",
                path=metadata_directory,
            )
        metadata = open_metadata(self._components, self.settings, self._fail, self._stops)
        if not has_bookie and (await StoredLedgers(metadata).any() or await metadata.children(COOKIES_PATH)):
            raise DataDirectoryError(
                f"{bookie_directory} holds no bookie although {metadata_directory} lists it and its ledgers; restore both "
                "from one backup (is its disk mounted?), or start with another data directory",
                path=bookie_directory,
            )
        return metadata

    async def _bookie_components(
        self, metadata: MetadataStore, repair_queue: MetadataRepairQueue
    ) -> BookieComponents:
        """Garbage collection asks the metadata of the same process; the bookie's cookie remembers which one it was."""
        cluster = await cluster_instance(metadata, self._components.rng)
        return replace(
            self._components.bookie,
            clock=self._components.clock,
            existing_ledgers=MetadataLedgers(metadata, cluster=cluster),
            repair_queue=repair_queue,
            cluster=cluster,
        )

    async def close(self) -> None:
        """Drains within the drain time, then stops everything."""
        await self._stops.aclose()

    def _fail(self, error: MagnetarError) -> None:
        self.on_failure(error)


def lock_data(files: Files, settings: ServiceSettings, stops: AsyncExitStack) -> FileLock:
    """Makes the data directory if there is none, and takes it for this process. DataDirectoryError."""
    files.make_directory(settings.daemon.data)
    lock = files.lock(settings.lock_path)
    stops.callback(lock.release)
    return lock


def open_metadata(
    components: BrokerComponents, settings: ServiceSettings, on_failure: Failure, stops: AsyncExitStack
) -> MetadataStore:
    """The embedded store. DataDirectoryError when it is damaged."""
    components.files.make_directory(settings.metadata_directory)
    metadata = components.open_metadata(settings.metadata_directory)
    if isinstance(metadata, LocalMetadataStore):
        metadata.on_failure = on_failure  # one failed write, and it takes no more: only a new start helps
    stops.push_async_callback(metadata.close)
    return metadata


async def connect_bookies(
    directory: StaticBookies | RegisteredBookies,
    settings: ServiceSettings,
    components: BrokerComponents,
    metadata: MetadataStore,
    name: str,
    stops: AsyncExitStack,
) -> TcpTransport:
    """Connections to these bookies, as the store knows them; `name` is how this process calls itself."""
    # Entries are larger than messages by what the client, the broker and the ledger client put before them.
    options = ConnectionOptions(name=name, max_message_bytes=settings.bookie.max_entry_bytes)
    cluster = await cluster_instance(metadata, components.rng)
    identities = StoredIdentities(metadata, cluster, metadata_timeout_s=settings.ledger.metadata_timeout_s)
    directory.identity = identities.known
    transport = TcpTransport(directory, settings.ledger, options, identities)
    stops.push_async_callback(transport.close)
    return transport


def ledger_client(
    settings: ServiceSettings,
    components: BrokerComponents,
    metadata: MetadataStore,
    transport: BookieTransport,
    directory: BookieDirectory,
    stops: AsyncExitStack,
    *,
    remember_deletions: bool = False,
) -> LedgerClient:
    """The ledgers of this store on these bookies."""
    client = LedgerClient(
        StoredLedgers(metadata),
        transport,
        directory,
        settings.ledger,
        components.rng,
        components.clock,
        remember_deletions=remember_deletions,
    )
    stops.push_async_callback(client.close)
    return client


async def start_bookie(
    settings: ServiceSettings, components: BookieComponents, on_failure: Failure, stops: AsyncExitStack
) -> Bookie:
    """Replays the journal and is ready for entries. DataDirectoryError, StorageFailed."""
    bookie = await open_bookie(settings.bookie, components)
    bookie.on_failure = on_failure
    stops.push_async_callback(bookie.close)
    return bookie


async def serve_bookie(
    bookie: Bookie, settings: ServiceSettings, stops: AsyncExitStack, port_flag: str = "--port"
) -> BookieServer:
    """The bookie protocol on TCP. ServiceNotReady when the port is taken."""
    daemon = settings.daemon
    options = ConnectionOptions(
        name="bookie",
        max_message_bytes=settings.bookie.max_entry_bytes,
        port_setting="bookie_port",
        port_flag=port_flag,
    )
    server = await BookieServer.start(bookie, daemon.host, daemon.bookie_port, options)
    stops.push_async_callback(server.close, daemon.drain_s / 4)
    return server


async def start_broker(
    settings: ServiceSettings,
    components: BrokerComponents,
    metadata: MetadataStore,
    transport: BookieTransport,
    directory: BookieDirectory,
    stops: AsyncExitStack,
    *,
    remember_deletions: bool = False,
    ownership: Ownership | None = None,
) -> tuple[Broker, FramedServer]:
    """Ledger client, topics and the native protocol on TCP. ServiceNotReady when the port is taken.

    `ownership`: of a broker that shares its topics with others.
    """
    daemon = settings.daemon
    ledgers = ledger_client(
        settings, components, metadata, transport, directory, stops, remember_deletions=remember_deletions
    )
    ledgers.send_missed_deletions()
    archives = components.archives(settings.broker)
    stops.push_async_callback(archives.close)
    broker = Broker(metadata, ledgers, settings.broker, components.clock, directory, archives, ownership)
    try:
        await broker.start()
    except BaseException:
        await broker.close()
        raise
    options = ConnectionOptions(name="broker", max_message_bytes=daemon.max_message_bytes)
    try:
        server = await start_server(daemon.host, daemon.port, listener(broker), options)
    except BaseException:
        await broker.close()
        raise

    async def stop() -> None:
        server.stop_accepting()
        await broker.close(drain_seconds=daemon.drain_s / 2)
        await server.close(daemon.drain_s / 4)

    stops.push_async_callback(stop)
    return broker, server


def _no_listener(error: MagnetarError) -> None:
    """Until the owner says what to do, a failure must not pass in silence."""
    raise error

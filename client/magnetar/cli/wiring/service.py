"""A process of Magnetar and its parts: metadata, bookie, ledgers, broker, repairs. Here is the one way to make each of them.

Daemons (`starters`) and commands make the parts that they need, one from another; what is made later is closed earlier. On a
stop the broker drains while its clients are still connected, so that receipts of what was stored reach them; the bookie goes
last, since everything above writes to it. Settings and components come in, so that the simulation runs this very class on a
simulated loop, disk and network. What a standalone service does not use (replication) is imported by what does: a tenth of
all imports of its start.

    DATA/LOCK       held by this process alone: a second one is refused at once (the bookie's own lock is shared with its
                    journal writer, and a successor waits for that)
    DATA/metadata   embedded metadata store
    DATA/bookie     the bookie (FORMATS.md)
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from magnetar.bookie import Bookie, BookieComponents, BookieSettings, open_bookie
from magnetar.bookie.components import os_components
from magnetar.bookie.gc.existing_ledgers import MetadataLedgers
from magnetar.bookie.layout import DataLayout
from magnetar.bookie.scrub.repair_queue import MetadataRepairQueue
from magnetar.bookie.server import BookieServer
from magnetar.bookie.server.server import InProcessBookie
from magnetar.broker import Broker, BrokerSettings, listener, start_pulsar_listener
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
from magnetar.ledger.identities import MOST_INTRODUCTIONS
from magnetar.metadata import MetadataStore
from magnetar.metadata.identity import cluster_instance
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.metadata.local import LocalMetadataStore
from magnetar.metadata.paths import COOKIES_PATH
from magnetar.metadata.timed import TimedStore
from magnetar.proto.errors import DataDirectoryError, MagnetarError, WrongBookie
from magnetar.runtime.clock import Clock, SystemClock
from magnetar.runtime.connection import ConnectionOptions, FramedServer, start_server
from magnetar.runtime.files import Files, OsFiles

from .metadata import open_shared_metadata, system_rng
from .settings import ServiceSettings

if TYPE_CHECKING:
    from magnetar.ledger.replication.auto_recovery import AutoRecovery
    from magnetar.ledger.replication.cluster_watch import ClusterWatch

Address = tuple[str, int]
Failure = Callable[[MagnetarError], None]


def _local_transport(bookie_id: str, bookie: Bookie, settings: LedgerSettings) -> BookieTransport:
    return LocalTransport(
        {bookie_id: InProcessBookie(bookie)},
        add_timeout_s=settings.add_timeout_s,
        read_timeout_s=settings.read_timeout_s,
        max_outstanding_bytes=settings.max_outstanding_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """What is injected into a process; see ARCHITECTURE.md, "Seams"."""

    files: Files
    clock: Clock
    rng: random.Random
    bookie: BookieComponents
    # Opens the store in a directory that exists.
    open_metadata: Callable[[str], MetadataStore]
    archives: Callable[[BrokerSettings], ArchiveReader] = lambda settings: NoArchives()
    # How the ledger client reaches a bookie of the same process.
    transport: Callable[[str, Bookie, LedgerSettings], BookieTransport] = _local_transport


def system_components() -> Components:
    """The real things: disk, clock, journal writer, disk worker and archive reader processes, RocksDB."""

    def open_embedded(directory: str) -> MetadataStore:
        from magnetar.metadata.embedded import EmbeddedMetadataStore

        return EmbeddedMetadataStore(directory)

    def archive_processes(settings: BrokerSettings) -> ArchiveReader:
        from magnetar.archive.reader import ArchiveProcesses

        return ArchiveProcesses(settings)

    rng = system_rng()
    return Components(
        files=OsFiles(),
        clock=SystemClock(),
        rng=rng,
        bookie=os_components(rng),
        open_metadata=open_embedded,
        archives=archive_processes,
    )


class Storage(NamedTuple):
    """What ledgers stand on: their records, and the bookies and how they are reached."""

    metadata: MetadataStore
    transport: BookieTransport
    directory: BookieDirectory


class Addresses(NamedTuple):
    """Where a standalone service listens."""

    broker: dict[str, Address]  # by scheme
    bookie: Address


class Service:
    """The parts of one process, made in the order in which they are asked for. `on_failure`: fail-stop, end the process."""

    def __init__(
        self, settings: ServiceSettings, components: Components, *, on_failure: Failure | None = None
    ) -> None:
        self.settings = settings
        self.components = components
        self.on_failure: Failure = on_failure or _no_listener
        # Those of this process, once they are made.
        self.bookie: Bookie | None = None
        self.broker: Broker | None = None
        # Closes what was made, the last one first.
        self.stops = AsyncExitStack()

    async def __aenter__(self) -> Service:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Drains within the drain time, then stops everything."""
        await self.stops.aclose()

    def _fail(self, error: MagnetarError) -> None:
        self.on_failure(error)

    def lock_data(self) -> None:
        """Makes the data directory if there is none, and takes it for this process. DataDirectoryError."""
        self.components.files.make_directory(self.settings.daemon.data)
        lock = self.components.files.lock(self.settings.lock_path)
        self.stops.callback(lock.release)

    # --- metadata ------------------------------------------------------------------------------------------------------

    async def shared_metadata(self) -> MetadataStore:
        """The store of a cluster, as [daemon] metadata says. ServiceNotReady; InvalidSetting without a cluster."""
        return await open_shared_metadata(self.settings.daemon.metadata, self.components.rng, self.stops)

    def embedded_metadata(self) -> MetadataStore:
        """The store of this process alone. DataDirectoryError when it is damaged."""
        directory = self.settings.metadata_directory
        self.components.files.make_directory(directory)
        metadata = self.components.open_metadata(directory)
        if isinstance(metadata, LocalMetadataStore):
            # One failed write, and it takes no more: only a new start helps.
            metadata.on_failure = self._fail
        self.stops.push_async_callback(metadata.close)
        return metadata

    async def _metadata_beside_bookie(self) -> MetadataStore:
        """The embedded store, if it and the bookie's data are both there or both new. DataDirectoryError.

        A bookie whose metadata was lost would be given its ledger ids a second time, and answer reads of a new topic with
        entries of an old one. On a first start the metadata is made before the cookie, and the cookie before any ledger.
        """
        files, metadata_directory = self.components.files, self.settings.metadata_directory
        bookie_directory = self.settings.bookie.data_directory
        has_bookie = files.exists(DataLayout.at(bookie_directory).cookie)
        if has_bookie and not files.exists(metadata_directory):
            raise DataDirectoryError(
                f"{metadata_directory} is missing although {bookie_directory} holds a bookie's data; restore both from "
                "one backup, or start with another data directory",
                path=metadata_directory,
            )
        metadata = self.embedded_metadata()
        if not has_bookie and (await StoredLedgers(metadata).any() or await metadata.children(COOKIES_PATH)):
            raise DataDirectoryError(
                f"{bookie_directory} holds no bookie although {metadata_directory} lists it and its ledgers; restore both "
                "from one backup (is its disk mounted?), or start with another data directory",
                path=bookie_directory,
            )
        return metadata

    # --- the bookie of this process ------------------------------------------------------------------------------------

    async def start_bookie(
        self, metadata: MetadataStore | None = None, *, in_cluster: bool = False
    ) -> tuple[Bookie, StoredIdentities | None]:
        """Replays the journal, and is ready for entries; with metadata it is introduced to them (rules 9, 35, 36).

        Garbage collection then asks these metadata, and the cookie remembers which they were. `in_cluster`: an emptied
        bookie is refused, and what repairs left unfinished here is found. DataDirectoryError, StorageFailed, WrongBookie.
        """
        components = replace(self.components.bookie, clock=self.components.clock)
        queue = assignments = None
        cluster = 0
        if metadata is not None:
            cluster = await cluster_instance(metadata, self.components.rng)
            queue = MetadataRepairQueue(metadata)
            self.stops.push_async_callback(queue.close)
            components = replace(
                components,
                existing_ledgers=MetadataLedgers(metadata, cluster=cluster),
                repair_queue=queue,
                cluster=cluster,
            )
            if in_cluster:
                from magnetar.ledger.replication.leftovers import StoredAssignments

                await refuse_emptied(self.components.files, self.settings.bookie, metadata, cluster)
                timed = TimedStore(metadata, self.settings.ledger.metadata_timeout_s)
                assignments = StoredAssignments(StoredLedgers(timed), "")  # named once the cookie is read
                components = replace(components, assignments=assignments)
        bookie = self.bookie = await open_bookie(self.settings.bookie, components)
        bookie.on_failure = self._fail
        self.stops.push_async_callback(bookie.close)
        if assignments is not None:
            assignments.bookie = bookie.cookie.bookie_id
        if metadata is None or queue is None:
            return bookie, None
        queue.start(bookie.cookie.bookie_id)
        return bookie, await introduce_bookie(bookie, metadata, cluster)

    async def serve_bookie(self, bookie: Bookie, port_flag: str = "--port") -> Address:
        """The bookie protocol on TCP. ServiceNotReady when the port is taken."""
        daemon = self.settings.daemon
        options = ConnectionOptions(
            name="bookie",
            max_message_bytes=self.settings.bookie.max_entry_bytes,
            port_setting="bookie_port",
            port_flag=port_flag,
        )
        server = await BookieServer.start(bookie, daemon.host, daemon.bookie_port, options)
        self.stops.push_async_callback(server.close, daemon.drain_s / 4)
        return server.addresses[0]

    # --- where ledgers are ---------------------------------------------------------------------------------------------

    async def own_storage(self) -> tuple[Storage, Address]:
        """Embedded metadata and a bookie of this process, which others reach at the address."""
        self.lock_data()
        metadata = await self._metadata_beside_bookie()
        bookie, identities = await self.start_bookie(metadata)
        assert identities is not None
        address = await self.serve_bookie(bookie, "--bookie-port")
        name = bookie.cookie.bookie_id
        transport = self.components.transport(name, bookie, self.settings.ledger)
        self.stops.push_async_callback(transport.close)
        # Clients get this address as well, so it is never a wildcard, to which nobody can connect.
        directory = StaticBookies({name: (self.settings.daemon.host_for_clients, address[1])})
        directory.identity = identities.known
        await self.read_infos(directory, transport)
        return Storage(metadata, transport, directory), address

    async def listed_storage(self, bookies: StaticBookies, name: str) -> Storage:
        """Embedded metadata and a list of bookies elsewhere; `name` is how this process calls itself."""
        self.lock_data()
        metadata = self.embedded_metadata()
        return Storage(metadata, await self._connect(bookies, metadata, name), bookies)

    async def shared_storage(
        self, metadata: MetadataStore, name: str, watch: ClusterWatch | None = None
    ) -> Storage:
        """The bookies that registered in the metadata of a cluster; by the `watch` nothing new is put on drained ones."""
        from magnetar.ledger.replication.cluster_watch import PlacedBookies

        registered = await RegisteredBookies.open(
            metadata, metadata_timeout_s=self.settings.ledger.metadata_timeout_s
        )
        self.stops.push_async_callback(registered.close)
        transport = await self._connect(registered, metadata, name)
        return Storage(metadata, transport, PlacedBookies(registered, watch) if watch else registered)

    async def _connect(
        self, directory: StaticBookies | RegisteredBookies, metadata: MetadataStore, name: str
    ) -> TcpTransport:
        # Entries are larger than messages by what the client, the broker and the ledger client put before them.
        options = ConnectionOptions(name=name, max_message_bytes=self.settings.bookie.max_entry_bytes)
        cluster = await cluster_instance(metadata, self.components.rng)
        timeout_s = self.settings.ledger.metadata_timeout_s
        identities = StoredIdentities(metadata, cluster, metadata_timeout_s=timeout_s)
        directory.identity = identities.known
        transport = TcpTransport(directory, self.settings.ledger, options, identities)
        self.stops.push_async_callback(transport.close)
        return transport

    async def read_infos(self, directory: StaticBookies, transport: BookieTransport) -> BookieInfoReader:
        """The directory learns when a bookie is read-only, and why: no ledger is made in vain then."""
        reader = BookieInfoReader(directory, transport, self.settings.ledger, self.components.rng)
        self.stops.push_async_callback(reader.close)
        await reader.start()
        return reader

    # --- what stands on it ---------------------------------------------------------------------------------------------

    def ledgers(self, storage: Storage, *, remember_deletions: bool = False) -> LedgerClient:
        """The client of these ledgers."""
        client = LedgerClient(
            StoredLedgers(storage.metadata),
            storage.transport,
            storage.directory,
            self.settings.ledger,
            self.components.rng,
            self.components.clock,
            remember_deletions=remember_deletions,
        )
        self.stops.push_async_callback(client.close)
        return client

    async def operator_ledgers(self, metadata: MetadataStore) -> LedgerClient:
        """The ledgers of a cluster, for a command: nothing new is placed on bookies that are drained."""
        from magnetar.ledger.replication.cluster_watch import ClusterWatch

        watch = ClusterWatch(TimedStore(metadata, self.settings.ledger.metadata_timeout_s))
        await watch.read()
        return self.ledgers(await self.shared_storage(metadata, "operator", watch))

    async def start_broker(
        self, storage: Storage, ownership: Ownership | None = None, *, remember_deletions: bool = False
    ) -> tuple[Broker, dict[str, Address]]:
        """Ledger client, topics, the native protocol and Pulsar's on TCP, by scheme. ServiceNotReady when a port is taken.

        `ownership`: of a broker that shares its topics with others.
        """
        daemon, components = self.settings.daemon, self.components
        ledgers = self.ledgers(storage, remember_deletions=remember_deletions)
        ledgers.send_missed_deletions()
        archives = components.archives(self.settings.broker)
        self.stops.push_async_callback(archives.close)
        broker = Broker(
            storage.metadata,
            ledgers,
            self.settings.broker,
            components.clock,
            storage.directory,
            archives,
            ownership,
        )
        options = ConnectionOptions(name="broker", max_message_bytes=daemon.max_message_bytes)
        servers: dict[str, FramedServer] = {}
        try:
            await broker.start()
            servers["magnetar"] = await start_server(daemon.host, daemon.port, listener(broker), options)
            if port := self.settings.broker.pulsar_port:
                servers["pulsar"] = await start_pulsar_listener(
                    broker,
                    daemon.host,
                    port,
                    replace(
                        options,
                        handshake_timeout_s=30.0,
                        port_setting="broker.pulsar_port",
                        port_flag="--pulsar-port",
                    ),
                )
        except BaseException:
            for server in servers.values():
                await server.close(0)
            await broker.close()
            raise

        async def stop() -> None:
            for server in servers.values():
                server.stop_accepting()
            await broker.close(drain_seconds=daemon.drain_s / 2)
            await asyncio.gather(*[server.close(daemon.drain_s / 4) for server in servers.values()])

        self.stops.push_async_callback(stop)
        self.broker = broker
        return broker, {scheme: server.addresses[0] for scheme, server in servers.items()}

    async def repairs(self, metadata: MetadataStore, owner: str) -> AutoRecovery:
        """Not started yet: what an operator asks for needs no start."""
        from magnetar.ledger.replication.auto_recovery import AutoRecovery

        storage = await self.shared_storage(metadata, "autorecovery")
        repairs = AutoRecovery(
            metadata,
            storage.transport,
            storage.directory,
            self.settings.ledger,
            self.settings.repair,
            self.components.rng,
            self.components.clock,
            owner=owner,
        )
        self.stops.push_async_callback(repairs.close)
        return repairs

    async def start_standalone(self) -> Addresses:
        """The whole service: its bookie serves the ledger client of the same process, and everybody else on TCP.

        Ready when it returns. When it raises, everything that had been started is stopped. DataDirectoryError,
        StorageFailed: the data; InvalidSetting; ServiceNotReady: a port is taken.
        """
        try:
            storage, bookie_address = await self.own_storage()
            _, broker_addresses = await self.start_broker(storage)
            return Addresses(broker_addresses, bookie_address)
        except BaseException:
            await self.close()
            raise


def _no_listener(error: MagnetarError) -> None:
    """Until the owner says what to do, a failure must not pass in silence."""
    raise error


# --- a bookie and the metadata that list its ledgers belong together (rules 9, 35, 36) ---------------------------------


async def refuse_emptied(
    files: Files, settings: BookieSettings, metadata: MetadataStore, cluster: int
) -> None:
    """WrongBookie where a bookie that is registered would be made anew in an empty directory. Nothing is made there.

    Only a bookie that was given its name can be known before it has a cookie.
    """
    name, directory = settings.bookie_id, settings.data_directory
    if not name or files.exists(DataLayout.at(directory).cookie):
        return
    known = await StoredIdentities(metadata, cluster).expected(name)
    if known.instance:
        data, _, last = directory.rpartition("/")
        where = f"--data {data}" if last == "bookie" else f"--set bookie.data_directory={directory}"
        raise WrongBookie(
            f"{directory} holds no bookie, and {name!r} is registered (instance {known.instance:016x}): were its disks "
            "emptied, or are they not mounted? Mount them; if they are lost, declare it (magnetar bookie cookie "
            f"{where} --accept-new-disk {name}) and start it again: its ledgers are repaired from their other copies"
        )


async def introduce_bookie(bookie: Bookie, metadata: MetadataStore, cluster: int) -> StoredIdentities:
    """Introduced as over TCP, before it serves anybody; who it is, for others.

    A bookie that took the place of one that lost its disks says so in its cookie: then every ledger that there was before is
    fenced and unknown there, so that nothing is said not to exist. WrongBookie when it is known with another data directory,
    or a newer state of it.
    """
    identities = StoredIdentities(metadata, cluster)
    name = bookie.cookie.bookie_id
    for _ in range(MOST_INTRODUCTIONS):
        expected = await identities.expected(name)
        if await identities.verify(name, expected, bookie.introduce(expected)):
            break
    return identities

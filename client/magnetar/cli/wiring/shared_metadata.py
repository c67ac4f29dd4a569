"""Daemons that share a metadata store (`--metadata zk://...`), and how each is put together.

bookie         store -> bookie (its cluster is the store's) -> introduced: cookie -> server -> registered -> repairs
broker         store -> bookies, but those that are drained -> transport -> broker, with its share of the topics
autorecovery   store -> bookies -> transport -> repairs
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib.metadata import version

from magnetar.bookie.gc.existing_ledgers import MetadataLedgers
from magnetar.bookie.scrub.repair_queue import MetadataRepairQueue
from magnetar.bookie.status import bookie_info, bookie_problems
from magnetar.broker import BrokerSettings
from magnetar.broker.ownership.bundle_ownership import OwnershipSettings
from magnetar.broker.ownership.cluster_ownership import ClusterOwnership
from magnetar.broker.settings import UNNAMED
from magnetar.ledger import LedgerClient, RegisteredBookies
from magnetar.ledger.directory import BOOKIES_PATH, encode_registration
from magnetar.ledger.replication.auto_recovery import AutoRecovery
from magnetar.ledger.replication.cluster_watch import ClusterWatch, PlacedBookies
from magnetar.ledger.replication.leftovers import StoredAssignments
from magnetar.ledger.tcp_transport import TcpTransport
from magnetar.metadata import MetadataStore
from magnetar.metadata.identity import cluster_instance
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.metadata.paths import known_broker_path
from magnetar.metadata.registration import Registration
from magnetar.metadata.timed import TimedStore
from magnetar.proto.errors import AlreadyExists, MagnetarError

from .bookie_identity import introduce_bookie, refuse_emptied
from .cluster_facts import ClusterHealth
from .components import bookie_components, broker_components
from .health import Started, autorecovery_reasons, bookie_reasons, broker_reasons
from .metadata import open_shared_metadata
from .metrics import service_metrics
from .settings import ServiceSettings, format_host
from .standalone import (
    BrokerComponents,
    connect_bookies,
    ledger_client,
    lock_data,
    serve_bookie,
    start_bookie,
    start_broker,
)

Failure = Callable[[MagnetarError], None]


async def run_bookie(settings: ServiceSettings, on_failure: Failure, stops: AsyncExitStack) -> Started:
    """A bookie of the cluster that shares this store, with its share of the repairs.

    WrongBookie, DataDirectoryError when it is none of the cluster's.
    """
    components = bookie_components()
    lock_data(components.files, settings, stops)
    metadata = await open_shared_metadata(settings.daemon.metadata, components.rng, stops)
    cluster = await cluster_instance(metadata, components.rng)
    await refuse_emptied(components.files, settings.bookie, metadata, cluster)
    repair_queue = MetadataRepairQueue(metadata)
    stops.push_async_callback(repair_queue.close)
    timed = TimedStore(metadata, settings.ledger.metadata_timeout_s)
    assignments = StoredAssignments(StoredLedgers(timed), "")  # its id is known once it has read its cookie
    bookie = await start_bookie(
        settings,
        replace(
            components,
            existing_ledgers=MetadataLedgers(metadata, cluster=cluster),
            repair_queue=repair_queue,
            assignments=assignments,
            cluster=cluster,
        ),
        on_failure,
        stops,
    )
    bookie_id = assignments.bookie = bookie.cookie.bookie_id
    repair_queue.start(bookie_id)
    await introduce_bookie(bookie, metadata, cluster)
    server = await serve_bookie(bookie, settings, stops)
    host, port = settings.daemon.host_for_clients, server.addresses[0][1]

    def registration() -> bytes:
        info = bookie_info(bookie)
        stalled = round(info["journal_stalled_s"])
        return encode_registration(
            f"{format_host(host)}:{port}",
            read_only=info["read_only"],
            read_only_reason=info["read_only_reason"],
            rack=info["rack"],
            zone=info["zone"],
            group=info["group"],
            free_bytes=_rounded(info["free_bytes"]),
            journal_stalled_s=stalled if stalled >= settings.bookie.journal_stall_s else 0.0,
            incarnation=bookie.cookie.incarnations[-1],
            problems={
                subject: reason
                for subject, reason in bookie_problems(bookie).items()
                if subject.startswith("disk")
            },
        )

    registered = Registration(
        metadata,
        f"{BOOKIES_PATH}/{bookie_id}",
        registration,
        settings.daemon.session_timeout_s,
        name=f"bookie {bookie_id}",
    )
    await registered.start()
    stops.push_async_callback(registered.close)
    health = _cluster_health(metadata, stops)
    repairs: AutoRecovery | None = None
    if settings.repair.auditor or settings.repair.workers:
        repairs = await open_repairs(settings, broker_components(), metadata, f"bookie {bookie_id}", stops)
        await repairs.start()
    return Started(
        {"bookie": server.addresses[0]},
        lambda: service_metrics(None, bookie, repairs),
        lambda: {**health.problems, **bookie_problems(bookie)},
        lambda: bookie_reasons(bookie, registered.standing),
        bookie,
    )


def _named(settings: BrokerSettings) -> BrokerSettings:
    """With the name by which the cluster knows the broker."""
    if settings.name != UNNAMED:
        return settings
    return replace(settings, name=settings.service_url.partition("://")[2])


async def run_broker(settings: ServiceSettings, stops: AsyncExitStack) -> Started:
    """A broker of the cluster that shares this store. ServiceNotReady when there is another one of its name."""
    components = broker_components()
    lock_data(components.files, settings, stops)
    metadata = await open_shared_metadata(settings.daemon.metadata, components.rng, stops)
    watch = ClusterWatch(TimedStore(metadata, settings.ledger.metadata_timeout_s))
    stops.push_async_callback(watch.close)
    await watch.start()
    registered, transport = await _bookies(settings, components, metadata, "broker", stops)
    directory = PlacedBookies(registered, watch)
    settings = replace(settings, broker=_named(settings.broker))
    ownership = ClusterOwnership(
        metadata,
        OwnershipSettings(
            name=settings.broker.name,
            url=settings.broker.service_url,
            zone=settings.broker.zone,
            group=settings.broker.group,
            session_timeout_s=settings.daemon.session_timeout_s,
            default_bundles=settings.broker.default_bundles,
            version=version("magnetar"),
        ),
        components.clock,
        components.rng,
        settings.balance,
        lambda: sum(os.times()[:2]),
        settings.ledger,
    )
    broker, server = await start_broker(
        settings, components, metadata, transport, directory, stops, ownership=ownership
    )

    await _note_broker(metadata, settings.broker.name, stops)
    health = _cluster_health(metadata, stops)

    def reasons() -> Mapping[str, str]:
        writable = len(directory.writable())
        return broker_reasons(settings, writable, session=ownership.valid, state=ownership.state)

    return Started(
        {"magnetar": server.addresses[0]},
        lambda: service_metrics(broker, None),
        lambda: {**health.problems, **broker.problems()},
        reasons,
    )


def _cluster_health(metadata: MetadataStore, stops: AsyncExitStack) -> ClusterHealth:
    health = ClusterHealth(metadata)
    stops.push_async_callback(health.close)
    return health


async def _note_broker(metadata: MetadataStore, name: str, stops: AsyncExitStack) -> None:
    """Until it stops: whoever does not find it registered knows that it was killed."""
    path = known_broker_path(name)
    with contextlib.suppress(AlreadyExists):
        await metadata.create(path, b"")

    async def forget() -> None:
        with contextlib.suppress(MagnetarError):  # without the store it is lost for the others anyway
            await metadata.delete(path)

    stops.push_async_callback(forget)


async def run_autorecovery(settings: ServiceSettings, stops: AsyncExitStack) -> Started:
    """Repairs in a process without a bookie."""
    components = broker_components()
    metadata = await open_shared_metadata(settings.daemon.metadata, components.rng, stops)
    owner = f"autorecovery at {socket.gethostname()}, process {os.getpid()}"
    repairs = await open_repairs(settings, components, metadata, owner, stops)
    await repairs.start()
    health = _cluster_health(metadata, stops)
    return Started(
        {},
        lambda: service_metrics(None, None, repairs),
        lambda: health.problems,
        lambda: autorecovery_reasons(repairs),
    )


async def open_repairs(
    settings: ServiceSettings,
    components: BrokerComponents,
    metadata: MetadataStore,
    owner: str,
    stops: AsyncExitStack,
) -> AutoRecovery:
    """Not started yet: what an operator asks for needs no start."""
    directory, transport = await _bookies(settings, components, metadata, "autorecovery", stops)
    repairs = AutoRecovery(
        metadata,
        transport,
        directory,
        settings.ledger,
        settings.repair,
        components.rng,
        components.clock,
        owner=owner,
    )
    stops.push_async_callback(repairs.close)
    return repairs


async def open_ledgers(
    settings: ServiceSettings, components: BrokerComponents, metadata: MetadataStore, stops: AsyncExitStack
) -> LedgerClient:
    """The ledgers of the cluster, for a command: nothing new is placed on bookies that are drained."""
    registered, transport = await _bookies(settings, components, metadata, "operator", stops)
    watch = ClusterWatch(TimedStore(metadata, settings.ledger.metadata_timeout_s))
    await watch.read()
    bookies = PlacedBookies(registered, watch)
    return ledger_client(settings, components, metadata, transport, bookies, stops)


async def _bookies(
    settings: ServiceSettings,
    components: BrokerComponents,
    metadata: MetadataStore,
    name: str,
    stops: AsyncExitStack,
) -> tuple[RegisteredBookies, TcpTransport]:
    """The registered bookies, and connections to them."""
    directory = await RegisteredBookies.open(metadata, metadata_timeout_s=settings.ledger.metadata_timeout_s)
    stops.push_async_callback(directory.close)
    return directory, await connect_bookies(directory, settings, components, metadata, name, stops)


def _rounded(size: int) -> int:
    """Two significant digits, so that a registration is written when the space changed much, and not every second."""
    step: int = 10 ** max(0, len(str(size)) - 2)
    return size - size % step

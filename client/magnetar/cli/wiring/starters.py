"""The daemons, each put together from the parts of a `Service`.

standalone     metadata and bookie of its own -> broker
bookie         alone; or store -> bookie, introduced to it -> server -> registered -> its share of the repairs
broker         metadata of its own and a list of bookies; or store -> registered bookies, but those that are drained
               -> broker, with its share of the topics
autorecovery   store -> bookies -> repairs
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING

from magnetar.bookie import Bookie
from magnetar.bookie.status import bookie_info, bookie_problems
from magnetar.broker.settings import UNNAMED
from magnetar.ledger import StaticBookies
from magnetar.ledger.directory import BOOKIES_PATH, encode_registration
from magnetar.metadata import MetadataStore
from magnetar.metadata.paths import known_broker_path
from magnetar.metadata.registration import Registration
from magnetar.metadata.timed import TimedStore
from magnetar.proto.errors import AlreadyExists, MagnetarError

from .health import Started, autorecovery_reasons, bookie_reasons, broker_reasons
from .service import Address, Service
from .settings import ServiceSettings, format_host, parse_bookies

if TYPE_CHECKING:
    from magnetar.broker import Broker
    from magnetar.broker.ownership.cluster_ownership import ClusterOwnership
    from magnetar.ledger.replication.auto_recovery import AutoRecovery
    from magnetar.runtime.metrics import Metrics

    from .cluster_facts import ClusterHealth


async def start_standalone(service: Service) -> Started:
    """The whole service in this process."""
    addresses = await service.start_standalone()
    bookie, broker = service.bookie, service.broker
    assert bookie is not None
    assert broker is not None
    broker.trouble = lambda: {**bookie_problems(bookie), **broker.problems()}
    return Started(
        {**addresses.broker, "bookie": addresses.bookie},
        _metrics(broker, bookie),
        broker.trouble,
        lambda: bookie_reasons(bookie),
        bookie,
        broker,
    )


async def start_bookie(service: Service) -> Started:
    """A bookie alone, or one of a cluster. WrongBookie, DataDirectoryError when it is none of the cluster's."""
    settings = service.settings
    service.lock_data()
    if not settings.daemon.metadata:
        bookie, _ = await service.start_bookie()
        address = await service.serve_bookie(bookie)
        return Started(
            {"bookie": address},
            _metrics(None, bookie),
            lambda: bookie_problems(bookie),
            lambda: bookie_reasons(bookie),
            bookie,
        )
    metadata = await service.shared_metadata()
    bookie, _ = await service.start_bookie(metadata, in_cluster=True)
    address = await service.serve_bookie(bookie)
    registered = await _register(service, metadata, bookie, address)
    health = _cluster_health(service, metadata)
    repairs: AutoRecovery | None = None
    if settings.repair.auditor or settings.repair.workers:
        repairs = await service.repairs(metadata, f"bookie {bookie.cookie.bookie_id}")
        await repairs.start()
    return Started(
        {"bookie": address},
        _metrics(None, bookie, repairs),
        lambda: {**health.problems, **bookie_problems(bookie)},
        lambda: bookie_reasons(bookie, registered.standing),
        bookie,
    )


async def _register(
    service: Service, metadata: MetadataStore, bookie: Bookie, address: Address
) -> Registration:
    """An ephemeral node that says where the bookie is, and goes when the process does."""
    settings, bookie_id = service.settings, bookie.cookie.bookie_id
    host = format_host(settings.daemon.host_for_clients)

    def registration() -> bytes:
        info = bookie_info(bookie)
        stalled = round(info["journal_stalled_s"])
        problems = bookie_problems(bookie).items()
        return encode_registration(
            f"{host}:{address[1]}",
            read_only=info["read_only"],
            read_only_reason=info["read_only_reason"],
            rack=info["rack"],
            zone=info["zone"],
            group=info["group"],
            free_bytes=_rounded(info["free_bytes"]),
            journal_stalled_s=stalled if stalled >= settings.bookie.journal_stall_s else 0.0,
            incarnation=bookie.cookie.incarnations[-1],
            problems={subject: reason for subject, reason in problems if subject.startswith("disk")},
        )

    registered = Registration(
        metadata,
        f"{BOOKIES_PATH}/{bookie_id}",
        registration,
        settings.daemon.session_timeout_s,
        name=f"bookie {bookie_id}",
    )
    await registered.start()
    service.stops.push_async_callback(registered.close)
    return registered


def _rounded(size: int) -> int:
    """Two significant digits, so that a registration is written when the space changed much, and not every second."""
    step: int = 10 ** max(0, len(str(size)) - 2)
    return size - size % step


async def start_broker(service: Service) -> Started:
    """A broker with a list of bookies, or of the cluster that shares a store. ServiceNotReady: there is one of its name."""
    settings = service.settings
    if not settings.daemon.metadata:
        listed = StaticBookies(parse_bookies(settings.daemon.bookies))
        storage = await service.listed_storage(listed, "broker")
        infos = await service.read_infos(listed, storage.transport)
        broker, addresses = await service.start_broker(storage, remember_deletions=True)
        broker.trouble = lambda: {**infos.problems(), **broker.problems()}
        return Started(
            addresses,
            _metrics(broker, None),
            broker.trouble,
            lambda: broker_reasons(settings, len(listed.writable())),
            broker=broker,
        )
    from magnetar.ledger.replication.cluster_watch import ClusterWatch

    service.lock_data()
    metadata = await service.shared_metadata()
    watch = ClusterWatch(TimedStore(metadata, settings.ledger.metadata_timeout_s))
    service.stops.push_async_callback(watch.close)
    await watch.start()
    storage = await service.shared_storage(metadata, "broker", watch)
    service.settings = settings = _named(settings)
    ownership = _ownership(service, metadata)
    broker, addresses = await service.start_broker(storage, ownership)
    await _note_broker(service, metadata)
    health = _cluster_health(service, metadata)

    def reasons() -> Mapping[str, str]:
        writable = len(storage.directory.writable())
        return broker_reasons(settings, writable, session=ownership.valid, state=ownership.state)

    broker.trouble = lambda: {**health.problems, **broker.problems()}
    return Started(
        addresses,
        _metrics(broker, None),
        broker.trouble,
        reasons,
        broker=broker,
    )


def _named(settings: ServiceSettings) -> ServiceSettings:
    """The broker has the name by which the cluster knows it."""
    if settings.broker.name != UNNAMED:
        return settings
    name = settings.broker.service_url.partition("://")[2]
    return replace(settings, broker=replace(settings.broker, name=name))


def _ownership(service: Service, metadata: MetadataStore) -> ClusterOwnership:
    from magnetar.broker.ownership.bundle_ownership import OwnershipSettings
    from magnetar.broker.ownership.cluster_ownership import ClusterOwnership

    settings, components = service.settings, service.components
    return ClusterOwnership(
        metadata,
        OwnershipSettings(
            name=settings.broker.name,
            url=settings.broker.service_url,
            zone=settings.broker.zone,
            group=settings.broker.group,
            session_timeout_s=settings.daemon.session_timeout_s,
            default_bundles=settings.broker.default_bundles,
            version=version("magnetar"),
            http=settings.broker.http_url,
            pulsar=settings.broker.pulsar_url_for_clients,
        ),
        components.clock,
        components.rng,
        settings.balance,
        lambda: sum(os.times()[:2]),
        settings.ledger,
    )


async def _note_broker(service: Service, metadata: MetadataStore) -> None:
    """Until it stops: whoever does not find it registered knows that it was killed."""
    path = known_broker_path(service.settings.broker.name)
    with contextlib.suppress(AlreadyExists):
        await metadata.create(path, b"")

    async def forget() -> None:
        with contextlib.suppress(MagnetarError):  # without the store it is lost for the others anyway
            await metadata.delete(path)

    service.stops.push_async_callback(forget)


async def start_autorecovery(service: Service) -> Started:
    """Repairs in a process without a bookie."""
    metadata = await service.shared_metadata()
    repairs = await service.repairs(
        metadata, f"autorecovery at {socket.gethostname()}, process {os.getpid()}"
    )
    await repairs.start()
    health = _cluster_health(service, metadata)
    return Started(
        {},
        _metrics(None, None, repairs),
        lambda: health.problems,
        lambda: autorecovery_reasons(repairs),
    )


def _metrics(
    broker: Broker | None, bookie: Bookie | None, repairs: AutoRecovery | None = None
) -> Callable[[], Metrics]:
    def make() -> Metrics:
        from .metrics import service_metrics  # with prometheus, which no start needs

        return service_metrics(broker, bookie, repairs)

    return make


def _cluster_health(service: Service, metadata: MetadataStore) -> ClusterHealth:
    from .cluster_facts import ClusterHealth

    health = ClusterHealth(metadata)
    service.stops.push_async_callback(health.close)
    return health


STARTERS: dict[str, Callable[[Service], Awaitable[Started]]] = {
    "standalone": start_standalone,
    "bookie": start_bookie,
    "broker": start_broker,
    "autorecovery": start_autorecovery,
}

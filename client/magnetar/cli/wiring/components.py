"""The real things behind the seams: disk, clock, journal writer, disk worker and archive reader processes, RocksDB."""

from __future__ import annotations

from magnetar.bookie.components import BookieComponents, os_components
from magnetar.broker import BrokerSettings
from magnetar.broker.log.reading import ArchiveReader
from magnetar.metadata import MetadataStore
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.files import OsFiles

from .metadata import system_rng
from .standalone import BrokerComponents, ServiceComponents


def bookie_components() -> BookieComponents:
    """Of a bookie on this machine's disk."""
    return os_components(system_rng())


def service_components() -> ServiceComponents:
    """Of a standalone service."""
    return ServiceComponents(
        files=OsFiles(),
        clock=SystemClock(),
        rng=system_rng(),
        bookie=bookie_components(),
        open_metadata=open_embedded,
        archives=archive_processes,
    )


def broker_components() -> BrokerComponents:
    """Of a broker with bookies elsewhere."""
    return BrokerComponents(
        files=OsFiles(),
        clock=SystemClock(),
        rng=system_rng(),
        open_metadata=open_embedded,
        archives=archive_processes,
    )


def archive_processes(settings: BrokerSettings) -> ArchiveReader:
    """Helper processes over Parquet files, started when an archived ledger is read."""
    from magnetar.archive.reader import ArchiveProcesses

    return ArchiveProcesses(settings)


def open_embedded(directory: str) -> MetadataStore:
    """RocksDB. DataDirectoryError."""
    from magnetar.metadata.embedded import EmbeddedMetadataStore

    return EmbeddedMetadataStore(directory)

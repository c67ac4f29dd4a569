"""What all topics of a broker share: stores, settings, clock, budgets, counters."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import NamedTuple

from magnetar.metadata import MetadataStore
from magnetar.runtime.clock import Clock

from ..dispatch.core.entry_source import DispatchCounters
from ..log.reading import ArchiveReader
from ..log.ring import Rings
from ..log.shared_reads import SharedReads
from ..log.tail_cache import TailCache
from ..ownership.ownership import Ownership
from ..resources.budget import ByteBudget
from ..resources.rates import Buckets
from ..resources.stores import Bookies, Ledgers
from ..settings import BrokerSettings
from ..tenancy.creation import Creation
from .partitions import PartitionedTopics
from .policies import NamespacePolicies


@dataclass(slots=True)
class PublishCounters:
    """Sums over the broker, counted per run, per entry and per batch of attached ledgers."""

    runs_in: int = 0
    messages_in: int = 0
    bytes_in: int = 0
    attached_ledgers: int = 0
    attached_messages: int = 0
    published_batches: int = 0
    entries_in: int = 0


class Components(NamedTuple):
    """What every topic of a broker shares."""

    metadata: MetadataStore
    ledgers: Ledgers
    settings: BrokerSettings
    clock: Clock
    cache: TailCache
    shared_reads: SharedReads
    publish_budget: ByteBudget
    read_budget: ByteBudget
    published: PublishCounters
    dispatched: DispatchCounters
    archives: ArchiveReader
    namespaces: NamespacePolicies
    partitioned: PartitionedTopics
    bookies: Bookies | None  # None: clients cannot learn where bookies listen
    compactions: asyncio.Semaphore  # a slot for each that may run at once
    ownership: Ownership
    rings: Rings
    publish_rates: Buckets  # of all topics together
    dispatch_rates: Buckets
    creation: Creation

"""What all topics of a broker share: stores, settings, clock, budgets, counters."""

from __future__ import annotations

from typing import NamedTuple

from magnetar.runtime.clock import Clock

from ..dispatch.core.entry_source import DispatchCounters
from ..log.tail_cache import TailCache
from ..resources.budget import ByteBudget
from ..resources.stores import Bookies, Ledgers, Metadata
from ..settings import BrokerSettings


class PublishCounters:
    """Sums over the broker, counted per run, per entry and per batch of attached ledgers."""

    __slots__ = (
        "attached_ledgers", "attached_messages", "bytes_in", "entries_in", "messages_in", "published_batches", "runs_in",
    )  # fmt: skip

    def __init__(self) -> None:
        self.runs_in = 0
        self.messages_in = 0
        self.bytes_in = 0
        self.attached_ledgers = 0
        self.attached_messages = 0
        self.published_batches = 0
        self.entries_in = 0


class Components(NamedTuple):
    """What every topic of a broker shares."""

    metadata: Metadata
    ledgers: Ledgers
    settings: BrokerSettings
    clock: Clock
    cache: TailCache
    publish_budget: ByteBudget
    read_budget: ByteBudget
    published: PublishCounters
    dispatched: DispatchCounters
    bookies: Bookies | None  # None: nobody is told where bookies listen

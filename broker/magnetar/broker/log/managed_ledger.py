"""A topic's log: a list of ledgers in metadata, of which the last one may be open and is written by this broker alone.

    appending    entries come in, through one open ledger after another
    changes      the ledger list changes, one change at a time
    reading      confirmed entries are read, wherever they are

A topic that stores nothing has a `Ring` in the place of the first one and of the cache: `takes` is what entries come in by.

Rule 23: opening recovers and closes the last ledger and then writes the list by compare-and-set, even if nothing changed:
a former owner that is still alive finds the conflict. Whichever part meets another owner fences all of them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from magnetar.metadata import MetadataStore
from magnetar.proto.errors import MagnetarError, TopicNotServed
from magnetar.runtime.clock import Clock
from magnetar.runtime.weak import weak_callback

from ..cursors.core.acks import AckState, Position
from ..cursors.cursor import Cursor
from ..resources.stores import Ledgers
from ..settings import BrokerSettings
from .appending import Appending, LedgerEvents, State
from .durability import Durability
from .ledger_list import LedgerList
from .list_changes import ListChanges
from .reading import ArchiveReader, LedgerReading
from .records import cursor_path
from .ring import Ring, Rings
from .shared_reads import SharedReads
from .tail_cache import TopicCache

_log = logging.getLogger(__name__)

T = TypeVar("T")


class ManagedLedger(Generic[T]):
    """The log of one topic. `open` it before use, and `close` it in the end."""

    def __init__(
        self,
        ledger_list: LedgerList,
        metadata: MetadataStore,
        ledgers: Ledgers,
        archives: ArchiveReader,
        cache: TopicCache,
        rings: Rings,
        shared_reads: SharedReads,
        settings: BrokerSettings,
        clock: Clock,
        events: LedgerEvents[T],
        durability: Callable[[], Durability],
    ) -> None:
        """`durability`: of the next ledger, by the policies in force; raises MagnetarError while they are not known."""
        self.name = ledger_list.name
        self._metadata = metadata
        self._ledgers = ledgers
        self._settings = settings
        self._clock = clock
        self._events = events
        self.durability = durability
        self.list = ledger_list
        self._ring: Ring[T] | None = None  # of a non-persistent topic
        if not self.name.persistent:
            limit = settings.max_non_persistent_topic_bytes
            self._ring = Ring(ledger_list, rings, limit, events.confirmed, events.leaving)
        self.reading = LedgerReading(ledger_list, ledgers, archives, self._ring or cache, shared_reads)
        fence = weak_callback(self.fence)
        self.changes = ListChanges(ledger_list, ledgers, self.reading, fence, events.rolled)
        self.appending: Appending[T] = Appending(
            self.changes, self.reading, ledgers, settings, clock, events, durability, fence
        )
        self.takes: Appending[T] | Ring[T] = self._ring or self.appending

    async def open(self, *, create: bool) -> bool:
        """Takes the topic over (rule 23). False: it was made. TopicNotFound unless `create`; TopicBusy on a conflict."""
        existed = await self.changes.take_over(self._clock.now_ms() if create else None)
        newest = [*self.list.archived_ledgers[-1:], *self.list.ledgers[-1:]]
        self.appending.not_before(max((info.last_append_ms for info in newest), default=0))
        if self._ring is not None and not self.list.record.deleting:
            self._ring.begin(self._clock.now_ms())
        return existed

    def cursor(self, subscription: str | None, position: Position = (0, 0, 0)) -> Cursor:
        """A cursor of this log, to be created at the position, recovered or deleted; None: a reader's, not durable."""
        return Cursor(
            None if subscription is None else cursor_path(self.name, subscription),
            AckState(self.list, position),
            self._metadata,
            self._ledgers,
            self._settings,
            self.fence,
            lambda: self.durability().of_ledger(),
        )

    def fence(self, cause: MagnetarError) -> None:
        """For good: another broker owns the topic, as a ledger or a cursor found. Nothing pending will be confirmed."""
        if self.changes.not_served is not None:
            return
        _log.warning("topic %s: fenced: %s", self.name, cause)
        if not isinstance(cause, TopicNotServed):
            cause = TopicNotServed(f"topic {self.name} was taken over: {cause}")
        self.changes.not_served = cause
        self.appending.end(State.FENCED)
        self._events.fenced(cause)

    async def close(self) -> None:
        """Waits for a roll-over, closes the open ledger and records it. Pending entries must have been confirmed."""
        fenced = self.changes.not_served is not None
        if self._ring is not None and self.list.ledgers:  # it has begun
            self._ring.close()
            with contextlib.suppress(
                MagnetarError
            ):  # ids of the next load are above these, unless clocks differ
                await self.changes.edit(self.list.commit)
        await self.appending.stop()
        await self.reading.close()
        if self.changes.not_served is None:
            self.changes.not_served = TopicNotServed(
                f"topic {self.name} is not served here any more; look it up again"
            )
        self.appending.end(State.CLOSED)
        await self.appending.close(fenced=fenced)


__all__ = ["LedgerEvents", "ManagedLedger", "State"]

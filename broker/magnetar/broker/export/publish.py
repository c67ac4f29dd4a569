"""Small batches: what the tasks staged is appended to the topic's open ledger, as one entry, instead of being attached.

The state machine stands in ARCHITECTURE.md (small batches): the place is recorded with the batch first, then the entry is
appended there. Batches of messages are joined untouched; work is per entry and per batch.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from magnetar.proto.entry import Entry, encode_entry
from magnetar.proto.errors import InvalidArgument, MalformedFrame
from magnetar.proto.ids import MAX_BATCHES_PER_ENTRY, MAX_MESSAGES_PER_ENTRY
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES

from ..log.managed_ledger import ManagedLedger
from ..log.placing import PlacedEntry, digest_of
from ..log.records import LedgerInfo, PublishedBatch
from ..resources.stores import Ledgers
from ..topics.coalescer import MAX_NAME_BYTES, ROW_BYTES, GatheredEntry
from ..topics.components import Components
from .queries import Batch, expiry, remembered
from .staging import Staging

_READ_BYTES = 1 << 20


@dataclass(slots=True)
class StagedBatches:
    """What the staged ledgers of a small batch hold, in task order: parallel lists."""

    batches: list[bytes] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    producers: list[int] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        """The batches of an entry. Raises IndexError, MalformedFrame if its table is none."""
        numbers = [self.names.setdefault(name, len(self.names)) for name in entry.producer_names]
        self.batches += [bytes(entry.batch(position)) for position in range(entry.batch_count)]
        self.counts += [end - start for start, end in pairwise((0, *entry.end_indexes))]
        self.producers += [numbers[number] for number in entry.producers]

    def fits(self, max_bytes: int) -> bool:
        """True if one entry can hold it all."""
        return (
            sum(map(len, self.batches)) + ROW_BYTES * len(self.batches) <= max_bytes
            and 0 < len(self.batches) <= MAX_BATCHES_PER_ENTRY
            and sum(self.counts) <= MAX_MESSAGES_PER_ENTRY
            and sum(4 * len(name) + 5 for name in self.names) <= MAX_NAME_BYTES
        )

    def encode(self, first_index: int, append_time_ms: int) -> bytes:
        """The entry."""
        return encode_entry(
            self.batches,
            self.counts,
            self.producers,
            list(self.names),
            first_index=first_index,
            append_time_ms=append_time_ms,
        )


async def read_staged(ledgers: Ledgers, infos: Sequence[LedgerInfo]) -> StagedBatches:
    """Reads closed staged ledgers. Raises InvalidArgument for one whose entries do not follow one another."""
    found = StagedBatches()
    for info in infos:
        reader = await ledgers.open(info.stored_id, recover=False)
        at = messages = 0
        while at < info.entries:
            for data in await reader.read(at, info.entries - 1, max_bytes=_READ_BYTES):
                try:
                    entry = Entry(data, LEDGER_ENTRY_HEADER_BYTES)
                    if entry.first_index != messages:
                        raise MalformedFrame(f"it begins at message {entry.first_index}, not {messages}")
                    found.add(entry)
                except (MalformedFrame, IndexError) as error:
                    raise InvalidArgument(
                        f"entry {at} of staged ledger {info.stored_id} is not one of a topic: {error}"
                    ) from error
                messages += entry.message_count
                at += 1
    return found


class _DoneBefore(Exception):
    """The batch is recorded already."""


class SmallBatches:
    """Of one topic: one at a time."""

    def __init__(self, ledger: ManagedLedger[Any], staging: Staging, components: Components) -> None:
        self._ledger = ledger
        self._staging = staging
        self._components = components
        self._one = asyncio.Lock()

    async def publish(
        self, batch: Batch, infos: Sequence[LedgerInfo], staged: StagedBatches
    ) -> dict[str, Any] | None:
        """The answer to AttachLedgers, once the entry is confirmed; None: the batch was done before.

        No other batch of the query may be published meanwhile. Raises InvalidArgument, TooManyRequests: then nothing
        changed; TopicNotServed: whoever asks again learns more.
        """
        place = functools.partial(self._place, batch, infos, staged)
        async with self._one:
            published = False
            while not published:
                placed: PlacedEntry | None = None
                with self._ledger.placing.hold():
                    while placed is None:
                        await self._ledger.placing.room(self._ledger)
                        try:
                            placed = await self._ledger.revise(place)
                        except _DoneBefore:
                            return None
                published = await placed.settled
        counters = self._components.published
        counters.published_batches += 1
        ledgers = self._ledger.list
        first = ledgers.record.publishing[batch.query].ledger_id
        return {"attached": True, "first": first, "end": list(ledgers.end)}

    async def _place(
        self, batch: Batch, infos: Sequence[LedgerInfo], staged: StagedBatches
    ) -> PlacedEntry | None:
        """STAGED to APPENDED, while nothing else changes the list; None: not at this place, and so not yet."""
        ledger, settings = self._ledger, self._components.settings
        if ledger.list.record.last_batch(batch.query) >= batch.number:
            raise _DoneBefore
        for info in infos:
            if info.stored_id not in self._staging:
                raise InvalidArgument(f"ledger {info.stored_id} was attached or discarded meanwhile")
        place = ledger.next_place
        if place is None:
            return None
        now = self._components.clock.now_ms()
        attached, publishing = remembered(ledger.list.record, batch.query, now, settings)
        payload = staged.encode(ledger.next_message, now)
        state = PublishedBatch(batch.number, now, expiry(batch, now, settings), *place, digest_of(payload))
        await ledger.list.commit(attached=attached, publishing={**publishing, batch.query: state})
        if ledger.next_place != place:  # the ledger failed, or is rolled over, meanwhile
            return None

        def confirmed() -> None:
            state.confirmed = True

        placed = PlacedEntry(confirmed)
        ledger.append(payload, sum(staged.counts), now, GatheredEntry(), placed)
        return placed

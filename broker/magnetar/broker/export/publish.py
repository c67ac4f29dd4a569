"""Small batches: what the tasks staged is appended to the topic's open ledger, as one entry, instead of being attached.

    record the batch, the position that its entry will come at or behind, and a digest of what the entry holds
      --> append it, an entry as any other --> confirmed: its place is known

The record comes first, so that whoever loads the topic next can look from that position on whether the entry is there. A
topic has at most one batch whose entry is not confirmed, so what is looked through is what was appended in the moment of
the crash. Batches of messages are joined untouched; work is per entry and per batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from xxhash import xxh3_128_digest

from magnetar.proto.admission import check_entry
from magnetar.proto.entry import Entry, encode_entry, entry_content
from magnetar.proto.errors import ChecksumMismatch, FinalError, InvalidArgument, MalformedFrame
from magnetar.proto.ids import MAX_BATCHES_PER_ENTRY, MAX_MESSAGES_PER_BATCH
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES

from ..log.managed_ledger import ManagedLedger
from ..log.records import LedgerInfo, PublishedBatch
from ..resources.stores import Ledgers
from ..topics.coalescer import MAX_NAME_BYTES, GatheredEntry
from ..topics.components import Components
from .queries import Batch, done_before, expiry, remembered
from .staging import Staging

_log = logging.getLogger(__name__)

_READ_BYTES = 1 << 20


def digest_of(entry: bytes) -> bytes:
    """By which an entry is known again, wherever and whenever it was appended."""
    return xxh3_128_digest(entry_content(entry))


@dataclass(slots=True)
class StagedBatches:
    """What the staged ledgers of a small batch hold, in task order: parallel lists."""

    batches: list[bytes] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    producers: list[int] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        """The batches of an entry, which was checked."""
        numbers = [self.names.setdefault(name, len(self.names)) for name in entry.producer_names]
        self.batches += [bytes(entry.batch(position)) for position in range(entry.batch_count)]
        self.counts += [end - start for start, end in pairwise((0, *entry.end_indexes))]
        self.producers += [numbers[number] for number in entry.producers]

    def fits(self) -> bool:
        """True if one entry can hold it all, however large."""
        return (
            0 < len(self.batches) <= MAX_BATCHES_PER_ENTRY
            and sum(self.counts) <= MAX_MESSAGES_PER_BATCH
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


async def read_staged(ledgers: Ledgers, infos: Sequence[LedgerInfo], max_batch_bytes: int) -> StagedBatches:
    """Reads closed staged ledgers. Raises as `staged_entries`."""
    found = StagedBatches()
    for info in infos:
        async for entry in staged_entries(ledgers, info, max_batch_bytes):
            found.add(entry)
    return found


async def staged_entries(
    ledgers: Ledgers, info: LedgerInfo, max_batch_bytes: int, stride: int = 1
) -> AsyncIterator[Entry]:
    """The entries of a closed staged ledger, all or one in `stride` and the last one, in order, checked.

    Raises InvalidArgument for one that a broker would not have made, or that does not follow the one before.
    """
    reader = await ledgers.open(info.stored_id, recover=False)
    at = messages = 0
    while at < info.entries:
        for data in await reader.read(at, at if stride > 1 else info.entries - 1, max_bytes=_READ_BYTES):
            try:
                entry = Entry(data, LEDGER_ENTRY_HEADER_BYTES)
                if entry.first_index != messages and (stride == 1 or at == 0):
                    raise MalformedFrame(f"it begins at message {entry.first_index}, not {messages}")
                check_entry(entry, max_batch_bytes)
            except (MalformedFrame, ChecksumMismatch, InvalidArgument) as error:
                raise InvalidArgument(
                    f"entry {at} of staged ledger {info.stored_id} is not one of a topic: {error}"
                ) from error
            yield entry
            messages += entry.message_count
            at = min(at + stride, info.entries - 1) if at < info.entries - 1 else info.entries


class SmallBatches:
    """Of one topic: one at a time. `load` before use."""

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

        async def record() -> PublishedBatch | None:
            return await self._record(batch, infos, staged)

        async with self._one:
            state = await self._ledger.changes.edit(record)
            if state is None:
                return None
            place = await self._ledger.appending.append_in_turn(
                staged.encode, sum(staged.counts), GatheredEntry()
            )
            state.ledger_id, state.entry_id = place
            state.confirmed = True
        self._components.published.published_batches += 1
        return {"attached": True, "first": state.ledger_id, "end": list(self._ledger.list.end)}

    async def _record(
        self, batch: Batch, infos: Sequence[LedgerInfo], staged: StagedBatches
    ) -> PublishedBatch | None:
        """While nothing else changes the list; None: the batch was done before."""
        ledgers, settings = self._ledger.list, self._components.settings
        if done_before(ledgers.record, batch):
            return None
        for info in infos:
            if info.stored_id not in self._staging:
                raise InvalidArgument(f"ledger {info.stored_id} was attached or discarded meanwhile")
        now = self._components.clock.now_ms()
        attached, publishing = remembered(ledgers.record, batch.query, now, settings)
        position, digest = self._ledger.appending.next_position, digest_of(staged.encode(0, 0))
        expires_ms = expiry(batch, now, settings)
        state = PublishedBatch(batch.number, now, expires_ms, *position, digest, content=batch.content)
        await ledgers.commit(attached=attached, publishing={**publishing, batch.query: state})
        return state

    # --- after a former owner ----------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Looks for the entries of batches that were recorded and not confirmed; forgets those that are not there."""
        ledgers = self._ledger.list
        if all(state.confirmed for state in ledgers.record.publishing.values()):
            return

        async def settle() -> None:
            for query, state in ledgers.record.publishing.items():
                if not state.confirmed:
                    await self._look_for(query, state)
            found = {query: state for query, state in ledgers.record.publishing.items() if state.confirmed}
            await ledgers.commit(publishing=found)

        await self._ledger.changes.edit(settle)

    async def _look_for(self, query: str, state: PublishedBatch) -> None:
        """Sets `confirmed`, and the place. An entry that is lost may be the batch, so it counts as published then."""
        recorded = (state.ledger_id, state.entry_id)
        for info in self._ledger.list.after(state.ledger_id - 1, len(self._ledger.list.ledgers)):
            if info.stored_id != info.ledger_id:
                continue  # it was attached
            entry_id = recorded[1] if info.ledger_id == recorded[0] else 0
            while entry_id < info.entries:
                try:
                    found = await self._ledger.reading.read(info.ledger_id, entry_id, max_bytes=_READ_BYTES)
                except FinalError as error:
                    _log.warning(
                        "topic %s: batch %d of %s counts as published, since an entry that may hold it is lost: %s",
                        self._ledger.name, state.batch, query, error,
                    )  # fmt: skip
                    state.confirmed = True
                    entry_id += 1
                    continue
                for data in found:
                    if digest_of(data[LEDGER_ENTRY_HEADER_BYTES:]) == state.digest:
                        state.ledger_id, state.entry_id, state.confirmed = info.ledger_id, entry_id, True
                        return
                    entry_id += 1

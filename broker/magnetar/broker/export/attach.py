"""ATTACH_LEDGERS: what a job staged becomes part of the topic, all of a batch at once, and each batch of a query once.

    staged ledgers --few bytes--> one entry of the topic's open ledger            PUBLISHED
             `--more--> closed ledgers in the topic's list, as they are           ATTACHED
    and in the end the staged ledgers that are not part of the topic are discarded, whichever way the batch went

1. A batch that the topic has (`queries.done_before`) is done; what of its ledgers is still staged goes.
2. Every ledger is looked at: staged, closed, its last entry says how many messages and bytes there are, as do the asking
   side and the metadata: a wrong count would shift all later offsets of the topic. Then its entries are (`staged_entries`).

Attaching:

3. The topic's open ledger is closed, once what is pending there is confirmed; appending goes on afterwards in the next one.
4. Position ids are drawn: they rise above all that the list had, so message ids grow along the topic.
5. One compare-and-set of the ledger list: the rows, `attached[query]`, and ledgers without entries among `trimmed`.
   Before it nobody sees anything, after it everybody sees all. An outcome that is not known is settled by reading back; if
   that fails too, the next change of the list meets the conflict, the topic is loaded anew, and whoever asks again learns
   from the record whether the batch is done.
6. The nodes of the staged ledgers go. A crash before that leaves nodes whose ledgers the list names: they mean nothing.

Publishing:

3. One compare-and-set records the batch in `publishing[query]`: the position that its entry will come at or behind, and a
   digest of what the entry holds. So whoever loads the topic next can look from that position on whether the entry is there.
4. The entry is appended as any other. Once it is confirmed, its place is known. A topic has at most one batch whose entry is
   not confirmed, so what is looked through after a crash is what was appended in the moment of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import msgspec

from magnetar.ledger import LedgerMetadata
from magnetar.metadata.ledgers import ledger_path
from magnetar.proto.errors import FinalError, InvalidArgument, LedgerNotFound, MalformedFrame
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from magnetar.runtime.tasks import TaskSet, awaited

from ..cursors.core.acks import Position
from ..log.ledger_list import check_not_terminated
from ..log.managed_ledger import ManagedLedger
from ..log.reading import measure
from ..log.records import AttachedQuery, LedgerInfo, PublishedBatch
from ..topics.coalescer import GatheredEntry
from ..topics.components import Components
from .names import check_text, decode_rows
from .queries import Batch, Remembered, done_before, remembered
from .staged_entries import READ_BYTES, StagedBatches, digest_of, read_staged, staged_entries
from .staging import Staging

_log = logging.getLogger(__name__)

MAX_LEDGERS_PER_ATTACHMENT = 10_000
_LOOKS_AT_ONCE = 16
# Of more than so many bytes in one batch a part of the entries is looked into, spread over all ledgers.
_CHECKED_BYTES = 256 << 20
_BATCH_BYTES = 1 << 20
_SMALL_READS_AT_ONCE = 2  # each holds at most attach_min_bytes
T = TypeVar("T")


class Row(NamedTuple):
    """What the asking side says of a ledger."""

    stored_id: int
    messages: int
    first_append_ms: int
    last_append_ms: int


class Attached(msgspec.Struct, frozen=True):
    """Whether this call attached or published the batch, the position id of its first ledger, and the topic's end."""

    attached: bool
    first: int | None
    end: Position


def decode_attachment(payload: bytes) -> list[Row]:
    """The payload of AttachLedgers. Raises InvalidArgument."""
    rows = decode_rows("the ledgers to attach", payload, Row, MAX_LEDGERS_PER_ATTACHMENT)
    if len({row.stored_id for row in rows}) < len(rows):
        raise InvalidArgument("a ledger is listed twice in one batch")
    for row in rows:
        if not 0 <= row.messages < 1 << 63 or not 0 <= row.first_append_ms <= row.last_append_ms < 1 << 63:
            raise InvalidArgument(f"ledger {row.stored_id} cannot have these figures: {list(row)}")
    return rows


class Attachments:
    """Makes what jobs staged for one topic part of it. `load` before use."""

    def __init__(self, ledger: ManagedLedger[Any], staging: Staging, components: Components) -> None:
        self._ledger = ledger
        self._list = ledger.list
        self._staging = staging
        self._ledgers = components.ledgers
        self._metadata = components.metadata
        self._settings = settings = components.settings
        self._clock = components.clock
        self._counters = components.published
        # What producers may send; who writes entries at once makes batches of half a megabyte, whatever messages may have.
        self._max_batch_bytes = max(settings.max_group_bytes, _BATCH_BYTES)
        self._looking = asyncio.Semaphore(_LOOKS_AT_ONCE)
        self._reads = asyncio.Semaphore(_SMALL_READS_AT_ONCE)
        # One request of a query at a time; a lock lives as long as somebody has it or waits.
        self._queries: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._one_published = asyncio.Lock()
        self._publishing = TaskSet("publish a batch")

    def last_batch(self, query: str) -> int:
        """The answer to QueryState: -1 if nothing of this query is known."""
        last = self._list.record.last_of(check_text("query", query))
        return -1 if last is None else last.batch

    def _done(self, batch: Batch) -> bool:
        return done_before(self._list.record, batch)

    async def attach(self, batch: Batch, rows: list[Row]) -> Attached:
        """Raises InvalidArgument for ledgers that cannot be attached; then nothing changed."""
        batch.check()
        if self._done(batch):
            return await self._done_before(rows)
        infos = await _all_of(self._look(row) for row in rows)
        filled = [info for info in infos if info.entries]
        size = sum(info.size for info in filled)
        if 0 < size < self._settings.attach_min_bytes:
            # Who asks again after its connection broke waits for the outcome.
            answer = await self._publishing.run(self._publish(batch, rows, filled))
            if answer is not None:
                return answer
        stride = max(-(-size // _CHECKED_BYTES), 1)
        await _all_of(self._check(info, stride) for info in filled)
        edit = self._ledger.appending.edit_closed if filled else self._ledger.changes.edit
        async with self._query(batch):
            answer = None if self._done(batch) else await edit(lambda: self._attach(batch, infos, filled))
        return answer or await self._done_before(rows)

    def _query(self, batch: Batch) -> asyncio.Lock:
        return self._queries.setdefault(batch.query, asyncio.Lock())

    async def _done_before(self, rows: list[Row]) -> Attached:
        await self._staging.drop(row.stored_id for row in rows)
        return Attached(False, None, self._list.end)

    async def stop(self) -> None:
        """To be called once the ledger is closed: whoever waits for it gets an error, and this returns."""
        await self._publishing.wait()

    # --- looking -----------------------------------------------------------------------------------------------------

    async def _look(self, row: Row) -> LedgerInfo:
        """Makes the ledger's row of the list, without its place. Raises InvalidArgument."""
        async with self._looking:
            stored_id = row.stored_id
            await self._staging.require(stored_id)
            found = await self._metadata.get(ledger_path(stored_id))
            if found is None:
                raise LedgerNotFound(f"staged ledger {stored_id} does not exist", ledger_id=stored_id)
            metadata = LedgerMetadata.decode(found.value, stored_id)
            if not metadata.closed:
                raise InvalidArgument(f"staged ledger {stored_id} is not closed; its writer closes it first")
            info = LedgerInfo(
                -1, 0, metadata.last_entry + 1, 0, metadata.length, 0, row.last_append_ms, True, stored_id
            )
            if info.entries:
                await self._measure(info)
            if (info.messages, info.last_append_ms) != (row.messages, row.last_append_ms):
                raise InvalidArgument(
                    f"staged ledger {stored_id} has {info.messages} messages, appended until {info.last_append_ms}, and not "
                    f"{row.messages} until {row.last_append_ms}"
                )
            return info

    async def _measure(self, info: LedgerInfo) -> None:
        """Counts and times from the last entry. Raises InvalidArgument."""
        reader = await self._ledgers.open(info.stored_id, recover=False)
        claimed = info.size
        try:
            await measure(info, reader, info.entries - 1)
        except MalformedFrame as error:
            raise InvalidArgument(
                f"staged ledger {info.stored_id} does not hold entries of a topic: {error}"
            ) from error
        if info.size != claimed:
            raise InvalidArgument(
                f"staged ledger {info.stored_id} has {info.size} bytes, and not {claimed} as its metadata says"
            )

    async def _check(self, info: LedgerInfo, stride: int) -> None:
        """Raises InvalidArgument unless a broker would have made such entries."""
        async with self._looking:
            async for _ in staged_entries(self._ledgers, info, self._max_batch_bytes, stride):
                pass

    def _remembered(self, batch: Batch, infos: list[LedgerInfo], now_ms: int) -> Remembered:
        """What stays beside the batch, as nothing else changes the list now.

        Raises InvalidArgument, TooManyRequests, TopicTerminated.
        """
        check_not_terminated(self._list)
        for info in infos:
            if info.stored_id not in self._staging or self._list.stored(info.stored_id) is not None:
                raise InvalidArgument(f"ledger {info.stored_id} was attached or discarded meanwhile")
        return remembered(self._list.record, batch.query, now_ms, self._settings)

    # --- attaching ---------------------------------------------------------------------------------------------------

    async def _attach(
        self, batch: Batch, infos: list[LedgerInfo], filled: list[LedgerInfo]
    ) -> Attached | None:
        """Steps 4 to 6, while nothing else changes the list. None: done before, by a request whose asker left."""
        ledgers = self._list
        if self._done(batch):
            return None
        now = self._clock.now_ms()
        attached, publishing = self._remembered(batch, infos, now)
        expires_ms = batch.expiry(now, self._settings)
        attached[batch.query] = AttachedQuery(batch.number, now, expires_ms, batch.content)
        first = await self._ledgers.next_id(len(filled)) if filled else None
        next_index, committed_ms = ledgers.record.next_index, self._ledger.appending.now_ms()
        for ledger_id, info in enumerate(filled, first or 0):
            info.ledger_id, info.first_index = ledger_id, next_index
            # Its entries say when they were written.
            info.first_append_ms = info.last_append_ms = committed_ms
            next_index += info.messages
        await ledgers.commit(
            append=filled,
            delete=[info.stored_id for info in infos if not info.entries],
            next_index=next_index,
            attached=attached,
            publishing=publishing,
        )
        self._staging.unregister(info.stored_id for info in infos)
        self._counters.attached_ledgers += len(filled)
        self._counters.attached_messages += sum(info.messages for info in filled)
        return Attached(True, first, ledgers.end)

    # --- publishing --------------------------------------------------------------------------------------------------

    async def _publish(self, batch: Batch, rows: list[Row], infos: list[LedgerInfo]) -> Attached | None:
        """None if one entry cannot hold the batch. TopicNotServed: whoever asks again learns more."""
        async with self._query(batch):
            if self._done(batch):
                return await self._done_before(rows)
            async with self._reads:
                staged = await read_staged(self._ledgers, infos, self._max_batch_bytes)
                if not staged.fits():
                    return None
                async with self._one_published:
                    answer = await self._append(batch, infos, staged)
        if answer is None:
            return await self._done_before(rows)
        await self._staging.drop_or_leave(row.stored_id for row in rows)
        return answer

    async def _append(self, batch: Batch, infos: list[LedgerInfo], staged: StagedBatches) -> Attached | None:
        """Once the entry is confirmed; None: the batch was done before."""

        async def record() -> PublishedBatch | None:
            return None if self._done(batch) else await self._record(batch, infos, staged)

        state = await self._ledger.changes.edit(record)
        if state is None:
            return None
        appending = self._ledger.appending
        place = await appending.append_in_turn(staged.encode, sum(staged.counts), GatheredEntry())
        state.ledger_id, state.entry_id = place
        state.confirmed = True
        self._counters.published_batches += 1
        return Attached(True, state.ledger_id, self._list.end)

    async def _record(self, batch: Batch, infos: list[LedgerInfo], staged: StagedBatches) -> PublishedBatch:
        now = self._clock.now_ms()
        attached, publishing = self._remembered(batch, infos, now)
        position, digest = self._ledger.appending.next_position, digest_of(staged.encode(0, 0))
        expires_ms = batch.expiry(now, self._settings)
        state = PublishedBatch(batch.number, now, expires_ms, *position, digest, content=batch.content)
        await self._list.commit(attached=attached, publishing={**publishing, batch.query: state})
        return state

    # --- after a former owner ----------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Looks for the entries of batches that were recorded and not confirmed; forgets those that are not there."""
        ledgers = self._list
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
        for info in self._list.after(state.ledger_id - 1, len(self._list.ledgers)):
            if info.stored_id != info.ledger_id:
                continue  # it was attached
            entry_id = recorded[1] if info.ledger_id == recorded[0] else 0
            while entry_id < info.entries:
                try:
                    found = await self._ledger.reading.read(info.ledger_id, entry_id, max_bytes=READ_BYTES)
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


async def _all_of(looks: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Side by side; the first failure ends all."""
    tasks = [awaited(look) for look in looks]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()

"""ATTACH_LEDGERS: closed staged ledgers become part of the topic, all of a batch at once, each batch of a query once.

A batch of few bytes is published instead (`publish`); otherwise:

1. A batch that the topic has (`queries.done_before`) is done; what of its ledgers is still staged goes.
2. Every ledger is looked at: staged, closed, its last entry says how many messages and bytes there are, as do the asking
   side and the metadata: a wrong count would shift all later offsets of the topic. Then its entries are: what they hold is
   what a producer may send (`proto.message_rules`), and they follow one another from message 0 on.
3. The topic's open ledger is closed, once what is pending there is confirmed; appending goes on afterwards in the next one.
4. Position ids are drawn: they rise above all that the list had, so message ids grow along the topic.
5. One compare-and-set of the ledger list: the rows, `attached[query]`, and ledgers without entries among `trimmed`.
   Before it nobody sees anything, after it everybody sees all. An outcome that is not known is settled by reading back; if
   that fails too, the next change of the list meets the conflict, the topic is loaded anew, and whoever asks again learns
   from the record whether the batch is done.
6. The nodes of the staged ledgers go. A crash before that leaves nodes whose ledgers the list names: they mean nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from magnetar.ledger import LedgerMetadata
from magnetar.metadata.ledgers import ledger_path
from magnetar.proto.errors import InvalidArgument, LedgerNotFound, MalformedFrame
from magnetar.runtime.tasks import TaskSet, awaited

from ..log.managed_ledger import ManagedLedger
from ..log.reading import measure
from ..log.records import AttachedQuery, LedgerInfo
from ..topics.components import Components
from .names import check_text, decode_rows
from .publish import SmallBatches, read_staged, staged_entries
from .queries import Batch, done_before, expiry, remembered
from .staging import Staging

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
    """Of one topic."""

    def __init__(self, ledger: ManagedLedger[Any], staging: Staging, components: Components) -> None:
        self._ledger = ledger
        self._staging = staging
        self._components = components
        self._small = SmallBatches(ledger, staging, components)
        # What producers may send; who writes entries at once makes batches of half a megabyte, whatever messages may have.
        self._max_batch_bytes = max(components.settings.max_group_bytes, _BATCH_BYTES)
        self._looks = asyncio.Semaphore(_LOOKS_AT_ONCE)
        self._reads = asyncio.Semaphore(_SMALL_READS_AT_ONCE)
        # One request of a query at a time; a lock lives as long as somebody has it or waits.
        self._queries: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._publishing = TaskSet("publish a batch")

    async def load(self) -> None:
        """Learns what became of the small batches that a former owner recorded."""
        await self._small.load()

    def last_batch(self, query: str) -> int:
        """The answer to QueryState: -1 if nothing of this query is known."""
        last = self._ledger.list.record.last_of(check_text("query", query))
        return -1 if last is None else last.batch

    def _done(self, batch: Batch) -> bool:
        return done_before(self._ledger.list.record, batch)

    async def attach(self, batch: Batch, rows: list[Row]) -> dict[str, Any]:
        """The answer to AttachLedgers. Raises InvalidArgument for ledgers that cannot be attached; then nothing changed."""
        check_text("query", batch.query)
        if not 0 <= batch.number < 1 << 63 or batch.remember_ms < 0 or not 0 <= batch.content < 1 << 64:
            raise InvalidArgument(f"batch {batch.number} of query {batch.query!r} is not possible")
        if self._done(batch):
            return await self._done_before(rows)
        infos = await self._look_at_all(self._look(row) for row in rows)
        filled = [info for info in infos if info.entries]
        size = sum(info.size for info in filled)
        if 0 < size < self._components.settings.attach_min_bytes:
            # Not to be left when the caller's connection breaks: who asks again waits for the outcome.
            task = self._publishing.begin(self._publish(batch, rows, filled), ended=self._published)
            answer = await asyncio.shield(task)
            if answer is not None:
                return answer
        stride = max(-(-size // _CHECKED_BYTES), 1)
        await self._look_at_all(self._check(info, stride) for info in filled)
        return await self._attach(batch, rows, infos)

    async def _look_at_all(self, looks: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        looked = [awaited(look) for look in looks]
        try:
            return await asyncio.gather(*looked)
        finally:
            for look in looked:
                look.cancel()

    async def _check(self, info: LedgerInfo, stride: int) -> None:
        """Raises InvalidArgument unless a broker would have made such entries."""
        async with self._looks:
            async for _ in staged_entries(self._components.ledgers, info, self._max_batch_bytes, stride):
                pass

    def _published(self, task: asyncio.Task[dict[str, Any] | None]) -> None:
        if not task.cancelled():
            task.exception()  # the caller gets it, and may have left

    async def stop(self) -> None:
        """To be called once the ledger is closed: whoever waits for it gets an error, and this returns."""
        await self._publishing.wait()

    async def _publish(self, batch: Batch, rows: list[Row], infos: list[LedgerInfo]) -> dict[str, Any] | None:
        """The answer; None if one entry cannot hold the batch."""
        async with self._queries.setdefault(batch.query, asyncio.Lock()):
            if self._done(batch):
                return await self._done_before(rows)
            async with self._reads:
                staged = await read_staged(self._components.ledgers, infos, self._max_batch_bytes)
                if not staged.fits():
                    return None
                answer = await self._small.publish(batch, infos, staged)
        if answer is not None:
            await self._staging.drop_or_leave(row.stored_id for row in rows)
        return await self._done_before(rows) if answer is None else answer

    async def _attach(self, batch: Batch, rows: list[Row], infos: list[LedgerInfo]) -> dict[str, Any]:
        async with self._queries.setdefault(batch.query, asyncio.Lock()):
            if self._done(batch):
                return await self._done_before(rows)
            ids = await self._draw(sum(info.entries > 0 for info in infos))

            async def work() -> dict[str, Any] | None:
                return await self._commit(batch, infos, ids)

            edit = self._ledger.appending.edit_closed if ids else self._ledger.changes.edit
            answer = await edit(work)
        return await self._done_before(rows) if answer is None else answer

    async def _done_before(self, rows: list[Row]) -> dict[str, Any]:
        await self._staging.drop(row.stored_id for row in rows)
        return {"attached": False, "first": None, "end": list(self._ledger.list.end)}

    async def _look(self, row: Row) -> LedgerInfo:
        """Makes the ledger's row of the list, without its place. Raises InvalidArgument."""
        async with self._looks:
            stored_id = row.stored_id
            await self._staging.require(stored_id)
            found = await self._components.metadata.get(ledger_path(stored_id))
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
        reader = await self._components.ledgers.open(info.stored_id, recover=False)
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

    async def _draw(self, count: int) -> list[int]:
        """Rising position ids; one synced write, however many."""
        first = await self._components.ledgers.next_id(count) if count else 0
        return list(range(first, first + count))

    async def _commit(self, batch: Batch, infos: list[LedgerInfo], ids: list[int]) -> dict[str, Any] | None:
        """Steps 4 to 6, while nothing else changes the list. The answer; None: the batch was done before."""
        ledgers, settings = self._ledger.list, self._components.settings
        record = ledgers.record
        if self._done(batch):  # by a request whose asker left
            return None
        for info in infos:
            if info.stored_id not in self._staging or ledgers.stored(info.stored_id) is not None:
                raise InvalidArgument(f"ledger {info.stored_id} was attached or discarded meanwhile")
        now = self._components.clock.now_ms()
        attached, publishing = remembered(record, batch.query, now, settings)
        attached[batch.query] = AttachedQuery(batch.number, now, expiry(batch, now, settings), batch.content)
        filled = [info for info in infos if info.entries]
        if filled and ids[0] <= ledgers.highest_id:  # another ledger came meanwhile
            ids[:] = await self._draw(len(filled))
        next_index, committed_ms = record.next_index, self._ledger.appending.now_ms()
        for info, ledger_id in zip(filled, ids, strict=True):
            info.ledger_id, info.first_index = ledger_id, next_index
            info.first_append_ms = info.last_append_ms = (
                committed_ms  # its entries say when they were written
            )
            next_index += info.messages
        await ledgers.commit(
            append=filled,
            delete=[info.stored_id for info in infos if not info.entries],
            next_index=next_index,
            attached=attached,
            publishing=publishing,
        )
        self._staging.unregister(info.stored_id for info in infos)
        counters = self._components.published
        counters.attached_ledgers += len(filled)
        counters.attached_messages += sum(info.messages for info in filled)
        first = filled[0].ledger_id if filled else None
        return {"attached": True, "first": first, "end": list(ledgers.end)}

"""Where a subscription starts or seeks to: earliest, latest, a message id (inclusive), or a time.

A time is looked for in the ledgers' append times, then by binary search in the append times of the ledger's entries, then
in the publish times of one entry's batches: nothing published at or after the time is skipped while clocks agree.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from magnetar.proto.batch import decode_batch_header
from magnetar.proto.entry import Entry
from magnetar.proto.errors import InvalidArgument
from magnetar.proto.ids import MessageId

from ..cursors.core.acks import EntryKey, Position
from .ledger_list import LedgerList

Start = tuple[str, Any]
ReadEntry = Callable[[EntryKey], Awaitable[Entry]]


async def find_position(ledgers: LedgerList, read_entry: ReadEntry, start: Start) -> Position:
    """Raises InvalidArgument for what is none of the forms."""
    kind, value = start
    if kind == "earliest":
        return ledgers.start
    if kind == "latest":
        return ledgers.end
    if kind == "id" and isinstance(value, bytes):
        return _at_id(ledgers, MessageId.from_bytes(value))
    if kind == "time" and isinstance(value, int):
        return await _at_time(ledgers, read_entry, value)
    raise InvalidArgument(
        f"not a place to start: {kind!r} (want earliest, latest, an id of 24 bytes, or a time in ms since the epoch)"
    )


def _at_id(ledgers: LedgerList, message_id: MessageId) -> Position:
    """The message itself; the next one that there is if it was trimmed; the end if it does not exist yet."""
    position = (message_id.ledger, message_id.entry, message_id.index)
    if position < ledgers.start:
        return ledgers.start
    return min(ledgers.normalise(position), ledgers.end)


async def _at_time(ledgers: LedgerList, read_entry: ReadEntry, time_ms: int) -> Position:
    for info in [*ledgers.archived_ledgers, *ledgers.ledgers]:
        if not info.entries or info.last_append_ms < time_ms:
            continue
        low, high = 0, info.entries - 1  # the answer is in low..high
        while low < high:
            middle = (low + high) // 2
            if (await read_entry((info.ledger_id, middle))).append_time_ms < time_ms:
                low = middle + 1
            else:
                high = middle
        entry = await read_entry((info.ledger_id, low))
        index = first_published(entry, time_ms)
        return (info.ledger_id, low, index) if index < entry.message_count else (info.ledger_id, low + 1, 0)
    return ledgers.end


def first_published(entry: Entry, time_ms: int) -> int:
    """Index of the first message of the first batch published at or after `time_ms`; past the end if none is."""
    for position in range(entry.batch_count):
        start, end = entry.batch_bounds(position)
        # A batch without bytes: a compaction left nothing of it.
        if end > start and decode_batch_header(entry.data, start).publish_time_ms >= time_ms:
            return entry.batch_start_index(position)
    count: int = entry.message_count
    return count

"""Where a subscription starts or seeks to: earliest, latest, a message id (inclusive), or a time.

A time is looked for in the ledgers' append times, then by binary search in the append times of the ledger's entries, then
in the publish times of one entry's batches: nothing published at or after the time is skipped while clocks agree.

What is to expire goes by append times alone: they are of the broker's clock, and never fall along a topic.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from magnetar.proto.batch import decode_batch_header
from magnetar.proto.entry import Entry
from magnetar.proto.errors import InvalidArgument
from magnetar.proto.ids import MessageId

from ..cursors.core.acks import EntryKey, Position
from .ledger_list import LedgerList, first_appended_at
from .records import LedgerInfo

Start = tuple[str, Any]
ReadEntry = Callable[[EntryKey], Awaitable[Entry]]


async def find_position(ledgers: LedgerList, read_entry: ReadEntry, start: Start) -> Position:
    """Raises as check_start."""
    check_start(start)
    kind, value = start
    if kind == "earliest":
        return ledgers.start
    if kind == "latest":
        return ledgers.end
    if kind == "id":
        return _at_id(ledgers, MessageId.from_bytes(value))
    return await _at_time(ledgers, read_entry, value)


def check_start(start: Start) -> None:
    """Raises InvalidArgument for what is none of the forms."""
    kind, value = start
    if kind == "id" and isinstance(value, bytes):
        MessageId.from_bytes(value)
    elif kind not in ("earliest", "latest") and not (kind == "time" and isinstance(value, int)):
        raise InvalidArgument(
            f"not a place to start: {kind!r} (want earliest, latest, an id of 24 bytes, or a time in ms since the epoch)"
        )


def _at_id(ledgers: LedgerList, message_id: MessageId) -> Position:
    """The message itself; the next one that there is if it was trimmed; the end if it does not exist yet."""
    position = message_id[:3]
    if position < ledgers.start:
        return ledgers.start
    return min(ledgers.normalise(position), ledgers.end)


def skips_trimmed(ledgers: LedgerList, start: Start, position: Position) -> bool:
    """True if messages between the id that was asked for and `position`, which `find_position` made of it, were trimmed."""
    kind, value = start
    if kind != "id":
        return False
    wanted = MessageId.from_bytes(value)[:3]
    found = ledgers.info(position[0])
    first_index = ledgers.message_count if found is None else found.first_index
    info = ledgers.info(wanted[0])
    if info is not None:  # or it ends before the id, and what follows it may be missing
        return position[0] != wanted[0] and first_index > info.first_index + info.messages
    if wanted >= ledgers.record.trimmed_end:
        return False
    before = ledgers.last_before(wanted[0])
    return first_index > (0 if before is None else before.first_index + before.messages)


async def _at_time(ledgers: LedgerList, read_entry: ReadEntry, time_ms: int) -> Position:
    info = _appended_at(ledgers, time_ms)
    if info is None:
        return ledgers.end
    entry_id = await _first_in(info, read_entry, time_ms, 0)
    entry = await read_entry((info.ledger_id, entry_id))
    index = first_published(entry, time_ms)
    return (
        (info.ledger_id, entry_id, index)
        if index < entry.message_count
        else (info.ledger_id, entry_id + 1, 0)
    )


async def find_expired(
    ledgers: LedgerList, read_entry: ReadEntry, time_ms: int, mark_delete: Position
) -> Position:
    """The position from `mark_delete` on before which everything was appended before `time_ms`, in whole entries.

    Reads the entry at the mark-delete position alone if nothing is to expire, else one for each halving of a ledger; none
    of an archived ledger, which expires as a whole. Nothing that it reads is trimmed while a cursor stands at `mark_delete`.
    """
    mark_delete = ledgers.normalise(mark_delete)
    info = _appended_at(ledgers, time_ms)
    if info is None:
        return max(mark_delete, ledgers.end)
    start = (info.ledger_id, 0, 0)
    if info.ledger_id < mark_delete[0]:
        return mark_delete
    # Append times of an attached ledger's entries are older than it is as a part of the topic.
    if info.first_append_ms >= time_ms or ledgers.archived(info.ledger_id) is not None:
        return max(mark_delete, start)
    first = max(mark_delete, start)[1]
    if first >= info.entries or (await read_entry((info.ledger_id, first))).append_time_ms >= time_ms:
        return max(mark_delete, start)
    return (info.ledger_id, await _first_in(info, read_entry, time_ms, first), 0)


def _appended_at(ledgers: LedgerList, time_ms: int) -> LedgerInfo | None:
    """The first ledger with an entry that was appended at `time_ms` or later."""
    for found in (ledgers.archived_ledgers, ledgers.ledgers):
        at = first_appended_at(found, time_ms)
        if at < len(found) and found[at].entries:
            return found[at]
    return None


async def _first_in(info: LedgerInfo, read_entry: ReadEntry, time_ms: int, low: int) -> int:
    """The first entry from `low` on that was appended at `time_ms` or later, in a ledger that has one."""
    return await first_appended(
        lambda entry_id: read_entry((info.ledger_id, entry_id)), low, info.entries - 1, time_ms
    )


async def first_appended(read: Callable[[int], Awaitable[Entry]], low: int, high: int, time_ms: int) -> int:
    """The first of low..high-1 whose entry was appended at `time_ms` or later; `high` if none was."""
    while low < high:
        middle = (low + high) // 2
        if (await read(middle)).append_time_ms < time_ms:
            low = middle + 1
        else:
            high = middle
    return low


def first_published(entry: Entry, time_ms: int) -> int:
    """Index of the first message of the first batch published at or after `time_ms`; past the end if none is."""
    for position in range(entry.batch_count):
        start, end = entry.batch_bounds(position)
        # A batch without bytes: a compaction left nothing of it.
        if end > start and decode_batch_header(entry.data, start).publish_time_ms >= time_ms:
            return entry.batch_start_index(position)
    count: int = entry.message_count
    return count

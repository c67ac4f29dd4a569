"""The operations of all commands except AddEntry: they check arguments, call the engine and make the answer.

A new operation of a bookie is a command (`proto.commands`), a function here, and the part of the bookie that does it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from magnetar.proto.commands import (
    ENTRY_RANGE_ROW,
    LEDGER_DELETED,
    LEDGER_FENCED,
    LEDGER_ROW,
    BookieInfo,
    Command,
    DeleteLedger,
    ForceLedger,
    ListEntries,
    ListLedgers,
    ReadEntries,
    ReadLastConfirmed,
    WaitLastConfirmed,
    WriteLastConfirmed,
    encode_rows,
)
from magnetar.proto.errors import (
    EntryDamaged,
    EntryNotFound,
    InvalidArgument,
    RequestTimeout,
    UnknownLedgerState,
)
from magnetar.proto.stripe import EVERY_ENTRY, Stripe

from ..engine import Bookie
from ..reads import LongPollResult
from ..status import bookie_info

_MAX_LONG_POLL_BYTES = 1 << 20


class Answer(NamedTuple):
    """Result and payload of an Ok."""

    result: Any = None
    payload: bytes | list[bytes] = b""


_Perform = Callable[[Bookie, int, Any], Awaitable[Answer]]
_PERFORM: dict[type[Command], _Perform] = {}
# What a principal must be allowed to do; reads that fence need more (see `authorize`).
OPERATIONS: dict[type[Command], str] = {WaitLastConfirmed: "read"}


def _performs(command: type[Command], operation: str) -> Callable[[_Perform], _Perform]:
    """Registers what carries out a command, and what a principal must be allowed to do for it."""

    def register(perform: _Perform) -> _Perform:
        _PERFORM[command], OPERATIONS[command] = perform, operation
        return perform

    return register


async def perform(bookie: Bookie, limit: int, command: Command) -> Answer:
    """Carries out one of `OPERATIONS` but the long poll. Raises the error to answer.

    `limit`: the bytes of entries that the peer takes in one frame, whatever it asks for; 0: there is no frame.
    """
    bookie.check_alive()
    return await _PERFORM[type(command)](bookie, limit, command)


@_performs(ReadEntries, "read")
async def _read(bookie: Bookie, limit: int, command: ReadEntries) -> Answer:
    entries, confirmed = await bookie.read(
        command.ledger_id,
        command.first,
        command.last,
        max_bytes=_bounded(command.max_bytes or limit, limit),
        fence=command.fence,
        stripe=Stripe(command.cycle, command.residues) if command.cycle != 1 else EVERY_ENTRY,
    )
    return Answer({"sizes": [len(entry) for entry in entries], "last_add_confirmed": confirmed}, entries)


@_performs(ReadLastConfirmed, "read")
async def _read_last_confirmed(bookie: Bookie, _: int, command: ReadLastConfirmed) -> Answer:
    confirmed, last_entry = await bookie.read_last_confirmed(command.ledger_id, fence=command.fence)
    return Answer({"last_add_confirmed": confirmed, "last_entry": last_entry})


@_performs(WriteLastConfirmed, "add")
async def _write_last_confirmed(bookie: Bookie, _: int, command: WriteLastConfirmed) -> Answer:
    await bookie.write_last_confirmed(command.ledger_id, command.last_add_confirmed)
    return Answer()


@_performs(BookieInfo, "info")
async def _info(bookie: Bookie, _: int, _command: BookieInfo) -> Answer:
    return Answer(bookie_info(bookie))


@_performs(ListLedgers, "list")
async def _list_ledgers(bookie: Bookie, _: int, command: ListLedgers) -> Answer:
    _check_count(command.count)
    ledgers, more = bookie.list_ledgers(command.after, command.count)
    rows = [
        (
            ledger.ledger_id,
            LEDGER_FENCED * ledger.fenced | LEDGER_DELETED * ledger.deleted,
            ledger.last_entry,
            ledger.last_add_confirmed,
        )
        for ledger in ledgers
    ]
    return Answer({"more": more}, encode_rows(LEDGER_ROW, rows))


@_performs(ListEntries, "list")
async def _list_entries(bookie: Bookie, _: int, command: ListEntries) -> Answer:
    _check_count(command.count)
    ranges, following = await bookie.list_entries(command.ledger_id, command.first, command.count)
    return Answer({"next": following}, encode_rows(ENTRY_RANGE_ROW, ranges))


@_performs(DeleteLedger, "delete")
async def _delete_ledger(bookie: Bookie, _: int, command: DeleteLedger) -> Answer:
    await bookie.delete_ledger(command.ledger_id)
    return Answer()


@_performs(ForceLedger, "add")
async def _force(bookie: Bookie, _: int, command: ForceLedger) -> Answer:
    await bookie.force(command.ledger_id)
    return Answer()


async def wait_for_last_confirmed(bookie: Bookie, command: WaitLastConfirmed) -> LongPollResult:
    """The waiting part of a long poll. Its entries are read as for other requests."""
    if min(command.timeout_ms, command.max_entries, command.max_bytes) < 0:
        raise InvalidArgument("timeout_ms, max_entries and max_bytes of WaitLastConfirmed cannot be negative")
    return await bookie.wait_last_confirmed(
        command.ledger_id, command.last_add_confirmed, timeout_s=command.timeout_ms / 1000
    )


async def answer_long_poll(
    bookie: Bookie, limit: int, command: WaitLastConfirmed, result: LongPollResult
) -> Answer:
    """The reading part."""
    entries: list[bytes] = []
    first = command.last_add_confirmed + 1
    if command.max_entries and result.last_add_confirmed >= first:
        limit = _bounded(command.max_bytes or _MAX_LONG_POLL_BYTES, limit)
        last = min(result.last_add_confirmed, first + command.max_entries - 1)
        # Another bookie has them, or their reader asks for one by id and gets the error.
        with contextlib.suppress(EntryNotFound, EntryDamaged, RequestTimeout, UnknownLedgerState):
            entries, _ = await bookie.read(command.ledger_id, first, last, max_bytes=limit)
    sizes = [len(entry) for entry in entries]
    return Answer(
        {"last_add_confirmed": result.last_add_confirmed, "fenced": result.fenced, "sizes": sizes}, entries
    )


def _bounded(wanted: int, limit: int) -> int:
    return min(wanted, limit) if limit else wanted


def _check_count(count: int) -> None:
    if count < 1:
        raise InvalidArgument(f"a list of {count} rows: it has 1 or more")

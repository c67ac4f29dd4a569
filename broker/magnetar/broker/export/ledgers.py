"""TOPIC_LEDGERS: the ledger list as of this moment, with what a reader needs to go to the bookies itself.

All counts of a page are taken in one step, before anything is awaited; an open ledger counts what is confirmed then, which
never changes. A list of 10,000 ledgers is ten pages, 2.5 MB in all, and 0.2 s of the broker (embedded store), in turns of
50 ledgers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from magnetar.metadata import MetadataStore
from magnetar.metadata.ledgers import ledger_path
from magnetar.proto.errors import BookieUnavailable, InvalidArgument
from magnetar.runtime.connection.addresses import format_address

from ..cursors.core.acks import Position
from ..log.ledger_list import LedgerList
from ..log.records import LedgerInfo
from ..resources.stores import Bookies

MAX_LEDGERS_PER_PAGE = 1_000
# A ledger whose ensemble changed often has large metadata; a page must fit into every peer's frame.
MAX_PAGE_BYTES = 1024 * 1024
_LEDGERS_PER_TURN = 50


class LedgerRow(msgspec.Struct, array_like=True):
    """A ledger at the bookies. Times in ms since the epoch, size in payload bytes."""

    position_id: int
    stored_id: int
    first_offset: int
    entries: int
    messages: int
    size: int
    first_append_ms: int
    last_append_ms: int
    closed: bool
    metadata: bytes = b""


class ArchivedRow(LedgerRow, array_like=True):
    """An archived one: without metadata, which is deleted, but with a field that no other row has."""

    location: str = ""


class LedgerPage(msgspec.Struct, frozen=True):
    """Ledgers of a topic, in its order: the answer to TopicLedgers (WIRE.md)."""

    ledgers: list[LedgerRow]
    more: bool
    end: Position  # after the last confirmed message
    bookies: dict[str, str]
    identities: dict[str, BookieRow]  # whom the broker has verified there
    end_offset: int  # topic-wide index of `end`
    created_ms: int  # of a topic that was deleted and made again it is another one


async def topic_ledgers(
    ledgers: LedgerList, metadata: MetadataStore, bookies: Bookies | None, *, after: int, count: int
) -> LedgerPage:
    """Ledgers with a position id above `after`. Raises InvalidArgument."""
    if count < 1:
        raise InvalidArgument(f"a page of {count} ledgers is not possible; ask for at least 1")
    most = min(count, MAX_LEDGERS_PER_PAGE)
    rows: list[LedgerRow] = [
        _archived(info, location) for info, location in ledgers.archived_after(after, most + 1)
    ]
    rows += [LedgerRow(*_figures(info)) for info in ledgers.after(after, most + 1 - len(rows))]
    end, end_offset = ledgers.end, ledgers.message_count
    more = len(rows) > most
    page: list[LedgerRow] = []
    named: dict[str, str] = {}
    size = 0
    for number, row in enumerate(rows[:most]):
        if not isinstance(row, ArchivedRow):
            if number % _LEDGERS_PER_TURN == _LEDGERS_PER_TURN - 1:
                await asyncio.sleep(0)
            stored = await metadata.get(ledger_path(row.stored_id))
            if (archived := ledgers.archived(row.position_id)) is not None:  # meanwhile
                row = _archived(*archived)
            elif stored is not None:
                row.metadata = stored.value
            elif ledgers.info(row.position_id) is None:
                continue  # trimmed meanwhile
        size += 100 + len(row.location if isinstance(row, ArchivedRow) else row.metadata)
        if page and size > MAX_PAGE_BYTES:
            more = True
            break
        name_bookies(named, bookies, row.metadata)
        page.append(row)
    identities = identities_of(named, bookies)
    return LedgerPage(page, more, end, named, identities, end_offset, ledgers.record.created_ms)


def _archived(info: LedgerInfo, location: str) -> ArchivedRow:
    return ArchivedRow(*_figures(info), location=location)


def _figures(info: LedgerInfo) -> tuple[int, int, int, int, int, int, int, int, bool]:
    return (
        info.ledger_id, info.stored_id, info.first_index, info.entries, info.messages, info.size,
        info.first_append_ms, info.last_append_ms, info.closed,
    )  # fmt: skip


# --- the bookies -----------------------------------------------------------------------------------------------------


class BookieRow(NamedTuple):
    """Who a bookie is, as this process has verified it (rule 35)."""

    cluster: int
    bookie_id: str
    instance: int
    start: int
    incarnation: int


class WritableBookie(NamedTuple):
    """One that takes new entries."""

    bookie: str
    address: str  # "host:port"
    rack: str
    zone: str
    group: str


class _Ensembles(msgspec.Struct):
    """What is needed here of ledger metadata: 2 us instead of 50 for all of it, and lists have thousands."""

    ensembles: list[tuple[int, list[str]]]


_decode = msgspec.msgpack.Decoder(_Ensembles).decode


def name_bookies(found: dict[str, str], bookies: Bookies | None, metadata: bytes) -> None:
    """Adds to `found` ({id: "host:port"}) the bookies that ledger metadata names; those that nobody knows are left out."""
    if bookies is None:
        return
    try:
        ensembles = _decode(metadata).ensembles
    except msgspec.MsgspecError:  # damaged: whoever reads the ledger gets the error
        return
    for bookie in {bookie: None for _, names in ensembles for bookie in names if bookie not in found}:
        if address := _address(bookies, bookie):
            found[bookie] = address


def identities_of(names: Iterable[str], bookies: Bookies | None) -> dict[str, BookieRow]:
    """By bookie, of those that this process has verified."""
    found = {} if bookies is None else {bookie: bookies.identity(bookie) for bookie in names}
    return {
        bookie: BookieRow(one.cluster, one.bookie_id, one.instance, one.start, one.incarnation)
        for bookie, one in found.items()
        if one.instance
    }


def writable_bookies(bookies: Bookies | None) -> list[WritableBookie]:
    """Those whose addresses are known."""
    return (
        [
            WritableBookie(bookie, address, *bookies.labels(bookie))
            for bookie in bookies.writable()
            if (address := _address(bookies, bookie))
        ]
        if bookies is not None
        else []
    )


def _address(bookies: Bookies, bookie: str) -> str:
    """ "" if nobody knows it."""
    try:
        return format_address(bookies.address(bookie))
    except BookieUnavailable:
        return ""

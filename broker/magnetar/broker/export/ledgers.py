"""TOPIC_LEDGERS: the ledger list as of this moment, with what a reader needs to go to the bookies itself.

All counts of a page are taken in one step, before anything is awaited; an open ledger counts what is confirmed then, which
never changes. A list of 10,000 ledgers is ten pages, 2.5 MB in all, and 0.2 s of the broker (embedded store), in turns of
50 ledgers.
"""

from __future__ import annotations

import asyncio
from typing import Any

from magnetar.metadata import MetadataStore
from magnetar.metadata.ledgers import ledger_path
from magnetar.proto.errors import InvalidArgument

from ..log.ledger_list import LedgerList
from ..log.records import ArchivedLedger, LedgerInfo
from ..resources.stores import Bookies
from .addresses import identities_of, name_bookies

MAX_LEDGERS_PER_PAGE = 1_000
# A ledger whose ensemble changed often has large metadata; a page must fit into every peer's frame.
MAX_PAGE_BYTES = 1024 * 1024
_LEDGERS_PER_TURN = 50
_FIGURES = 9


async def topic_ledgers(
    ledgers: LedgerList, metadata: MetadataStore, bookies: Bookies | None, *, after: int, count: int
) -> dict[str, Any]:
    """The answer to TopicLedgers (WIRE.md). Raises InvalidArgument."""
    if count < 1:
        raise InvalidArgument(f"a page of {count} ledgers is not possible; ask for at least 1")
    most = min(count, MAX_LEDGERS_PER_PAGE)
    rows = [_archived_row(one) for one in ledgers.archived_after(after, most + 1)]
    rows += [_figures(info) for info in ledgers.after(after, most + 1 - len(rows))]
    end, end_offset = ledgers.end, ledgers.message_count
    more = len(rows) > most
    page: list[list[Any]] = []
    named: dict[str, str] = {}
    size = 0
    for number, row in enumerate(rows[:most]):
        if len(row) == _FIGURES:
            if number % _LEDGERS_PER_TURN == _LEDGERS_PER_TURN - 1:
                await asyncio.sleep(0)
            stored = await metadata.get(ledger_path(row[1]))
            if (archived := ledgers.archived(row[0])) is not None:  # meanwhile
                row = _archived_row(archived)
            elif stored is None and ledgers.info(row[0]) is None:
                continue  # trimmed meanwhile
            else:
                row.append(b"" if stored is None else stored.value)
        size += 100 + sum(len(field) for field in row[_FIGURES:])
        if page and size > MAX_PAGE_BYTES:
            more = True
            break
        name_bookies(named, bookies, row[_FIGURES])
        page.append(row)
    return {
        "ledgers": page, "more": more, "end": list(end), "bookies": named,
        "identities": identities_of(named, bookies),
        "end_offset": end_offset, "created_ms": ledgers.record.created_ms,
    }  # fmt: skip


def _archived_row(one: ArchivedLedger) -> list[Any]:
    """Without metadata, which is deleted, but with a field that no other row has: where the archive is."""
    return [*_figures(one.info), b"", one.location]


def _figures(info: LedgerInfo) -> list[Any]:
    return [
        info.ledger_id, info.stored_id, info.first_index, info.entries, info.messages, info.size,
        info.first_append_ms, info.last_append_ms, info.closed,
    ]  # fmt: skip

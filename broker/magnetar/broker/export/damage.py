"""REPORT_DAMAGE: what an audit found wrong at the bookies comes into the repair queue (`metadata.damage`).

Clients do not write to the metadata store, so the broker does, once it has seen that a row can be true: the ledger belongs
to the topic, the entries are confirmed, and the bookie is in their ensembles. Whether a copy really is damaged the broker
does not look at: the queue asks for repair, and whoever repairs reads the copy again before replacing it.

How much can be queued is bounded by what there is: a node for each bookie and ledger of the topic, of at most 500 ranges.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

import msgspec

from magnetar.ledger import LedgerMetadata
from magnetar.metadata import MetadataStore
from magnetar.metadata.damage import Ranges, add_ranges
from magnetar.metadata.ledgers import ledger_path
from magnetar.proto.errors import DataDirectoryError, InvalidArgument, LedgerNotFound
from magnetar.proto.ids import TopicName

from ..log.ledger_list import LedgerList
from .names import decode_rows

MAX_ROWS_PER_REPORT = 1_000
MAX_REASON_CHARS = 200
_log = logging.getLogger(__name__)


class DamageRow(NamedTuple):
    """Entries `first` to `last`, both included, of the ledger that bookies know as `stored_id`."""

    stored_id: int
    bookie: str
    first: int
    last: int
    reason: str


class DamageReported(msgspec.Struct, frozen=True):
    """How many copies of ledgers were queued for repair by this call, and before."""

    queued: int
    known: int


def decode_damage(payload: bytes) -> list[DamageRow]:
    """The payload of ReportDamage. Raises InvalidArgument."""
    rows = decode_rows("the damage to report", payload, DamageRow, MAX_ROWS_PER_REPORT)
    for row in rows:
        if not 0 <= row.first <= row.last:
            raise InvalidArgument(f"entries {row.first} to {row.last} are no range")
        if len(row.reason) > MAX_REASON_CHARS or not row.reason.isprintable():
            raise InvalidArgument(
                f"not a reason of damage: {row.reason[:40]!r} (want at most {MAX_REASON_CHARS} printable characters)"
            )
    return rows


async def report_damage(
    name: TopicName, ledgers: LedgerList, metadata: MetadataStore, rows: list[DamageRow]
) -> DamageReported:
    """The nodes are durable when it returns.

    Raises LedgerNotFound for a ledger that is not (any more) the topic's, InvalidArgument for entries that it does not have
    or a bookie that is not in their ensembles: then nothing was written. DataDirectoryError names nodes that cannot be read,
    once the others are written.
    """
    found = {stored_id: await _metadata_of(name, metadata, stored_id) for stored_id in _ids(rows)}
    nodes: dict[tuple[str, int], Ranges] = {}
    for row in rows:
        _check(name, ledgers, found[row.stored_id], row)
        nodes.setdefault((row.bookie, row.stored_id), []).append((row.first, row.last, row.reason))
    queued, unreadable = 0, list[str]()
    for (bookie, stored_id), ranges in nodes.items():
        try:
            queued += await add_ranges(metadata, bookie, stored_id, ranges)
        except DataDirectoryError as error:
            unreadable.append(error.message)
        await asyncio.sleep(0)
    if queued:
        _log.warning(
            "topic %s: an audit found damage: %d copies of ledgers are queued for repair", name, queued
        )
    if unreadable:
        raise DataDirectoryError("; ".join(unreadable))
    return DamageReported(queued, len(nodes) - queued)


def _ids(rows: list[DamageRow]) -> dict[int, None]:
    return dict.fromkeys(row.stored_id for row in rows)


async def _metadata_of(name: TopicName, metadata: MetadataStore, stored_id: int) -> LedgerMetadata:
    stored = await metadata.get(ledger_path(stored_id)) if 0 <= stored_id < 1 << 63 else None
    if stored is None:
        raise _not_here(name, stored_id)
    return LedgerMetadata.decode(stored.value, stored_id)


def _not_here(name: TopicName, stored_id: int) -> LedgerNotFound:
    return LedgerNotFound(f"ledger {stored_id} is not one of topic {name}", ledger_id=stored_id)


def _check(name: TopicName, ledgers: LedgerList, metadata: LedgerMetadata, row: DamageRow) -> None:
    info = ledgers.stored(row.stored_id)
    if info is None:
        raise _not_here(name, row.stored_id)
    if row.last >= info.entries:
        raise InvalidArgument(
            f"ledger {row.stored_id} has {info.entries} confirmed entries, and none up to {row.last}"
        )
    start = row.first
    while start <= row.last:
        if row.bookie not in metadata.ensemble_of(start).bookies:
            raise InvalidArgument(
                f"bookie {row.bookie[:100]!r} does not have entry {start} of ledger {row.stored_id}"
            )
        end = metadata.end_of_ensemble(start)
        start = row.last + 1 if end is None else end + 1

"""What the metadata store says of all ledgers of a cluster, whoever made them: where their copies are, which of them wait
for repair and who works on them, which copies are damaged.

All comes in pages, whose work is bounded as well: a page ends after as many rows as were asked for, 1 MiB of them, or
10,000 that were looked at, and says where the next one goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.metadata.damage import DAMAGED_PATH, damaged_path, decode_ranges
from magnetar.metadata.ledgers import LEDGERS_PER_PAGE, StoredLedgers
from magnetar.metadata.paths import AUDITOR_PATH, COOKIES_PATH
from magnetar.metadata.timed import TimedStore
from magnetar.proto.errors import InvalidArgument, LedgerNotFound, MagnetarError, NotFound
from magnetar.proto.ids import check_ids

from ..topics.registry import Broker
from .diagnosis import bookie_rows
from .operations import on_cluster

if TYPE_CHECKING:
    from magnetar.ledger.replication.queue import UnderreplicatedLedgers

K = TypeVar("K")
T = TypeVar("T")

MAX_ROWS: Final = 1_000
_READS: Final = 20  # at once, and in a turn of the loop
_MAX_BYTES = 1024 * 1024
_MAX_LOOKED = 10_000
_MAX_PAGES = 10  # of the queue of repairs, whose ledgers are counted
_TIMEOUT_S = 10.0


class StoredFragment(msgspec.Struct, frozen=True):
    """Entries of a ledger that are on the same bookies."""

    first: int
    last: int | None  # None: entries still come
    bookies: list[str]


class StoredLedger(msgspec.Struct, frozen=True):
    """A ledger, as its record in the metadata store says."""

    ledger: int
    state: str  # "open", "in_recovery", "closed", or "unreadable": then nothing but `error` is known
    ensemble_size: int = 0
    write_quorum: int = 0
    ack_quorum: int = 0
    created_ms: int = 0
    last_entry: int = -1  # these two are known once it is closed
    bytes: int = 0
    properties: dict[str, str] = {}  # whose it is: "kind", and under the name of that kind a topic or a path
    fragments: list[StoredFragment] = []
    error: str = ""


class Repair(msgspec.Struct, frozen=True):
    """Why a ledger is in the queue of repairs, and who works on it."""

    bookies: Mapping[str, str]  # whose copies are looked at: "lost", "draining", "check"
    placement: bool  # copies are to be moved as the placement policy wants them
    since_ms: int
    note: str  # why the last attempt did not succeed
    worker: str  # the process that repairs it now; "": it waits for one


class DamagedCopy(msgspec.Struct, frozen=True):
    """What a bookie has damaged of a ledger; it is made anew from other copies."""

    bookie: str
    ledger: int
    ranges: list[tuple[int, int, str]]  # first and last entry, and how that was found
    error: str = ""  # the report cannot be read


class LedgerFound(msgspec.Struct, frozen=True):
    """All that is known of a ledger."""

    ledger: int
    stored: StoredLedger | None  # None: it was deleted, which its repair will find
    bookies: dict[str, str]  # that have copies: why this broker does not write there; "": it does
    repair: Repair | None  # None: it is not in the queue
    damage: list[DamagedCopy]


class LedgersFound(msgspec.Struct, frozen=True):
    """Ledgers, ids rising. `next` here and below: the `after` of the next page, which may be empty; None: there is none."""

    ledgers: list[StoredLedger]
    next: int | None


class RepairsFound(msgspec.Struct, frozen=True):
    """Ledgers that are short of copies, or may be, ids rising."""

    waiting: int  # in all, or in the first ten pages of the queue, which hold 10,000 where all wait
    auditor: str  # the process that finds them; "": none does
    ledgers: list[LedgerFound]
    next: int | None


class DamageFound(msgspec.Struct, frozen=True):
    """Copies that are damaged, by bookie and ledger."""

    copies: list[DamagedCopy]
    next: str | None


class StoredService:
    """`BrokerService.stored`. What needs the room of repairs imports it when it is asked for: a start does not."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._store = TimedStore(broker.metadata, _TIMEOUT_S)
        self._records = StoredLedgers(self._store)

    @on_cluster("list_ledgers")
    async def ledgers(self, *, after: int = -1, count: int = 100, bookie: str = "") -> LedgersFound:
        """Ledgers with their fragments; with `bookie` those that it has copies of. Raises NotFound, InvalidArgument."""
        await self._check_bookie(bookie)
        return LedgersFound(*await _page(self._all_ledgers(after, bookie), count))

    @on_cluster("list_ledgers")
    async def ledger(self, ledger: int) -> LedgerFound:
        """A ledger: its fragments, the bookies that have them, its repair, its damage. LedgerNotFound, InvalidArgument."""
        check_ids(ledger, 0)
        found = await self._find(ledger)
        if found.stored is None:
            raise LedgerNotFound(f"ledger {ledger} does not exist", ledger_id=ledger)
        return found

    @on_cluster("list_ledgers")
    async def repairs(self, *, after: int = -1, count: int = 100) -> RepairsFound:
        """Ledgers that wait for repair: why, since when, who works on them. Raises InvalidArgument."""
        found = await _page(self._all_repairs(after), count)
        auditor = await self._store.get(AUDITOR_PATH)
        name = "" if auditor is None else auditor.value.decode("utf-8", "replace")
        return RepairsFound(await self._queue.count(_MAX_PAGES), name, *found)

    @on_cluster("list_ledgers")
    async def damage(self, *, after: str = "", count: int = 100, bookie: str = "") -> DamageFound:
        """Damaged copies, of one bookie or of all. Raises NotFound, InvalidArgument."""
        await self._check_bookie(bookie)
        return DamageFound(*await _page(self._all_damage(after, bookie), count))

    @property
    def _queue(self) -> UnderreplicatedLedgers:
        from magnetar.ledger.replication.queue import UnderreplicatedLedgers

        return UnderreplicatedLedgers(self._store)

    @property
    def _bookies(self) -> dict[str, str]:
        """Why this broker does not write to each that it knows; "": it does."""
        return {one.name: one.reason for one in bookie_rows(self._broker.bookies)}

    async def _check_bookie(self, name: str) -> None:
        if name and name not in (known := {*self._bookies, *await self._store.children(COOKIES_PATH)}):
            there = ", ".join(sorted(known)[:20]) or "none"
            raise NotFound(f"there is no bookie {name[:80]!r} in this cluster; it has {there}")

    # --- all there are; what `_page` takes -----------------------------------------------------------------------------

    async def _all_ledgers(self, after: int, bookie: str) -> AsyncIterator[tuple[int, StoredLedger | None]]:
        from magnetar.ledger.replication.records import may_name, stored_records

        async for group in stored_records(self._records, after=after):
            for ledger_id, node in group:
                found = stored_ledger(ledger_id, node.value) if may_name(node, [bookie.encode()]) else None
                wanted = found and (not bookie or found.error or bookie in _bookies_of(found))
                yield ledger_id, found if wanted else None

    async def _all_repairs(self, after: int) -> AsyncIterator[tuple[int, LedgerFound | None]]:
        for page in await self._queue.pages():
            if not page.isdecimal() or (int(page) + 1) * LEDGERS_PER_PAGE <= after:
                continue
            ids = [ledger_id for ledger_id in await self._queue.ledgers(page) if ledger_id > after]
            for at in range(0, len(ids), _READS):
                some = ids[at : at + _READS]
                found = await asyncio.gather(*map(self._find, some))
                for row in found:  # those without a request were repaired meanwhile
                    yield row.ledger, row if row.repair else None
                await asyncio.sleep(0)

    async def _all_damage(self, after: str, bookie: str) -> AsyncIterator[tuple[str, DamagedCopy | None]]:
        begun, _, ledger = after.rpartition("/")
        for name in [bookie] if bookie else await self._store.children(DAMAGED_PATH):
            behind = ledger if name == begun else ""
            while name >= begun and (
                names := await self._store.children(f"{DAMAGED_PATH}/{name}", after=behind, limit=_READS)
            ):
                behind = names[-1]
                ids = [int(one) for one in names if one.isdecimal() and one.isascii()]
                found = await asyncio.gather(*(self._damage_of(name, ledger_id) for ledger_id in ids))
                for ledger_id, copy in zip(ids, found, strict=True):
                    yield f"{name}/{ledger_id:020d}", copy
                await asyncio.sleep(0)

    # --- one ledger ----------------------------------------------------------------------------------------------------

    async def _find(self, ledger_id: int) -> LedgerFound:
        queue, known, repair = self._queue, self._bookies, None
        node, worker = await self._records.get(ledger_id), await queue.worker(ledger_id)
        try:
            if (request := await queue.get(ledger_id)) is not None:
                wanted = request[0]
                repair = Repair(wanted.bookies, wanted.placement, wanted.since_ms, wanted.note, worker)
        except InvalidArgument as error:
            repair = Repair({}, False, 0, error.message, worker)
        if node is None:
            return LedgerFound(ledger_id, None, {}, repair, [])
        stored = stored_ledger(ledger_id, node.value)
        names = _bookies_of(stored)
        bookies = {name: known.get(name, "it is not registered") for name in names}
        damage = await asyncio.gather(*(self._damage_of(name, ledger_id) for name in names))
        return LedgerFound(ledger_id, stored, bookies, repair, [copy for copy in damage if copy])

    async def _damage_of(self, bookie: str, ledger_id: int) -> DamagedCopy | None:
        path = damaged_path(bookie, ledger_id)
        if (node := await self._store.get(path)) is None:
            return None
        try:
            return DamagedCopy(bookie, ledger_id, decode_ranges(node.value, path))
        except MagnetarError as error:
            return DamagedCopy(bookie, ledger_id, [], error.message)


async def _page(found: AsyncIterator[tuple[K, T | None]], count: int) -> tuple[list[T], K | None]:
    """Rows, and the key behind which there may be more; each comes with its key, or None if it was not asked for."""
    if not 0 < count <= MAX_ROWS:
        raise InvalidArgument(f"a page of {count} rows is not possible; want 1 to {MAX_ROWS}")
    rows: list[T] = []
    size = looked = 0
    async for key, row in found:
        looked += 1
        if row is not None:
            rows.append(row)
            size += len(msgspec.json.encode(row))
        if len(rows) == count or size >= _MAX_BYTES or looked == _MAX_LOOKED:
            return rows, key
    return rows, None


def stored_ledger(ledger_id: int, record: bytes) -> StoredLedger:
    """What the record of a ledger says."""
    try:
        found = LedgerMetadata.decode(record, ledger_id)
    except MagnetarError as error:
        return StoredLedger(ledger_id, "unreadable", error=error.message)
    fragments = [StoredFragment(one.first, one.last, list(one.bookies)) for one in found.fragments()]
    return StoredLedger(
        ledger_id, found.state.name.lower(), *found.sizes, found.created_at_ms, found.last_entry, found.length,
        dict(found.properties), fragments,
    )  # fmt: skip


def _bookies_of(ledger: StoredLedger) -> list[str]:
    """Each once, in the order of their fragments."""
    return list(dict.fromkeys(name for one in ledger.fragments for name in one.bookies))

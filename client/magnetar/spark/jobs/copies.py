"""Every copy of the entries of a ledger, read from each bookie that should have it, and compared.

An entry's copies may carry different last-add-confirmed numbers, and so different digests: a recovery writes entries again
under its own. What has to be equal is the payload and the ledger's length up to it.

| state | what |
|---|---|
| ok | there, intact, and as the others |
| missing | the bookie says that it does not have it |
| damaged | the bookie cannot read it, or what it answers does not match its digest |
| differs | intact, but other than most |
| disputed | intact, but there are several versions of the entry, and none has a majority |
| unreachable | the bookie did not answer, or could not say |

The first three that are not ok are damage of one copy, which others can heal. Which of several disputed ones is right, only
a person can say; and a bookie that is away has lost nothing yet.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import xxhash

from magnetar.ledger import BookieTransport, LedgerMetadata
from magnetar.proto.errors import (
    EntryDamaged,
    EntryNotFound,
    LedgerNotFound,
    MagnetarError,
    RetryableError,
)
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES, verify_ledger_entry
from magnetar.proto.stripe import EVERY_ENTRY, Stripe

OK: Final = "ok"
MISSING: Final = "missing"
DAMAGED: Final = "damaged"
DIFFERS: Final = "differs"
DISPUTED: Final = "disputed"
UNREACHABLE: Final = "unreachable"
HEALABLE: Final = (MISSING, DAMAGED, DIFFERS)

NO_COPY_LEFT: Final = "no bookie has an intact copy: the entry is lost"

READ_BYTES: Final = 4 << 20
ATTEMPTS: Final = 3
RETRY_S: Final = 0.5

# Length of the ledger up to an entry, and a hash of its payload.
Fingerprint = tuple[int, int]


class Copy(NamedTuple):
    """What one bookie has of one entry. A fingerprint only if it is intact; `detail` says what is wrong otherwise."""

    state: str
    fingerprint: Fingerprint | None = None
    detail: str = ""


class Share(NamedTuple):
    """Entries of a range that one bookie should have."""

    bookie: str
    ids: Sequence[int]
    stripe: Stripe


class CopyRow(NamedTuple):
    """The verdict on one copy."""

    entry: int
    bookie: str
    state: str
    detail: str


class CopyRange(NamedTuple):
    """The verdict on `copies` copies of one bookie: those that it should have of first..last. `detail` is of the first."""

    first: int
    last: int
    copies: int
    bookie: str
    state: str
    detail: str


def shares(metadata: LedgerMetadata, first: int, last: int) -> list[Share]:
    """Who should have which of the entries first..last: an ensemble's bookies by their place in the write sets."""
    found: list[Share] = []
    striping = metadata.striping
    start = first
    while start <= last:
        end = metadata.end_of_ensemble(start)
        end = last if end is None else min(end, last)
        for position, bookie in enumerate(metadata.ensemble_of(start).bookies):
            size = striping.ensemble_size
            residues = sum(1 << turn for turn in range(size) if position in striping.write_set(turn))
            whole = residues == (1 << size) - 1
            stripe = EVERY_ENTRY if whole else Stripe(size, residues)
            ids = [entry for entry in range(start, end + 1) if whole or residues >> entry % size & 1]
            if ids:
                found.append(Share(bookie, ids, stripe))
        start = end + 1
    return found


async def read_share(transport: BookieTransport, ledger_id: int, share: Share) -> dict[int, Copy]:
    """Asks the bookie for all of its share. Raises nothing that a bookie answers."""
    found: dict[int, Copy] = {}
    ids, next_one = share.ids, 0
    while next_one < len(ids):
        entry_id = ids[next_one]
        try:
            entries = await _read(transport, ledger_id, share, entry_id)
            for data, expected in zip(entries, ids[next_one:]):
                found[expected] = _copy(data, ledger_id, expected)
            next_one += len(entries)
        except EntryDamaged as error:
            found[entry_id] = Copy(DAMAGED, detail=error.message)
            next_one += 1
        except EntryNotFound:
            following = bisect_left(ids, await _next_stored(transport, ledger_id, share.bookie, entry_id + 1))
            found.update(dict.fromkeys(ids[next_one:following], Copy(MISSING)))
            next_one = following
        except LedgerNotFound:
            found.update(
                dict.fromkeys(ids[next_one:], Copy(MISSING, detail="the bookie does not know the ledger"))
            )
            break
        except MagnetarError as error:
            found.update(dict.fromkeys(ids[next_one:], Copy(UNREACHABLE, detail=error.message)))
            break
    return found


async def _read(transport: BookieTransport, ledger_id: int, share: Share, first: int) -> list[bytes]:
    """Entries of the share from `first` on, one at least."""
    for attempt in range(ATTEMPTS):
        try:
            result = await transport.read(
                share.bookie, ledger_id, first, share.ids[-1], max_bytes=READ_BYTES, stripe=share.stripe
            )
        except RetryableError:
            if attempt == ATTEMPTS - 1:
                raise
            await asyncio.sleep(RETRY_S * 2**attempt)
        else:
            if not result.entries:
                raise EntryNotFound(f"bookie {share.bookie} answered nothing for entry {first}")
            return result.entries
    raise AssertionError("not reached")


async def _next_stored(transport: BookieTransport, ledger_id: int, bookie: str, first: int) -> int:
    """The next entry that the bookie lists; so that a long gap costs a question, not one for each entry."""
    while True:
        try:
            page = await transport.list_entries(bookie, ledger_id, first=first, count=1)
        except LedgerNotFound:
            return 1 << 62
        except MagnetarError:
            return first  # it is asked for one after the other
        if page.ranges:
            return max(first, page.ranges[0][0])
        if page.following <= first:
            return 1 << 62
        first = page.following


def _copy(data: bytes, ledger_id: int, entry_id: int) -> Copy:
    try:
        header = verify_ledger_entry(data)
    except EntryDamaged as error:
        return Copy(DAMAGED, detail=error.message)
    if (header.ledger_id, header.entry_id) != (ledger_id, entry_id):
        return Copy(DAMAGED, detail=f"answered entry {header.entry_id} of ledger {header.ledger_id}")
    payload = memoryview(data)[LEDGER_ENTRY_HEADER_BYTES:]
    return Copy(OK, (header.length, xxhash.xxh3_64_intdigest(payload)))


def verdicts(entry_id: int, copies: Mapping[str, Copy]) -> list[CopyRow]:
    """The copies of one entry, by bookie, once they were held against one another."""
    versions = Counter(copy.fingerprint for copy in copies.values() if copy.fingerprint is not None)
    right: Fingerprint | None = None
    if versions:
        version, count = versions.most_common(1)[0]
        if 2 * count > versions.total():
            right = version
    rows: list[CopyRow] = []
    for bookie, copy in copies.items():
        if copy.fingerprint is None or copy.fingerprint == right:
            rows.append(CopyRow(entry_id, bookie, copy.state, copy.detail))
        elif right is not None:
            rows.append(CopyRow(entry_id, bookie, DIFFERS, "other payload or length than most"))
        else:
            rows.append(CopyRow(entry_id, bookie, DISPUTED, "no version of the entry has a majority"))
    if rows and all(row.state in (MISSING, DAMAGED) for row in rows):
        return [row._replace(detail=NO_COPY_LEFT) for row in rows]
    return rows


def ranges_of(rows: Iterable[CopyRow], metadata: LedgerMetadata) -> list[CopyRange]:
    """Rows of a ledger in the order of entries, those of a bookie that follow one another put together, by bookie.

    A range lies within one ensemble, so the bookie belongs to the ensemble of all its entries.
    """
    found: dict[str, list[CopyRange]] = {}
    borders = [ensemble.first_entry for ensemble in metadata.ensembles]
    for row in rows:
        ranges = found.setdefault(row.bookie, [])
        before = ranges[-1] if ranges else None
        if (
            before is not None
            and before.state == row.state
            and (before.detail == NO_COPY_LEFT) == (row.detail == NO_COPY_LEFT)
            and bisect_right(borders, before.last) == bisect_right(borders, row.entry)
        ):
            ranges[-1] = before._replace(last=row.entry, copies=before.copies + 1)
        else:
            ranges.append(CopyRange(row.entry, row.entry, 1, row.bookie, row.state, row.detail))
    return [one for ranges in found.values() for one in ranges]


async def compare_copies(
    transport: BookieTransport, ledger_id: int, metadata: LedgerMetadata, first: int, last: int
) -> list[CopyRow]:
    """All copies of entries first..last of a ledger, read from all bookies at once; a row per entry and bookie."""
    wanted = shares(metadata, first, last)
    answers = await asyncio.gather(*[read_share(transport, ledger_id, share) for share in wanted])
    by_entry: dict[int, dict[str, Copy]] = {entry: {} for entry in range(first, last + 1)}
    for share, copies in zip(wanted, answers, strict=True):
        for entry, copy in copies.items():
            by_entry[entry][share.bookie] = copy
    return [row for entry, copies in by_entry.items() for row in verdicts(entry, copies)]

"""Looks up the locations of the entries that a scan found; runs of a ledger are looked up as ranges."""

from __future__ import annotations

from collections.abc import Sequence

from ..entry_log import Scanned
from ..index import Location, LocationIndex

__all__ = ["locations_of"]

_RANGE = 500


def locations_of(index: LocationIndex, records: Sequence[Scanned]) -> list[Location | None]:
    """One location for each record, None where the index has none.

    0.6 us for an entry of a run, 4 us for a single one. StorageFailed.
    """
    places: list[Location | None] = []
    start = 0
    while start < len(records):
        ledger_id, first = records[start].ledger_id, records[start].entry_id
        end = start + 1
        # A flush writes the entries of a ledger in order; with E > Qw each bookie has every second or third of them.
        while (
            end < len(records)
            and end - start < _RANGE
            and records[end].ledger_id == ledger_id
            and 0 < records[end].entry_id - records[end - 1].entry_id <= 3
        ):
            end += 1
        if end == start + 1:
            places.append(index.get(ledger_id, first))
        else:
            found = dict(index.get_range(ledger_id, first, records[end - 1].entry_id - first + 1))
            places += [found.get(record.entry_id) for record in records[start:end]]
        start = end
    return places

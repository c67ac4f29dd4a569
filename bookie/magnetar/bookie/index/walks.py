"""Walks over an index, a page of rows at a time, which is read when it is asked for: a loop may work in between."""

from __future__ import annotations

from collections.abc import Iterator

from .locations import LedgerRecord, Location, LocationIndex

__all__ = ["ledger_pages", "ledgers_of", "location_pages", "locations_of_ledger"]

_ROWS = 1000


def location_pages(index: LocationIndex, rows: int = _ROWS) -> Iterator[list[tuple[int, int, Location]]]:
    """All locations, in order of ledger and entry; about 0.5 us each. Errors are those of the index."""
    after: tuple[int, int] | None = None
    while page := index.walk(after, rows):
        yield page
        after = page[-1][:2]


def ledger_pages(index: LocationIndex, rows: int = _ROWS) -> Iterator[list[tuple[int, LedgerRecord]]]:
    """All ledger records, by id."""
    after = -1
    while page := index.list_ledgers(after, rows):
        yield page
        after = page[-1][0]


def ledgers_of(index: LocationIndex) -> Iterator[tuple[int, LedgerRecord]]:
    """The same without pages."""
    for page in ledger_pages(index):
        yield from page


def locations_of_ledger(
    index: LocationIndex, ledger_id: int, first: int = 0
) -> Iterator[tuple[int, Location]]:
    """Locations of one ledger from entry `first` on, in order."""
    after = first - 1
    while page := index.list_locations(ledger_id, after, _ROWS):
        yield from page
        after = page[-1][0]

"""An index in memory for tests and the simulation: what was not flushed is lost with it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from itertools import islice

from magnetar.bookie.index import LedgerRecord, Location
from magnetar.proto.ledger_entry import NO_ENTRY

__all__ = ["ModelLocationIndex", "ModelStorage"]


class ModelStorage:
    """What a ModelLocationIndex keeps through a crash."""

    def __init__(self) -> None:
        self.locations: dict[tuple[int, int], Location] = {}
        self.ledgers: dict[int, LedgerRecord] = {}
        self.instance: int | None = None
        self.incomplete_below = 0
        self.states_are_logged = False
        # The index that was opened last; weak, so that copies of what is stored do not copy a bookie.
        self.opened: Callable[[], ModelLocationIndex | None] = _nobody

    def damage(self, ledger_id: int, entry_id: int, location: Location | None) -> None:
        """Another location, or none, behind the back of the index that is open: for tests of damage."""
        if location is None:
            del self.locations[ledger_id, entry_id]
        else:
            self.locations[ledger_id, entry_id] = location
        if (index := self.opened()) is not None:
            index.forget(ledger_id, entry_id)


def _nobody() -> None:
    """A storage that no index was opened on."""


class ModelLocationIndex:
    """An index in memory over a ModelStorage: a new one on the same storage sees what was flushed.

    `flush_*_early` is for subclasses that flush of their own accord, as RocksDB does when its memtable is full.
    """

    def __init__(self, storage: ModelStorage | None = None) -> None:
        self._storage = storage if storage is not None else ModelStorage()
        # What was written since; None: deleted.
        self._locations: dict[tuple[int, int], Location | None] = {}
        self._ledgers: dict[int, LedgerRecord | None] = {}
        # What is there now, flushed or not, by ledger and entry; and for each ledger an entry above which was never one.
        self._live: dict[int, dict[int, Location]] = {}
        self._highest: dict[int, int] = {}
        self._storage.opened = weakref.ref(self)
        for (ledger_id, entry_id), location in self._storage.locations.items():
            self._put(ledger_id, entry_id, location)

    def forget(self, ledger_id: int, entry_id: int) -> None:
        """What is stored counts, whatever was written here."""
        self._locations.pop((ledger_id, entry_id), None)
        location = self._storage.locations.get((ledger_id, entry_id))
        if location is not None:
            self._put(ledger_id, entry_id, location)
        else:
            self._live.get(ledger_id, {}).pop(entry_id, None)

    def instance(self) -> int | None:
        """See `LocationIndex`."""
        return self._storage.instance

    def set_instance(self, instance: int) -> None:
        """See `LocationIndex`."""
        self._storage.instance = instance

    def incomplete_below(self) -> int:
        """See `LocationIndex`."""
        return self._storage.incomplete_below

    def set_incomplete(self, below: int) -> None:
        """See `LocationIndex`."""
        self._storage.incomplete_below = below

    def last_ledger(self, below: int) -> int:
        """See `LocationIndex`."""
        merged: dict[int, LedgerRecord | None] = {**self._storage.ledgers, **self._ledgers}
        known = (one for one, record in merged.items() if record is not None and one < below)
        return max(known, default=-1)

    def states_are_logged(self) -> bool:
        """See `LocationIndex`."""
        return self._storage.states_are_logged

    def set_states_logged(self) -> None:
        """See `LocationIndex`."""
        self._storage.states_are_logged = True

    def get(self, ledger_id: int, entry_id: int) -> Location | None:
        """See `LocationIndex`."""
        ledger = self._live.get(ledger_id)
        return ledger.get(entry_id) if ledger is not None else None

    def get_each(self, ledger_id: int, entry_ids: Sequence[int]) -> list[tuple[int, Location]]:
        """See `LocationIndex`."""
        ledger = self._live.get(ledger_id)
        if ledger is None:
            return []
        if isinstance(entry_ids, range) and entry_ids.step > 0:
            # Reading ahead asks for a hundred entries behind each, most of them behind the end of the ledger.
            end = min(entry_ids.stop, self._highest[ledger_id] + 1)
            entry_ids = range(entry_ids.start, end, entry_ids.step)
        get = ledger.get
        return [(entry_id, location) for entry_id in entry_ids if (location := get(entry_id)) is not None]

    async def find(self, ledger_id: int, entry_id: int) -> Location | None:
        """See `LocationIndex`."""
        return self.get(ledger_id, entry_id)

    async def warm_locations(self, ledger_id: int, first: int, last: int) -> None:
        """See `LocationIndex`."""

    async def warm_ledger(self, ledger_id: int) -> None:
        """See `LocationIndex`."""

    def list_locations(
        self, ledger_id: int, after: int = NO_ENTRY, count: int = 1000
    ) -> list[tuple[int, Location]]:
        """See `LocationIndex`."""
        rows = sorted(self._live.get(ledger_id, {}).items())
        return [row for row in rows if row[0] > after][:count]

    def walk(
        self, after: tuple[int, int] | None = None, count: int = 1000
    ) -> list[tuple[int, int, Location]]:
        """See `LocationIndex`."""
        return list(islice((row for row in self._all() if after is None or row[:2] > after), count))

    def _all(self) -> list[tuple[int, int, Location]]:
        return [
            (ledger_id, entry_id, location)
            for ledger_id in sorted(self._live)
            for entry_id, location in sorted(self._live[ledger_id].items())
        ]

    def put_locations(self, locations: Sequence[tuple[int, int, Location]]) -> None:
        """See `LocationIndex`."""
        for ledger_id, entry_id, location in locations:
            self._locations[(ledger_id, entry_id)] = location
            self._put(ledger_id, entry_id, location)

    def _put(self, ledger_id: int, entry_id: int, location: Location) -> None:
        self._live.setdefault(ledger_id, {})[entry_id] = location
        self._highest[ledger_id] = max(self._highest.get(ledger_id, NO_ENTRY), entry_id)

    def replace_locations(self, moved: Sequence[tuple[int, int, Location, Location | None]]) -> int:
        """See `LocationIndex`."""
        there = [(ledger, entry, new) for ledger, entry, old, new in moved if self.get(ledger, entry) == old]
        if put := [(ledger, entry, new) for ledger, entry, new in there if new is not None]:
            self.put_locations(put)
        for ledger, entry, new in there:
            if new is None:
                self._locations[(ledger, entry)] = None
                del self._live[ledger][entry]
        return len(there)

    def delete_locations(self, ledger_id: int) -> None:
        """See `LocationIndex`."""
        for entry_id in self._live.pop(ledger_id, {}):
            self._locations[(ledger_id, entry_id)] = None
        self._highest.pop(ledger_id, None)

    def get_ledger(self, ledger_id: int) -> LedgerRecord | None:
        """See `LocationIndex`."""
        if ledger_id in self._ledgers:
            return self._ledgers[ledger_id]
        return self._storage.ledgers.get(ledger_id)

    def list_ledgers(self, after: int = -1, count: int = 1000) -> list[tuple[int, LedgerRecord]]:
        """See `LocationIndex`."""
        merged: dict[int, LedgerRecord | None] = {**self._storage.ledgers, **self._ledgers}
        rows = ((ledger_id, merged[ledger_id]) for ledger_id in sorted(merged) if ledger_id > after)
        return list(islice(((ledger_id, record) for ledger_id, record in rows if record is not None), count))

    def put_ledgers(self, ledgers: Sequence[tuple[int, LedgerRecord]]) -> None:
        """See `LocationIndex`."""
        self._ledgers.update(ledgers)

    def delete_ledger(self, ledger_id: int) -> None:
        """See `LocationIndex`."""
        self._ledgers[ledger_id] = None

    async def flush_locations(self) -> None:
        """See `LocationIndex`."""
        written = dict(self._locations)
        await asyncio.sleep(0)
        self._keep_locations(written)

    async def flush_ledgers(self) -> None:
        """See `LocationIndex`."""
        written = dict(self._ledgers)
        await asyncio.sleep(0)
        self._keep_ledgers(written)

    def flush_locations_early(self) -> None:
        """What was put and deleted so far is durable."""
        self._keep_locations(self._locations)

    def flush_ledgers_early(self) -> None:
        """What was put and deleted so far is durable."""
        self._keep_ledgers(self._ledgers)

    def _keep_locations(self, written: dict[tuple[int, int], Location | None]) -> None:
        for key, location in written.items():
            if location is None:
                self._storage.locations.pop(key, None)
            else:
                self._storage.locations[key] = location

    def _keep_ledgers(self, written: dict[int, LedgerRecord | None]) -> None:
        for ledger_id, record in written.items():
            if record is None:
                self._storage.ledgers.pop(ledger_id, None)
            else:
                self._storage.ledgers[ledger_id] = record

    def close(self) -> None:
        """See `LocationIndex`."""

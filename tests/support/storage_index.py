"""The location index of a simulated bookie: a flush is a call of its disk, and some puts are durable before anybody asks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from magnetar.bookie.index import LedgerRecord, Location
from magnetar.proto.errors import StorageFailed
from support.index_model import ModelLocationIndex, ModelStorage
from support.sim import SimFiles

# Chance that what was just put is durable at once: RocksDB flushes when it likes.
_EARLY = 0.2


class CountedIndex(ModelLocationIndex):
    """A flush may fail, or be the last thing that the process did. It never comes after the process's death."""

    def __init__(self, storage: ModelStorage, files: SimFiles, rng: random.Random, path: str) -> None:
        super().__init__(storage)
        self._files = files
        self._rng = rng
        self._path = path
        self._failed: str | None = None

    def put_locations(self, locations: Sequence[tuple[int, int, Location]]) -> None:
        """See LocationIndex."""
        super().put_locations(locations)
        self._perhaps(self.flush_locations_early)

    def delete_locations(self, ledger_id: int) -> None:
        """See LocationIndex."""
        super().delete_locations(ledger_id)
        self._perhaps(self.flush_locations_early)

    def put_ledgers(self, ledgers: Sequence[tuple[int, LedgerRecord]]) -> None:
        """See LocationIndex."""
        super().put_ledgers(ledgers)
        self._perhaps(self.flush_ledgers_early)

    def delete_ledger(self, ledger_id: int) -> None:
        """See LocationIndex."""
        super().delete_ledger(ledger_id)
        self._perhaps(self.flush_ledgers_early)

    def _perhaps(self, flush: Callable[[], None]) -> None:
        self._files.check_alive()
        if self._rng.random() < _EARLY:
            flush()

    async def flush_locations(self) -> None:
        """See LocationIndex."""
        self._call("locations")
        await super().flush_locations()

    async def flush_ledgers(self) -> None:
        """See LocationIndex."""
        self._call("ledgers")
        await super().flush_ledgers()

    def _call(self, family: str) -> None:
        if self._failed is not None:  # RocksDB writes nothing any more after a failed flush
            raise StorageFailed(self._failed)
        try:
            self._files.disk.call("sync", f"{self._path}/{family}")
        except OSError as error:
            self._failed = f"the index failed: {error}"
            raise StorageFailed(self._failed) from error
        self._files.check_alive()

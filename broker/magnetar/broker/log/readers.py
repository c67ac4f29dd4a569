"""Open handles to read a topic's ledgers with: a few, by stored id; those who want the same one share its opening."""

from __future__ import annotations

import asyncio

from magnetar.runtime.tasks import awaited, end_all

from ..resources.stores import Ledgers, Reader, delete_ledgers
from .ledger_list import LedgerList

MAX_OPEN_READERS = 8


class LedgerReaders:
    """Use `reader`; `close` when done."""

    def __init__(self, ledgers: Ledgers) -> None:
        self._ledgers = ledgers
        self._readers: dict[int, Reader] = {}  # in the order of opening
        self._opening: dict[int, asyncio.Task[Reader]] = {}

    async def reader(self, stored_id: int) -> Reader:
        """A handle of a ledger that is not written here."""
        reader = self._readers.get(stored_id)
        if reader is not None:
            return reader
        task = self._opening.get(stored_id)
        if task is None:
            task = self._opening[stored_id] = awaited(self._open(stored_id))
            task.add_done_callback(lambda _: self._opening.pop(stored_id, None))
        reader = await asyncio.shield(task)
        if len(self._readers) >= MAX_OPEN_READERS:
            del self._readers[next(iter(self._readers))]
        self._readers[stored_id] = reader
        return reader

    async def _open(self, stored_id: int) -> Reader:
        return await self._ledgers.open(stored_id, recover=False)

    async def delete_trimmed(self, ledgers: LedgerList) -> None:
        """Deletes what the stored list no longer names; what fails is tried again at the next change or opening."""
        for stored_id in ledgers.record.trimmed:
            self._readers.pop(stored_id, None)
        await delete_ledgers(self._ledgers, ledgers.record.trimmed, f"topic {ledgers.name}")

    async def close(self) -> None:
        """Whoever waits for an opening is cancelled."""
        await end_all(self._opening.values())

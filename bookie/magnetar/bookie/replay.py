"""The replay: a start applies the records of the journals to write cache and ledger descriptors, as if they came again.

A repeated replay changes nothing. When the write cache is full, one memtable is flushed while the other one fills; the mark
stays where it is (rule 3), so a crash during a replay is a crash before it.

On a full disk nothing is flushed (rule 39): all that the journals hold stays in the write cache, however large it gets,
until there is room. That is as much as was not flushed before: what two memtables hold, and what recoveries added.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from magnetar.proto.errors import DiskFull
from magnetar.proto.ids import check_ids
from magnetar.proto.ledger_entry import LEDGER_ENTRY_FIELDS
from magnetar.runtime.tasks import awaited

from .journal.records import Record, RecordType, ledger_change
from .journal.recovery import Recovered, replay_journals
from .mark import Mark

if TYPE_CHECKING:
    from .engine import Bookie

_log = logging.getLogger(__name__)
_ADD = int(RecordType.ADD)


async def replay(bookie: Bookie, mark: Mark) -> dict[str, Recovered]:
    """Everything from the mark on, of each journal directory that it names. What did not fit is still in the write cache.

    One journal after the other: one of them has all records of a ledger since the mark. Raises DataDirectoryError,
    StorageFailed.
    """
    target = _Target(bookie)
    recovered: dict[str, Recovered] = {}
    try:
        for name, position in mark.items():
            directory = bookie.layout.directory(name)
            recovered[name] = await replay_journals(
                bookie.components.files,
                directory,
                bookie.cookie.instance,
                position,
                target.apply,
                target.make_room,
            )
    finally:
        await target.flushed()
    if records := sum(journal.records for journal in recovered.values()):
        _log.info("replayed %d journal records", records)
    return recovered


class _Target:
    """Write cache and ledger states of a bookie that is being opened."""

    def __init__(self, bookie: Bookie) -> None:
        self._bookie = bookie
        self._cache = bookie.cache
        self._ledgers = bookie.ledgers
        self._flush: asyncio.Task[None] | None = None
        self._full_disk = False

    def apply(self, record: Record) -> bool:
        """False if the write cache has no room for it; InvalidArgument for ids that cannot be. 2 us for an entry."""
        payload = record.payload
        if record.type != _ADD:
            self._apply_state(record)
            return True
        ledger_id, entry_id, last_add_confirmed, _ = LEDGER_ENTRY_FIELDS.unpack_from(payload)
        check_ids(ledger_id, entry_id, last_add_confirmed)
        ledgers, cache = self._ledgers, self._cache
        state = ledgers.by_id.get(ledger_id) or ledgers.load(ledger_id)
        if state.deleted_at_ms:  # rule 7: its journals may outlive it
            return True
        if not cache.has_room(len(payload)) and not self._full_disk:
            return False
        cache.put(ledger_id, entry_id, payload)
        ledgers.note_entry(state, ledger_id, entry_id, last_add_confirmed)
        return True

    def _apply_state(self, record: Record) -> None:
        change = ledger_change(record)
        assert change is not None, "a replay leaves out what the journal writes for itself"
        ledger_id, added = change
        check_ids(ledger_id, last=added.explicit_lac)
        if added.deleted_at_ms:
            self._bookie.fencing.apply_tombstone(ledger_id, added.deleted_at_ms)
            return
        state = self._ledgers.load(ledger_id)
        state.fenced = state.fenced or added.fenced
        state.explicit_lac = max(state.explicit_lac, added.explicit_lac)
        self._ledgers.mark_dirty(state, ledger_id)

    async def make_room(self) -> None:
        """Begins a flush of what is there, once the one before has ended; returns when its memtable has been swapped."""
        await self.flushed()
        full = self._cache.active
        if self._full_disk or not self._bookie.checkpointer.has_room(full):
            self._full_disk = True
            return
        self._flush = awaited(self._run(), "bookie replay flush")
        while self._cache.active is full and not self._flush.done():  # noqa: ASYNC110 - two or three turns
            await asyncio.sleep(0)

    async def _run(self) -> None:
        await self._bookie.checkpointer.run(None)

    async def flushed(self) -> None:
        """Waits for the flush in progress. Raises what it raised, but for DiskFull."""
        if self._flush is not None:
            flush, self._flush = self._flush, None
            try:
                await flush
            except DiskFull:
                self._full_disk = True

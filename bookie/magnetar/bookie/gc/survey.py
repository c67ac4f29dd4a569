"""What there is to collect: which ledgers are deleted, and how much of each closed log is alive.

A ledger is *dead* when it has a tombstone, and *gone* when it is dead or when nothing whatever is known of it: neither
state nor place (its tombstone was forgotten). Everything else is alive, a ledger that was only fenced here included, until
metadata says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence

from magnetar.proto.errors import MagnetarError

from ..entry_log import DirectoryState, LogInfo
from .compactor import IndexFailed
from .decisions import LogUsage, live_bytes
from .parts import StorageParts

__all__ = ["Survey", "index_writes"]

_log = logging.getLogger(__name__)
_LIST = 1000
# Look-ups in the index in one turn of the loop, 4 us each.
_SLICE = 200


@contextlib.contextmanager
def index_writes() -> Iterator[None]:
    """What the index says inside becomes IndexFailed: the bookie must stop."""
    try:
        yield
    except MagnetarError as error:
        raise IndexFailed(error) from error


class Survey:
    """Lasts from round to round; each begins with `list_ledgers` and `purge`."""

    def __init__(self, parts: StorageParts) -> None:
        # Bytes that are alive in a log, where the scrub has measured them; None: not known.
        self.measured_live_bytes: Callable[[int], int | None] = _not_measured
        # Deleted ledgers, as of this round: membership is asked, and the order is that of their ids.
        self.dead: dict[int, None] = {}
        self._parts = parts
        # Dead ledgers whose places have left the index, as this process has seen.
        self._purged: set[int] = set()
        # Dead ledgers that each closed log names.
        self._dead_in: dict[int, list[int]] = {}
        self._gone: dict[int, bool] = {}

    async def list_ledgers(self) -> list[int]:
        """Begins a round; returns the ledgers that are not deleted, by id."""
        index, by_id = self._parts.index, self._parts.ledgers.by_id
        self.dead = {}
        self._gone = {}
        alive: list[int] = []
        after = -1
        while rows := index.list_ledgers(after, _LIST):
            after = rows[-1][0]
            for ledger_id, record in rows:
                state = by_id.get(ledger_id)
                if record.deleted_at_ms if state is None else state.deleted_at_ms:
                    self.dead[ledger_id] = None
                else:
                    alive.append(ledger_id)
            await asyncio.sleep(0)
        return alive

    async def purge(self) -> None:
        """Dead ledgers have no places in the index, durably. Nothing may be flushed meanwhile. IndexFailed."""
        index = self._parts.index
        purged = [ledger_id for ledger_id in self.dead if ledger_id not in self._purged]
        for number, ledger_id in enumerate(purged):
            if self._has_places(ledger_id):
                with index_writes():
                    index.delete_locations(ledger_id)
            if number % _SLICE == 0:
                await asyncio.sleep(0)
        if purged:
            with index_writes():
                await index.flush_locations()
        # A flush that waits for space still holds entries, and will put their places into the index.
        if not self._parts.checkpointer.stopped_by_full_disk:
            self._purged.update(purged)

    def gone(self, ledger_id: int) -> bool:
        """Whether nothing of the ledger is kept. Cached for the round; 8 us the first time."""
        known = self._gone.get(ledger_id)
        if known is None:
            known = self._gone[ledger_id] = ledger_id in self.dead or (
                ledger_id not in self._parts.ledgers.by_id
                and self._parts.index.get_ledger(ledger_id) is None
                and not self._has_places(ledger_id)
            )
        return known

    async def usages(self, closed: Sequence[LogInfo]) -> list[LogUsage]:
        """Of the closed logs that may be touched."""
        logs = self._parts.logs
        states = logs.directory_states
        found: list[LogUsage] = []
        self._dead_in = {}
        for info in closed:
            if states[info.directory] is DirectoryState.FAILED:
                continue
            try:
                statistics = await logs.statistics(
                    info.log_id, bytes_per_s=self._parts.settings.compaction_bytes_per_s
                )
            except MagnetarError as error:
                _log.warning(
                    "entry log %08x is left alone, it cannot be looked through: %s", info.log_id, error
                )
                continue
            ledgers = statistics.ledgers
            for number, ledger_id in enumerate(ledgers):
                self.gone(ledger_id)
                if number % _SLICE == _SLICE - 1:
                    await asyncio.sleep(0)
            gone = {ledger_id for ledger_id in ledgers if self._gone[ledger_id]}
            live = live_bytes(ledgers, gone, self.measured_live_bytes(info.log_id))
            if not live and len(gone) < len(ledgers):
                live = 1  # only a compaction can tell that nothing of a live ledger is needed
            self._dead_in[info.log_id] = [ledger_id for ledger_id in ledgers if ledger_id in self.dead]
            found.append(LogUsage(info.log_id, info.directory, info.bytes, live, statistics.whole))
        return found

    def logs_went(self, log_ids: Collection[int]) -> None:
        """Tombstones that went with these logs are written again while another log could bring their ledger back.

        Only a rebuild of the index from the logs would: the index has the tombstone.
        """
        went: dict[int, None] = {}
        for log_id in log_ids:
            went.update(dict.fromkeys(self._dead_in.pop(log_id, [])))
        for others in self._dead_in.values():
            for ledger_id in others:
                if ledger_id in went:
                    del went[ledger_id]
                    self._parts.ledgers.restate(ledger_id)

    async def forget_tombstones(self) -> int:
        """Those that have served their time. Nothing may be flushed meanwhile. IndexFailed.

        Not before the mark has passed the journals that hold adds of the ledger: a replay would revive it.
        """
        parts = self._parts
        latest = parts.clock.now_ms() - round(parts.settings.tombstone_retention_s * 1000)
        forgotten = 0
        for number, ledger_id in enumerate(self.dead):
            if number % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            record = parts.index.get_ledger(ledger_id)
            if (
                record is not None
                and 0 < record.deleted_at_ms <= latest
                and ledger_id in self._purged
                and parts.ledgers.settled(ledger_id)
            ):
                with index_writes():
                    parts.index.delete_ledger(ledger_id)
                parts.ledgers.forget(ledger_id)
                self._purged.discard(ledger_id)
                forgotten += 1
        if forgotten:
            with index_writes():
                await parts.index.flush_ledgers()
        return forgotten

    def _has_places(self, ledger_id: int) -> bool:
        return bool(self._parts.index.list_locations(ledger_id, count=1))


def _not_measured(log_id: int) -> int | None:
    return None

"""Defects of self-repair, for the scenario `repair`: rule 22, and BookKeeper #4668."""

from __future__ import annotations

import asyncio
from typing import Any

from magnetar.bookie.gc.assignments import Leftovers
from magnetar.bookie.gc.collector import Collector
from magnetar.ledger.replication.core.repair import Copied, RepairCore
from magnetar.ledger.replication.leftovers import StoredAssignments
from magnetar.ledger.replication.worker import Worker
from sim.defects.registry import repair_defect


@repair_defect
def repair_names_the_copy_before_it_is_durable() -> None:
    """Rule 22: the record is changed while the entries are still being copied."""
    worker: Any = Worker
    copy = worker._copy
    tasks: dict[asyncio.Task[Any], None] = {}

    async def early(self: Any, ledger_id: int, wanted: Any) -> Any:
        task = asyncio.get_running_loop().create_task(copy(self, ledger_id, wanted))
        tasks[task] = None
        task.add_done_callback(tasks.pop)
        return Copied()

    worker._copy = early


@repair_defect
def repair_fences_without_a_grace_period() -> None:
    """Rule 22: an open ledger is fenced as soon as its last ensemble lost a bookie."""
    core: Any = RepairCore
    begin = core.__init__

    def impatient(self: Any, ledger_id: int, request: Any, grace_s: float, grace: Any = None) -> None:
        begin(self, ledger_id, request, 0.0, grace)

    core.__init__ = impatient


@repair_defect
def repair_changes_the_writers_ensemble() -> None:
    """An open ledger is not recovered: a bookie of its last ensemble is replaced like any other."""
    from magnetar.ledger.core.metadata import LedgerMetadata
    from magnetar.ledger.replication.core.repair import RepairCore

    core: Any = RepairCore
    record: Any = LedgerMetadata
    following, fragments = core._next, record.fragments

    def closed(self: Any) -> Any:
        return [f if f.last is not None else f._replace(last=f.first - 1 + 3) for f in fragments(self)]

    def careless(self: Any, now: float, view: Any) -> Any:
        record.fragments = closed
        try:
            return following(self, now, view)
        finally:
            record.fragments = fragments

    core._next = careless
    replaced = record.with_replaced

    def anywhere(self: Any, first_entry: int, bookies: Any) -> Any:
        if self.closed or first_entry < self.last_ensemble.first_entry:
            return replaced(self, first_entry, bookies)
        old = self.last_ensemble.bookies
        return self.with_ensemble(first_entry, tuple(bookies.get(p, b) for p, b in enumerate(old)))

    record.with_replaced = anywhere


@repair_defect
def leftovers_are_dropped_without_a_new_version() -> None:
    """BookKeeper #4668: a repair that is copying meanwhile names a bookie that drops the copy."""
    assignments: Any = StoredAssignments

    async def careless(self: Any, found: Any) -> bool:
        return True

    assignments.confirm = careless


@repair_defect
def leftovers_take_newer_copies_along() -> None:
    """What a repair adds again while leftovers are dropped is dropped as well."""
    leftovers: Any = Leftovers
    drop = leftovers._drop

    async def everything(self: Any, found: Any, closed: Any) -> None:
        await asyncio.sleep(0.5)
        await drop(self, found, frozenset(info.log_id for info in self._logs.logs()))

    leftovers._drop = everything


@repair_defect
def leftovers_of_open_ledgers_are_dropped() -> None:
    """A recovery has put entries here, and will name this bookie when it closes the ledger."""
    from magnetar.ledger.core.metadata import LedgerMetadata
    from magnetar.ledger.replication.leftovers import UnassignedEntries, ranges_of_others

    assignments: Any = StoredAssignments

    async def any_state(self: Any, ledger_id: int) -> Any:
        node = await self._ledgers.get(ledger_id)
        if node is None:
            return None
        ranges = ranges_of_others(LedgerMetadata.decode(node.value, ledger_id), self.bookie)
        return UnassignedEntries(ledger_id, ranges, (node.value, node.version)) if ranges else None

    assignments.unassigned = any_state


@repair_defect
def dropping_leftovers_forgets_the_fence() -> None:
    """Rule 7: a stale writer is let in again, because nothing is known of its ledger any more."""
    leftovers: Any = Leftovers
    drop = leftovers._drop

    async def forgetful(self: Any, found: Any, closed: Any) -> None:
        await drop(self, found, closed)
        self._index.delete_ledger(found.ledger_id)
        self.ledgers.forget(found.ledger_id)

    collector: Any = Collector
    begin = collector.__init__

    def with_ledgers(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        if self._leftovers is not None:
            self._leftovers.ledgers = self._ledgers

    collector.__init__ = with_ledgers
    leftovers._drop = forgetful

"""A durable cursor: acknowledgement state in memory, and its changes in a `snapshot_ledger`.

A delta holds all acknowledgements that came while the last one was being written (group commit): the mark-delete position
and the ranges that lie beyond it. Receipts are given when the delta is durable (rule 34). Acknowledgements without a receipt
wait `cursor_flush_interval_ms` at most, and so do redelivery counts that have risen, which are an entry of their own behind
the delta. Large deltas are several entries, with a turn of the loop for each: what is acknowledged while a snapshot is being
written may be in it or not, and is in the next delta in any case.

Everything is written by one flush task at a time (rule 26). If another owner is found (rule 52), nothing is written or
answered with success any more, and the topic fences itself.

What of the ledger cannot be read any more costs the redelivery of what was acknowledged there, and nothing else. A seek,
which takes acknowledgements back, begins a new ledger. So do deltas that have so many entries, or so many ranges beside
those that stand, that reading them back would take longer than reading a snapshot.

    CLEAN --> DIRTY     `changed`
    DIRTY --> WRITING   the flush task runs: at once with a receipt, else after the interval
    WRITING --> CLEAN, DIRTY   durable; whatever came meanwhile is the next delta
    any --> CLOSED
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from magnetar.metadata import MetadataStore
from magnetar.proto.errors import (
    LedgerFenced,
    MagnetarError,
    ServiceNotReady,
    StorageFailed,
    TopicNotServed,
)
from magnetar.runtime.tasks import begin
from magnetar.runtime.weak import weak_callback

from ..log.open_ledger import own_moment
from ..resources.stores import Ledgers
from ..settings import BrokerSettings
from .core.acks import AckState, Position, Topology, number_of, numbers_of
from .core.range_blocks import LedgerRanges
from .core.redeliveries import RedeliveryCounts, RedeliveryRow
from .entries import MAX_ROWS_PER_ENTRY, encode_acks, encode_redeliveries, encode_rewinds, replay
from .snapshot_ledger import SnapshotLedger, resolve

_log = logging.getLogger(__name__)

# Redelivery counts that rise faster than they can be written: then a snapshot takes the place of the changes.
_MAX_COUNT_ROWS = 20_000
# Receipts that wait for the next write. Nothing but a cursor that cannot be written for long lets so many pile up.
MAX_WAITING_RECEIPTS = 50_000
# Rows of deltas behind a snapshot: replaying one takes 2 us, of a snapshot 0.3 us. At least so many, or a share of the
# ranges that stand.
_MIN_DELTA_ROWS = 20_000
_DELTA_SHARE = 4

DurableCallback = Callable[[MagnetarError | None], None]


class Cursor:
    """See the module docstring. `state` is changed through `ack`, `ack_through`, `skip_to` and `reset` only.

    Dispatch changes `redeliveries`, and says so by `redeliveries_changed`.
    """

    def __init__(
        self,
        path: str | None,
        state: AckState,
        metadata: MetadataStore,
        ledgers: Ledgers,
        settings: BrokerSettings,
        on_conflict: Callable[[MagnetarError], None],
        durability: Callable[[], Mapping[str, Any]],
    ) -> None:
        """`path` None: a reader's cursor, which is not durable. `durability`: of its next ledger, for `Ledgers.create`."""
        self.state = state
        self.redeliveries = RedeliveryCounts()
        self.generation = 0  # of a stored state: how often the cursor was reset
        self._settings = settings
        self._on_conflict = on_conflict
        self._loop = asyncio.get_running_loop()
        self._store: SnapshotLedger | None = None  # of a reader's cursor
        if path is not None:
            self._store = SnapshotLedger(
                "cursor",
                path,
                self,
                metadata,
                ledgers,
                durability,
                weak_callback(self._taken_over),
                max_entries=settings.max_cursor_ledger_entries,
                max_inline_bytes=settings.max_inline_cursor_bytes,
            )
        self._name = f"cursor {path}"
        self._changed = LedgerRanges()  # acknowledged since the last delta was taken, as `state` has it
        self._dirty = False
        self._snapshot_due = False
        # Receipts to give: for the change that is being written, and for those that come after it.
        self._writing: list[DurableCallback] = []
        self._waiting: list[DurableCallback] = []
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._fenced = False  # another owner has it: final
        self._leaving = False  # its ledger, in a while: see `restore`
        self._durable_mark = state.mark_delete
        # The mark-delete position that `recover` fell back to because of damage; None: everything could be read.
        self.recovered_from: Position | None = None

    @property
    def durable(self) -> bool:
        """False for a reader's cursor."""
        return self._store is not None

    # --- opening -----------------------------------------------------------------------------------------------------

    async def create(self, now_ms: int, properties: Mapping[str, str] = MappingProxyType({})) -> None:
        """Records a new durable cursor at the state's position; durable when it returns. Raises AlreadyExists."""
        if self._store is not None:
            self._store.pointer.properties = properties
            await self._store.create(now_ms)

    @property
    def properties(self) -> Mapping[str, str]:
        """What users noted of the subscription; a reader's has none."""
        return {} if self._store is None else self._store.pointer.properties

    async def set_properties(self, properties: Mapping[str, str]) -> None:
        """They are these from now on, durable when this returns. Raises what the write met: then they may be, or not."""
        if self._store is not None:
            self._store.pointer.properties = properties
            self._dirty = self._snapshot_due = True
            await self.flush()

    async def recover(self, topology: Topology) -> bool:
        """Takes the cursor over and reads its state; False if the subscription was being deleted: call `delete` then.

        What is damaged in its ledger is left out, and `recovered_from` set. Raises DataDirectoryError when the pointer is
        damaged: then `delete` is all that can be done. NotFoundInStore: there is no such cursor. Any other error may pass,
        and this may be called again.
        """
        assert self._store is not None
        state = AckState(topology, (0, 0, 0))
        self.redeliveries.clear()
        if not await self._store.recover(lambda piece: (replay(state, self.redeliveries, piece),)):
            return False
        if self._store.damage:
            self.recovered_from = state.mark_delete
            _log.warning(
                "%s: %s; it goes on from %s, and what was acknowledged there beyond it is delivered again",
                self._name, self._store.damage, state.mark_delete,
            )  # fmt: skip
        self.state = state
        self._durable_mark = state.mark_delete
        return True

    @property
    def ledger(self) -> tuple[int, int]:
        """The ledger that it is written to, and its last entry there; -1 and -1: none now."""
        return (-1, -1) if self._store is None else self._store.ledger

    @property
    def durable_mark(self) -> Position:
        """Below this nothing is needed, neither now nor after a restart: trimming goes by it."""
        return min(self._durable_mark, self.state.mark_delete)

    # --- changes -----------------------------------------------------------------------------------------------------

    def ack(self, ledger: int, entry: int, firsts: Sequence[int], lasts: Sequence[int], count: int) -> int:
        """Acknowledges sorted, disjoint ranges of an entry of `count` messages; returns how many were new."""
        added = self.state.ack_all(ledger, entry, firsts, lasts, count)
        if added and self.durable:
            self._dirty = True
            if self.state.mark_delete <= (ledger, entry, min(lasts[-1], count - 1)):  # else it says so
                self._changed.add_all(ledger, *numbers_of(entry, firsts, lasts, count))
        return added

    def ack_through(self, ledger: int, entry: int, index: int, message_count: int) -> bool:
        """Acknowledges everything up to and with a message."""
        moved = self.state.ack_through(ledger, entry, index, message_count)
        self._dirty |= moved and self.durable
        return moved

    def skip_to(self, position: Position) -> bool:
        """Acknowledges everything before `position`; False if all of it was. `changed` or `flush` afterwards."""
        moved = self.state.move_to(position)
        self.redeliveries.drop_below(self.state.mark_delete)
        self._dirty |= moved and self.durable
        return moved

    def follow(self, topology: Topology) -> None:
        """What follows what is another matter now: what the mark-delete position passes thereby is recorded soon."""
        before = self.state.mark_delete
        self.state.follow(topology)
        if self.state.mark_delete != before:
            self._dirty |= self.durable
            self.changed(None)

    def pass_entry(self, ledger: int, entry: int) -> None:
        """The mark-delete position stands behind the last message of this entry: it belongs before the next one."""
        if self.state.mark_delete[:2] == (ledger, entry):
            self._dirty |= self.state.move_to((ledger, entry + 1, 0)) and self.durable
            self.changed(None)

    def redeliveries_changed(self) -> None:
        """Schedules the flush of `redeliveries`."""
        if self.durable:
            self._dirty = True
            self.changed(None)
        else:
            self.redeliveries.clear_changes()

    @property
    def active_ms(self) -> int:
        """When its subscription had consumers last, as far as that was noted down, or was made."""
        pointer = None if self._store is None else self._store.pointer
        return 0 if pointer is None else max(pointer.active_ms, pointer.record.created_ms)

    def keep_active(self, now_ms: int, every_ms: int) -> None:
        """Its subscription has consumers: stored soon, if what is stored is older than `every_ms`."""
        if self._store is not None and now_ms - self.active_ms >= every_ms:
            self._store.pointer.active_ms = now_ms
            self._dirty = self._snapshot_due = True
            self.changed(None)

    def restore(self) -> None:
        """Leaves a ledger for which there is a better one (`Writer.replaceable`), at this cursor's moment."""
        if self._store is not None and self._store.replaceable and not self._leaving:
            self._leaving = True
            delay_s = own_moment(self._store.path, self._settings.ledger_change_spread_ms)
            if delay_s:
                self._loop.call_later(delay_s, self._leave_ledger)
            else:
                self._leave_ledger()

    def _leave_ledger(self) -> None:
        self._leaving = False
        if self._store is not None and self._store.replaceable and not self._closed:
            self._dirty = self._snapshot_due = True
            self.changed(None)

    def reset(self, position: Position) -> None:
        """A seek: the one way in which the mark-delete position goes back."""
        self.state.reset(position)
        self.redeliveries.clear()
        self._changed.clear()
        self.generation += 1
        self._dirty = self._snapshot_due = self.durable

    def changed(self, done: DurableCallback | None) -> None:
        """Schedules the flush. `done` is called once when everything before this call is durable, or with an error."""
        if self._fenced or (self._closed and self._dirty):
            if done is not None:
                done(ServiceNotReady("the subscription is being closed"))
            return
        if not self._dirty and self._task is None:
            if done is not None:
                done(None)
            return
        if done is not None and len(self._waiting) >= MAX_WAITING_RECEIPTS:
            done(ServiceNotReady(f"{len(self._waiting)} receipts wait for a write of the cursor already"))
            return
        if len(self.redeliveries.changed_rows) > _MAX_COUNT_ROWS:
            self.redeliveries.clear_changes()
            self._snapshot_due = True
        if done is not None:
            self._waiting.append(done)
            self._start_flush()
        elif self._task is None and self._timer is None:
            self._timer = self._loop.call_later(
                self._settings.cursor_flush_interval_ms / 1000, self._start_flush
            )

    async def flush(self) -> None:
        """Returns when every change so far is durable. Raises what the flush met."""
        future: asyncio.Future[None] = self._loop.create_future()
        self.changed(partial(resolve, future))
        await future

    def _start_flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is None and self._store is not None and not self._closed and not self._fenced:
            self._task = begin(self._flush(self._store), self._name)

    async def _flush(self, store: SnapshotLedger) -> None:
        try:
            # Those who wait for a change that is in the delta just written were taken along with it.
            while self._dirty or self._waiting:
                self._writing, self._waiting = self._waiting, []
                try:
                    replaced = await self._write(store)
                except MagnetarError as failure:
                    self._answer(self._writing, failure)
                    break
                self._answer(self._writing, None)
                if replaced:  # no receipt waits for this, nor does each of the next ones for what failed here
                    await store.delete_former()
        except Exception as failure:  # a defect must not leave receipts waiting for ever
            _log.exception("%s: flush failed", self._name)
            error = StorageFailed(f"the cursor could not be written: {failure!r}")
            self._answer(self._writing, error)
            self._answer(self._waiting, error)
        finally:
            self._task = None
            if not self._closed and not self._fenced:
                if self._waiting:
                    self._start_flush()
                elif self._dirty and self._timer is None:
                    self._timer = self._loop.call_later(
                        self._settings.cursor_flush_interval_ms / 1000, self._start_flush
                    )

    def _answer(self, receipts: list[DurableCallback], error: MagnetarError | None) -> None:
        """Each is taken out before it is called, so that none is called twice, whatever one of them raises."""
        receipts.reverse()
        while receipts:
            receipts.pop()(error)

    # --- writing -----------------------------------------------------------------------------------------------------

    async def _write(self, store: SnapshotLedger) -> bool:
        """Makes the current state durable: as a delta, else (True) as a snapshot, which replaces the ledger."""
        if not self._dirty:
            return False
        changed, self._changed = self._changed, LedgerRanges()
        self._dirty = False
        mark = self.state.mark_delete
        counts = self.redeliveries
        count_rows, rewinds = counts.changed_rows, list(counts.rewinds) if counts.rewinds_changed else None
        counts.clear_changes()
        try:
            replaced = not await self._append_delta(store, mark, changed, count_rows, rewinds)
            if replaced:
                self._snapshot_due = False
                await store.replace()
        except BaseException:  # whether it is durable is not known, and the changes were taken
            self._dirty = self._snapshot_due = True
            raise
        self._durable_mark = mark
        return replaced

    async def _append_delta(
        self,
        store: SnapshotLedger,
        mark: Position,
        changed: LedgerRanges,
        count_rows: list[RedeliveryRow],
        rewinds: list[Position] | None,
    ) -> bool:
        """False if a snapshot is to be written instead."""
        self.restore()
        most_rows = max(_MIN_DELTA_ROWS, self.state.range_count // _DELTA_SHARE)
        if self._snapshot_due or not store.has_room or store.changed_rows >= most_rows:
            return False
        try:
            changed.remove_ledgers_below(mark[0])
            changed.remove_below(mark[0], number_of(mark))
            if changed or mark != self._durable_mark:
                for piece in changed.pieces(MAX_ROWS_PER_ENTRY):
                    await store.append(encode_acks(mark, piece), sum(len(starts) for _, starts, _ in piece))
            for first in range(0, len(count_rows), MAX_ROWS_PER_ENTRY):
                rows = count_rows[first : first + MAX_ROWS_PER_ENTRY]
                await store.append(encode_redeliveries(rows), len(rows))
            if rewinds is not None:
                await store.append(encode_rewinds(rewinds), len(rewinds))
        except LedgerFenced:
            raise
        except MagnetarError as error:
            _log.warning("%s: its ledger failed: %s", self._name, error)
            return False
        return True

    def pieces(self) -> Iterator[bytes]:
        """A snapshot. The mark-delete position of each piece is of its moment, so that nothing falls out between two of them
        because everything before it was acknowledged meanwhile.
        """
        for piece in self.state.acked.pieces(MAX_ROWS_PER_ENTRY):
            yield encode_acks(self.state.mark_delete, piece)
        counts = self.redeliveries
        counts.drop_below(self.state.mark_delete)
        for rows in counts.pieces(MAX_ROWS_PER_ENTRY):
            yield encode_redeliveries(rows)
        if counts.rewinds:
            yield encode_rewinds(counts.rewinds)

    def summary(self) -> bytes:
        """The mark-delete position alone."""
        return encode_acks(self.state.mark_delete, [])

    def _taken_over(self, error: MagnetarError) -> None:
        """Another owner has the cursor: nothing is written any more, and the topic ends."""
        self._fenced = True
        taken_over = TopicNotServed(f"{self._name} was taken over: {error}")
        self._answer(self._writing, taken_over)
        self._answer(self._waiting, taken_over)
        self._on_conflict(error)

    # --- ending ------------------------------------------------------------------------------------------------------

    async def _stop(self) -> None:
        """Ends a flush that is under way; those who wait for it are answered, also if it never began to run."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        task, self._task = self._task, None
        try:
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        finally:
            error = ServiceNotReady("the subscription is being closed")
            self._answer(self._writing, error)
            self._answer(self._waiting, error)

    async def close(self, *, fenced: bool = False) -> None:
        """Writes what is dirty and closes; a small cursor moves into its pointer, which opens fastest."""
        store = self._store
        if store is None or fenced or self._fenced:
            await self._stop()
            if store is not None:
                store.detach()
            return
        small = await store.fits_pointer()
        idle = self._task is None and not self._waiting and not store.has_room
        if self._dirty and not (small and idle):
            with contextlib.suppress(MagnetarError):
                await self.flush()
        await self._stop()
        try:
            await store.close(changed=self._dirty, small=small)
        except MagnetarError as error:  # the next owner recovers the ledger
            _log.warning("%s: not closed cleanly: %s", self._name, error)

    async def delete(self) -> None:
        """The subscription does not exist from the first write on; its ledgers and pointer are deleted when this returns."""
        await self._stop()
        if self._store is not None:
            await self._store.delete()

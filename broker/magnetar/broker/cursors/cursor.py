"""A durable cursor: acknowledgement state in memory, its changes in a cursor ledger, a pointer to that in metadata.

The cursor ledger begins with a snapshot, deltas follow: one for all acknowledgements that came while the last one was being
written (group commit), holding the mark-delete position and the ranges that lie beyond it. Receipts are given when the delta
is durable (rule 34). Acknowledgements without a receipt wait `cursor_flush_interval_ms` at most, and so do redelivery counts
that have risen, which are an entry of their own behind the delta. Large ones are several entries, with a turn of the loop
for each: what is acknowledged while a snapshot is being written may be in it or not, and is in the next delta in any case.

Everything is written by one flush task at a time, so a roll-over finds nothing outstanding (rule 26): it writes a full
snapshot to a new ledger, moves the pointer by compare-and-set, then deletes the old ledger. If no ledger can be written the
snapshot goes into the pointer itself.

One owner (rule 52): who takes a cursor over fences its ledger, then writes its pointer, so that a former owner can neither
append nor roll over. Either of these, a fenced ledger or a version conflict, means another owner: nothing is written or
answered with success any more, and the topic fences itself.

A roll-over leaves its snapshot in the pointer as well (if it is large, the mark-delete position alone). So whatever of a
cursor ledger cannot be read any more costs the redelivery of what was acknowledged there, and nothing else: every entry
holds acknowledgements that are true without those before it, and a seek, which takes some back, begins a new ledger.

A ledger is left when its deltas have so many entries, or so many ranges beside those that stand, that reading them back
would take longer than reading the snapshot.

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
from typing import Any

from magnetar.metadata import MetadataStore
from magnetar.proto.errors import (
    DataDirectoryError,
    EntryDamaged,
    EntryNotFound,
    FinalError,
    LedgerFenced,
    LedgerNotFound,
    MagnetarError,
    ServiceNotReady,
    StorageFailed,
    TopicBusy,
    TopicNotServed,
    VersionConflict,
)
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from magnetar.runtime.tasks import begin

from ..log.moments import own_moment
from ..log.records import CursorLedgers, CursorRecord, replace
from ..resources.stores import Ledgers, Reader, Writer, delete_ledgers
from ..settings import BrokerSettings
from .core.acks import AckState, Position, Topology, number_of, numbers_of
from .core.ranges import LedgerRanges
from .core.redeliveries import RedeliveryCounts, RedeliveryRow
from .entries import MAX_ROWS_PER_ENTRY, encode_acks, encode_redeliveries, encode_rewinds, replay

_log = logging.getLogger(__name__)

NO_LEDGER = -1
# Redelivery counts that rise faster than they can be written: then a snapshot takes the place of the changes.
_MAX_COUNT_ROWS = 20_000
# Receipts that wait for the next write. Nothing but a cursor that cannot be written for long lets so many pile up.
MAX_WAITING_RECEIPTS = 50_000
# Rows of deltas behind a snapshot: replaying one takes 2 us, of a snapshot 0.3 us. At least so many, or a share of the
# ranges that stand.
_MIN_DELTA_ROWS = 20_000
_DELTA_SHARE = 4

DurableCallback = Callable[[MagnetarError | None], None]


def is_damage(error: MagnetarError) -> bool:
    """True if reading again cannot help; else (a bookie is away, its disk failed) the error may pass."""
    return type(error) is FinalError or isinstance(
        error, (EntryDamaged, EntryNotFound, LedgerNotFound, DataDirectoryError)
    )


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
        self.path = path
        self.state = state
        self.redeliveries = RedeliveryCounts()
        self._metadata = metadata
        self._ledgers = ledgers
        self._settings = settings
        self._on_conflict = on_conflict
        self._durability = durability
        self._loop = asyncio.get_running_loop()
        self._version = -1
        self._record = CursorRecord(NO_LEDGER, [], 0, {}, [], False)
        self._writer: Writer | None = None
        # In the cursor ledger: entries, the snapshot counts as one, and rows behind the snapshot.
        self._entries = 0
        self._delta_rows = 0
        self._changed = LedgerRanges()  # acknowledged since the last delta was taken, as `state` has it
        self._dirty = False
        self._snapshot_due = False
        self._resets = 0
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
        self._damaged = False  # not even the ledger can be read from the pointer

    @property
    def durable(self) -> bool:
        """False for a reader's cursor."""
        return self.path is not None

    # --- opening -----------------------------------------------------------------------------------------------------

    async def create(self, now_ms: int) -> None:
        """Records a new durable cursor at the state's position; durable when it returns. Raises AlreadyExists."""
        if self.path is not None:
            snapshot = list(self._state_entries())
            self._record = CursorRecord(NO_LEDGER, snapshot, now_ms, {}, [], False)
            self._version = await self._metadata.create(self.path, self._record.encode())

    async def recover(self, topology: Topology) -> None:
        """After `adopt`: takes the cursor over and reads its state; its ledger is fenced and closed on the way.

        What is damaged in the ledger is left out, and `recovered_from` set. Raises DataDirectoryError when the pointer is
        damaged; any other error may pass, and `adopt` and `recover` may be called again.
        """
        await self._delete_trimmed()
        if not self._record.snapshot:
            raise DataDirectoryError(f"the metadata of {self.path} is damaged: it has no snapshot")
        state = AckState(topology, (0, 0, 0))
        self.redeliveries.clear()
        for number, entry in enumerate(self._record.snapshot):
            if number:
                await asyncio.sleep(0)
            replay(state, self.redeliveries, entry)
        if self._record.ledger_id != NO_LEDGER:
            await self._read_ledger(state)
        await self._take_pointer()
        self._record.snapshot = []  # the state has it
        self.state = state
        self._durable_mark = state.mark_delete

    async def _take_pointer(self) -> None:
        """Writes the pointer as it is. Raises VersionConflict if its former owner wrote it since it was read."""
        assert self.path is not None
        version, self._version = self._version, -1
        self._version = await replace(self._metadata, self.path, self._record.encode(), version)

    async def _read_ledger(self, state: AckState) -> None:
        """Replays the cursor ledger on the pointer's snapshot, without what is damaged."""
        ledger_id = self._record.ledger_id
        first, last = 0, 0
        rows = 0  # replayed in this turn of the loop
        reader: Reader | None = None
        damage: list[MagnetarError] = []
        while first <= last:
            try:
                if reader is None:
                    reader = await self._ledgers.open(ledger_id, recover=True)
                    last = max(reader.last_add_confirmed, 0)  # it is not pointed to before it has a snapshot
                entries = await reader.read(first, last, max_bytes=1 << 20)
            except MagnetarError as error:
                if not is_damage(error):
                    raise
                damage.append(error)
                first += 1
                continue
            for entry in entries:
                if rows >= MAX_ROWS_PER_ENTRY:
                    await asyncio.sleep(0)
                    rows = 0
                try:
                    rows += 1 + replay(state, self.redeliveries, entry[LEDGER_ENTRY_HEADER_BYTES:])
                except DataDirectoryError as error:
                    damage.append(error)
            first += len(entries)
        if damage:
            self.recovered_from = state.mark_delete
            _log.warning(
                "cursor %s: %d of %d entries of its ledger %d cannot be read (%s); it goes on from %s, and what was "
                "acknowledged there beyond it is delivered again",
                self.path, len(damage), last + 1, ledger_id, damage[0], state.mark_delete,
            )  # fmt: skip

    async def adopt(self) -> bool:
        """Reads the pointer alone; False if the subscription was being deleted: call `delete` then.

        Raises DataDirectoryError when it is damaged: then `delete` is all that can be done.
        """
        assert self.path is not None
        stored = await self._metadata.get(self.path)
        if stored is None:
            raise DataDirectoryError(f"the cursor at {self.path} has no metadata")
        if self._version not in (-1, stored.version):
            conflict = VersionConflict(f"{self.path} was changed by another owner")
            self._fence(conflict)
            raise conflict
        self._version = stored.version
        try:
            self._record = CursorRecord.decode(stored.value, self.path)
        except DataDirectoryError:
            known = CursorLedgers.decode(stored.value)
            if known is None:
                self._damaged = True
            else:
                self._record.ledger_id, self._record.trimmed = known.ledger_id, known.trimmed
            raise
        return not self._record.deleting

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

    def restore(self) -> None:
        """Leaves a ledger for which there is a better one (`Writer.replaceable`), at this cursor's moment."""
        if self._writer is not None and self._writer.replaceable and not self._leaving:
            self._leaving = True
            delay_s = own_moment(str(self.path), self._settings.ledger_change_spread_ms)
            if delay_s:
                self._loop.call_later(delay_s, self._leave_ledger)
            else:
                self._leave_ledger()

    def _leave_ledger(self) -> None:
        self._leaving = False
        if self._writer is not None and self._writer.replaceable and not self._closed:
            self._dirty = self._snapshot_due = True
            self.changed(None)

    def reset(self, position: Position) -> None:
        """A seek: the one way in which the mark-delete position goes back."""
        self.state.reset(position)
        self.redeliveries.clear()
        self._changed.clear()
        self._resets += 1
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
        self.changed(partial(_resolve, future))
        await future

    def _start_flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is None and not self._closed and not self._fenced:
            self._task = begin(self._flush(), f"cursor {self.path}")

    async def _flush(self) -> None:
        try:
            # Those who wait for a change that is in the delta just written were taken along with it.
            while self._dirty or self._waiting:
                self._writing, self._waiting = self._waiting, []
                try:
                    await self._write()
                except MagnetarError as failure:
                    self._answer(self._writing, failure)
                    break
                self._answer(self._writing, None)
        except Exception as failure:  # a defect must not leave receipts waiting for ever
            _log.exception("cursor %s: flush failed", self.path)
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

    async def _write(self) -> None:
        """Makes the current state durable: as a delta, else as a snapshot in a new ledger, else in the pointer."""
        if not self._dirty:
            return
        changed, self._changed = self._changed, LedgerRanges()
        self._dirty = False
        mark = self.state.mark_delete
        counts = self.redeliveries
        count_rows, rewinds = counts.changed_rows, list(counts.rewinds) if counts.rewinds_changed else None
        counts.clear_changes()
        try:
            await self._write_state(mark, changed, count_rows, rewinds)
        except BaseException as error:  # whether it is durable is not known, and the changes were taken
            self._dirty = self._snapshot_due = True
            if isinstance(error, LedgerFenced):
                self._fence(error)
            raise
        self._durable_mark = mark

    async def _write_state(
        self,
        mark: Position,
        changed: LedgerRanges,
        count_rows: list[RedeliveryRow],
        rewinds: list[Position] | None,
    ) -> None:
        if self._writer is not None and not self._snapshot_due:
            most_rows = max(_MIN_DELTA_ROWS, self.state.range_count // _DELTA_SHARE)
            full = self._entries >= self._settings.max_cursor_ledger_entries or self._delta_rows >= most_rows
            self.restore()
            if not full and not self._snapshot_due:
                try:
                    changed.remove_ledgers_below(mark[0])
                    changed.remove_below(mark[0], number_of(mark))
                    if changed or mark != self._durable_mark:
                        for piece in changed.pieces(MAX_ROWS_PER_ENTRY):
                            await self._append(self._writer, encode_acks(mark, piece))
                    for first in range(0, len(count_rows), MAX_ROWS_PER_ENTRY):
                        rows = count_rows[first : first + MAX_ROWS_PER_ENTRY]
                        await self._append(self._writer, encode_redeliveries(rows))
                    if rewinds is not None:
                        await self._append(self._writer, encode_rewinds(rewinds))
                    self._delta_rows += changed.count + len(count_rows) + len(rewinds or ())
                    return
                except LedgerFenced:
                    raise
                except MagnetarError as error:
                    _log.warning("cursor %s: its ledger failed: %s", self.path, error)
        self._snapshot_due = False
        try:
            await self._roll_over()
        except (VersionConflict, LedgerFenced):
            raise
        except MagnetarError as error:
            _log.warning(
                "cursor %s: its state is written to metadata, since no ledger can be written: %s",
                self.path,
                error,
            )
            await self._write_pointer()

    async def _append(self, writer: Writer, payload: bytes) -> None:
        future: asyncio.Future[None] = self._loop.create_future()

        writer.append(payload, lambda _entry_id, _entry, error: _resolve(future, error))
        await future
        self._entries += 1

    async def _roll_over(self) -> None:
        """Rule 26: snapshot to a new ledger, compare-and-set the pointer, delete the old ledger."""
        old_writer, self._writer = self._writer, None
        while True:
            resets = self._resets
            writer = await self._create_ledger()
            try:
                snapshot = await self._append_snapshot(writer)
            except BaseException:
                with contextlib.suppress(MagnetarError):
                    await self._ledgers.delete(writer.ledger_id)
                raise
            if resets == self._resets:
                break
            # A seek: what was written before it is not acknowledged any more.
            writer.detach()
            with contextlib.suppress(MagnetarError):
                await self._ledgers.delete(writer.ledger_id)
        try:
            await self._point(writer.ledger_id, snapshot)
        except BaseException:
            writer.detach()  # the stored pointer may name the new ledger, so it stays
            raise
        self._writer = writer
        self._entries, self._delta_rows = 1, 0
        await self._delete_trimmed(old_writer)

    async def _create_ledger(self) -> Writer:
        assert self.path is not None
        return await self._ledgers.create(
            **self._durability(),
            properties={"kind": "cursor", "cursor": self.path},
            explicit_lac=False,
        )

    async def _append_snapshot(self, writer: Writer) -> list[bytes]:
        """The state becomes entries of the ledger. Returns those of the pointer: the same, or if large the mark alone."""
        snapshot: list[bytes] = []
        size = 0
        for entry in self._state_entries():
            await self._append(writer, entry)
            size += len(entry)
            if size <= self._settings.max_inline_cursor_bytes:
                snapshot.append(entry)
        return snapshot if size <= self._settings.max_inline_cursor_bytes else [self._mark_entry()]

    async def _write_pointer(self) -> None:
        old_writer, self._writer = self._writer, None
        snapshot = await self._snapshot()
        assert snapshot is not None
        await self._point(NO_LEDGER, snapshot)
        await self._delete_trimmed(old_writer)

    async def _snapshot(self, most_bytes: int | None = None) -> list[bytes] | None:
        """Entries of the whole state, with a turn of the loop for each; None if they have more than `most_bytes`."""
        while True:
            resets, size = self._resets, 0
            entries: list[bytes] = []
            for entry in self._state_entries():
                if entries:
                    await asyncio.sleep(0)
                entries.append(entry)
                size += len(entry)
                if most_bytes is not None and size > most_bytes:
                    return None
            if resets == self._resets:
                return entries

    def _state_entries(self) -> Iterator[bytes]:
        """A snapshot, piece by piece. The mark-delete position of each is of its moment, so that nothing falls out between
        two pieces because everything before it was acknowledged meanwhile.
        """
        for piece in self.state.acked.pieces(MAX_ROWS_PER_ENTRY):
            yield encode_acks(self.state.mark_delete, piece)
        counts = self.redeliveries
        counts.drop_below(self.state.mark_delete)
        for rows in counts.pieces(MAX_ROWS_PER_ENTRY):
            yield encode_redeliveries(rows)
        if counts.rewinds:
            yield encode_rewinds(counts.rewinds)

    def _mark_entry(self) -> bytes:
        return encode_acks(self.state.mark_delete, [])

    async def _point(self, ledger_id: int, snapshot: list[bytes], *, deleting: bool = False) -> None:
        """Moves the pointer by compare-and-set; the ledger that it named is to be deleted then."""
        old = self._record
        trimmed = (
            [*old.trimmed, old.ledger_id] if old.ledger_id not in (NO_LEDGER, ledger_id) else old.trimmed
        )
        record = CursorRecord(ledger_id, snapshot, old.created_ms, old.properties, trimmed, deleting)
        await self._put(record)
        self._record = record
        self._answer(self._writing, None)  # durable; nobody waits for the deletion of what it replaces

    async def _put(self, record: CursorRecord) -> None:
        assert self.path is not None
        try:
            self._version = await replace(self._metadata, self.path, record.encode(), self._version)
        except VersionConflict as conflict:
            self._fence(conflict)
            raise

    def _fence(self, error: MagnetarError) -> None:
        """Another owner has the cursor: nothing is written any more, and the topic ends."""
        self._fenced = True
        taken_over = TopicNotServed(f"cursor {self.path} was taken over: {error}")
        self._answer(self._writing, taken_over)
        self._answer(self._waiting, taken_over)
        self._on_conflict(error)

    async def _delete_trimmed(self, writer: Writer | None = None) -> None:
        """Deletes what the pointer no longer names; what fails is tried again at the next change or opening."""
        if writer is not None:
            with contextlib.suppress(MagnetarError):
                await writer.close()
        await delete_ledgers(self._ledgers, self._record.trimmed, f"cursor {self.path}")

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
        if not self.durable or fenced or self._fenced:
            await self._stop()
            if self._writer is not None:
                self._writer.detach()  # the ledger is another owner's, or is about to be deleted
            return
        small = await self._snapshot(self._settings.max_inline_cursor_bytes) is not None
        idle = self._writer is None and self._task is None and not self._waiting
        if self._dirty and not (small and idle):
            with contextlib.suppress(MagnetarError):
                await self.flush()
        await self._stop()
        try:
            if self._dirty or (small and self._record.ledger_id != NO_LEDGER):
                await self._write_pointer()
            elif self._writer is not None:
                await self._writer.close()
        except MagnetarError as error:  # the next owner recovers the ledger
            _log.warning("cursor %s: not closed cleanly: %s", self.path, error)

    async def delete(self) -> None:
        """The subscription does not exist from the first write on; its ledgers and pointer are deleted when this returns."""
        await self._stop()
        if self.path is None:
            return
        if self._damaged:
            _log.warning(
                "cursor %s: deleted; nothing of it can be read, so that its ledger, if it has one, stays: the ledger whose "
                "property `cursor` is this path", self.path,
            )  # fmt: skip
            await self._metadata.delete(self.path, version=self._version)
            return
        writer, self._writer = self._writer, None
        await self._point(NO_LEDGER, [], deleting=True)
        await self._delete_trimmed(writer)
        if self._record.trimmed:
            raise TopicBusy(
                f"the ledgers of the cursor at {self.path} could not be deleted yet; delete it again"
            )
        await self._metadata.delete(self.path, version=self._version)


def _resolve(future: asyncio.Future[None], error: MagnetarError | None) -> None:
    if not future.done():
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

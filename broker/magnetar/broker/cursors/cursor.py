"""A durable cursor: acknowledgement state in memory, its changes in a cursor ledger, a pointer to that in metadata.

The cursor ledger begins with a snapshot, deltas follow: one for all acknowledgements that came while the last one was being
written (group commit), holding the mark-delete position and the rows that lie beyond it. Receipts are given when the delta
is durable (rule 34). Acknowledgements without a receipt wait `cursor_flush_interval_ms` at most, and so do redelivery counts
that have risen, which are an entry of their own behind the delta.

Everything is written by one flush task at a time, so a roll-over finds nothing outstanding (rule 26): it writes a full
snapshot to a new ledger, moves the pointer by compare-and-set, then deletes the old ledger. If no ledger can be written the
snapshot goes into the pointer itself. A version conflict on the pointer means another owner: the topic fences itself.

A roll-over leaves its snapshot in the pointer as well (if it is large, the mark-delete position alone). So whatever of a
cursor ledger cannot be read any more costs the redelivery of what was acknowledged there, and nothing else: every delta
holds acknowledgements that are true without those before it, and a seek, which takes some back, begins a new ledger.

    CLEAN --> DIRTY     `changed`
    DIRTY --> WRITING   the flush task runs: at once with a receipt, else after the interval
    WRITING --> CLEAN, DIRTY   durable; whatever came meanwhile is the next delta
    any --> CLOSED
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial

from magnetar.metadata import MetadataStore
from magnetar.proto.errors import (
    DataDirectoryError,
    EntryDamaged,
    EntryNotFound,
    FinalError,
    LedgerNotFound,
    MagnetarError,
    ServiceNotReady,
    StorageFailed,
    TopicBusy,
    VersionConflict,
)
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES

from ..log.records import CursorLedgers, CursorRecord, replace
from ..resources.stores import Ledgers, Reader, Writer, delete_ledgers
from ..settings import BrokerSettings
from .core.acks import AckState, Position, Snapshot, Topology
from .core.redeliveries import RedeliveryCounts
from .entries import AckRowWithCount, encode_delta, encode_redeliveries, encode_snapshot, replay

_log = logging.getLogger(__name__)

NO_LEDGER = -1
# A cursor that acknowledges faster than it can write keeps this many rows at most; then a snapshot takes their place.
_MAX_ROWS = 20_000

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
    ) -> None:
        """`path` None: a reader's cursor, which is not durable."""
        self.path = path
        self.state = state
        self.redeliveries = RedeliveryCounts()
        self._metadata = metadata
        self._ledgers = ledgers
        self._settings = settings
        self._on_conflict = on_conflict
        self._loop = asyncio.get_running_loop()
        self._version = -1
        self._record = CursorRecord(NO_LEDGER, None, 0, {}, [], False)
        self._writer: Writer | None = None
        self._entries = 0  # in the cursor ledger
        self._rows: list[AckRowWithCount] = []
        self._dirty = False
        self._snapshot_due = False
        # Receipts to give: for the change that is being written, and for those that come after it.
        self._writing: list[DurableCallback] = []
        self._waiting: list[DurableCallback] = []
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
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
            self._record = CursorRecord(NO_LEDGER, self._snapshot(), now_ms, {}, [], False)
            self._version = await self._metadata.create(self.path, self._record.encode())

    async def recover(self, topology: Topology) -> None:
        """After `adopt`: reads the state from the pointer and its ledger, which is fenced and closed on the way.

        What is damaged in the ledger is left out, and `recovered_from` set. Raises DataDirectoryError when the pointer is
        damaged; any other error may pass, and `recover` may be called again.
        """
        await self._delete_trimmed()
        if self._record.snapshot is None:
            raise DataDirectoryError(f"the metadata of {self.path} is damaged: it has no snapshot")
        state = AckState.restore(topology, self._record.snapshot)
        self.redeliveries.restore(self._record.snapshot.redeliveries, self._record.snapshot.rewinds)
        if self._record.ledger_id != NO_LEDGER:
            state = await self._read_ledger(state, topology)
        self._record.snapshot = None  # the state has it
        self.state = state
        self._durable_mark = state.mark_delete

    async def _read_ledger(self, state: AckState, topology: Topology) -> AckState:
        """Replays the cursor ledger on the pointer's snapshot, without what is damaged."""
        ledger_id = self._record.ledger_id
        first, last = 0, 0
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
                try:
                    state = replay(state, self.redeliveries, topology, entry[LEDGER_ENTRY_HEADER_BYTES:])
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
        return state

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
            self._on_conflict(conflict)
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

    def ack(self, ledger: int, entry: int, first: int, last: int, message_count: int) -> int:
        """Acknowledges a range; returns how many messages were new. `changed` afterwards, once for many."""
        added = self.state.ack(ledger, entry, first, last, message_count)
        if added and self.durable:
            self._rows.append((ledger, entry, first, last, message_count))
            self._dirty = True
        return added

    def ack_through(self, ledger: int, entry: int, index: int, message_count: int) -> bool:
        """Acknowledges everything up to and with a message."""
        moved = self.state.ack_through(ledger, entry, index, message_count)
        self._dirty |= moved and self.durable
        return moved

    def skip_to(self, position: Position) -> bool:
        """Acknowledges everything before `position`; False if all of it was. `changed` or `flush` afterwards."""
        moved = self.state.move_to(position)
        self._dirty |= moved and self.durable
        return moved

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

    def reset(self, position: Position) -> None:
        """A seek: the one way in which the mark-delete position goes back."""
        self.state.reset(position)
        self.redeliveries.clear()
        self._rows = []
        self._dirty = self._snapshot_due = self.durable

    def changed(self, done: DurableCallback | None) -> None:
        """Schedules the flush. `done` is called once when everything before this call is durable, or with an error."""
        if self._closed and self._dirty:
            if done is not None:
                done(ServiceNotReady("the subscription is being closed"))
            return
        if not self._dirty and self._task is None:
            if done is not None:
                done(None)
            return
        if len(self._rows) + len(self.redeliveries.changed_rows) > _MAX_ROWS:
            self._rows = []
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
        if self._task is None and not self._closed:
            self._task = self._loop.create_task(self._flush())

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
            if not self._closed:
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
        rows, self._rows = self._rows, []
        self._dirty = False
        mark = self.state.mark_delete
        entries: list[bytes] = []
        if rows or mark != self._durable_mark:
            entries.append(encode_delta(mark, [row for row in rows if row[:2] >= mark[:2]]))
        counts = self.redeliveries
        if counts.changed:
            entries.append(encode_redeliveries(counts.changed_rows, counts.rewinds))
            counts.clear_changes()
        try:
            await self._write_state(entries)
        except BaseException:  # whether it is durable is not known, and the rows were taken
            self._dirty = self._snapshot_due = True
            raise
        self._durable_mark = mark

    async def _write_state(self, entries: list[bytes]) -> None:
        if self._writer is not None and not self._snapshot_due:
            full = self._entries >= self._settings.max_cursor_ledger_entries
            if not full and not self._writer.restorable:
                try:
                    for entry in entries:
                        await self._append(self._writer, entry)
                    return
                except MagnetarError as error:
                    _log.warning("cursor %s: its ledger failed: %s", self.path, error)
        self._snapshot_due = False
        try:
            await self._roll_over()
        except VersionConflict:
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
        settings = self._settings
        assert self.path is not None
        writer = await self._ledgers.create(
            ensemble_size=settings.ensemble_size,
            write_quorum=settings.write_quorum,
            ack_quorum=settings.ack_quorum,
            properties={"kind": "cursor", "cursor": self.path},
            explicit_lac=False,
        )
        old_writer, self._writer = self._writer, None
        self._entries = 0
        # What comes while this is being written is the next delta, so the snapshot is of this very moment.
        snapshot = self._snapshot()
        entry = encode_snapshot(snapshot)
        if len(entry) > settings.max_inline_cursor_bytes:
            snapshot = Snapshot(snapshot.mark_delete, [], [], [], [])
        try:
            await self._append(writer, entry)
        except BaseException:
            with contextlib.suppress(MagnetarError):
                await self._ledgers.delete(writer.ledger_id)
            raise
        try:
            await self._point(writer.ledger_id, snapshot)
        except BaseException:
            writer.detach()  # the stored pointer may name the new ledger, so it stays
            raise
        self._writer = writer
        await self._delete_trimmed(old_writer)

    async def _write_pointer(self) -> None:
        old_writer, self._writer = self._writer, None
        await self._point(NO_LEDGER, self._snapshot())
        await self._delete_trimmed(old_writer)

    def _snapshot(self) -> Snapshot:
        snapshot, counts = self.state.snapshot(), self.redeliveries
        counts.drop_below(snapshot.mark_delete)
        snapshot.redeliveries, snapshot.rewinds = counts.stored_rows(), list(counts.rewinds)
        return snapshot

    async def _point(self, ledger_id: int, snapshot: Snapshot | None, *, deleting: bool = False) -> None:
        """Moves the pointer by compare-and-set; the ledger that it named is to be deleted then."""
        old = self._record
        trimmed = (
            [*old.trimmed, old.ledger_id] if old.ledger_id not in (NO_LEDGER, ledger_id) else old.trimmed
        )
        record = CursorRecord(ledger_id, snapshot, old.created_ms, old.properties, trimmed, deleting)
        await self._put(record)
        self._record = record

    async def _put(self, record: CursorRecord) -> None:
        assert self.path is not None
        try:
            self._version = await replace(self._metadata, self.path, record.encode(), self._version)
        except VersionConflict as conflict:
            self._on_conflict(conflict)
            raise

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
        if not self.durable or fenced:
            await self._stop()
            if self._writer is not None:
                self._writer.detach()  # the ledger is another owner's, or is about to be deleted
            return
        small = len(encode_snapshot(self._snapshot())) <= self._settings.max_inline_cursor_bytes
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
        await self._point(NO_LEDGER, None, deleting=True)
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


__all__ = ["Cursor", "DurableCallback"]

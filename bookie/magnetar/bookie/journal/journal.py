"""The journal: encodes records, acknowledges what the device made durable, owns the files.

Files are `prepared` (named, zero-filled, durable, without a valid BEGIN record), then `begun` (BEGIN is the first record
of the stream that goes there), then released by a checkpoint and prepared again under a new sequence. A sequence, and so
an incarnation, is never used twice.

Once nothing was written for a while after a group, a small record (SYNCED) says that the group is durable, so that damage
at the very end of a journal can be distinguished from a torn tail (rule 5). Before that the next record says so.

The journal moves on to the next file as soon as the prepared part of the current one is used up. If no next file is ready,
the current one grows, and more files are prepared in advance from then on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from magnetar.proto.errors import DiskFull, MagnetarError, ServiceNotReady, StorageFailed
from magnetar.runtime.tasks import begin

from ..disk_worker import DiskWorker
from ..layout import journal_path
from ..mark import JournalPosition
from ..metrics import SIZE_BOUNDS, Histogram
from ..settings import BookieSettings
from .device import JournalDevice, ignore
from .records import (
    DELETED,
    FENCE,
    LAST_CONFIRMED,
    RECORD_HEADER_BYTES,
    RecordType,
    encode_begin,
    encode_record_header,
    incarnation_of,
)

_log = logging.getLogger(__name__)

# (ledger id, entry id, code): code 0 when the record is durable, else that of the error.
DurableCallback = Callable[[int, int, int], None]

_RETRY_PREPARE_S = 1.0
# How long nothing is written before a SYNCED record follows. It has a sync of its own, so that with 0.1 s each record of a
# sparse journal cost two. With 2 s it is one in 2 s at most, and damage at the very end of a journal that was written
# less than 2 to 4 s before a crash counts as a torn tail.
_IDLE_S = 2.0
ADD = int(RecordType.ADD)


class JournalFile(NamedTuple):
    """A begun file: all records from `base` to the base of the next one."""

    sequence: int
    base: int
    # Bytes prepared in advance.
    prepared_bytes: int


class Journal:
    """One journal directory. `on_failure` is called once; no callback reports success after it."""

    def __init__(
        self,
        device: JournalDevice,
        worker: DiskWorker,
        directory: str,
        settings: BookieSettings,
        instance: int,
        take_sequence: Callable[[], int],
    ) -> None:
        """`take_sequence` serves all journals of the bookie: no two files ever have the same sequence."""
        self.directory = directory
        self.device = device
        self.on_failure: Callable[[MagnetarError], None] | None = None
        # `no_space` changed.
        self.on_space: Callable[[], None] = ignore
        self.records = self.groups = self.rolls = 0
        self.group_records = Histogram(SIZE_BOUNDS)
        self._worker = worker
        self._settings = settings
        self._instance = instance
        self._incarnation = 0
        self._files: list[JournalFile] = []
        # A file was used up before the next one was ready.
        self._outran = False
        self._spares: deque[tuple[int, int]] = deque()  # (sequence, prepared bytes), ready to begin
        self._released: deque[tuple[int, int]] = deque()  # no longer needed, to be recycled or deleted
        self._take_sequence = take_sequence
        self._pending: deque[tuple[int, DurableCallback, int, int]] = deque()  # in order of end offset
        # Loop time at which a record became durable last, or the first of those that wait now came.
        self._progress_at = 0.0
        self._now: Callable[[], float] = float  # of the loop, once it has started
        # Records for which the ring had no room, in order. The write cache has their payloads, and bounds them.
        self._waiting: deque[tuple[int, bytes, DurableCallback, int, int]] = deque()
        # Why nothing is acknowledged any more.
        self.failure: MagnetarError | None = None
        self._wanted = asyncio.Event()
        self._preparing: asyncio.Task[None] | None = None
        # No file could be prepared for want of space, and none is ready.
        self._cannot_prepare = False
        # The timer for a SYNCED record, and the end offset when it was set. Records up to `_synced_record_end` need none.
        self._idle: asyncio.TimerHandle | None = None
        self._quiet_at = self._synced_record_end = -1
        # Deferred adds are synced when this fires, or when so many bytes wait, if nothing else has brought a sync.
        self._deferred_timer: asyncio.TimerHandle | None = None
        self._deferred_limit = settings.journal_ring_bytes // 4
        self._closing = False
        # Set by `close`: the last waiting record went to the device, or the device failed.
        self._emptied: asyncio.Future[None] | None = None

    async def start(
        self,
        position: JournalPosition,
        prepared_bytes: int,
        released: list[tuple[int, int]],
        needed: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Begins the prepared file at `position`; `released` are old files (sequence, bytes) for reuse.

        `needed`: those that the mark still points to, durable, the oldest first.
        """
        self._files += [JournalFile(sequence, 0, size) for sequence, size in needed]
        self._now = asyncio.get_running_loop().time
        self.device.on_durable = self._durable
        self.device.on_failure = self._device_failed
        self.device.on_space = self._space_changed
        self._released.extend(released)
        await self.device.start(position.sequence, position.offset)
        self._begin(position.sequence, prepared_bytes)
        self._wanted.set()
        self._preparing = begin(self._prepare_files(), "journal files", self._preparing_ended)

    @property
    def waiting(self) -> bool:
        """True while the ring is full and records wait for room."""
        return bool(self._waiting)

    @property
    def no_space(self) -> bool:
        """True while the disk takes no new journal file, or not even what was appended.

        Nothing but fences and the like should be added then: what is prepared of the current file is for them (rule 12).
        """
        return self.device.full or self._cannot_prepare

    @property
    def queued(self) -> tuple[int, int]:
        """(records, bytes) that are on their way to the disk."""
        on_the_way = self.device.end_offset - self.device.durable_offset
        return len(self._pending) + len(self._waiting), on_the_way

    @property
    def stalled_s(self) -> float:
        """How long records have waited without any becoming durable; 0 while none waits."""
        device = self.device
        if not self._waiting and (not self._pending or device.durable_offset == device.requested_offset):
            return 0.0  # deferred adds wait for no disk
        return self._now() - self._progress_at

    @property
    def files(self) -> list[int]:
        """Sequences of the files that a recovery would read, oldest first."""
        return [file.sequence for file in self._files]

    def durable_position(self) -> JournalPosition:
        """Everything before it is durable, and was in the write cache before it was written here (rule 1)."""
        durable = self.device.durable_offset
        for file in reversed(self._files):
            if file.base <= durable:
                return JournalPosition(file.sequence, durable, file.base)
        raise AssertionError("the first file begins at the first offset")

    def add(self, entry: bytes, done: DurableCallback, ledger_id: int, entry_id: int) -> None:
        """Appends a ledger entry; `done` is called once, never from in here. About 3 us and the copy."""
        device = self.device
        if self._waiting or device.free_bytes < len(entry) + 2 * RECORD_HEADER_BYTES or self.failure:
            self._append_later(ADD, entry, done, ledger_id, entry_id)
            return
        header = encode_record_header(self._incarnation, device.end_offset, device.durable_offset, ADD, entry)
        if not self._pending or (
            # Only deferred adds wait: they have asked for nothing yet.
            self._deferred_timer is not None and device.durable_offset == device.requested_offset
        ):
            self._progress_at = self._now()
        device.append(header, entry)
        self._pending.append((device.end_offset, done, ledger_id, entry_id))

    def add_deferred(self, entry: bytes, done: DurableCallback, ledger_id: int, entry_id: int) -> None:
        """The same without asking for a sync: the next sync covers it, within `journal_deferred_sync_s`."""
        device = self.device
        if self._waiting or device.free_bytes < len(entry) + 2 * RECORD_HEADER_BYTES or self.failure:
            self._append_later(ADD, entry, done, ledger_id, entry_id)
            return
        header = encode_record_header(self._incarnation, device.end_offset, device.durable_offset, ADD, entry)
        if device.durable_offset == device.requested_offset:
            self._progress_at = self._now()
        device.append_deferred(header, entry)
        self._pending.append((device.end_offset, done, ledger_id, entry_id))
        if device.end_offset - device.requested_offset >= self._deferred_limit:
            self.sync()
        elif self._deferred_timer is None:
            loop = asyncio.get_running_loop()
            self._deferred_timer = loop.call_later(
                self._settings.journal_deferred_sync_s, self._sync_deferred
            )

    def sync(self) -> None:
        """Sends deferred records to the disk now, in one group with all others."""
        if self.failure is None:
            if self.device.durable_offset == self.device.requested_offset:
                self._progress_at = self._now()
            self.device.sync()

    def force(self, ledger_id: int, done: DurableCallback) -> None:
        """`done` is called when everything appended before is durable. Forces of one turn of the loop share a sync."""
        device = self.device
        if self.failure is not None or self._waiting:
            # A position behind the records that wait for the ring.
            self._append_later(RecordType.SYNCED, b"", done, ledger_id, -1)
        elif device.durable_offset == device.end_offset:
            asyncio.get_running_loop().call_soon(done, ledger_id, -1, 0)
        else:
            self._pending.append((device.end_offset, done, ledger_id, -1))
            self.sync()

    def _sync_deferred(self) -> None:
        self._deferred_timer = None
        self.sync()

    def fence(self, ledger_id: int, done: DurableCallback) -> None:
        """Appends a fence. One record stands for the ledger's key and its fence (rule 6)."""
        self._append_later(RecordType.FENCE, FENCE.pack(ledger_id), done, ledger_id, -1)
        self._drain_waiting()

    def last_confirmed(self, ledger_id: int, last_add_confirmed: int, done: DurableCallback) -> None:
        """Appends an explicit last add confirmed."""
        payload = LAST_CONFIRMED.pack(ledger_id, last_add_confirmed)
        self._append_later(RecordType.LAST_CONFIRMED, payload, done, ledger_id, last_add_confirmed)
        self._drain_waiting()

    def delete(self, ledger_id: int, deleted_at_ms: int, done: DurableCallback) -> None:
        """Appends a tombstone (rule 7)."""
        payload = DELETED.pack(ledger_id, deleted_at_ms)
        self._append_later(RecordType.DELETED, payload, done, ledger_id, -1)
        self._drain_waiting()

    def release(self, mark: JournalPosition) -> None:
        """Files before the mark's are not needed any more. Only after the mark is durable (rule 2)."""
        while len(self._files) > 1 and self._files[0].sequence < mark.sequence:
            file = self._files.pop(0)
            self._released.append((file.sequence, file.prepared_bytes))
        self._wanted.set()

    async def close(self) -> None:
        """Waits until everything appended is durable and acknowledged; on a full disk it is refused instead."""
        self._closing = True
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if self._deferred_timer is not None:
            self._deferred_timer.cancel()
            self._deferred_timer = None
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.gather(self._preparing, return_exceptions=True)
            self._preparing = None
        wait = False
        try:
            if self._waiting and self.failure is None and not self.device.full:
                self._emptied = asyncio.get_running_loop().create_future()
                await self._emptied
            wait = True
        finally:  # also when the bookie gives up waiting
            try:
                await self.device.close(wait=wait)
                await asyncio.sleep(0)  # what the device has to say
            finally:
                self._refuse_all(ServiceNotReady("this bookie is stopping"))

    def _append_later(
        self, record_type: int, payload: bytes, done: DurableCallback, ledger_id: int, number: int
    ) -> None:
        if self.failure is not None:
            asyncio.get_running_loop().call_soon(done, ledger_id, number, self.failure.code)
            return
        if not self._pending and not self._waiting:
            self._progress_at = self._now()
        self._waiting.append((record_type, payload, done, ledger_id, number))
        self.device.sync()  # what fills the ring may be deferred

    def _drain_waiting(self) -> None:
        device, waiting = self.device, self._waiting
        while waiting:
            record_type, payload, done, ledger_id, number = waiting[0]
            if device.free_bytes < len(payload) + 2 * RECORD_HEADER_BYTES:
                return
            waiting.popleft()
            header = encode_record_header(
                self._incarnation, device.end_offset, device.durable_offset, record_type, payload
            )
            device.append(header, payload)
            self._pending.append((device.end_offset, done, ledger_id, number))

    def _durable(self, offset: int) -> None:
        pending = self._pending
        before = len(pending)
        self._progress_at = self._now()
        while pending and pending[0][0] <= offset:
            _, done, ledger_id, number = pending.popleft()
            try:
                done(ledger_id, number, 0)
            except Exception:
                _log.exception("a callback of the journal failed")
        self.groups += 1
        if before > len(pending):
            self.records += before - len(pending)
            self.group_records.observe(before - len(pending))
        if self._waiting:
            self._drain_waiting()
            self._notify_emptied()
        file = self._files[-1]
        position = self.device.file_position
        if offset > file.base and position >= file.prepared_bytes:
            if self._spares:
                sequence, prepared = self._spares.popleft()
                self.device.roll(sequence)
                self._begin(sequence, prepared)
                self.rolls += 1
                self._wanted.set()
            else:
                self._outran = True
        if self._idle is None and self._synced_record_end != offset == self.device.end_offset:
            self._schedule_synced_record()

    def _schedule_synced_record(self) -> None:
        self._quiet_at = self.device.end_offset
        self._idle = asyncio.get_running_loop().call_later(_IDLE_S, self._append_synced_record)

    def _append_synced_record(self) -> None:
        """Appends a SYNCED record if nothing was written meanwhile. Its own durability does not matter."""
        self._idle = None
        device = self.device
        end = device.end_offset
        if (
            self.failure is not None
            or self._closing
            or device.durable_offset != end
            or self._synced_record_end == end
        ):
            return  # the next group sets the timer again
        if end != self._quiet_at:
            self._schedule_synced_record()
            return
        device.append(encode_record_header(self._incarnation, end, end, RecordType.SYNCED, b""), b"")
        self._synced_record_end = device.end_offset

    def _begin(self, sequence: int, prepared_bytes: int) -> None:
        device = self.device
        base = device.end_offset
        self._incarnation = incarnation_of(self._instance, sequence)
        payload = encode_begin(self._instance, sequence)
        header = encode_record_header(
            self._incarnation, base, device.durable_offset, RecordType.BEGIN, payload
        )
        device.append(header, payload)
        self._synced_record_end = device.end_offset
        self._files.append(JournalFile(sequence, base, prepared_bytes))

    def stop(self, error: MagnetarError) -> None:
        """The bookie has failed elsewhere: nothing is acknowledged any more, what is on its way least of all."""
        self._device_failed(error)

    def _device_failed(self, error: MagnetarError) -> None:
        if self._refuse_all(error) and self.on_failure is not None:
            self.on_failure(error)

    def _refuse_all(self, error: MagnetarError) -> bool:
        """Refuses all records that wait or still come. False if that has happened before."""
        if self.failure is not None:
            return False
        self.failure = error
        pending, self._pending = self._pending, deque()
        waiting, self._waiting = self._waiting, deque()
        for _, done, ledger_id, number in pending:
            done(ledger_id, number, error.code)
        for _, _, done, ledger_id, number in waiting:
            done(ledger_id, number, error.code)
        self._notify_emptied()
        return True

    def _space_changed(self) -> None:
        if self._closing and self.device.full and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)
        self.on_space()

    def _set_cannot_prepare(self, value: bool) -> None:
        if value != self._cannot_prepare:
            self._cannot_prepare = value
            self.on_space()

    def _notify_emptied(self) -> None:
        if self._emptied is not None and not self._waiting and not self._emptied.done():
            self._emptied.set_result(None)

    def _preparing_ended(self, task: asyncio.Task[None]) -> None:
        """Stops the journal: without new files the current one would silently grow for ever."""
        if self._closing or self.failure is not None:
            return
        error = asyncio.CancelledError("cancelled") if task.cancelled() else task.exception()
        _log.critical("the preparation of journal files in %s ended", self.directory, exc_info=error)
        self._device_failed(
            StorageFailed(f"the preparation of journal files in {self.directory} ended: {error!r}")
        )

    async def _prepare_files(self) -> None:
        """The task that prepares files, recycles released ones and deletes surplus ones."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                while self._released or self._short_of_files():
                    await self._prepare_one()
                self._set_cannot_prepare(False)
            except DiskFull as error:
                # What is prepared of the current file remains; the bookie turns read-only meanwhile.
                if not self._spares:
                    self._set_cannot_prepare(True)
                _log.warning("no journal file could be prepared: %s", error)
                await asyncio.sleep(_RETRY_PREPARE_S)
                self._wanted.set()
            except MagnetarError as error:
                self._device_failed(error)
                return

    def _short_of_files(self) -> bool:
        """One is always ready. Under load, so many that they last until a flush of the write cache releases some.

        A file that must grow costs the disk four times as much per byte as one that was prepared (1.2 s a GB of the writer
        instead of 0.2, on one machine), and each of its syncs writes metadata. A bookie without load stays small.
        """
        settings = self._settings
        if not self._spares or not self._outran:
            return not self._spares
        spare = sum(size for _, size in self._spares)
        if spare + settings.journal_file_bytes > settings.journal_spare_bytes:
            return False
        share = settings.write_cache_bytes // max(1, len(settings.journal_directories))
        return spare + sum(file.prepared_bytes for file in self._files) < share + settings.journal_file_bytes

    async def _prepare_one(self) -> None:
        wanted = self._settings.journal_file_bytes
        if self._released:
            source, size = self._released[0]
            spare_bytes = sum(size for _, size in self._spares)
            # One that is too small was the first file of a first start.
            if size < wanted or (self._spares and spare_bytes + size > self._settings.journal_spare_bytes):
                await self._worker.delete(journal_path(self.directory, source))
                self._released.popleft()
                return
        else:
            source, size = 0, wanted
        sequence = self._take_sequence()
        source_path = journal_path(self.directory, source) if source else ""
        path = journal_path(self.directory, sequence)
        try:
            await self._worker.prepare(path, size, source_path)
        except DiskFull:
            if not source:
                # A part of it would stay, and one more after each attempt: no space that is freed would reach the bookie.
                await self._worker.delete(path)
            raise
        if source:
            self._released.popleft()
        self._spares.append((sequence, size))

"""A journal device whose disk work is done by another process, over a ring of shared memory.

    append:  copy into the ring; once per turn of the loop announce the end offset through a pipe
    writer:  pwrite straight from the ring, fdatasync, report the durable offset through a pipe
    daemon:  the loop reads the pipe and acknowledges everything up to that offset

No thread of this process is involved, so a saturated loop waits for nothing but the disk. Offsets travel through pipes:
16 bytes in one write arrive whole and in order, and the system call is the memory barrier that makes the bytes in the
ring visible first, on any processor.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
from collections import deque

from magnetar.proto.errors import DiskFull, MagnetarError, StorageFailed
from magnetar.runtime.processes import HelperProcess, spawn_helper

from ..journal.device import JournalDevice
from ..journal.records import GROUP_ALIGNMENT
from . import writer_process
from .writer_process import CONTROL, DURABLE, FULL, NO_SPACE, REPORT, ROLL, WRITTEN

_STOP_TIMEOUT_S = 5.0


def shared_memory(name: str, size: int) -> int:
    """A descriptor of anonymous memory that another process can map."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name)
    else:
        fd, path = tempfile.mkstemp(prefix=f"{name}-")
        os.unlink(path)
    os.ftruncate(fd, size)
    return fd


class RingJournalDevice(JournalDevice):
    """See `JournalDevice`. `lock_fd` is inherited by the writer, which so holds the data directory (rule 12b).

    `sync_data` False is unsafe: it acknowledges what is buffered. `writer`: the script of the process.
    """

    def __init__(
        self,
        path_template: str,
        *,
        ring_bytes: int = 32 << 20,
        lock_fd: int | None = None,
        sync_data: bool = True,
        writer: str = writer_process.__file__,
    ) -> None:
        super().__init__(-(-ring_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._template = path_template
        self._lock_fd = lock_fd
        self._sync_data = sync_data
        self._writer = writer
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process: HelperProcess | None = None
        self._ring: mmap.mmap | None = None
        self._control_fd = self._report_fd = -1
        self._announced = 0
        self._scheduled = False
        # Control messages that the pipe did not take; only while the writer is stuck in a long sync.
        self._outbox: deque[bytes] = deque()
        self._report_rest = b""
        self._failure: MagnetarError | None = None
        self._drained: asyncio.Future[None] | None = None

    @property
    def writer_pid(self) -> int:
        """Process id of the writer, 0 before `start`."""
        return self._process.pid if self._process is not None else 0

    async def start(self, sequence: int, offset: int) -> None:
        """See `JournalDevice`. 15 to 25 ms until the writer runs; this returns before."""
        self._loop = asyncio.get_running_loop()
        self._end = self._announced = self._durable = offset
        ring_fd = shared_memory("magnetar-journal-ring", self._capacity)
        control_read, self._control_fd = os.pipe()
        self._report_fd, report_write = os.pipe()
        try:
            self._ring = mmap.mmap(ring_fd, self._capacity)
            numbers = (control_read, report_write, ring_fd, self._capacity, offset, GROUP_ALIGNMENT)
            inherited = [control_read, report_write, ring_fd]
            if self._lock_fd is not None:
                inherited.append(self._lock_fd)
            arguments = [*map(str, numbers), str(int(self._sync_data)), self._template]
            self._process = spawn_helper(self._writer, arguments, inherited)
        finally:
            os.close(control_read)
            os.close(report_write)
            os.close(ring_fd)
        os.set_blocking(self._control_fd, False)
        os.set_blocking(self._report_fd, False)
        self._process.on_exit(self._writer_ended)
        self._loop.add_reader(self._report_fd, self._report_readable)
        self._send(CONTROL.pack(ROLL, sequence))

    def append(self, header: bytes, payload: bytes) -> None:
        """See `JournalDevice`. 0.5 us and the copy."""
        ring, size = self._ring, self._capacity
        assert ring is not None
        end = self._end
        at = end % size
        middle = at + len(header)
        after = middle + len(payload)
        if after <= size:
            ring[at:middle] = header
            ring[middle:after] = payload
        else:
            data = header + payload
            ring[at:size] = data[: size - at]
            ring[: after - size] = data[size - at :]
        self._end = end + after - at
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._announce)  # type: ignore[union-attr]

    def append_deferred(self, header: bytes, payload: bytes) -> None:
        scheduled, self._scheduled = self._scheduled, True  # so that nothing is announced for it
        self.append(header, payload)
        self._scheduled = scheduled

    def sync(self) -> None:
        if not self._scheduled and self._announced < self._end:
            self._scheduled = True
            self._loop.call_soon(self._announce)  # type: ignore[union-attr]

    @property
    def requested_offset(self) -> int:
        return self._announced

    def roll(self, sequence: int) -> None:
        self._announce()
        self._send(CONTROL.pack(ROLL, sequence))

    async def close(self, *, wait: bool = True) -> None:
        try:
            if wait and self._loop is not None and self._failure is None and self._durable < self._end:
                self._announce()
                self._drained = self._loop.create_future()
                if not self.full:
                    await self._drained
                if self.full and self._failure is None:
                    self._no_room_to_close()
        finally:  # cancelled when the disk hangs: what is not durable by now is not acknowledged any more
            self._failure = self._failure or StorageFailed("the journal device is closed")
            await self._release()

    async def _release(self) -> None:
        if self._report_fd >= 0:
            assert self._loop is not None
            self._loop.remove_reader(self._report_fd)
            if self._outbox:
                self._loop.remove_writer(self._control_fd)
                self._outbox.clear()
            os.close(self._control_fd)
            os.close(self._report_fd)
            self._control_fd = self._report_fd = -1
        if self._process is not None:
            await self._process.stop(_STOP_TIMEOUT_S)
            self._process = None
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def _announce(self) -> None:
        self._scheduled = False
        if self._announced < self._end and self._failure is None:
            self._announced = self._end
            self._send(CONTROL.pack(WRITTEN, self._end))

    def _send(self, message: bytes) -> None:
        if self._outbox:
            self._outbox.append(message)
            return
        try:
            os.write(self._control_fd, message)
        except BlockingIOError:
            # 4096 messages are waiting for a writer in a long sync; the ring bounds what can still come.
            self._outbox.append(message)
            assert self._loop is not None
            self._loop.add_writer(self._control_fd, self._send_outbox)
        except OSError as error:
            self._loop.call_soon(self._writer_unreachable, error)  # type: ignore[union-attr]

    def _send_outbox(self) -> None:
        try:
            while self._outbox:
                os.write(self._control_fd, self._outbox[0])
                self._outbox.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            self._outbox.clear()
            self._writer_unreachable(error)
        assert self._loop is not None
        self._loop.remove_writer(self._control_fd)

    def _writer_unreachable(self, error: OSError) -> None:
        """The control pipe is closed; the last report of the process may say why."""
        if self._report_fd >= 0:
            self._report_readable()
        self._fail(StorageFailed(f"the journal writer process has ended: {error.strerror}"))

    def _report_readable(self) -> None:
        try:
            data = os.read(self._report_fd, 65536)
        except BlockingIOError:
            return
        if not data:  # the end; `_writer_ended` says why
            assert self._loop is not None
            self._loop.remove_reader(self._report_fd)
            return
        if self._failure is not None:
            return
        data = self._report_rest + data
        whole = len(data) - len(data) % REPORT.size
        self._report_rest = data[whole:]
        durable = self._durable
        full = self.full
        for kind, value, position, sync_ns in REPORT.iter_unpack(data[:whole]):
            if kind == DURABLE:
                self.sync_seconds.observe(sync_ns / 1e9)
                self.group_bytes.observe(value - durable)
                durable, self._position, full = value, position, False
            elif kind == FULL:
                full = True
            else:
                self._write_failed(value, position)
                break
        if durable > self._durable:
            self._durable = durable
            self.on_durable(durable)
            if self._drained is not None and durable >= self._end and not self._drained.done():
                self._drained.set_result(None)
        if full != self.full:
            self.full = full
            self.on_space()
            if full and self._drained is not None and not self._drained.done():
                self._drained.set_result(None)

    def _no_room_to_close(self) -> None:
        """Fails the journal: what is not durable was never acknowledged."""
        self._fail(DiskFull("the disk of the journal is full: what is not durable yet was not stored"))

    def _write_failed(self, number: int, sequence: int) -> None:
        kind = DiskFull if number in NO_SPACE else StorageFailed
        path = self._template % sequence
        self._fail(
            kind(
                f"writing or syncing the journal {path} failed: {os.strerror(number)}; the bookie stops, and a "
                "restart recovers what is durable",
                path=path,
                errno=number,
            )
        )

    def _writer_ended(self, code: int) -> None:
        # What it reported before it ended is still in the pipe, and it is durable.
        while self._report_fd >= 0 and self._failure is None:
            before = self._durable
            self._report_readable()
            if self._durable == before:
                break
        self._fail(
            StorageFailed(
                f"the journal writer process ended with {code}; the bookie stops, and a restart recovers "
                "what is durable"
            )
        )

    def _fail(self, failure: MagnetarError) -> None:
        if self._failure is not None:
            return
        self._failure = failure
        assert self._loop is not None
        self._loop.call_soon(self.on_failure, failure)
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

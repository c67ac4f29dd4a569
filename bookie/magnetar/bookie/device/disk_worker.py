"""The disk worker in a process of its own: requests and answers over a socket pair, bytes to write in shared memory.

The shared memory is cut into slots. A write is copied into free ones, and waits for others to become free; a slot is free
again when the worker has answered, whether its caller still waits or not.

Reads of a directory that hangs end after a timeout, with RequestTimeout: so many are with the process, the others wait for
these, and while a directory has been silent for the timeout its further reads fail at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from magnetar.proto.errors import DiskFull, MagnetarError, RequestTimeout, StorageFailed
from magnetar.runtime.files import FileLock, storage_error
from magnetar.runtime.processes import HelperProcess, spawn_helper

from ..journal.device import ignore
from . import disk_process
from .disk_process import (
    ANSWER,
    CREATE,
    DELETE,
    PREPARE,
    RENAME,
    REPLACE,
    REQUEST,
    SYNC,
    TRUNCATE,
    WARM,
    WRITE,
)
from .ring import shared_memory

_STOP_TIMEOUT_S = 5.0
# Below the read timeout of ledger clients, 5 s, so that they get the reason. Reads of one directory with the process.
_READ_TIMEOUT_S = 4.0
_READS_OF_A_DIRECTORY = 64
_SYNCING = "syncing"
_WRITING = "writing to"
_SLOT_BYTES = 512 << 10
_SLOTS = 16
# A copy of its own costs a part about 0.1 us.
_JOIN_BYTES = 2048


class ProcessDiskWorker:
    """Asks a helper process; only for files of the real disk. `memory_bytes` are shared for writes, in slots."""

    def __init__(
        self,
        memory_bytes: int = _SLOTS * _SLOT_BYTES,
        *,
        slot_bytes: int = _SLOT_BYTES,
        read_timeout_s: float = _READ_TIMEOUT_S,
    ) -> None:
        self.on_failure: Callable[[MagnetarError], None] = ignore
        self._process: HelperProcess | None = None
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slot_bytes = slot_bytes
        self._memory_bytes = max(1, memory_bytes // slot_bytes) * slot_bytes
        self._memory: mmap.mmap | None = None
        # Where free slots begin; and those who wait for one, in order.
        self._free = list(range(0, self._memory_bytes, slot_bytes))
        self._writers: deque[asyncio.Future[int]] = deque()
        # (future, path, what is done, slot or -1)
        self._waiting: dict[int, tuple[asyncio.Future[None], str, str, int]] = {}
        self._read_timeout_s = read_timeout_s
        self._reads: dict[str, _DirectoryReads] = {}
        # Of directories, and when each was asked.
        self._probes: dict[str, tuple[asyncio.Future[None], float]] = {}
        self._next_id = 0
        self._buffer = b""
        # What the socket did not take; requests are small and bounded by their callers.
        self._unsent = bytearray()
        self._closed = False

    async def start(self, lock: FileLock) -> None:
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        memory_fd = shared_memory("magnetar-disk-worker", self._memory_bytes)
        try:
            self._memory = mmap.mmap(memory_fd, self._memory_bytes)
            inherited = [theirs.fileno(), memory_fd]
            self._process = spawn_helper(
                disk_process.__file__,
                [*map(str, inherited), str(self._memory_bytes)],
                [*inherited, lock.fileno()],
            )
        finally:
            os.close(memory_fd)
        theirs.close()
        ours.setblocking(False)
        self._socket = ours
        self._process.on_exit(self._worker_ended)
        self._loop.add_reader(ours.fileno(), self._readable)

    async def sync(self, path: str) -> None:
        await self._ask(SYNC, path, _SYNCING)

    async def create(self, path: str) -> None:
        await self._ask(CREATE, path, "making")

    async def write(self, path: str, position: int, parts: Sequence[bytes]) -> None:
        """See `DiskWorker`. The loop copies: about 0.1 ms a MB."""
        asked: list[asyncio.Future[None]] = []
        for pieces in _for_slots(parts, self._slot_bytes):
            slot = self._free.pop() if self._free else await self._free_slot()
            memory = self._memory
            if memory is None:
                raise StorageFailed("the disk worker is closed")
            at = slot
            for piece in pieces:
                end = at + len(piece)
                memory[at:end] = piece
                at = end
            asked.append(self._ask(WRITE, path, _WRITING, position, slot, count=at - slot, slot=slot))
            position += at - slot
        # All are waited for: after an error nothing of this write is on its way any more.
        error: BaseException | None = None
        for future in asked:
            try:
                await future
            except MagnetarError as failure:
                # What is not just a full disk outweighs it.
                if error is None or isinstance(error, DiskFull):
                    error = failure
        if error is not None:
            raise error

    async def truncate(self, path: str, size: int) -> None:
        await self._ask(TRUNCATE, path, "truncating", size)

    async def warm(self, path: str, offset: int, length: int) -> None:
        assert self._loop is not None
        directory = os.path.dirname(path)
        reads = self._reads.get(directory)
        if reads is None:
            reads = self._reads[directory] = _DirectoryReads(self._loop.time)
        if reads.silent_s() < self._read_timeout_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._read_timeout_s):
                    await reads.room.acquire()
                    try:
                        asked = self._ask(WARM, path, "reading", offset, length)
                    except MagnetarError:
                        reads.room.release()
                        raise
                    reads.begun(asked)
                    # It takes room until it is answered, whether its caller still waits or not.
                    await asyncio.shield(asked)
                    return
        raise RequestTimeout(
            f"reads of {directory} wait for its disk, which has not answered for {reads.silent_s():.1f} s; "
            "read another replica, and look at the disk",
            path=path,
        )

    def probe(self, directory: str) -> None:
        """See `DiskWorker`. A directory is synced: its disk flushes, whatever changed; in turn with its files."""
        last = self._probes.get(directory)
        if last is not None and not last[0].done():
            return
        assert self._loop is not None
        with contextlib.suppress(MagnetarError):  # closed
            asked = self._ask(SYNC, f"{directory}/.", _SYNCING)
            asked.add_done_callback(asyncio.Future.exception)
            self._probes[directory] = (asked, self._loop.time())

    def silent_directories(self) -> dict[str, float]:
        silent = {path: reads.silent_s() for path, reads in self._reads.items()}
        for path, (asked, at) in self._probes.items():
            if not asked.done() and self._loop is not None:
                silent[path] = max(silent.get(path, 0.0), self._loop.time() - at)
        return silent

    async def prepare(self, path: str, size: int, source: str = "", *, hurry: bool = False) -> None:
        await self._ask(PREPARE, path, "preparing", size, int(hurry), data=source.encode())

    async def replace(self, path: str, data: bytes) -> None:
        await self._ask(REPLACE, path, "replacing", data=data)

    async def rename(self, source: str, target: str) -> None:
        await self._ask(RENAME, source, "renaming", data=target.encode())

    async def delete(self, path: str) -> None:
        await self._ask(DELETE, path, "deleting")

    async def close(self) -> None:
        self._closed = True
        if self._socket is not None:
            assert self._loop is not None
            self._loop.remove_reader(self._socket.fileno())
            if self._unsent:
                self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._socket = None
        if self._process is not None:
            await self._process.stop(_STOP_TIMEOUT_S)
            self._process = None
        self._fail_waiting(StorageFailed("the disk worker is closed"))
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    async def _free_slot(self) -> int:
        """Waits for its turn, so that writes are sent in the order of their calls."""
        assert self._loop is not None
        turn: asyncio.Future[int] = self._loop.create_future()
        self._writers.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn in self._writers:
                self._writers.remove(turn)
            elif not turn.cancelled() and turn.exception() is None:
                self._release(turn.result())
            raise

    def _release(self, slot: int) -> None:
        """Gives memory to the write that waits longest, or returns it to the free memory."""
        while self._writers:
            turn = self._writers.popleft()
            if not turn.done():
                turn.set_result(slot)
                return
        self._free.append(slot)

    def _ask(
        self,
        operation: int,
        path: str,
        doing: str,
        a: int = 0,
        b: int = 0,
        *,
        count: int = 0,
        data: bytes = b"",
        slot: int = -1,
    ) -> asyncio.Future[None]:
        if self._closed or self._socket is None or self._loop is None:
            raise StorageFailed("the disk worker is closed")  # or its process ended: there would be no answer
        self._next_id = number = (self._next_id + 1) & 0xFFFFFFFF
        encoded = path.encode()
        length = REQUEST.size - 4 + len(encoded) + len(data)
        self._send(REQUEST.pack(length, operation, number, a, b, count, len(encoded)) + encoded + data)
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting[number] = (future, path, doing, slot)
        return future

    def _send(self, message: bytes) -> None:
        assert self._socket is not None
        assert self._loop is not None
        if not self._unsent:
            try:
                sent = self._socket.send(message)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # the process has ended: `_worker_ended` fails what waits
            if sent == len(message):
                return
            message = message[sent:]
            self._loop.add_writer(self._socket.fileno(), self._writable)
        self._unsent += message

    def _writable(self) -> None:
        assert self._socket is not None
        assert self._loop is not None
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()
        if not self._unsent:
            self._loop.remove_writer(self._socket.fileno())

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            data = self._buffer + self._socket.recv(65536)
        except (BlockingIOError, ConnectionError):
            return
        if not data:
            assert self._loop is not None
            self._loop.remove_reader(self._socket.fileno())
            return
        whole = len(data) - len(data) % ANSWER.size
        self._buffer = data[whole:]
        for number, error_number in ANSWER.iter_unpack(data[:whole]):
            future, path, doing, slot = self._waiting.pop(number)
            if slot >= 0:
                self._release(slot)
            if future.done():
                continue
            if error_number:
                future.set_exception(_failure(error_number, doing, path))
            else:
                future.set_result(None)

    def _worker_ended(self, code: int) -> None:
        error = StorageFailed(f"the disk worker process ended with {code}; the bookie stops")
        self._fail_waiting(error)
        if not self._closed:
            self._closed = True
            self.on_failure(error)

    def _fail_waiting(self, error: MagnetarError) -> None:
        waiting, self._waiting = self._waiting, {}
        for future, _, _, _ in waiting.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # a write that was refused halfway no longer asks
        for turn in self._writers:
            if not turn.done():
                turn.set_exception(error)
        self._writers.clear()


class _DirectoryReads:
    """The reads of one directory that the process has."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.room = asyncio.Semaphore(_READS_OF_A_DIRECTORY)
        # When each was asked, the oldest first; and when the last one was answered.
        self._asked: dict[asyncio.Future[None], float] = {}
        self._answered_at = 0.0

    def begun(self, asked: asyncio.Future[None]) -> None:
        """One takes room until it is answered."""
        self._asked[asked] = self._now()
        asked.add_done_callback(self._answered)

    def _answered(self, asked: asyncio.Future[None]) -> None:
        del self._asked[asked]
        self._answered_at = self._now()
        self.room.release()

    def silent_s(self) -> float:
        """How long nothing has been answered although something was asked."""
        oldest = next(iter(self._asked.values()), None)
        return 0.0 if oldest is None else self._now() - max(oldest, self._answered_at)


def _for_slots(parts: Sequence[bytes], slot_bytes: int) -> Iterator[list[bytes | memoryview]]:
    """What goes into one slot after another. Small parts are joined, large ones are not copied twice."""
    if len(parts) > 1 and sum(map(len, parts)) < _JOIN_BYTES * len(parts):
        parts = [b"".join(parts)]
    pieces: list[bytes | memoryview] = []
    left = slot_bytes
    for part in parts:
        rest: bytes | memoryview = part
        while len(rest) > left:
            pieces.append(memoryview(rest)[:left])
            yield pieces
            rest = memoryview(rest)[left:]
            pieces, left = [], slot_bytes
        if rest:
            pieces.append(rest)
            left -= len(rest)
    if pieces:
        yield pieces


def _failure(number: int, doing: str, path: str) -> MagnetarError:
    """Rule 4: whatever made a sync or a write fail, a second one would not miss what this one lost."""
    error = storage_error(OSError(number, os.strerror(number)), doing, path)
    if doing == _SYNCING or (doing == _WRITING and not isinstance(error, DiskFull)):
        return StorageFailed(error.message, path=path, errno=number)
    return error

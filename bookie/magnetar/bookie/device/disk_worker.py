"""The disk worker in a process of its own: requests and answers over a socket pair."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

from magnetar.proto.errors import MagnetarError, StorageFailed
from magnetar.runtime.files import FileLock
from magnetar.runtime.processes import HelperProcess, spawn_helper
from magnetar.runtime.storage_error import storage_error

from ..journal.device import ignore_failure
from . import disk_process
from .disk_process import ANSWER, DELETE, PREPARE, REPLACE, REQUEST, SYNC, WARM

__all__ = ["ProcessDiskWorker"]

_STOP_TIMEOUT_S = 5.0
_SYNCING = "syncing"


class ProcessDiskWorker:
    """Asks a helper process; only for files of the real disk."""

    def __init__(self) -> None:
        self.on_failure: Callable[[MagnetarError], None] = ignore_failure
        self._process: HelperProcess | None = None
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[int, tuple[asyncio.Future[None], str, str]] = {}
        self._next_id = 0
        self._buffer = b""
        # What the socket did not take; requests are small and bounded by their callers.
        self._unsent = bytearray()
        self._closed = False

    async def start(self, lock: FileLock) -> None:
        """See `DiskWorker`."""
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        self._process = spawn_helper(
            disk_process.__file__, [str(theirs.fileno())], [theirs.fileno(), lock.fileno()]
        )
        theirs.close()
        ours.setblocking(False)
        self._socket = ours
        self._process.on_exit(self._worker_ended)
        self._loop.add_reader(ours.fileno(), self._readable)

    async def sync(self, path: str) -> None:
        """See `DiskWorker`."""
        await self._ask(SYNC, path, _SYNCING)

    async def warm(self, path: str, offset: int, length: int) -> None:
        """See `DiskWorker`."""
        await self._ask(WARM, path, "reading", offset, length)

    async def prepare(self, path: str, size: int, source: str = "", *, hurry: bool = False) -> None:
        """See `DiskWorker`."""
        await self._ask(PREPARE, path, "preparing", size, int(hurry), source.encode())

    async def replace(self, path: str, data: bytes) -> None:
        """See `DiskWorker`."""
        await self._ask(REPLACE, path, "replacing", 0, 0, data)

    async def delete(self, path: str) -> None:
        """See `DiskWorker`."""
        await self._ask(DELETE, path, "deleting")

    async def close(self) -> None:
        """See `DiskWorker`."""
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

    def _ask(
        self, operation: int, path: str, doing: str, a: int = 0, b: int = 0, data: bytes = b""
    ) -> asyncio.Future[None]:
        if self._closed or self._socket is None or self._loop is None:
            raise StorageFailed("the disk worker is closed")  # or its process ended: nobody would answer
        self._next_id = number = (self._next_id + 1) & 0xFFFFFFFF
        encoded = path.encode()
        length = REQUEST.size - 4 + len(encoded) + len(data)
        self._send(REQUEST.pack(length, operation, number, a, b, len(encoded)) + encoded + data)
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting[number] = (future, path, doing)
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
                return  # it is gone: `_worker_ended` fails what waits
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
            future, path, doing = self._waiting.pop(number)
            if future.done():
                continue
            if error_number:
                error = storage_error(OSError(error_number, os.strerror(error_number)), doing, path)
                if (
                    doing == _SYNCING
                ):  # whatever the reason: a second one would not miss what this one lost (rule 4)
                    error = StorageFailed(error.message, path=path, errno=error_number)
                future.set_exception(error)
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
        for future, _, _ in waiting.values():
            if not future.done():
                future.set_exception(error)

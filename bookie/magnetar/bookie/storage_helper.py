"""The seam for disk work that blocks: syncing, warming the page cache, preparing files.

No thread of the daemon does it (a thread that comes back under a busy loop waits for the interpreter, DEPENDENCIES.md):
`ProcessStorageHelper` asks a process over a socket, `InlineStorageHelper` works in the loop over `files`.

A failed sync raises StorageFailed and is never tried again (rule 4). A helper that dies takes unknown outcomes with it,
so `on_failure` stops the daemon as well.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Protocol

from magnetar.proto.errors import DataDirectoryError, MagnetarError, StorageFailed
from magnetar.runtime.files import Files
from magnetar.runtime.processes import HelperProcess, spawn_helper
from magnetar.runtime.storage_error import storage_error

from . import storage_process
from .journal.inline import _ignore_failure
from .storage_process import ANSWER, DELETE, PREPARE, REPLACE, REQUEST, SYNC, WARM

__all__ = ["InlineStorageHelper", "ProcessStorageHelper", "StorageHelper"]

_STOP_TIMEOUT_S = 5.0
_WARM_STEP_BYTES = 1 << 20


class StorageHelper(Protocol):
    """Paths are those of `files`. All raise StorageFailed, DiskFull or DataDirectoryError."""

    on_failure: Callable[[MagnetarError], None]

    async def start(self) -> None:
        """Makes it ready."""
        ...

    async def sync(self, path: str) -> None:
        """A file's bytes, or a directory's names, are durable when it returns."""
        ...

    async def warm(self, path: str, offset: int, length: int) -> None:
        """The range is in the page cache when it returns, if memory allows."""
        ...

    async def prepare(self, path: str, size: int, source: str = "", *, hurry: bool = False) -> None:
        """A zero-filled file of at least `size` bytes, durable with its name; made from `source` if that is given.

        It is made slowly, so that the journal is not disturbed (64 MiB take 2 s), unless `hurry`.
        """
        ...

    async def replace(self, path: str, data: bytes) -> None:
        """The content is replaced atomically and durable when it returns."""
        ...

    async def delete(self, path: str) -> None:
        """The file is gone, durably once its directory is synced."""
        ...

    async def close(self) -> None:
        """Ends it; what is still asked for fails."""
        ...


class InlineStorageHelper:
    """Does the work in the loop."""

    def __init__(self, files: Files) -> None:
        self.on_failure: Callable[[MagnetarError], None] = _ignore_failure
        self._files = files

    async def start(self) -> None:
        """See `StorageHelper`."""

    async def sync(self, path: str) -> None:
        """See `StorageHelper`."""
        await asyncio.sleep(0)
        try:
            file = self._files.open(path)
        except DataDirectoryError:  # a directory
            self._files.sync_directory(path)
            return
        try:
            file.sync()
        finally:
            file.close()

    async def warm(self, path: str, offset: int, length: int) -> None:
        """See `StorageHelper`."""
        await asyncio.sleep(0)
        file = self._files.open(path, read_only=True)
        try:
            for start in range(offset, offset + length, _WARM_STEP_BYTES):
                file.read_at(start, min(_WARM_STEP_BYTES, offset + length - start))
        finally:
            file.close()

    async def prepare(self, path: str, size: int, source: str = "", *, hurry: bool = False) -> None:
        """See `StorageHelper`."""
        await asyncio.sleep(0)
        if source:
            self._files.rename(source, path)
        file = self._files.open(path, create=True)
        try:
            present = file.size()
            if present < size:
                file.zero_fill(present, size - present)
            file.sync()
        finally:
            file.close()
        self._files.sync_directory(os.path.dirname(path))

    async def replace(self, path: str, data: bytes) -> None:
        """See `StorageHelper`."""
        await asyncio.sleep(0)
        self._files.write_atomically(path, data)

    async def delete(self, path: str) -> None:
        """See `StorageHelper`."""
        await asyncio.sleep(0)
        self._files.delete(path)

    async def close(self) -> None:
        """See `StorageHelper`."""


class ProcessStorageHelper:
    """Asks a helper process; only for files of the real disk."""

    def __init__(self) -> None:
        self.on_failure: Callable[[MagnetarError], None] = _ignore_failure
        self._process: HelperProcess | None = None
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[int, tuple[asyncio.Future[None], str, str]] = {}
        self._next_id = 0
        self._buffer = b""
        # What the socket did not take; requests are small and bounded by their callers.
        self._unsent = bytearray()
        self._closed = False

    async def start(self) -> None:
        """See `StorageHelper`."""
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        self._process = spawn_helper(storage_process.__file__, [str(theirs.fileno())], [theirs.fileno()])
        theirs.close()
        ours.setblocking(False)
        self._socket = ours
        self._process.on_exit(self._helper_ended)
        self._loop.add_reader(ours.fileno(), self._readable)

    async def sync(self, path: str) -> None:
        """See `StorageHelper`."""
        await self._ask(SYNC, path, "syncing")

    async def warm(self, path: str, offset: int, length: int) -> None:
        """See `StorageHelper`."""
        await self._ask(WARM, path, "reading", offset, length)

    async def prepare(self, path: str, size: int, source: str = "", *, hurry: bool = False) -> None:
        """See `StorageHelper`."""
        await self._ask(PREPARE, path, "preparing", size, int(hurry), source.encode())

    async def replace(self, path: str, data: bytes) -> None:
        """See `StorageHelper`."""
        await self._ask(REPLACE, path, "replacing", 0, 0, data)

    async def delete(self, path: str) -> None:
        """See `StorageHelper`."""
        await self._ask(DELETE, path, "deleting")

    async def close(self) -> None:
        """See `StorageHelper`."""
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
        self._fail_waiting(StorageFailed("the storage helper is closed"))

    def _ask(
        self, operation: int, path: str, doing: str, a: int = 0, b: int = 0, data: bytes = b""
    ) -> asyncio.Future[None]:
        if self._socket is None or self._loop is None:
            raise StorageFailed("the storage helper is closed")
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
                return  # it is gone: `_helper_ended` fails what waits
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
                future.set_exception(error)
            else:
                future.set_result(None)

    def _helper_ended(self, code: int) -> None:
        error = StorageFailed(f"the storage helper process ended with {code}; the bookie stops")
        self._fail_waiting(error)
        if not self._closed:
            self._closed = True
            self.on_failure(error)

    def _fail_waiting(self, error: MagnetarError) -> None:
        waiting, self._waiting = self._waiting, {}
        for future, _, _ in waiting.values():
            if not future.done():
                future.set_exception(error)

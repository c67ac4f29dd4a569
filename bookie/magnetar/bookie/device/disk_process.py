"""The disk worker: a process that syncs, warms and prepares files for the daemon. Run as a script.

Two lanes, each in order: a slow sync never keeps a read waiting.

    arguments: descriptor of a stream socket
    request:  u32 length of the rest | u8 operation | u32 id | u64 a | u64 b | u16 path length | path | data
    answer:   u32 id | u32 errno (0: done)

    SYNC     path                fdatasync of a file, fsync of a directory
    WARM     path, a, b          reads b bytes at a, so that they are in the page cache
    PREPARE  path, a, b, data    a zero-filled, synced file of `a` bytes or more, its name durable; data: recycle that
                                 file; b: 1 if somebody waits for it
    REPLACE  path, data          replaces the content atomically; durable when answered
    DELETE   path                fine if it is missing

The end of the socket ends the process, with whatever is still queued. It holds the inherited lock of the data directory
until then: what it has begun is done before a successor of its daemon looks at the directory (rule 12b).
"""

import _thread
import os
import struct
import sys
import time

SYNC = 1
WARM = 2
PREPARE = 3
REPLACE = 4
DELETE = 5

REQUEST = struct.Struct(">IBIQQH")
ANSWER = struct.Struct(">II")
_READ_BYTES = 1 << 20
_FILL_BYTES = 512 << 10
_PAUSE_S = 0.015
_ZEROS = bytes(_FILL_BYTES)

if sys.platform == "darwin":
    import fcntl

    def fdatasync(fd: int) -> None:
        """fsync(2) stops at the drive's cache on macOS."""
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)

else:
    fdatasync = os.fdatasync


def sync(path: str) -> None:
    """A file or a directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if os.path.isdir(path):
            os.fsync(fd)
        else:
            fdatasync(fd)
    finally:
        os.close(fd)


def warm(path: str, offset: int, length: int) -> None:
    """Reads and forgets."""
    fd = os.open(path, os.O_RDONLY)
    try:
        while length > 0:
            count = len(os.pread(fd, min(length, _READ_BYTES), offset))
            if not count:
                return
            offset += count
            length -= count
    finally:
        os.close(fd)


def prepare(path: str, size: int, hurry: bool, source: str) -> None:
    """In small steps with pauses, since the journal shares the disk; at once if somebody waits (`hurry`)."""
    if source:
        os.replace(source, path)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o640)
    try:
        position = os.fstat(fd).st_size
        while position < size:
            position += os.pwrite(fd, _ZEROS[: size - position], position)
            if not hurry:
                fdatasync(fd)
                time.sleep(_PAUSE_S)
        fdatasync(fd)
    finally:
        os.close(fd)
    sync(os.path.dirname(path))


def replace(path: str, data: bytes) -> None:
    """By way of a temporary file."""
    fd = os.open(path + ".tmp", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o640)
    try:
        written = 0
        while written < len(data):
            written += os.pwrite(fd, data[written:], written)
        fdatasync(fd)
    finally:
        os.close(fd)
    os.replace(path + ".tmp", path)
    sync(os.path.dirname(path))


def delete(path: str) -> None:
    """Durable after a sync of the directory."""
    if os.path.exists(path):
        os.unlink(path)


class Lane:
    """Requests worked on one after another by a thread of this process."""

    def __init__(self, answer_fd: int) -> None:
        self._answer_fd = answer_fd
        self._requests: list[tuple[int, int, int, int, str, bytes]] = []
        self._ready = _thread.allocate_lock()
        self._ready.acquire()
        _thread.start_new_thread(self._work, ())

    def put(self, request: "tuple[int, int, int, int, str, bytes]") -> None:
        """Queues a request; the daemon bounds how many there are."""
        self._requests.append(request)
        # Only this thread releases; the lane takes it again before it looks at the list.
        if self._ready.locked():
            self._ready.release()

    def _work(self) -> None:
        while True:
            self._ready.acquire()
            while self._requests:
                operation, number, a, b, path, data = self._requests.pop(0)
                failure = 0
                try:
                    if operation == SYNC:
                        sync(path)
                    elif operation == WARM:
                        warm(path, a, b)
                    elif operation == PREPARE:
                        prepare(path, a, bool(b), data.decode())
                    elif operation == REPLACE:
                        replace(path, data)
                    else:
                        delete(path)
                except OSError as error:
                    failure = error.errno or 5
                try:
                    os.write(self._answer_fd, ANSWER.pack(number, failure))
                except OSError:
                    os._exit(0)  # the daemon is gone


def main(arguments: "list[str]") -> int:
    """Entry point of the script."""
    fd = int(arguments[0])
    # Preparing a journal file takes long and nobody waits for it: a lane of its own.
    lanes = {operation: Lane(fd) for operation in (SYNC, WARM, PREPARE)}
    buffer = b""
    while data := os.read(fd, 65536):
        buffer += data
        while len(buffer) >= 4:
            length = int.from_bytes(buffer[:4], "big") + 4
            if len(buffer) < length:
                break
            _, operation, number, a, b, path_bytes = REQUEST.unpack_from(buffer)
            body = buffer[REQUEST.size : length]
            buffer = buffer[length:]
            path, rest = body[:path_bytes].decode(), body[path_bytes:]
            lanes.get(operation, lanes[SYNC]).put((operation, number, a, b, path, rest))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The disk worker: a process that writes, syncs, warms and prepares files for the daemon. Run as a script.

Each kind of work has a queue for each directory, worked on in order by a thread of its own: a slow sync delays no read, no
write and no other disk, and a directory that hangs delays no other one. Several threads read, so that the disk has some
requests to choose from.

    arguments: descriptors of a stream socket and of shared memory, bytes of the memory
    request:  u32 length of the rest | u8 operation | u32 id | u64 a | u64 b | u32 c | u16 path length | path | data
    answer:   u32 id | u32 errno (0: done)

    SYNC     path                fdatasync of a file, fsync of a directory
    WARM     path, a, b          reads b bytes at a, so that they are in the page cache
    PREPARE  path, a, b, data    a zero-filled, synced file of `a` bytes, its name durable; data: recycle that
                                 file; b: 1 if a caller waits for it
    REPLACE  path, data          replaces the content atomically; durable when answered
    DELETE   path                fine if it is missing
    RENAME   path, data          to the path `data`
    CREATE   path                a new file
    WRITE    path, a, b, c       writes c bytes of the shared memory, from b on, at `a` of the file
    TRUNCATE path, a             to `a` bytes

Files that are written to stay open and are synced through the same descriptor, on which the kernel reports every failed
write. The end of the socket ends the process, with whatever is still queued. It holds the inherited lock of the
data directory until then: what it has begun is done before a successor of its daemon looks at the directory (rule 12b).
"""

import _thread
import contextlib
import os
import struct
import sys
import time
from _queue import SimpleQueue
from mmap import PROT_READ, mmap

SYNC = 1
WARM = 2
PREPARE = 3
REPLACE = 4
DELETE = 5
RENAME = 6
CREATE = 7
WRITE = 8
TRUNCATE = 9
# Operations of one queue; the others, but for WARM and PREPARE, share that of SYNC.
_WRITING = (CREATE, WRITE, TRUNCATE)
_READING_THREADS = 8

REQUEST = struct.Struct(">IBIQQIH")
ANSWER = struct.Struct(">II")
_READ_BYTES = 1 << 20
_FILL_BYTES = 512 << 10
_PAUSE_S = 0.004
_ZEROS = bytes(_FILL_BYTES)
_OPEN_FILES = 16
_QUEUES_OF_A_KIND = 16
_EIO = 5
# (operation, id, a, b, c, path, data)
Request = tuple[int, int, int, int, int, str, bytes]

if sys.platform == "darwin":
    import fcntl

    def fdatasync(fd: int) -> None:
        """fsync(2) stops at the drive's cache on macOS."""
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)

else:
    fdatasync = os.fdatasync


class OpenFiles:
    """Files that were written to, by path: the last few. Each user has a descriptor of its own for the same open file."""

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._fds: dict[str, int] = {}

    def use(self, path: str, flags: int = -1) -> int:
        """Returns a descriptor that the caller closes.

        With `flags` a file that is not open yet is opened and stays open; without, -1.
        """
        with self._lock:
            fd = self._fds.pop(path, -1)
            if fd < 0:
                if flags < 0:
                    return -1
                fd = os.open(path, flags, 0o640)
            self._fds[path] = fd
            if len(self._fds) > _OPEN_FILES:
                os.close(self._fds.pop(next(iter(self._fds))))
            return os.dup(fd)

    def forget(self, path: str) -> None:
        """The path is, or will be, another file's."""
        with self._lock:
            fd = self._fds.pop(path, -1)
            if fd >= 0:
                os.close(fd)


FILES = OpenFiles()


def sync(path: str) -> None:
    """A file or a directory."""
    fd = FILES.use(path)
    if fd < 0:
        fd = os.open(path, os.O_RDONLY)
    try:
        if os.path.isdir(path):
            os.fsync(fd)
        else:
            fdatasync(fd)
    finally:
        os.close(fd)


def create(path: str) -> None:
    """Fails if it exists."""
    FILES.forget(path)
    os.close(FILES.use(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))


def write(path: str, position: int, data: "memoryview") -> None:
    """To an existing file."""
    fd = FILES.use(path, os.O_RDWR)
    try:
        while data:
            count = os.pwrite(fd, data, position)
            position += count
            data = data[count:]
    finally:
        os.close(fd)


def truncate(path: str, size: int) -> None:
    """Of an existing file."""
    fd = FILES.use(path, os.O_RDWR)
    try:
        os.ftruncate(fd, size)
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
    """In small steps with pauses, since the journal shares the disk; at once if a caller waits (`hurry`)."""
    if source:
        rename(source, path)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o640)
    try:
        position = os.fstat(fd).st_size
        if position > size:
            # It grew past what was prepared, while no next one was ready: that space is not counted anywhere.
            os.ftruncate(fd, size)
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


def rename(source: str, target: str) -> None:
    """Durable after a sync of the directory."""
    FILES.forget(source)
    FILES.forget(target)
    os.replace(source, target)


def delete(path: str) -> None:
    """Durable after a sync of the directory."""
    FILES.forget(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def work(request: "Request", memory: "memoryview") -> None:
    """Raises OSError."""
    operation, _, a, b, c, path, data = request
    if operation == SYNC:
        sync(path)
    elif operation == WARM:
        warm(path, a, b)
    elif operation == PREPARE:
        prepare(path, a, bool(b), data.decode())
    elif operation == REPLACE:
        replace(path, data)
    elif operation == RENAME:
        rename(path, data.decode())
    elif operation == CREATE:
        create(path)
    elif operation == WRITE:
        write(path, a, memory[b : b + c])
    elif operation == TRUNCATE:
        truncate(path, a)
    else:
        delete(path)


class WorkQueue:
    """Requests worked on in order by threads of this process; the daemon bounds how many there are."""

    def __init__(self, answer_fd: int, memory: "memoryview", threads: int) -> None:
        self._answer_fd = answer_fd
        self._memory = memory
        self._requests: SimpleQueue[Request] = SimpleQueue()
        self.put = self._requests.put
        for _ in range(threads):
            _thread.start_new_thread(self._work, ())

    def _work(self) -> None:
        while True:
            request = self._requests.get()
            failure = 0
            try:
                work(request, self._memory)
            except OSError as error:
                failure = error.errno or _EIO
            except Exception as error:  # our own bug: whoever waits must not wait for ever
                failure = _EIO
                sys.stderr.write(f"magnetar: request {request} of the disk worker failed: {error!r}\n")
            try:
                os.write(self._answer_fd, ANSWER.pack(request[1], failure))
            except OSError:
                os._exit(0)  # the daemon has ended


def queue_name(operation: int, path: str) -> "tuple[int, str]":
    """Name of the queue of a request."""
    if operation not in (WARM, PREPARE):  # preparing takes long, and no other request waits for it
        operation = WRITE if operation in _WRITING else SYNC
    return operation, os.path.dirname(path)


def read_socket(fd: int) -> bytes:
    """What the daemon sent; nothing when it is gone, also if it left answers unread."""
    try:
        return os.read(fd, 65536)
    except ConnectionResetError:
        return b""


def main(arguments: "list[str]") -> int:
    """Entry point of the script."""
    fd, memory_fd, memory_bytes = map(int, arguments)
    memory = memoryview(mmap(memory_fd, memory_bytes, prot=PROT_READ))
    queues: dict[tuple[int, str], WorkQueue] = {}
    buffer = b""
    while data := read_socket(fd):
        buffer += data
        while len(buffer) >= 4:
            length = int.from_bytes(buffer[:4], "big") + 4
            if len(buffer) < length:
                break
            _, operation, number, a, b, c, path_bytes = REQUEST.unpack_from(buffer)
            body = buffer[REQUEST.size : length]
            buffer = buffer[length:]
            path, rest = body[:path_bytes].decode(), body[path_bytes:]
            name = queue_name(operation, path)
            queue = queues.get(name)
            if queue is None:
                # There are few directories; beyond the limit they share the first queue of their kind.
                known = [other for other in queues if other[0] == name[0]]
                if len(known) < _QUEUES_OF_A_KIND:
                    queue = WorkQueue(fd, memory, _READING_THREADS if name[0] == WARM else 1)
                else:
                    queue = queues[known[0]]
                queues[name] = queue
            queue.put((operation, number, a, b, c, path, rest))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

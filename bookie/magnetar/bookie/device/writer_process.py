"""The journal writer: a process that writes and syncs what the daemon puts into a shared ring. Run as a script.

It imports next to nothing and stays near 9 MB. One blocking read is its whole schedule: what the daemon announced while
the last sync ran is the next group.

    arguments: control fd, report fd, ring fd, ring bytes, start offset, path template ("/data/journal-%016x.log"),
               mode ("sync", "no-sync" or "shadow")
    control, from the daemon, 16 bytes each (little-endian u64 u64): (WRITTEN, offset), (ROLL, sequence)
    report, to the daemon, 24 bytes each: (DURABLE, offset, position in the file), (FAILED, errno, file sequence)

A ROLL takes effect at the offset announced before it: everything up to there is synced first. Messages are shorter than
PIPE_BUF, so they arrive whole and in order, on any machine. The end of the control pipe ends the process: the daemon is
gone, or wants it to end. It holds the inherited lock of the data directory until then (rule 12b).

"shadow" is for tests: what was not synced is kept in memory and lost when the process is killed, as it would be by a
power failure; a sync writes pages in reverse order, so that one that is cut short leaves a torn group.
"""

import os
import struct
import sys
from mmap import PROT_READ, mmap

WRITTEN = 1
ROLL = 2
DURABLE = 3
FAILED = 4

CONTROL = struct.Struct("<QQ")
REPORT = struct.Struct("<QQQ")
PAGE_BYTES = 4096
_ZEROS = memoryview(bytes(PAGE_BYTES))


if sys.platform == "darwin":
    import fcntl

    def fdatasync(fd: int) -> None:
        """fsync(2) stops at the drive's cache on macOS."""
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)

else:
    fdatasync = os.fdatasync


class PlainDisk:
    """The file as it is."""

    def __init__(self, sync_data: bool) -> None:
        self._sync_data = sync_data
        self._fd = -1

    def open(self, path: str) -> None:
        """Changes to an existing file."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = os.open(path, os.O_RDWR)

    def write(self, position: int, parts: "list[memoryview]") -> None:
        """Buffered when it returns."""
        while parts:
            count = os.pwritev(self._fd, parts, position)
            position += count
            while parts and count >= len(parts[0]):
                count -= len(parts.pop(0))
            if parts and count:
                parts[0] = parts[0][count:]

    def sync(self) -> None:
        """Durable when it returns."""
        if self._sync_data:
            fdatasync(self._fd)


class ShadowDisk(PlainDisk):
    """Loses with its process what was not synced."""

    def __init__(self) -> None:
        super().__init__(True)
        self._unsynced: list[tuple[int, bytes]] = []

    def write(self, position: int, parts: "list[memoryview]") -> None:
        """In memory only."""
        self._unsynced.append((position, b"".join(parts)))

    def sync(self) -> None:
        """Writes the last page first."""
        for position, data in reversed(self._unsynced):
            for start in reversed(range(0, len(data), PAGE_BYTES)):
                super().write(position + start, [memoryview(data)[start : start + PAGE_BYTES]])
        self._unsynced.clear()
        super().sync()


class Writer:
    """Writes [written, target) of the stream from the ring to the current file, group by group."""

    def __init__(self, disk: PlainDisk, ring: memoryview, template: str, offset: int, report_fd: int) -> None:
        self._disk = disk
        self._ring = ring
        self._template = template
        self._written = offset
        self._position = 0
        self._report_fd = report_fd
        self.sequence = 0

    def group(self, target: int) -> None:
        """Makes everything up to `target` durable and says so."""
        size, ring_bytes = target - self._written, len(self._ring)
        if not size:
            return
        start = self._written % ring_bytes
        parts = [self._ring[start : start + size]]
        if start + size > ring_bytes:
            parts.append(self._ring[: start + size - ring_bytes])
        padding = -size % PAGE_BYTES
        if padding:
            parts.append(_ZEROS[:padding])
        self._disk.write(self._position, parts)
        self._disk.sync()
        self._written = target
        self._position += size + padding
        os.write(self._report_fd, REPORT.pack(DURABLE, target, self._position))

    def roll(self, sequence: int) -> None:
        """Everything written so far is durable; goes on in another file."""
        self.sequence = sequence
        self._disk.open(self._template % sequence)
        self._position = 0

    def run(self, control_fd: int) -> None:
        """Until the control pipe ends."""
        rest = b""
        while data := os.read(control_fd, 65536):
            data = rest + data
            whole = len(data) - len(data) % CONTROL.size
            rest = data[whole:]
            target = self._written
            for kind, value in CONTROL.iter_unpack(data[:whole]):
                if kind == WRITTEN:
                    target = value
                elif kind == ROLL:
                    self.group(target)
                    self.roll(value)
            self.group(target)


def main(arguments: "list[str]") -> int:
    """Entry point of the script."""
    control_fd, report_fd, ring_fd, ring_bytes, offset = map(int, arguments[:5])
    template, mode = arguments[5:7]
    ring = memoryview(mmap(ring_fd, ring_bytes, prot=PROT_READ))
    disk = ShadowDisk() if mode == "shadow" else PlainDisk(mode == "sync")
    writer = Writer(disk, ring, template, offset, report_fd)
    try:
        writer.run(control_fd)
    except BrokenPipeError:
        return 0  # the daemon is gone
    except OSError as error:
        os.write(report_fd, REPORT.pack(FAILED, error.errno or 0, writer.sequence))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

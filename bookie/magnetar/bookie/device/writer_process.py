"""The journal writer: a process that writes and syncs what the daemon puts into a shared ring. Run as a script.

It imports next to nothing and stays near 9 MB. One blocking read is its whole schedule: what the daemon announced while
the last sync ran is the next group.

    arguments: control fd, report fd, ring fd, ring bytes, start offset, alignment, 1 (0: without syncs),
               path template ("/data/journal-%016x.log")
    control, from the daemon, 16 bytes each (little-endian u64 u64): (WRITTEN, offset), (ROLL, sequence)
    report, to the daemon, 32 bytes each: (DURABLE, offset, position in the file, ns of the sync),
               (FAILED, errno, file sequence, 0), (FULL, errno, file sequence, 0)

A write that finds the disk full is tried again until there is space: nothing of it is lost, and nothing of it was reported
(FULL is reported once). A sync is never tried again, whatever its reason (rule 4).

A ROLL takes effect at the offset announced before it: everything up to there is synced first. Messages are shorter than
PIPE_BUF, so they arrive whole and in order, on any machine. The end of the control pipe ends the process: the daemon is
dead, or wants it to end. It holds the inherited lock of the data directory until then (rule 12b).
"""

import errno
import os
import select
import struct
import sys
import time
from mmap import PROT_READ, mmap

WRITTEN = 1
ROLL = 2
DURABLE = 3
FAILED = 4
FULL = 5

CONTROL = struct.Struct("<QQ")
REPORT = struct.Struct("<QQQQ")
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_SPACE_CHECK_MS = 500


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


class JournalWriter:
    """Writes [written, target) of the stream from the ring to the current file, group by group."""

    def __init__(
        self,
        disk: PlainDisk,
        ring: memoryview,
        template: str,
        offset: int,
        control_fd: int,
        report_fd: int,
        alignment: int,
    ) -> None:
        self._disk = disk
        self._ring = ring
        self._template = template
        self._written = self._target = offset
        self._position = 0
        self._control_fd = control_fd
        self._report_fd = report_fd
        self._alignment = alignment
        self._zeros = memoryview(bytes(alignment))
        self.sequence = 0

    def group(self) -> None:
        """Makes everything up to the target durable and says so."""
        size, ring_bytes = self._target - self._written, len(self._ring)
        if not size:
            return
        start = self._written % ring_bytes
        parts = [self._ring[start : start + size]]
        if start + size > ring_bytes:
            parts.append(self._ring[: start + size - ring_bytes])
        padding = -size % self._alignment
        if padding:
            parts.append(self._zeros[:padding])
        self._write(parts)
        before = time.monotonic_ns()
        self._disk.sync()
        took = time.monotonic_ns() - before
        self._written = self._target
        self._position += size + padding
        os.write(self._report_fd, REPORT.pack(DURABLE, self._written, self._position, took))

    def _write(self, parts: "list[memoryview]") -> None:
        reported_full = False
        while True:
            try:
                self._disk.write(self._position, list(parts))
                return
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                if not reported_full:
                    reported_full = True
                    os.write(self._report_fd, REPORT.pack(FULL, error.errno, self.sequence, 0))
            poll = select.poll()
            poll.register(self._control_fd, 0)  # only its end shows: messages wait
            if poll.poll(_SPACE_CHECK_MS):
                raise BrokenPipeError

    def roll(self, sequence: int) -> None:
        """Everything written so far is durable; goes on in another file."""
        self.sequence = sequence
        self._disk.open(self._template % sequence)
        self._position = 0

    def run(self) -> None:
        """Until the control pipe ends."""
        rest = b""
        while data := os.read(self._control_fd, 65536):
            rest = self._take(rest + data)
            self.group()

    def _take(self, data: bytes) -> bytes:
        """Follows whole messages and returns the rest."""
        whole = len(data) - len(data) % CONTROL.size
        for kind, value in CONTROL.iter_unpack(data[:whole]):
            if kind == WRITTEN:
                self._target = value
            elif kind == ROLL:
                self.group()
                self.roll(value)
        return data[whole:]


def main(arguments: "list[str]") -> int:
    """Entry point of the script."""
    control_fd, report_fd, ring_fd, ring_bytes, offset, alignment, sync_data = map(int, arguments[:7])
    ring = memoryview(mmap(ring_fd, ring_bytes, prot=PROT_READ))
    disk = PlainDisk(bool(sync_data))
    writer = JournalWriter(disk, ring, arguments[7], offset, control_fd, report_fd, alignment)
    try:
        writer.run()
    except BrokenPipeError:
        return 0  # the daemon has ended
    except OSError as error:
        os.write(report_fd, REPORT.pack(FAILED, error.errno or 0, writer.sequence, 0))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The journal of the ring probe: writes and syncs what the ring holds, and publishes how far it is durable.

Arguments: ring descriptor, its size, descriptors of the eventfds to wait on and to ring, path of the zero-filled file.
The first page of the ring holds two offsets, written and durable; the records follow. Ends when the daemon does.
"""

import mmap
import os
import select
import sys

PAGE = 4096


def main() -> None:
    """Serves until standard input, the daemon's life line, ends."""
    ring_fd, size, wait_fd, ring_back_fd = map(int, sys.argv[1:5])
    ring = memoryview(mmap.mmap(ring_fd, PAGE + size))
    offsets = ring[:16].cast("Q")
    data = ring[PAGE:]
    file = os.open(sys.argv[5], os.O_RDWR)
    file_bytes = os.fstat(file).st_size
    durable = 0
    poller = select.poll()
    poller.register(wait_fd, select.POLLIN)
    poller.register(0, select.POLLIN | select.POLLHUP)
    while True:
        for descriptor, _ in poller.poll():
            if descriptor == 0:
                return
        os.eventfd_read(wait_fd)
        written = offsets[0]
        while durable < written:
            at = durable % size
            length = min(written - durable, size - at)
            os.pwrite(file, data[at : at + length], durable % file_bytes)
            durable += length
        os.fdatasync(file)
        offsets[1] = durable
        os.eventfd_write(ring_back_fd, 1)


main()

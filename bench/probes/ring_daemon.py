"""The daemon of the ring probe: TCP on one side, the shared-memory ring of a writer process on the other.

It does what a service cannot do without, and nothing else: copy what arrived into the ring, wake the writer, and send an
answer of 16 bytes once it is durable. Prints its port; ends with its standard input. Arguments: directory.
"""

import asyncio
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import uvloop

from bench.probes import disk
from bench.probes.lifeline import until_hung_up

PAGE = 4096
RING_BYTES = 1 << 20
RECORD_BYTES = 128
ANSWER = bytes(16)

assert RING_BYTES % RECORD_BYTES == 0, "a record must not wrap"


class Daemon(asyncio.Protocol):
    """One client at a time; one record in flight at a time."""

    def __init__(self, path: Path) -> None:
        ring_fd = os.memfd_create("ring")
        os.ftruncate(ring_fd, PAGE + RING_BYTES)
        self._ring = memoryview(mmap.mmap(ring_fd, PAGE + RING_BYTES))
        self._offsets = self._ring[:16].cast("Q")
        self._written = 0
        self._to_writer = os.eventfd(0)
        from_writer = os.eventfd(0, os.EFD_NONBLOCK)
        self._from_writer = from_writer
        self.writer = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", str(Path(__file__).with_name("ring_writer.py"))),
                *(str(ring_fd), str(RING_BYTES), str(self._to_writer), str(from_writer), str(path)),
            ],
            stdin=subprocess.PIPE,
            pass_fds=(ring_fd, self._to_writer, from_writer),
        )
        self._transport: asyncio.Transport | None = None
        asyncio.get_running_loop().add_reader(from_writer, self._durable)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        assert len(data) == RECORD_BYTES, "the probe sends one record at a time"
        at = PAGE + self._written % RING_BYTES
        self._ring[at : at + len(data)] = data
        self._written += len(data)
        self._offsets[0] = self._written
        os.eventfd_write(self._to_writer, 1)

    def _durable(self) -> None:
        os.eventfd_read(self._from_writer)
        assert self._offsets[1] == self._written
        if self._transport is not None:
            self._transport.write(ANSWER)


async def main() -> None:
    """Serves until standard input ends."""
    path = Path(sys.argv[1]) / "ring-probe"
    disk.zero_filled(path, 16 << 20)
    loop = asyncio.get_running_loop()
    daemon = Daemon(path)
    server = await loop.create_server(lambda: daemon, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await until_hung_up()
    server.close()
    daemon.writer.communicate()
    path.unlink()


if __name__ == "__main__":
    uvloop.run(main())

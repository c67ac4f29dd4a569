"""What the machine can do without us, measured in the same run: the limits that figures are compared with.

calibrate     a fixed loop of Python: how fast this minute is, for comparing runs
disk_write    pwrite + fdatasync of groups of a given size, into a zero-filled file as the journal does
disk_read     a file whose pages were dropped, read in pieces of 1 MiB
socket_echo   a bare uvloop echo over TCP, as many frames as go
ring          one frame at a time over TCP to a process that puts it into a shared ring, whose writer process pwrites and
              fdatasyncs it: what a synchronous durable send cannot beat
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from mmap import mmap
from pathlib import Path
from typing import Any, cast

import uvloop

FRAME_BYTES = 150
GROUP = 64 * 1024


def calibrate() -> float:
    """Millions of rounds a second of a loop of additions and dictionary look-ups."""
    table = {number: number for number in range(64)}
    began = time.perf_counter()
    total = 0
    for number in range(1_000_000):
        total += table[number & 63]
    return 1.0 / (time.perf_counter() - began)


def percentile(samples: list[float], percent: float) -> float:
    """Of samples in any order."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def disk_write(directory: Path, group_bytes: int, seconds: float) -> dict[str, float]:
    """Bytes per second and milliseconds per sync."""
    size = 256 << 20
    path = directory / "probe-write"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        zeros = bytes(1 << 20)
        size = min(size, max(32 << 20, group_bytes * 64))
        for offset in range(0, size, len(zeros)):
            os.pwrite(fd, zeros, offset)
        os.fsync(fd)
        data = memoryview(os.urandom(group_bytes))
        times: list[float] = []
        offset = 0
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            if offset + group_bytes > size:
                offset = 0
            os.pwrite(fd, data, offset)
            os.fdatasync(fd)
            times.append(time.perf_counter() - began)
            offset += group_bytes + (-group_bytes % 4096)
    finally:
        os.close(fd)
        path.unlink()
    return {"bytes_per_s": group_bytes / statistics.mean(times), "p50_ms": percentile(times, 50) * 1e3}


def disk_read(directory: Path, size: int = 256 << 20) -> float:
    """Bytes per second of a cold sequential read."""
    path = directory / "probe-read"
    piece = os.urandom(1 << 20)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        for offset in range(0, size, len(piece)):
            os.pwrite(fd, piece, offset)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        for offset in range(0, size, len(piece)):
            os.pread(fd, len(piece), offset)
        return size / (time.perf_counter() - began)
    finally:
        os.close(fd)
        path.unlink()


class _Echo(asyncio.Protocol):
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class _RingServer(asyncio.Protocol):
    """Copies each frame into the ring and answers when the writer says that it is durable."""

    def __init__(self, ring: mmap, to_writer: int, from_writer: int) -> None:
        self._ring = ring
        self._to_writer = to_writer
        self._offset = 0
        self._sent = 0
        self._from_writer = from_writer
        self._transport: asyncio.Transport | None = None
        asyncio.get_running_loop().add_reader(from_writer, self._durable)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        start = self._offset % (len(self._ring) - 4096)
        self._ring[start : start + len(data)] = data
        self._offset += len(data)
        self._sent = len(data)
        os.write(self._to_writer, start.to_bytes(8, "little") + len(data).to_bytes(8, "little"))

    def _durable(self) -> None:
        os.read(self._from_writer, 8)
        if self._transport is not None:
            self._transport.write(bytes(self._sent))


def _ring_writer(ring: mmap, from_server: int, to_server: int, path: str) -> None:
    """The journal writer of the probe: pwrite from the ring, fdatasync, tell."""
    fd = os.open(path, os.O_RDWR)
    view = memoryview(ring)
    position = 0
    while message := os.read(from_server, 16):
        start, length = int.from_bytes(message[:8], "little"), int.from_bytes(message[8:], "little")
        os.pwrite(fd, view[start : start + length], position)
        os.fdatasync(fd)
        position = (position + 4096) % (16 << 20)
        os.write(to_server, b"durable!")


async def _serve(kind: str, path: str) -> None:
    loop = asyncio.get_running_loop()
    if kind == "echo":
        server = await loop.create_server(_Echo, "127.0.0.1", 0)
    else:
        ring = mmap(-1, 1 << 20)
        to_writer, from_server = os.pipe()[::-1]
        from_writer, to_server = os.pipe()
        if os.fork() == 0:
            os.close(to_writer)
            _ring_writer(ring, from_server, to_server, path)
            os._exit(0)
        server = await loop.create_server(lambda: _RingServer(ring, to_writer, from_writer), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.connect_read_pipe(_UntilClosed, sys.stdin)
    await asyncio.Event().wait()


class _UntilClosed(asyncio.Protocol):
    def connection_lost(self, exc: Exception | None) -> None:
        os._exit(0)


class _Counter(asyncio.Protocol):
    """Keeps `window` bytes in flight, or one frame, and counts what comes back."""

    def __init__(self, window: int, done: asyncio.Future[None], seconds: float) -> None:
        self._block = bytes(FRAME_BYTES) * max(1, GROUP // FRAME_BYTES) if window > 1 else bytes(FRAME_BYTES)
        self._blocks = window
        self._done = done
        self._seconds = seconds
        self.received = 0
        self.seconds = 0.0
        self.times: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._began = self._sent_at = time.perf_counter()
        self._owed = 0
        for _ in range(self._blocks):
            self._transport.write(self._block)

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        self._owed += len(data)
        now = time.perf_counter()
        if now - self._began > self._seconds:
            self.seconds = now - self._began
            if not self._done.done():
                self._done.set_result(None)
            self._transport.abort()
            return
        while self._owed >= len(self._block):
            self._owed -= len(self._block)
            self.times.append(now - self._sent_at)
            self._sent_at = time.perf_counter()
            self._transport.write(self._block)


def _against(kind: str, directory: Path, window: int, seconds: float) -> _Counter:
    path = directory / "probe-ring"
    path.write_bytes(bytes(32 << 20))
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    server = subprocess.Popen(
        [sys.executable, "-m", "bench.machine", kind, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    assert server.stdin is not None
    try:
        port = int(server.stdout.readline())

        async def run() -> _Counter:
            loop = asyncio.get_running_loop()
            done: asyncio.Future[None] = loop.create_future()
            _, counter = await loop.create_connection(
                lambda: _Counter(window, done, seconds), "127.0.0.1", port
            )
            await done
            return counter

        return uvloop.run(run())
    finally:
        server.stdin.close()
        server.stdout.close()
        server.wait()
        path.unlink()


def run_probes(directory: Path, groups: dict[str, int], seconds: float) -> dict[str, Any]:
    """All probes once. `groups`: bytes of a journal group by workload, as seen."""
    echo = _against("echo", directory, 16, seconds)
    ring = _against("ring", directory, 1, seconds)
    results: dict[str, Any] = {
        "calibration": calibrate(),
        "echo_bytes": echo.received / echo.seconds,
        "echo_messages": echo.received / FRAME_BYTES / echo.seconds,
        "ring_p50": percentile(ring.times, 50) * 1e3,
        "ring_p99": percentile(ring.times, 99) * 1e3,
        "ring_p999": percentile(ring.times, 99.9) * 1e3,
        "disk_read_bytes": disk_read(directory),
    }
    for name, group in sorted(groups.items()):
        found = disk_write(directory, group, seconds / 2)
        results[f"disk_{name}"] = {"group_bytes": group, **found}
    results["disk_bytes"] = max(
        (found["bytes_per_s"] for name, found in results.items() if isinstance(found, dict)), default=0.0
    )
    return results


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1], sys.argv[2]))

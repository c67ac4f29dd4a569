"""The raw disk: pwrite + fdatasync into a zero-filled file at the group sizes that the journal wrote, and cold reads."""

import mmap
import os
import time
from pathlib import Path
from typing import NamedTuple

FILE_BYTES = 128 << 20
PIECE_BYTES = 1 << 20


class Syncs(NamedTuple):
    """Groups of `group_bytes`, each written and synced before the next."""

    group_bytes: int
    bytes_per_s: float
    p50_ms: float
    p99_ms: float


def zero_filled(path: Path, size: int = FILE_BYTES) -> None:
    """Writes and syncs `size` zeros, so that later syncs have no file size and no extents to record."""
    piece = bytes(PIECE_BYTES)
    with path.open("wb", buffering=0) as file:
        for _ in range(size // PIECE_BYTES):
            file.write(piece)
        os.fsync(file.fileno())


def synced_writes(path: Path, group_bytes: int, seconds: float) -> Syncs:
    """Writes groups one after another into the zero-filled file at `path` for `seconds`."""
    data = os.urandom(min(group_bytes, FILE_BYTES // 2))
    descriptor = os.open(path, os.O_RDWR)
    times: list[float] = []
    offset = 0
    try:
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until or len(times) < 3:
            if offset + len(data) > FILE_BYTES:
                offset = 0
            os.pwrite(descriptor, data, offset)
            os.fdatasync(descriptor)
            times.append(time.perf_counter() - began)
            offset += len(data)
    finally:
        os.close(descriptor)
    times.sort()
    return Syncs(
        group_bytes,
        len(data) * len(times) / sum(times),
        times[len(times) // 2] * 1e3,
        times[len(times) * 99 // 100] * 1e3,
    )


def cold_read_bytes_per_s(path: Path) -> float:
    """Sequential reads of 1 MiB from the file at `path`, which is dropped from the page cache first."""
    buffer = mmap.mmap(-1, PIECE_BYTES)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(descriptor).st_size
        began = time.perf_counter()
        for offset in range(0, size, PIECE_BYTES):
            os.preadv(descriptor, [buffer], offset)
        return size / (time.perf_counter() - began)
    finally:
        os.close(descriptor)

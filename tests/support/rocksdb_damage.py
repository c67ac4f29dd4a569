"""Damaged copies of a closed RocksDB directory, one after another; each is gone when the next one is asked for."""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

PAGE_BYTES = 4096
_RECORD = struct.Struct("<IHB")  # of a MANIFEST: checksum, length, type


def with_flipped_bits(directory: Path, copy: Path, files: Iterable[Path], *, times: int) -> Iterator[str]:
    """One bit of each page of each file, so often; yields what kind of file it was, with `copy` damaged."""
    rng = random.Random(4)
    for path in files:
        size = len(path.read_bytes().rstrip(b"\0"))
        for start in [*range(0, size, PAGE_BYTES)] * times:
            shutil.copytree(directory, copy)
            data = bytearray(path.read_bytes())
            data[rng.randrange(start, min(start + PAGE_BYTES, size))] ^= 1 << rng.randrange(8)
            (copy / path.name).write_bytes(data)
            yield path.name.split("-")[0][-8:]
            shutil.rmtree(copy)


def with_damaged_manifest(directory: Path, copy: Path, damage: str, *, last: int = 0) -> Iterator[None]:
    """Each of its records (or of the `last` ones) has a "length" beyond the end, or the file is "cut" there.

    RocksDB takes it for a torn write, and opens without the newest tables.
    """
    (path,) = directory.glob("MANIFEST-*")
    data = path.read_bytes()
    for start in manifest_records(data)[-last:]:
        shutil.copytree(directory, copy)
        changed = bytearray(data)
        changed[start + 5] ^= 0x10  # 4096 more bytes than there are
        (copy / path.name).write_bytes(changed if damage == "length" else data[:start])
        yield
        shutil.rmtree(copy)


def manifest_records(data: bytes) -> list[int]:
    """Where the records of a MANIFEST of less than 32 KB start."""
    starts, at = [], 0
    while at + _RECORD.size <= len(data):
        _, length, kind = _RECORD.unpack_from(data, at)
        if not kind:
            break
        starts.append(at)
        at += _RECORD.size + length
    return starts

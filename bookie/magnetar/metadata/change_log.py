"""The write-ahead log of the embedded metadata store: changes in order, durable before anything else knows of them.

Two files, `changes-0` and `changes-1`, are used in turns, for ever. A turn ends when its file is full; by the time when its
file is used again, the database has flushed what is in it. Turn t is written to file t % 2:

    4096 bytes: "MAGMDLOG" | u32 version | u64 turn | u64 end of the turn before | u64 xxh3-64 of all before it | zeros
                at 2048: u64 synced | u64 xxh3-64 of it with the turn as seed: all before this position was durable
    records, each at a multiple of 8:
                u64 xxh3-64 of all that follows, with the turn as seed | u64 its position | u32 length | bytes | zeros

A record is synced before the next one is written, so its presence proves that everything before it was durable. What is bad
is judged by that (rule 5). At the first record that cannot be read:

    a good record of this turn stands behind it, or `synced` does,
    or the next turn says that this one went on                     ->  damage: refused, nothing is cut off
    else                                                            ->  torn: never acknowledged, and written over

What earlier turns left in a file has another seed. `synced` is written without a sync of its own, after a pause; it covers
the last record, behind which no other proves anything.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
from array import array
from collections.abc import Iterator
from typing import Final

import xxhash

from magnetar.proto.errors import DataDirectoryError, DiskFull
from magnetar.runtime.files import File, Files

TURN_BYTES: Final = 4 << 20
# Files are read in such pieces: what a start reads at once stays in the heap for ever.
_PIECE_BYTES: Final = 64 << 10
_HEADER = struct.Struct(">8sIQQ")
_U64 = struct.Struct(">Q")
_RECORD = struct.Struct(">QQI")
_SYNCED = struct.Struct(">QQ")
_SYNCED_AT = 2048
_BEGIN = 4096
_MAGIC = b"MAGMDLOG"
_VERSION = 1
RESTORE: Final = "restore the data directory from a backup"


class ChangeLog:
    """The log of one store, held by one process. Opened by `open`; `replay` comes before the first `append`.

    Invariant: `position` is where the next record goes in the file of `turn`; all before it is durable.
    """

    def __init__(self, files: Files, directory: str, *, turn_bytes: int = TURN_BYTES) -> None:
        self.turn = 0
        self.position = _BEGIN
        self._files = files
        self._directory = directory
        self._turn_bytes = turn_bytes
        self._open: list[File] = []
        # Turns whose files have good headers; where the turn before each ended.
        self._turns: dict[int, int] = {}

    @property
    def full(self) -> bool:
        """Whether the next turn is due. Appending goes on all the same; the file then grows."""
        return self.position >= self._turn_bytes

    def create(self) -> None:
        """Makes both files at full size: a full disk takes as many changes. Durable; may be repeated after a crash."""
        for number in range(2):
            with contextlib.closing(self._files.open(_path(self._directory, number), create=True)) as file:
                file.zero_fill(0, self._turn_bytes)
                if number == 0:
                    file.write_at(0, [_header(0, _BEGIN)])
                file.sync()
        self._files.sync_directory(self._directory)

    def open(self) -> None:
        """Finds the newest turn. DataDirectoryError if a file is missing, damaged, or of another version."""
        for number in range(2):
            path = _path(self._directory, number)
            if not self._files.exists(path):
                raise self._damaged(number, "it is missing")
            self._open.append(self._files.open(path))
            if (header := self._read_header(number)) is not None:
                turn, end_before = header
                if turn % 2 != number:
                    raise self._damaged(number, f"it has turn {turn}, which belongs into the other file")
                self._turns[turn] = end_before
        if not self._turns:
            raise self._damaged(0, "neither file has a good header")
        self.turn = max(self._turns)
        # The header of the next turn may be torn; then nothing of that turn is in its file.
        following = self.turn + 1
        if len(self._turns) < 2 and self._first_good(following, _BEGIN) is not None:
            raise self._damaged(following % 2, "its header is damaged")

    def replay(self, first_turn: int) -> Iterator[bytes]:
        """The changes from this turn on, in order. DataDirectoryError for damage, or a turn that is not there."""
        if first_turn not in self._turns:
            raise self._damaged(
                first_turn % 2, f"the database needs turn {first_turn} of it, and it is in turn {self.turn}"
            )
        for turn in range(first_turn, self.turn + 1):
            yield from self._records(turn)

    def append(self, change: bytes) -> None:
        """Durable when it returns. DiskFull: nothing of it is there; StorageFailed: that is not known."""
        file = self._open[self.turn % 2]
        rest = _U64.pack(self.position) + len(change).to_bytes(4) + change
        file.write_at(
            self.position,
            [(xxhash.xxh3_64_digest(rest, self.turn) + rest).ljust(_record_bytes(change), b"\0")],
        )
        file.sync()
        self.position += _record_bytes(change)

    def note_synced(self) -> None:
        """What was appended was durable: a hint that is not synced itself, and may fail."""
        digest = xxhash.xxh3_64_intdigest(_U64.pack(self.position), self.turn)
        try:
            self._open[self.turn % 2].write_at(_SYNCED_AT, [_SYNCED.pack(self.position, digest)])
        except DiskFull:  # a file that is there needs no room, but on a file system that copies on write
            return

    def begin_turn(self) -> None:
        """The next turn, in the file of the one before this. The database has flushed what was in it. Durable."""
        following = self.turn + 1
        file = self._open[following % 2]
        file.write_at(0, [_header(following, self.position)])
        file.sync()
        self.turn, self.position = following, _BEGIN

    def close(self) -> None:
        """May be called twice."""
        for file in self._open:
            file.close()
        self._open.clear()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _read_header(self, number: int) -> tuple[int, int] | None:
        """The turn, and where the turn before it ended; None: damaged or torn."""
        data = self._open[number].read_at(0, _HEADER.size + 8)
        body = data[: _HEADER.size]
        if len(data) < _HEADER.size + 8 or data[_HEADER.size :] != xxhash.xxh3_64_digest(body):
            return None
        magic, version, turn, end_before = _HEADER.unpack(body)
        if magic != _MAGIC or version != _VERSION:
            raise DataDirectoryError(
                f"{_path(self._directory, number)} has format version {version}, this release reads {_VERSION}; start the "
                "release that wrote it"
            )
        return turn, end_before

    def _records(self, turn: int) -> Iterator[bytes]:
        pieces = _Pieces(self._open[turn % 2])
        position = _BEGIN
        while (change := _read_record(pieces, turn, position)) is not None:
            yield change
            position += _record_bytes(change)
        if turn < self.turn:
            durable = self._turns[turn + 1] != position
        else:
            self.position = position
            durable = _read_synced(pieces, turn) > position or self._first_good(turn, position) is not None
        if durable:
            raise self._damaged(
                turn % 2,
                f"the record at {position} cannot be read, and something behind it proves that it was durable",
            )

    def _first_good(self, turn: int, begin: int) -> int | None:
        """Position of the first good record of a turn from `begin` on; each record has its own position in it. 30 ms."""
        pieces = _Pieces(self._open[turn % 2])
        for start in range(begin + 8, pieces.size, _PIECE_BYTES):
            piece = pieces.at(start, min(_PIECE_BYTES, pieces.size - start) // 8 * 8)
            if not piece.strip(b"\0"):
                continue
            numbers = array("Q", piece)
            if sys.byteorder == "little":
                numbers.byteswap()
            for index, number in enumerate(numbers):
                position = start + index * 8 - 8
                if number == position and _read_record(pieces, turn, position) is not None:
                    return position
        return None

    def _damaged(self, number: int, what: str) -> DataDirectoryError:
        path = _path(self._directory, number)
        return DataDirectoryError(
            f"the log {path} of the metadata store is damaged: {what}; {RESTORE}", path=path
        )


def _path(directory: str, number: int) -> str:
    return os.path.join(directory, f"changes-{number}")


def _header(turn: int, end_before: int) -> bytes:
    body = _HEADER.pack(_MAGIC, _VERSION, turn, end_before)
    return (body + xxhash.xxh3_64_digest(body)).ljust(_BEGIN, b"\0")


def _record_bytes(change: bytes) -> int:
    return -(-(_RECORD.size + len(change)) // 8) * 8


class _Pieces:
    """The bytes of one file of the log, read a piece at a time."""

    def __init__(self, file: File) -> None:
        self.size = file.size()
        self._file = file
        self._start = 0
        self._piece = b""

    def at(self, position: int, length: int) -> bytes:
        """The bytes there; fewer at the end of the file."""
        if not self._start <= position <= position + length <= self._start + len(self._piece):
            self._start, self._piece = position, self._file.read_at(position, max(length, _PIECE_BYTES))
        return self._piece[position - self._start : position - self._start + length]


def _read_record(pieces: _Pieces, turn: int, position: int) -> bytes | None:
    """The change of the record there; None: there is no good record of this turn."""
    begin = position + _RECORD.size
    if begin > pieces.size:
        return None
    digest, named, length = _RECORD.unpack(pieces.at(position, _RECORD.size))
    if named != position or begin + length > pieces.size:
        return None
    covered = pieces.at(position + 8, _RECORD.size - 8 + length)
    return covered[_RECORD.size - 8 :] if xxhash.xxh3_64_intdigest(covered, turn) == digest else None


def _read_synced(pieces: _Pieces, turn: int) -> int:
    """0: nothing is noted in this turn."""
    position, digest = _SYNCED.unpack(pieces.at(_SYNCED_AT, _SYNCED.size))
    return position if xxhash.xxh3_64_intdigest(_U64.pack(position), turn) == digest else 0

"""Entries of a cursor ledger (FORMATS.md): what is acknowledged, and redelivery counts, in pieces.

A snapshot is a row of such entries, and so is a change: each is true by itself, whatever of the others can be read. So a
piece may be taken while the state goes on changing, and what is damaged costs what stands in it.
"""

from __future__ import annotations

from itertools import accumulate
from operator import sub
from typing import Annotated, Any

import msgspec

from magnetar.proto.compression import Compression, compress, decompress
from magnetar.proto.errors import DataDirectoryError, MalformedFrame

from .core.acks import INDEX_BITS, AckState, Position
from .core.range_blocks import RangesOfLedger
from .core.redeliveries import RedeliveryCounts, RedeliveryRow

# Ranges or rows of one entry: encoding or replaying it takes a few milliseconds of a turn of the loop.
MAX_ROWS_PER_ENTRY = 4_000

_KIND_ACKS = 1
_KIND_REDELIVERIES = 2
_KIND_REWINDS = 3
_HEADER_BYTES = 2  # kind, codec
_COMPRESSED_FROM = 256  # bytes: a change of a few rows is stored as it is

_Number = Annotated[int, msgspec.Meta(ge=0)]
_Position = tuple[_Number, _Number, _Number]
_DECODERS: dict[int, msgspec.msgpack.Decoder[Any]] = {
    _KIND_ACKS: msgspec.msgpack.Decoder(tuple[_Position, list[tuple[_Number, list[_Number]]]]),
    _KIND_REDELIVERIES: msgspec.msgpack.Decoder(list[tuple[_Number, _Number, _Number, _Number, _Number]]),
    _KIND_REWINDS: msgspec.msgpack.Decoder(list[_Position]),
}


def encode_acks(mark_delete: Position, rows: list[RangesOfLedger]) -> bytes:
    """Where the mark-delete position is, and ranges of numbers (`core.acks`) that are acknowledged beyond it."""
    return _encode(
        _KIND_ACKS, (mark_delete, [(ledger, _steps(starts, ends)) for ledger, starts, ends in rows])
    )


def encode_redeliveries(rows: list[RedeliveryRow]) -> bytes:
    """Redelivery counts."""
    return _encode(_KIND_REDELIVERIES, rows)


def encode_rewinds(rewinds: list[Position]) -> bytes:
    """All read positions from which it went back."""
    return _encode(_KIND_REWINDS, rewinds)


def _encode(kind: int, content: Any) -> bytes:
    body = msgspec.msgpack.encode(content)
    codec = Compression.NONE if len(body) < _COMPRESSED_FROM else Compression.ZSTD
    return bytes((kind, codec)) + compress(codec, body)


def _steps(starts: list[int], ends: list[int]) -> list[int]:
    """Bounds of ranges, each as the distance from the one before: small numbers that repeat."""
    bounds = [0] * (2 * len(starts))
    bounds[::2], bounds[1::2] = starts, ends
    return [*bounds[:1], *map(sub, bounds[1:], bounds)]


def _decode(payload: bytes) -> tuple[int, Any]:
    """Kind and content; of acknowledgements (mark-delete position, [(ledger, steps), ...]). Raises DataDirectoryError."""
    try:
        if len(payload) < _HEADER_BYTES:
            raise MalformedFrame(f"it has {len(payload)} bytes")
        kind = payload[0]
        decoder = _DECODERS.get(kind)
        if decoder is not None:
            content = decoder.decode(decompress(payload[1], payload[_HEADER_BYTES:]))
            if kind == _KIND_ACKS and any(len(steps) % 2 for _, steps in content[1]):
                raise MalformedFrame("a range has a start and no end")
            return kind, content
    except (MalformedFrame, msgspec.MsgspecError) as error:
        raise DataDirectoryError(f"an entry of a cursor ledger is damaged: {error}") from error
    raise DataDirectoryError(f"an entry of a cursor ledger is of unknown kind {kind}")


def replay(state: AckState, counts: RedeliveryCounts, payload: bytes) -> int:
    """Applies one entry of a cursor ledger; returns how many rows it has. Raises DataDirectoryError."""
    kind, content = _decode(payload)
    if kind == _KIND_ACKS:
        mark_delete, stepped = content
        rows = [(ledger, list(accumulate(steps))) for ledger, steps in stepped]
        state.merge(mark_delete, [(ledger, bounds[::2], bounds[1::2]) for ledger, bounds in rows])
        return sum(len(steps) for _, steps in stepped) // 2
    if kind == _KIND_REDELIVERIES:
        for row in content:
            counts.set_row(row)
    else:
        counts.rewinds = sorted(content)
    counts.clear_changes()
    return len(content)


def describe(payload: bytes) -> dict[str, Any]:
    """What an entry of a cursor ledger says, for people: `kind` and `content`. Raises DataDirectoryError."""
    kind, content = _decode(payload)
    if kind == _KIND_ACKS:
        mark_delete, stepped = content
        ranges = [
            [ledger, *_place(start), *_place(end)]
            for ledger, steps in stepped
            for bounds in [list(accumulate(steps))]
            for start, end in zip(bounds[::2], bounds[1::2])
        ]
        return {
            "kind": "cursor acknowledgements",
            "content": {"mark_delete": list(mark_delete), "ranges": ranges},
        }
    if kind == _KIND_REDELIVERIES:
        return {"kind": "cursor redeliveries", "content": {"rows": [list(row) for row in content]}}
    return {"kind": "cursor rewinds", "content": {"rewinds": [list(one) for one in content]}}


def _place(number: int) -> tuple[int, int]:
    """Entry and index."""
    return number >> INDEX_BITS, number & ((1 << INDEX_BITS) - 1)

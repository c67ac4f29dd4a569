"""Messages of one group into SEND frames: one batch, or a batch of one in a frame of its own for each message.

The frames of single messages without keys are made column by column, each step one C loop over the group: 330 ns a
message, 670 with a call of encode_single and encode_frame each (measured at 1,000 x 100 bytes).

>>> from magnetar.proto.frames import FrameParser
>>> singles = encode_singles([b"a", b"bc"], first_sequence_id=5, publish_time_ms=9)
>>> [(header, batches)] = FrameParser().feed(singles.frames(b"h", 0))
>>> from magnetar.proto.batch import encode_single
>>> batches == [encode_single(b"a", 5, 9), encode_single(b"bc", 6, 9)]
True
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import count, repeat
from operator import add

from xxhash import xxh3_64_digest

from magnetar.proto.batch import BATCH_HEADER_BYTES, FLAG_SINGLE, FORMAT_NATIVE, encode_batch
from magnetar.proto.compression import Compression
from magnetar.proto.frames import encode_frame, encode_frames, frame_prefix

from .columns import Columns

# What follows the checksum of a single message, in three parts: constant, sequence id, constant within one group.
_SINGLE_HEAD = struct.pack(">BBHII", FORMAT_NATIVE, FLAG_SINGLE, BATCH_HEADER_BYTES, 1, 0)
_SINGLE_REST = struct.Struct(f">{len(_SINGLE_HEAD)}sQ16s")
_LENGTH = struct.Struct(">I")


class Batch:
    """A group that is one batch."""

    __slots__ = ("batch",)

    def __init__(self, batch: bytes) -> None:
        self.batch = batch

    def frames(self, header: bytes, first: int) -> bytes:
        """One frame; a batch is stored whole or not at all, so `first` does not matter."""
        return encode_frame(header, self.batch)


class Frames:
    """A group of encoded batches of one message each."""

    __slots__ = ("batches",)

    def __init__(self, batches: list[bytes]) -> None:
        self.batches = batches

    def frames(self, header: bytes, first: int) -> bytes:
        """A frame for each message from `first` on."""
        return encode_frames(header, self.batches[first:] if first else self.batches)


class Singles:
    """A group of plain messages: the checksum of each, and what it covers."""

    __slots__ = ("digests", "rests")

    def __init__(self, digests: list[bytes], rests: list[bytes]) -> None:
        self.digests = digests
        self.rests = rests

    def frames(self, header: bytes, first: int) -> bytes:
        """A frame for each message from `first` on."""
        digests, rests = self.digests[first:], self.rests[first:]
        sizes = list(map(len, rests))
        # All of a frame before the checksum depends on the size alone, and a group has few sizes.
        prefixes = {
            size: frame_prefix(header, size + 12) + _LENGTH.pack(size + 8) for size in dict.fromkeys(sizes)
        }
        parts = [b""] * (3 * len(rests))
        parts[0::3] = map(prefixes.__getitem__, sizes)
        parts[1::3] = digests
        parts[2::3] = rests
        return b"".join(parts)


def encode_singles(values: Sequence[bytes], first_sequence_id: int, publish_time_ms: int) -> Singles:
    """Plain messages as batches of one each."""
    tail = struct.pack(">QII", publish_time_ms, 0, 0)
    heads = map(_SINGLE_REST.pack, repeat(_SINGLE_HEAD), count(first_sequence_id), repeat(tail))
    rests = list(map(add, heads, values))
    return Singles(list(map(xxh3_64_digest, rests)), rests)


def encode_group(
    columns: Columns,
    first_sequence_id: int,
    publish_time_ms: int,
    *,
    batching: bool,
    compression: Compression,
) -> Batch | Frames | Singles:
    """The bytes of a group. Raises what msgpack raises for values, keys or properties of other types."""
    values = columns.values
    if batching:
        return Batch(
            encode_batch(
                values,
                sequence_id=first_sequence_id,
                publish_time_ms=publish_time_ms,
                keys=columns.keys,
                properties=columns.properties,
                event_times_ms=columns.event_times_ms,
                compression=compression,
            )
        )
    if columns.plain and compression is Compression.NONE and None not in values:
        return encode_singles(values, first_sequence_id, publish_time_ms)  # type: ignore[arg-type]
    batches: list[bytes] = []
    nothing = repeat(None)
    for sequence_id, value, key, properties, event_time_ms in zip(
        count(first_sequence_id),
        values,
        columns.keys or nothing,
        columns.properties or nothing,
        columns.event_times_ms or nothing,
    ):
        batches.append(
            encode_batch(
                [value],
                sequence_id=sequence_id,
                publish_time_ms=publish_time_ms,
                keys=None if key is None else [key],
                properties=None if not properties else [properties],
                event_times_ms=None if event_time_ms is None else [event_time_ms],
                compression=compression,
            )
        )
    return Frames(batches)

"""Compression of batch columns: none, lz4, zstd, zlib, snappy. A compressed column is `u32 raw size | codec's bytes`.

This is where a codec is added: its number and name, and a row of `_CODECS`.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from typing import Literal, NamedTuple

from .errors import InvalidArgument, MalformedFrame

_SIZE = struct.Struct(">I")
# A column never inflates past this: 16 times the default message limit, so that a length bomb stays harmless.
MAX_RAW_COLUMN_BYTES = 80 * 1024 * 1024

CompressionName = Literal["none", "lz4", "zstd", "zlib", "snappy"]


class Compression(enum.IntEnum):
    """Codec ids as they stand in a batch's flags."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2
    ZLIB = 3
    SNAPPY = 4

    @classmethod
    def parse(cls, name: str) -> Compression:
        """From the name that users write, one of CompressionName. Raises InvalidArgument."""
        try:
            return cls[name.upper()]
        except (KeyError, AttributeError):
            raise InvalidArgument(
                f"unknown compression {name!r} (one of {', '.join(COMPRESSION_NAMES)})"
            ) from None


COMPRESSION_NAMES = tuple(member.name.lower() for member in Compression)


class _Codec(NamedTuple):
    compress: Callable[[bytes], bytes]
    # Gets the raw size as well, and raises whatever it does for damage.
    decompress: Callable[[bytes | memoryview, int], bytes]


def _lz4(data: bytes) -> bytes:
    import lz4.block

    packed: bytes = lz4.block.compress(data, store_size=False)
    return packed


def _un_lz4(data: bytes | memoryview, raw_size: int) -> bytes:
    import lz4.block

    raw: bytes = lz4.block.decompress(data, uncompressed_size=raw_size)
    return raw


def _zstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=3).compress(data)


def _un_zstd(data: bytes | memoryview, raw_size: int) -> bytes:
    import zstandard

    if zstandard.frame_content_size(data) not in (raw_size, -1):
        raise ValueError("it has another size than it says")
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=max(raw_size, 1))


def _zlib(data: bytes) -> bytes:
    import zlib

    return zlib.compress(data)


def _un_zlib(data: bytes | memoryview, raw_size: int) -> bytes:
    import zlib

    stream = zlib.decompressobj()
    raw = stream.decompress(
        data, raw_size + 1
    )  # one byte more than it says, so that its end is seen; never all that it has
    # Pulsar's Java client does not end a stream, it flushes it.
    if stream.unused_data or not (stream.eof or bytes(data[-4:]) == b"\0\0\xff\xff"):
        raise ValueError("it does not end where it says")
    return raw


def _snappy(data: bytes) -> bytes:
    import cramjam

    return bytes(cramjam.snappy.compress_raw(data))


def _un_snappy(data: bytes | memoryview, raw_size: int) -> bytes:
    import cramjam

    if cramjam.snappy.decompress_raw_len(data) != raw_size:
        raise ValueError("it has another size than it says")
    return bytes(cramjam.snappy.decompress_raw(data))


# Libraries are imported when a codec is used first: a client that compresses nothing loads none.
_CODECS = {
    Compression.LZ4: _Codec(_lz4, _un_lz4),
    Compression.ZSTD: _Codec(_zstd, _un_zstd),
    Compression.ZLIB: _Codec(_zlib, _un_zlib),
    Compression.SNAPPY: _Codec(_snappy, _un_snappy),
}


def compress(codec: Compression, data: bytes) -> bytes:
    """`data` as a compressed column."""
    if codec is Compression.NONE:
        return data
    return _SIZE.pack(len(data)) + _CODECS[codec].compress(data)


def decompress(codec: int, data: bytes | memoryview) -> bytes:
    """Inverse of `compress`. Raises MalformedFrame for damaged or oversized columns and unknown codecs."""
    if codec == Compression.NONE:
        return bytes(data)
    if codec not in _CODECS:
        raise MalformedFrame(f"compression codec {codec} is not known here")
    if len(data) < _SIZE.size:
        raise MalformedFrame("a compressed column is too short")
    (raw_size,) = _SIZE.unpack_from(data)
    return decompress_raw(codec, data[_SIZE.size :], raw_size)


def decompress_raw(
    codec: int, data: bytes | memoryview, raw_size: int, max_bytes: int = MAX_RAW_COLUMN_BYTES
) -> bytes:
    """The same where the size does not stand before the codec's bytes."""
    if raw_size > max_bytes:
        raise MalformedFrame(f"a column inflates to {raw_size} bytes, more than {max_bytes}")
    try:
        raw = _CODECS[Compression(codec)].decompress(data, raw_size)
    except Exception as error:
        raise MalformedFrame(f"a compressed column is damaged: {error}") from error
    if len(raw) != raw_size:
        raise MalformedFrame(f"a compressed column has {len(raw)} bytes, not the {raw_size} it says")
    return raw

"""Compression of batch columns: none, lz4, zstd. A compressed column is `u32 raw size | codec's bytes`."""

from __future__ import annotations

import enum
import struct

from .errors import InvalidArgument, MalformedFrame

_SIZE = struct.Struct(">I")
# A column never inflates past this: 16 times the default message limit, so that a length bomb stays harmless.
MAX_RAW_COLUMN_BYTES = 80 * 1024 * 1024


class Compression(enum.IntEnum):
    """Codec ids as they stand in a batch's flags."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2

    @classmethod
    def parse(cls, name: str) -> Compression:
        """From the name that users write: "none", "lz4", "zstd"."""
        try:
            return cls[name.upper()]
        except (KeyError, AttributeError):
            names = ", ".join(member.name.lower() for member in cls)
            raise InvalidArgument(f"unknown compression {name!r} (one of {names})") from None


def compress(codec: Compression, data: bytes) -> bytes:
    """`data` as a compressed column."""
    if codec is Compression.LZ4:
        import lz4.block

        packed: bytes = lz4.block.compress(data, store_size=False)
    elif codec is Compression.ZSTD:
        import zstandard

        packed = zstandard.ZstdCompressor(level=3).compress(data)
    else:
        return data
    return _SIZE.pack(len(data)) + packed


def decompress(codec: int, data: bytes | memoryview) -> bytes:
    """Inverse of `compress`. Raises MalformedFrame for damaged or oversized columns and unknown codecs."""
    if codec == Compression.NONE:
        return bytes(data)
    if len(data) < 4:
        raise MalformedFrame("a compressed column is too short")
    (raw_size,) = _SIZE.unpack_from(data)
    if raw_size > MAX_RAW_COLUMN_BYTES:
        raise MalformedFrame(f"a column inflates to {raw_size} bytes, more than {MAX_RAW_COLUMN_BYTES}")
    body = data[4:]
    try:
        if codec == Compression.LZ4:
            import lz4.block

            raw: bytes = lz4.block.decompress(body, uncompressed_size=raw_size)
        elif codec == Compression.ZSTD:
            import zstandard

            if zstandard.frame_content_size(body) not in (raw_size, -1):
                raise MalformedFrame("a compressed column has another size than it says")
            raw = zstandard.ZstdDecompressor().decompress(body, max_output_size=max(raw_size, 1))
        else:
            raise MalformedFrame(f"compression codec {codec} is not known here")
    except MalformedFrame:
        raise
    except Exception as error:
        raise MalformedFrame(f"a compressed column is damaged: {error}") from error
    if len(raw) != raw_size:
        raise MalformedFrame(f"a compressed column has {len(raw)} bytes, not the {raw_size} it says")
    return raw

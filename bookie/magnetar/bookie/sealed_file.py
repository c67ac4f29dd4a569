"""Small files that are replaced as a whole: cookie, mark, log ids, what a compaction replaces, progress of the scrub.

    magic | u32 version | msgpack | u64 xxh3-64 of all before it

The checksum covers every byte, so a version that this program does not know was written by another one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, TypeVar

import msgpack
import xxhash

from magnetar.proto.errors import DataDirectoryError

T = TypeVar("T")
_VERSION = struct.Struct(">I")
_CHECKSUM = struct.Struct(">Q")


class _UnknownVersion(ValueError):
    """The bytes are good, and another program wrote them."""


def seal(magic: bytes, version: int, fields: Any) -> bytes:
    """The file's bytes."""
    data: bytes = magic + _VERSION.pack(version) + msgpack.packb(fields)
    return data + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(data))


def unseal(data: bytes, magic: bytes, version: int) -> Any:
    """The fields. Raises ValueError."""
    start, end = len(magic) + _VERSION.size, len(data) - _CHECKSUM.size
    if end < start or data[: len(magic)] != magic:
        raise ValueError("it does not begin as such a file does")
    if _CHECKSUM.pack(xxhash.xxh3_64_intdigest(data[:end])) != data[end:]:
        raise ValueError("its checksum does not match")
    if (found := _VERSION.unpack_from(data, len(magic))[0]) != version:
        raise _UnknownVersion(f"it has format version {found}, this program reads {version}")
    return msgpack.unpackb(data[start:end], strict_map_key=False)


def open_sealed(
    data: bytes, magic: bytes, version: int, decode: Callable[[Any], T], *, name: str, path: str, cure: str
) -> T:
    """What `decode` makes of the fields. DataDirectoryError for a file without which the bookie cannot start.

    `name` is what the file is, `cure` what to do about a damaged one: both for the operator.
    """
    try:
        return decode(unseal(data, magic, version))
    except _UnknownVersion as error:
        raise DataDirectoryError(
            f"{name} {path} cannot be read: {error}; run the version of magnetar that wrote it", path=path
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise DataDirectoryError(f"{name} {path} is damaged ({error}); {cure}", path=path) from error

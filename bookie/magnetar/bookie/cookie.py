"""The cookie: whose data directory this is, and in which format. Written once, before anything else.

    b"MAGNETAR-BOOKIE\\n" | u32 length | msgpack map | u64 xxh3-64 of all before it

The map holds "format_version", "instance" (64 random bits, the seed of every journal incarnation) and "bookie_id".
Whatever stands in a directory without a readable cookie is never overwritten (rule 9).
"""

from __future__ import annotations

import random
import struct
from typing import Any, NamedTuple

import msgpack
import xxhash

from magnetar.proto.errors import DataDirectoryError
from magnetar.runtime.files import Files

from .layout import DataLayout

__all__ = ["FORMAT_VERSION", "Cookie", "decode_cookie", "encode_cookie", "open_data_directory"]

FORMAT_VERSION = 1
_MAGIC = b"MAGNETAR-BOOKIE\n"
_LENGTH = struct.Struct(">I")
_CHECKSUM = struct.Struct(">Q")


class Cookie(NamedTuple):
    """Identity of a data directory."""

    format_version: int
    instance: int
    bookie_id: str


def encode_cookie(cookie: Cookie) -> bytes:
    """The file's bytes."""
    body: bytes = msgpack.packb(cookie._asdict())
    head = _MAGIC + _LENGTH.pack(len(body)) + body
    return head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))


def decode_cookie(data: bytes, path: str) -> Cookie:
    """Raises DataDirectoryError when the bytes are damaged or of a newer format."""
    start = len(_MAGIC) + _LENGTH.size
    try:
        if data[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it does not begin as a cookie does")
        end = start + _LENGTH.unpack_from(data, len(_MAGIC))[0]
        if len(data) != end + 8 or _CHECKSUM.unpack_from(data, end)[0] != xxhash.xxh3_64_intdigest(
            data[:end]
        ):
            raise ValueError("its checksum does not match")
        fields: dict[str, Any] = msgpack.unpackb(data[start:end])
        cookie = Cookie(int(fields["format_version"]), int(fields["instance"]), str(fields["bookie_id"]))
    except (ValueError, KeyError, struct.error, msgpack.UnpackException) as error:
        raise DataDirectoryError(
            f"the cookie {path} is damaged ({error}); restore it from a backup of this directory, "
            "or start with another data directory",
            path=path,
        ) from error
    if cookie.format_version != FORMAT_VERSION:
        raise DataDirectoryError(
            f"the data directory has format version {cookie.format_version}, this program reads "
            f"{FORMAT_VERSION}; run the version of magnetar that wrote it ({path})",
            path=path,
            format_version=cookie.format_version,
        )
    return cookie


def open_data_directory(files: Files, layout: DataLayout, bookie_id: str, rng: random.Random) -> Cookie:
    """Reads the cookie, or makes a new one in an empty directory. Durable when it returns.

    Raises DataDirectoryError for a damaged cookie, for data without a cookie, and for another bookie's directory.
    """
    if files.exists(layout.cookie):
        cookie = decode_cookie(files.read(layout.cookie), layout.cookie)
        if bookie_id and bookie_id != cookie.bookie_id:
            raise DataDirectoryError(
                f"{layout.root} belongs to bookie {cookie.bookie_id!r}, not to {bookie_id!r}; "
                "correct data_directory or bookie_id",
                path=layout.root,
            )
        for directory in (layout.journal, layout.ledgers):
            if not files.exists(directory):
                raise DataDirectoryError(
                    f"{directory} is missing although {layout.cookie} says that this bookie has data; "
                    "restore the directory (is its disk mounted?)",
                    path=directory,
                )
        return cookie
    for name in ("journal", "ledgers", "index", "mark"):
        path = f"{layout.root}/{name}"
        if files.exists(path) and not _empty_directory(files, path):
            raise DataDirectoryError(
                f"{layout.root} holds data ({name}) but no cookie; restore {layout.cookie}, "
                "or start with another data directory",
                path=path,
            )
    for directory in (layout.journal, layout.ledgers):
        files.make_directory(directory)
    instance = rng.getrandbits(64)
    cookie = Cookie(FORMAT_VERSION, instance, bookie_id or f"bookie-{instance:016x}")
    files.write_atomically(layout.cookie, encode_cookie(cookie))
    return cookie


def _empty_directory(files: Files, path: str) -> bool:
    try:
        return not files.list(path)
    except DataDirectoryError:
        return False

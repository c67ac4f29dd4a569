"""Values in metadata: msgpack maps with a format number (FORMATS.md)."""

from __future__ import annotations

from typing import Final, Self

import msgspec

from magnetar.proto.errors import DataDirectoryError

FORMAT: Final = 1
_encode = msgspec.msgpack.Encoder().encode


class _Format(msgspec.Struct):
    format: int


class Record(msgspec.Struct, tag_field="format", tag=FORMAT):
    """Every key is stored, and required when it is read."""

    def encode(self) -> bytes:
        """The value."""
        return _encode(self)

    @classmethod
    def decode(cls, value: bytes, path: str, cure: str = "") -> Self:
        """Raises DataDirectoryError, which names the node at `path`, and the cure of a damaged one."""
        try:
            found = msgspec.msgpack.decode(value, type=_Format).format
            if found == FORMAT:
                return msgspec.msgpack.decode(value, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            end = f"; {cure}" if cure else ""
            raise DataDirectoryError(f"the metadata of {path} is damaged: {error}{end}") from error
        raise DataDirectoryError(
            f"the metadata of {path} has format {found}, and this release reads {FORMAT}: upgrade it"
        )

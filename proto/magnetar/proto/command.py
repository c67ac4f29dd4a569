"""What all headers have in common. Import the commands themselves from `commands`."""

from __future__ import annotations

from typing import ClassVar

import msgspec

_encoder = msgspec.msgpack.Encoder()


class Command(msgspec.Struct, array_like=True, gc=False, tag_field="command"):
    """Base of all headers."""

    request_id: int

    NUMBER: ClassVar[int] = 0

    def encode(self) -> bytes:
        """The header's bytes."""
        return _encoder.encode(self)

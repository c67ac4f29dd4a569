"""The base class of all wire commands. Import the commands themselves from `commands`."""

from __future__ import annotations

from typing import ClassVar

import msgspec

_encoder = msgspec.msgpack.Encoder()


class Command(msgspec.Struct, array_like=True, gc=False, tag_field="command"):
    """A command is the header of a frame: a msgpack array [command number, request id, fields...].

    Request id 0: no answer is wanted.
    """

    request_id: int

    NUMBER: ClassVar[int] = 0  # the command number, the msgpack tag; `commands` sets it on each subclass

    def encode(self) -> bytes:
        """The header's bytes."""
        return _encoder.encode(self)

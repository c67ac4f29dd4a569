"""The base class of all wire commands. Import the commands themselves from `commands`."""

from __future__ import annotations

import re
from typing import ClassVar

import msgspec

from .errors import InvalidArgument

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

    def check(self) -> None:
        """Raises InvalidArgument, which names the field, unless the peer can decode it.

        Fields are not checked when a command is made, and a header that cannot be decoded costs the whole connection.
        """
        try:
            msgspec.msgpack.decode(self.encode(), type=type(self))
        except msgspec.ValidationError as error:
            at = re.search(r" - at `\$\[(\d+)\]", str(error))
            field = self.__struct_fields__[int(at[1]) - 1] if at else "a field"
            raise InvalidArgument(f"{field} of {type(self).__name__}: {error}") from None
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidArgument(f"{type(self).__name__} cannot be encoded: {error}") from None

"""Whom a received frame is for, found from two bytes of its header instead of decoding it (0.1 us)."""

from __future__ import annotations

from magnetar.proto.commands import COMMANDS, Failed, Ok, peek_number
from magnetar.proto.errors import MalformedFrame

UNKNOWN, INTERNAL, FOR_HANDLER = 0, 1, 2

# Handshake, keep-alive and answers have the lowest numbers; the connection deals with them itself.
_LAST_INTERNAL = 7
assert COMMANDS[6] is Ok
assert COMMANDS[_LAST_INTERNAL] is Failed

# By the second byte of the header: msgpack writes numbers below 128 as themselves, after one byte for a short array.
KINDS = bytes(
    UNKNOWN
    if number not in COMMANDS or number >= 128
    else INTERNAL
    if number <= _LAST_INTERNAL
    else FOR_HANDLER
    for number in range(256)
)


def kind_of(header: bytes) -> int:
    """UNKNOWN also for what is no command header at all; decoding it tells."""
    if len(header) > 1 and 0x90 < header[0] < 0xA0:
        kind = KINDS[header[1]]
        if kind:
            return kind
    try:
        number = peek_number(header)  # a peer may write a number in a longer form than needed
    except MalformedFrame:
        return UNKNOWN
    return FOR_HANDLER if number > _LAST_INTERNAL and number in COMMANDS else UNKNOWN

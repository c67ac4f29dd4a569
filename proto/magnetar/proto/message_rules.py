"""What a message may have: one set of rules for all that write messages, which the broker checks once more.

* The value, the key and the properties as they are encoded count together against max_message_bytes.
* Properties are a map of text to text: nothing else, and no null.
* A batch has at most MAX_MESSAGES_PER_BATCH messages.
* Sequence ids have 63 bits; those of a batch rise.
* Times are milliseconds since the epoch, not before it and not after the year 9999: every reader can show them.

Who copies a message (a dead letter) adds where it comes from, at most GROUP_OVERHEAD_BYTES together with the headers of a
batch: the broker takes groups of max_message_bytes and so much more, and what was let in can be passed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from .errors import InvalidArgument
from .ids import MAX_MESSAGES_PER_BATCH

MAX_TIME_MS = 253_402_300_799_999
MAX_SEQUENCE_ID = (1 << 63) - 1

_pack = msgspec.msgpack.Encoder().encode


def checked_properties(properties: Any) -> dict[str, str] | None:
    """A copy that later changes of the caller's map do not reach; None if it is empty. Raises InvalidArgument."""
    if properties is None:
        return None
    if properties.__class__ is not dict and not isinstance(properties, Mapping):
        raise InvalidArgument(f"properties are a map of str to str, not {type(properties).__name__}")
    checked: dict[str, str] = {}
    for name, value in properties.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidArgument(f"properties are a map of str to str, not {name!r}: {value!r}")
        if not (name.isascii() and value.isascii()) and not is_utf8(name + value):
            raise InvalidArgument(f"the property {name!r}: {value!r} cannot be written as UTF-8")
        checked[str.__str__(name)] = str.__str__(value)
    return checked or None


def is_utf8(text: str) -> bool:
    """False for a lone surrogate, which file names and JSON can bring into a str."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def properties_bytes(properties: Mapping[str, str] | None) -> int:
    """What checked properties count against the limit: their encoded bytes."""
    return len(_pack(properties)) if properties else 0


def check_message_count(count: int) -> None:
    """Raises InvalidArgument if that is too many messages for a batch."""
    if count > MAX_MESSAGES_PER_BATCH:
        raise InvalidArgument(
            f"{count} messages are more than the {MAX_MESSAGES_PER_BATCH} of a batch; send fewer at once, by send_many or "
            "with a lower batching_max_messages"
        )


def checked_time_ms(ms: Any) -> int:
    """`ms`, or InvalidArgument unless it is such a time."""
    if type(ms) is not int or not 0 <= ms <= MAX_TIME_MS:
        raise InvalidArgument(
            f"not a time: {ms!r} (want a datetime or whole milliseconds, not before the epoch and not after the year 9999)"
        )
    return ms


def checked_sequence_id(number: Any) -> int:
    """`number`, or InvalidArgument unless a message may have this sequence id."""
    if type(number) is not int or not 0 <= number <= MAX_SEQUENCE_ID:
        raise InvalidArgument(f"not a sequence id: {number!r} (want 0 to {MAX_SEQUENCE_ID})")
    return number

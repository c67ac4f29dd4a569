"""Messages to send, column by column: checked, measured and cut into batches that are small enough."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence, Sized
from datetime import datetime
from functools import partial
from itertools import accumulate, pairwise, repeat
from operator import add, lt
from typing import Any, NamedTuple, TypedDict, TypeVar

from magnetar.proto.batch import Columns, Key, Properties
from magnetar.proto.errors import (
    AlreadyClosed,
    InvalidArgument,
    MagnetarError,
    MessageTooLarge,
    RequestTimeout,
    SequenceIdError,
)
from magnetar.proto.ids import MessageId
from magnetar.proto.message_rules import (
    MAX_SEQUENCE_ID,
    MAX_TIME_MS,
    checked_properties,
    checked_sequence_id,
    checked_time_ms,
    is_utf8,
    properties_bytes,
)
from magnetar.runtime.clock import Clock

from ..durations import Duration, in_seconds
from ..options import time_in_ms

T = TypeVar("T")

# Every message counts this much more than its value against batch and memory bounds: it has objects of its own.
MESSAGE_OVERHEAD_BYTES = 64
# send_many cuts here, so that no batch makes an entry that is far larger than what the broker aims at.
MANY_MAX_MESSAGES = 10_000
MANY_MAX_BYTES = 1024 * 1024
# Of 2001: what is less is not meant as milliseconds, as a rule as seconds.
MIN_DELIVER_AT_MS = 1_000_000_000_000
# Delivery times are rounded up to such steps, so that messages that are due at about the same time share a batch.
DELIVERY_STEP_MS = 10


class MessageFields(TypedDict, total=False):
    """What may be sent with a message beside its value and its key: see `Producer.send_nowait`."""

    properties: Properties | None
    event_time: datetime | int | None
    sequence_id: int | None
    deliver_at: datetime | int | None
    deliver_after: Duration | None


class Row(NamedTuple):
    """A message, checked: what it has of each of the `Columns`."""

    value: bytes | None
    key: Key
    properties: Properties | None
    event_time_ms: int | None
    sequence_id: int | None
    deliver_at_ms: int | None

    @property
    def size(self) -> int:
        """See `message_bytes`."""
        return message_bytes(self.value, self.key, self.properties)

    def columns(self) -> Columns:
        """It alone."""
        value, *others = self
        keys, properties, times, ids, due = ([one] if one is not None else None for one in others)
        return Columns([value], keys, properties, times, None, ids, due)  # type: ignore[arg-type]


_new_row: Callable[[tuple[Any, ...]], Row] = partial(
    tuple.__new__, Row
)  # in C, which Row() is not: 200 ns less


def checked_row(
    clock: Clock,
    value: Any,
    key: Any,
    properties: Any = None,
    event_time: datetime | int | None = None,
    sequence_id: Any = None,
    deliver_at: datetime | int | None = None,
    deliver_after: Duration | None = None,
) -> Row:
    """What a user gave to `send` and its like. Raises InvalidArgument."""
    due_ms = None
    if deliver_at is not None or deliver_after is not None:
        due_ms = delivery_time(deliver_at, deliver_after, clock.now_ms())
    row = (
        value if value.__class__ is bytes else checked_value(value),
        None if key is None else checked_key(key),
        None if properties is None else checked_properties(properties),
        None if event_time is None else time_in_ms(event_time),
        None if sequence_id is None else checked_sequence_id(sequence_id),
        due_ms,
    )
    return _new_row(row)


def row_of(columns: Columns) -> Row:
    """The first of these messages."""
    rows: Any = [column and column[0] for column in columns]
    return Row(*rows[:4], *rows[5:])  # without its index, which it has only where it was stored


def checked_columns(
    values: Sequence[bytes | None],
    keys: Sequence[Key] | None,
    properties: Sequence[Properties | None] | None,
    event_times: Sequence[datetime | int | None] | None,
    sequence_ids: Sequence[int] | None = None,
    deliver_at: Sequence[datetime | int | None] | None = None,
) -> Columns:
    """What a user gave to send_many. Raises InvalidArgument, which names the message, for wrong types and lengths."""
    values = list(values)
    if set(map(type, values)) - {bytes}:
        values = _each(checked_value, values)
    columns = {
        "keys": keys,
        "properties": properties,
        "event_times": event_times,
        "sequence_ids": sequence_ids,
        "deliver_at": deliver_at,
    }
    for name, column in columns.items():
        if column is not None and not isinstance(column, Sized):
            raise InvalidArgument(
                f"{name} of send_many is a list with one for each value (or None), not {type(column).__name__}"
            )
        if column is not None and len(column) != len(values):
            raise InvalidArgument(
                f"{len(values)} values, but {len(column)} {name}: each value needs one (or None)"
            )
    if keys is not None:
        keys = list(keys) if _are_keys(keys) else _each(checked_key, keys)
    maps = None if properties is None else _each(checked_properties, properties)
    times = None if event_times is None else _each(_checked_time, event_times)
    ids = None if sequence_ids is None else _rising(sequence_ids)
    due = None if deliver_at is None else _each(_checked_due, deliver_at)
    return Columns(values, keys, maps, times, None, ids, due)


def _each(check: Callable[[Any], T], column: Sequence[Any]) -> list[T]:
    checked: list[T] = []
    try:
        checked.extend(map(check, column))
    except InvalidArgument as error:
        raise InvalidArgument(f"message {len(checked)}: {error.message}") from None
    return checked


def _rising(ids: Sequence[int]) -> list[int]:
    """Raises SequenceIdError, InvalidArgument."""
    ids = list(ids)
    if set(map(type, ids)) != {int} or not 0 <= min(ids) <= max(ids) <= MAX_SEQUENCE_ID:
        ids = _each(checked_sequence_id, ids)
    if not all(map(lt, ids, ids[1:])):
        number = next(number for number, (one, other) in enumerate(pairwise(ids), 1) if one >= other)
        raise SequenceIdError(
            f"message {number}: the sequence id {ids[number]} follows {ids[number - 1]}; they rise"
        )
    return ids


def _checked_due(time: datetime | int | None) -> int | None:
    if type(time) is int and MIN_DELIVER_AT_MS <= time < MAX_TIME_MS - DELIVERY_STEP_MS:
        return time + -time % DELIVERY_STEP_MS
    return delivery_time(time, None, 0)


def delivery_time(
    deliver_at: datetime | int | None, deliver_after: Duration | None, now_ms: int
) -> int | None:
    """When a message is due, in ms and never before it was asked for; None: at once. Raises InvalidArgument."""
    if deliver_at is not None:
        if deliver_after is not None:
            raise InvalidArgument("a message is due deliver_at or deliver_after, not both")
        if type(deliver_at) is int and deliver_at < MIN_DELIVER_AT_MS:
            raise InvalidArgument(
                f"deliver_at={deliver_at} is no time in milliseconds since the epoch (13 digits), nor a datetime; "
                "seconds are to be multiplied by 1000, and a time from now is deliver_after"
            )
        past = (
            isinstance(deliver_at, datetime) and deliver_at.year <= 1970
        )  # the milliseconds may be negative
        time_ms = 0 if past else time_in_ms(deliver_at)
    elif deliver_after is not None:
        seconds: Any = in_seconds(deliver_after)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not abs(seconds) < math.inf:
            raise InvalidArgument(
                f"deliver_after is a number of seconds or a timedelta, not {deliver_after!r}"
            )
        time_ms = checked_time_ms(now_ms + math.ceil(min(seconds, MAX_TIME_MS) * 1000)) if seconds > 0 else 0
    else:
        return None
    return min(time_ms + -time_ms % DELIVERY_STEP_MS, MAX_TIME_MS) if time_ms > 0 else None


def _are_keys(keys: Sequence[Key]) -> bool:
    """True if these are keys for sure: 40 ns each instead of 200."""
    types = set(map(type, keys)) - {type(None)}
    if types == {str}:
        try:
            "".join(filter(None, keys)).encode()  # type: ignore[arg-type]
        except UnicodeEncodeError:
            return False
    return types <= {str} or types == {bytes}


def checked_value(value: Any) -> bytes | None:
    """`value` as bytes, None for a tombstone. Raises InvalidArgument."""
    if value is None or type(value) is bytes:
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise InvalidArgument(f"a message value is bytes, not {type(value).__name__}; encode it first")


def checked_key(key: Any) -> Key:
    """`key` as a plain str or bytes, or InvalidArgument."""
    if key is None:
        return None
    if isinstance(key, bytes):
        return bytes(key)
    if not isinstance(key, str):
        raise InvalidArgument(f"a key is str or bytes, not {type(key).__name__}")
    if not is_utf8(key):
        raise InvalidArgument(
            f"the key {key!r} cannot be written as UTF-8; encode it yourself, keys may be bytes"
        )
    return str.__str__(key)


def _checked_time(time: datetime | int | None) -> int | None:
    return None if time is None else time_in_ms(time)


def message_bytes(value: bytes | None, key: Key, properties: Properties | None) -> int:
    """What a message counts against bounds: its bytes as they are encoded."""
    size = MESSAGE_OVERHEAD_BYTES + (0 if value is None else len(value))
    if key is not None:
        size += _length(key)
    return size if properties is None else size + properties_bytes(properties)


def too_large(size: int, max_message_bytes: int) -> MessageTooLarge:
    """The error for a message that counts `size`."""
    return MessageTooLarge(
        f"a message of {size - MESSAGE_OVERHEAD_BYTES} bytes exceeds the limit of {max_message_bytes}; "
        "send it by a producer with chunking=True, in parts, or raise max_message_bytes at client and service"
    )


def some_failed(error: MagnetarError, sent: list[MessageId | None], count: int) -> MagnetarError:
    """The error of send_many: `details["ids"]` has an id for each message that is stored, None for every other one.

    Not all were sent if `sent` is shorter than `count`.
    """
    ids = [*sent, *[None] * (count - len(sent))]
    first = ids.index(None) if None in ids else count
    unknown = isinstance(error, RequestTimeout | AlreadyClosed)
    text = (
        f"{error.message}; of {count} messages {count - ids.count(None)} are stored, the first {first} among them (the ids "
        f'are in details["ids"]); {"whether more are is not known" if unknown else "the others are not"}'
    )
    return type(error)(text, **{**error.details, "ids": ids})


def cut_columns(
    columns: Columns, max_message_bytes: int, *, chunking: bool, border: int = -1
) -> list[tuple[Columns, int]]:
    """Pieces that are small enough for a batch, each with what it counts. Raises MessageTooLarge.

    With `chunking` a message that is too large is a piece of its own. The sequence ids of a piece are on one side of
    `border`: up to it, or behind it.
    """
    ids, count = columns.sequence_ids, len(columns.values)
    if ids and ids[0] <= border < ids[-1]:
        behind = bisect_right(ids, border)
        parts = columns.part(0, behind), columns.part(behind, count)
        return [piece for one in parts for piece in cut_columns(one, max_message_bytes, chunking=chunking)]
    values, keys, properties, *_ = columns
    max_bytes = min(MANY_MAX_BYTES, max_message_bytes)
    if (
        0 < len(values) <= MANY_MAX_MESSAGES
        and properties is None
        and None not in values
        and None not in (keys or ())
    ):
        # The usual case, 20 ns a message and column.
        key_bytes = _joined_length(keys) if keys else 0
        total = sum(map(len, values)) + key_bytes + MESSAGE_OVERHEAD_BYTES * len(values)  # type: ignore[arg-type]
        if total <= max_bytes:
            return [(columns, total)]
    sizes = list(_sizes(columns))
    if sizes and max(sizes) > max_message_bytes + MESSAGE_OVERHEAD_BYTES and not chunking:
        raise too_large(max(sizes), max_message_bytes)
    ends = [0, *accumulate(sizes)]
    pieces: list[tuple[Columns, int]] = []
    first = 0
    while first < len(sizes):
        end = min(bisect_right(ends, ends[first] + max_bytes) - 1, first + MANY_MAX_MESSAGES)
        end = max(end, first + 1)
        whole = first == 0 and end == len(sizes)
        piece = columns if whole else columns.part(first, end)
        pieces.append((piece, ends[end] - ends[first]))
        first = end
    return pieces


def _sizes(columns: Columns) -> Iterable[int]:
    """`message_bytes` of each; without properties a few C loops."""
    values, keys, properties, *_ = columns
    if properties is not None:
        return map(message_bytes, values, keys or repeat(None), properties)
    length: Callable[[Any], int] = len
    sizes = map(add, map(_length if None in values else length, values), repeat(MESSAGE_OVERHEAD_BYTES))
    return sizes if keys is None else map(add, sizes, map(_length, keys))


def _joined_length(keys: Sequence[Key]) -> int:
    try:
        return len("".join(keys).encode())  # type: ignore[arg-type]
    except TypeError:  # not all of them are text
        return sum(map(_length, keys))


def _length(value: str | bytes | None) -> int:
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode())
    return 0 if value is None else len(value)

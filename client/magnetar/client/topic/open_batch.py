"""The open batch of a producer: the messages that are sent, and not encoded yet, column by column."""

from __future__ import annotations

from typing import Any

from magnetar.proto.batch import Columns, Key, Properties

from ..receipts import Group, Receipt
from .columns import Row


class OpenBatch:
    """Columns as long as `values`; beside these, None until a message has one. It is open while it has values.

    One of the three rooms says what still fits, the others are -1: `plain_room` while there are values only, `keyed_room`
    while there are values and keys. So one comparison shows that a value can simply be appended, and to which columns.
    """

    __slots__ = (
        "_deliver_at_ms",
        "_event_times_ms",
        "_properties",
        "bytes_held",
        "group",
        "keyed_room",
        "keys",
        "other_room",
        "plain_room",
        "sequence_ids",
        "values",
    )

    def __init__(self) -> None:
        self.group = Group(0)
        self._clear()

    def _clear(self) -> None:
        self.values: list[bytes | None] = []
        self.keys: list[Key] | None = None
        self._properties: list[Properties | None] | None = None
        self._event_times_ms: list[int | None] | None = None
        self.sequence_ids: list[int] | None = None
        self._deliver_at_ms: list[int | None] | None = None
        self.bytes_held = 0  # by the messages and the room that is left
        self.plain_room = self.keyed_room = self.other_room = -1

    @property
    def room(self) -> int:
        """Bytes that still fit; -1 if it is not open."""
        return max(self.plain_room, self.keyed_room, self.other_room)

    @property
    def bytes(self) -> int:
        """What its messages count."""
        return self.bytes_held - self.room if self.values else 0

    @property
    def last_sequence_id(self) -> int:
        """-1 if it is not open."""
        if not self.values:
            return -1
        ids = self.sequence_ids
        return self.group.first_sequence_id + len(self.values) - 1 if ids is None else ids[-1]

    def open(self, group: Group, size: int, *, own_ids: bool) -> None:
        """`own_ids`: the first message's id is not the one before the ids that are given automatically."""
        self.group = group
        self.bytes_held = self.plain_room = size
        self.sequence_ids = [] if own_ids else None

    def append(self, row: Row, sequence_id: int, room: int) -> Receipt:
        """A message for which there is room, which is `room` from then on."""
        count, first = len(self.values), self.group.first_sequence_id
        if self.sequence_ids is None and sequence_id != first + count:
            self.sequence_ids = list(range(first, first + count))
        if self.sequence_ids is not None:
            self.sequence_ids.append(sequence_id)
        value, key, properties, event_time_ms, _, deliver_at_ms = row
        self.values.append(value)
        if key is not None or self.keys is not None:
            self.keys = _longer(self.keys, key, count)
        if properties is not None or self._properties is not None:
            self._properties = _longer(self._properties, properties, count)
        if event_time_ms is not None or self._event_times_ms is not None:
            self._event_times_ms = _longer(self._event_times_ms, event_time_ms, count)
        if deliver_at_ms is not None or self._deliver_at_ms is not None:
            self._deliver_at_ms = _longer(self._deliver_at_ms, deliver_at_ms, count)
        self.plain_room = self.keyed_room = self.other_room = -1
        if self._properties or self._event_times_ms or self.sequence_ids or self._deliver_at_ms:
            self.other_room = room
        elif self.keys is not None:
            self.keyed_room = room
        else:
            self.plain_room = room
        return Receipt(self.group, count)

    def extend(self, columns: Columns, size: int) -> int:
        """Messages with values and keys only, as all in it, for which there is room; returns the first one's number."""
        first, count = len(self.values), len(columns.values)
        self.values += columns.values
        if columns.keys is not None or self.keys is not None:
            self.keys = [None] * first if self.keys is None else self.keys
            self.keys += columns.keys or [None] * count
        room = self.room - size
        self.plain_room, self.keyed_room = (room, -1) if self.keys is None else (-1, room)
        return first

    def slow_down(self) -> None:
        """Every message goes through `append` until one has."""
        self.other_room = self.room
        self.plain_room = self.keyed_room = -1

    def take(self) -> tuple[Columns, int]:
        """The messages, and what they count. It is not open any more."""
        columns = Columns(
            self.values,
            self.keys,
            self._properties,
            self._event_times_ms,
            None,
            self.sequence_ids,
            self._deliver_at_ms,
        )
        size = self.bytes
        self._clear()
        return columns, size


def _longer(column: list[Any] | None, item: Any, count: int) -> list[Any]:
    """A column of `count` messages, and one more."""
    if column is None:
        column = [None] * count
    column.append(item)
    return column

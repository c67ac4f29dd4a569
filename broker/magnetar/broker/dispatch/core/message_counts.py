"""How many messages the delivered entries have: an acknowledgement needs it to tell when an entry is whole."""

from __future__ import annotations

from ...cursors.core.acks import EntryKey, Position

MAX_MESSAGE_COUNTS = 65_536  # above, the oldest are forgotten, and looked up when somebody acknowledges them


class MessageCounts:
    """Of entries that are not known to be acknowledged, in the order in which they were delivered."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[EntryKey, int] = {}

    def __contains__(self, key: EntryKey) -> bool:
        return key in self._counts

    def get(self, key: EntryKey) -> int | None:
        """None: not known."""
        return self._counts.get(key)

    def remember(self, key: EntryKey, message_count: int) -> None:
        """The entry is delivered."""
        counts = self._counts
        if key not in counts:
            if len(counts) >= MAX_MESSAGE_COUNTS:
                del counts[next(iter(counts))]
            counts[key] = message_count

    def drop_below(self, mark_delete: Position) -> None:
        """Forgets entries that the mark-delete position has passed, as far as they are the oldest ones."""
        counts = self._counts
        while counts:
            key = next(iter(counts))
            if key >= mark_delete[:2]:
                break
            del counts[key]

    def clear(self) -> None:
        """Forgets all."""
        self._counts.clear()

    def check(self) -> None:
        """Asserts the invariant; tests call it after every event."""
        assert len(self._counts) <= MAX_MESSAGE_COUNTS

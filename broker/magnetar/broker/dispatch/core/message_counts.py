"""How many messages the delivered entries have: an acknowledgement needs it to tell when an entry is whole."""

from __future__ import annotations

from ...cursors.core.acks import EntryKey, Position

MAX_MESSAGE_COUNTS = 65_536  # above, the oldest are forgotten, and looked up when somebody acknowledges them


class MessageCounts(dict[EntryKey, int]):
    """Of entries that are not known to be acknowledged, in the order in which they were delivered."""

    __slots__ = ()

    def remember(self, key: EntryKey, message_count: int) -> None:
        """The entry is delivered."""
        if key not in self:
            if len(self) >= MAX_MESSAGE_COUNTS:
                del self[next(iter(self))]
            self[key] = message_count

    def drop_below(self, mark_delete: Position) -> None:
        """Forgets entries that the mark-delete position has passed, as far as they are the oldest ones."""
        while self:
            key = next(iter(self))
            if key >= mark_delete[:2]:
                break
            del self[key]

    def check(self) -> None:
        """Asserts the invariant; tests call it after every event."""
        assert len(self) <= MAX_MESSAGE_COUNTS

"""A ledger of a topic as others than its broker know it."""

from __future__ import annotations

from typing import NamedTuple


class TopicLedger(NamedTuple):
    """A ledger of a topic, field by field as TOPIC_LEDGERS tells of it. Times in ms, size in payload bytes."""

    position_id: int
    stored_id: int
    first_offset: int
    entries: int
    messages: int
    size: int
    first_append_ms: int
    last_append_ms: int
    closed: bool
    metadata: bytes
    archive: str = ""  # where its messages are if they are not at the bookies

    @property
    def append_ms(self) -> int:
        """When all its messages became part of the topic; 0 if each entry says so itself, as the broker wrote it."""
        return self.last_append_ms if self.stored_id != self.position_id else 0

    @property
    def end_offset(self) -> int:
        """Topic-wide index after its last message."""
        return self.first_offset + self.messages

"""Entries that were appended to a topic and are not confirmed yet, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from magnetar.proto.errors import TopicNotServed
from magnetar.proto.ids import TopicName

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class PendingEntry(Generic[T]):
    """An entry that is appended and not confirmed."""

    payload: bytes
    messages: int
    append_time_ms: int
    context: T
    place: asyncio.Future[tuple[int, int]] | None = None  # gets the ledger and entry that it is confirmed at
    entry_id: int = -1

    def abandon(self, topic: TopicName) -> T:
        """It will not be confirmed here. Returns the context, for those who wait for it."""
        if self.place is not None and not self.place.done():
            self.place.set_exception(
                TopicNotServed(f"topic {topic} is not served here any more; look it up again")
            )
        return self.context


class PendingEntries(Generic[T]):
    """All of them belong to the current ledger, or wait for the next one. The first `_receipted` were acknowledged already.

    Those happen with flush=async only: they wait to be durable, and hold up nobody.
    """

    __slots__ = ("_entries", "_receipted", "outstanding_bytes", "receipted_bytes")

    def __init__(self) -> None:
        self._entries: list[PendingEntry[T]] = []  # a few; an empty deque takes 600 bytes of every topic
        self._receipted = 0
        self.outstanding_bytes = 0  # of all of them
        self.receipted_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[PendingEntry[T]]:
        return iter(self._entries)

    @property
    def first(self) -> PendingEntry[T]:
        """The one that is confirmed next."""
        return self._entries[0]

    @property
    def last(self) -> PendingEntry[T]:
        """The newest one."""
        return self._entries[-1]

    def room(self, most_entries: int, most_bytes: int) -> bool:
        """Whether what waits to be receipted is less than both."""
        return (
            len(self._entries) - self._receipted < most_entries
            and self.outstanding_bytes - self.receipted_bytes < most_bytes
        )

    def add(self, entry: PendingEntry[T]) -> None:
        """The last one."""
        self._entries.append(entry)
        self.outstanding_bytes += len(entry.payload)

    def take(self) -> PendingEntry[T]:
        """The first one is confirmed."""
        entry = self._entries.pop(0)
        size = len(entry.payload)
        self.outstanding_bytes -= size
        if self._receipted:
            self._receipted -= 1
            self.receipted_bytes -= size
        return entry

    def receipt(self, last_entry: int) -> list[PendingEntry[T]]:
        """Those up to this entry of the current ledger can be receipted; returns the ones that were not before."""
        begin = end = self._receipted
        while end < len(self._entries) and 0 <= self._entries[end].entry_id <= last_entry:
            self.receipted_bytes += len(self._entries[end].payload)
            end += 1
        self._receipted = end
        return self._entries[begin:end]

    def abandon(self, topic: TopicName) -> list[T]:
        """None of them will be confirmed here. Returns their contexts."""
        abandoned = [entry.abandon(topic) for entry in self._entries]
        self._entries.clear()
        self._receipted = self.outstanding_bytes = self.receipted_bytes = 0
        return abandoned

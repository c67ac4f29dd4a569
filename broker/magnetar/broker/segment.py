"""The parts of a managed ledger: its states, what it tells the topic, the open ledger, what is appended to it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from magnetar.proto.errors import MagnetarError

from .records import LedgerInfo
from .stores import Writer

T = TypeVar("T")
EntryDone = Callable[["Segment", int, bytes | None, MagnetarError | None], None]


class State(enum.Enum):
    """See `managed_ledger`."""

    IDLE = "idle"
    ROLLING = "rolling"
    WRITING = "writing"
    FENCED = "fenced"
    CLOSED = "closed"


class LedgerEvents(NamedTuple, Generic[T]):
    """What the topic is told. `confirmed` gets (ledger, entry, stored bytes or None, what was given to `append`)."""

    confirmed: Callable[[int, int, bytes | None, T], None]
    ready: Callable[[], None]  # appending is possible (again)
    rolled: Callable[[], None]  # the ledger list changed
    fenced: Callable[[MagnetarError], None]


class PendingEntry(Generic[T]):
    """An entry that is appended and not confirmed."""

    __slots__ = ("append_time_ms", "context", "entry_id", "messages", "payload")

    def __init__(self, payload: bytes, messages: int, append_time_ms: int, context: T) -> None:
        self.payload = payload
        self.messages = messages
        self.append_time_ms = append_time_ms
        self.context = context
        self.entry_id = -1


class Segment:
    """The open ledger. `live` False: it was left, and whatever it still reports is ignored (rule 24)."""

    __slots__ = ("_done", "info", "live", "next_message", "opened_ms", "writer")

    def __init__(self, writer: Writer, info: LedgerInfo, opened_ms: int, done: EntryDone) -> None:
        self._done = done
        self.writer = writer
        self.info = info
        self.opened_ms = opened_ms
        self.live = True
        self.next_message = 0  # index in the ledger of the next message appended

    def confirmed(self, entry_id: int, entry: bytes, error: MagnetarError | None) -> None:
        """`ConfirmCallback` of every append."""
        if self.live:
            self._done(self, entry_id, entry, error)

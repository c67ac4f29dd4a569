"""Events for the dispatch core, and the instructions that it gives its shell.

Times are milliseconds of one monotonic clock, which the shell reads.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from magnetar.proto.errors import MagnetarError

from ...cursors.core.acks import EntryKey
from .consumer import Consumer, Delivery

AckRange = tuple[int, int, int, int]  # ledger, entry, first index, last index


class EntryRanges(NamedTuple):
    """Messages of one entry: range i is from firsts[i] to lasts[i]; sorted, disjoint, none is empty."""

    ledger: int
    entry: int
    firsts: list[int]
    lasts: list[int]


def by_entry(rows: Iterable[AckRange]) -> list[EntryRanges]:
    """Rows, none of which is empty, in their order: those of an entry that are sorted are one. 0.1 us for each of these."""
    found: list[EntryRanges] = []
    firsts: list[int] = []
    lasts: list[int] = []
    last_ledger = last_entry = last_index = -1
    for ledger, entry, first, last in rows:
        if entry == last_entry and first > last_index and ledger == last_ledger:
            firsts.append(first)
            lasts.append(last)
        else:
            firsts, lasts = [first], [last]
            found.append(EntryRanges(ledger, entry, firsts, lasts))
            last_ledger, last_entry = ledger, entry
        last_index = last
    return found


class Pause(enum.Enum):
    """Why nothing is delivered, whoever has permits."""

    SEEK = "the cursor is being moved"
    ACK_LOOKUP = "an acknowledgement waits for a message count; what it names must not be delivered again"


class Stop(enum.Enum):
    """What ended a run of deliveries. The value is the event after which `poll` goes on: every stop has a waker."""

    CLOSED = "none"
    PAUSED = "Resumed"
    NO_CONSUMER = (
        "PermitsGranted, ConnectionWritable, ConsumerAdded; Acknowledged, BacklogSkipped or Nacked when a cap blocks; "
        "TimerDue while a failover consumer takes over"
    )
    LOOK_AHEAD = (
        "whatever releases what was set aside: PermitsGranted, Acknowledged, BacklogSkipped, Nacked, ConsumerAdded, "
        "ConsumerLeft"
    )
    NO_ENTRIES = "none of its own: the topic has `poll` called when entries are confirmed"
    READING = "ReadDone, ReadFailed"
    READ_FAILED = "TimerDue"
    TOO_MANY_RANGES = "Acknowledged, BacklogSkipped"


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConsumerAdded:
    """A consumer without permits; the first one chooses the type."""

    consumer: Consumer
    type: str
    now_ms: int


@dataclass(frozen=True, slots=True)
class ConsumerLeft:
    """What it had not acknowledged is delivered again; what it had handed out counts."""

    consumer: Consumer


@dataclass(slots=True)  # not frozen: made for every frame, at a third of the cost
class PermitsGranted:
    """FLOW."""

    consumer: Consumer
    messages: int
    size: int


@dataclass(frozen=True, slots=True)
class ConnectionWritable:
    """The port of this consumer is writable again."""

    consumer: Consumer


@dataclass(frozen=True, slots=True)
class LedgersChanged:
    """The topic's ledger list has changed, and the cursor with it."""


@dataclass(frozen=True, slots=True)
class ReadDone:
    """Ledger entries from the first one that was asked for on, at least one."""

    read_id: int
    entries: list[bytes]
    now_ms: int


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """The first entry that was asked for could not be read."""

    read_id: int
    error: MagnetarError
    now_ms: int


@dataclass(slots=True)  # not frozen: made for every frame, at a third of the cost
class Acknowledged:
    """The cursor has taken these ranges, or (`cumulative`) all up to the end of the only one.

    `added[i]`: how many messages of `ranges[i]` were not acknowledged before.
    """

    consumer: Consumer
    ranges: list[EntryRanges]
    added: list[int]
    cumulative: bool


@dataclass(frozen=True, slots=True)
class Nacked:
    """A negative acknowledgement; without rows of everything that the consumer holds, and its epoch rises."""

    consumer: Consumer
    rows: list[AckRange]
    counted: bool = True  # redelivery counts rise; False: without rows those rise of what was handed out
    epoch: int = 0  # without rows


@dataclass(frozen=True, slots=True)
class HandedOut:
    """The consumer gives these to its program now, or (`taken_back`) has not done so after all."""

    consumer: Consumer
    rows: list[AckRange]
    taken_back: bool


@dataclass(frozen=True, slots=True)
class Paused:
    """Nothing is delivered until this pause is over."""

    reason: Pause


@dataclass(frozen=True, slots=True)
class Resumed:
    """The pause is over."""

    reason: Pause


@dataclass(frozen=True, slots=True)
class CursorReset:
    """A seek has moved the cursor, and the epoch has risen."""

    epoch: int


@dataclass(frozen=True, slots=True)
class BacklogSkipped:
    """The mark-delete position has moved on although nobody acknowledged what lies before it: rule 30."""


@dataclass(frozen=True, slots=True)
class TimerDue:
    """The time of the last `WakeAt` has come."""

    now_ms: int


@dataclass(frozen=True, slots=True)
class Closed:
    """The subscription ends: nothing is delivered any more."""


Event = (
    ConsumerAdded | ConsumerLeft | PermitsGranted | ConnectionWritable | LedgersChanged
    | ReadDone | ReadFailed | Acknowledged | Nacked | HandedOut | Paused | Resumed | CursorReset | BacklogSkipped | TimerDue
    | Closed
)  # fmt: skip

# --- instructions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Read:
    """Read entries from `key` on, answered by ReadDone or ReadFailed with the same id."""

    read_id: int
    key: EntryKey
    max_bytes: int


@dataclass(frozen=True, slots=True)
class CancelReads:
    """Nobody wants these any more; an answer that comes all the same is ignored."""

    read_ids: list[int]


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send TimerDue at `due_ms`, instead of at a later time asked for before."""

    due_ms: int


@dataclass(frozen=True, slots=True)
class ActiveChanged:
    """Failover: the consumer is active from now on, or is not any more."""

    consumer: Consumer
    active: bool


@dataclass(frozen=True, slots=True)
class PassEntry:
    """The cursor stands behind the last message of this entry: move it before the next one."""

    key: EntryKey


@dataclass(frozen=True, slots=True)
class SkipEntry:
    """The entry is lost, and the policy is to go on without it: acknowledge it as a whole, and say so."""

    key: EntryKey
    error: MagnetarError


@dataclass(frozen=True, slots=True)
class ReportUnreadable:
    """The entry could not be read after many attempts: say so. `error` None: nothing waits for it any more."""

    key: EntryKey
    error: MagnetarError | None


@dataclass(frozen=True, slots=True)
class TurnOver:
    """So much was done: let the loop have its turn, then poll again; what happens meanwhile waits for that."""


Instruction = (
    Delivery | Read | CancelReads | WakeAt | ActiveChanged | PassEntry | SkipEntry | ReportUnreadable | TurnOver
)  # fmt: skip

"""The instructions that the dispatch core gives its shell, and what ends a row of them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from magnetar.proto.errors import MagnetarError
from magnetar.proto.ranges import Range

from ...cursors.core.acks import EntryKey
from .consumer import Consumer, Delivery


class Pause(enum.Enum):
    """Why nothing is delivered, whoever has permits."""

    SEEK = "the cursor is being moved"
    ACK_LOOKUP = "an acknowledgement waits for a message count; what it names must not be delivered again"


class Stop(enum.Enum):
    """What ended a run of deliveries. The value is the event of the core after which `poll` goes on: every stop has one."""

    CLOSED = "none"
    PAUSED = "resume"
    NO_CONSUMER = (
        "granted, writable, added; acknowledged, skipped or nacked when a cap blocks; "
        "timer_due while a failover consumer takes over"
    )
    LOOK_AHEAD = "whatever releases what was set aside: granted, acknowledged, skipped, nacked, added, left"
    NO_ENTRIES = "none of its own: the topic has `poll` called when entries are confirmed"
    READING = "read_done, read_failed"
    READ_FAILED = "timer_due"
    THROTTLED = "none of its own: the shell has `poll` called when a rate lets more be delivered"
    DELAYS = "delays_known"
    TOO_MANY_RANGES = "acknowledged, skipped"


@dataclass(frozen=True, slots=True)
class Read:
    """Read entries from `key` on, answered by `read_done` or `read_failed` with the same id."""

    read_id: int
    key: EntryKey
    max_bytes: int


@dataclass(frozen=True, slots=True)
class CancelReads:
    """Nobody wants these any more; an answer that comes all the same is ignored."""

    read_ids: list[int]


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Call `timer_due` at `due_ms`, instead of at a later time asked for before."""

    due_ms: int


@dataclass(frozen=True, slots=True)
class ActiveChanged:
    """Failover: the consumer is active from now on, or is not any more."""

    consumer: Consumer
    active: bool


@dataclass(frozen=True, slots=True)
class EndReached:
    """The topic is terminated, and nothing is left for the consumer: tell it, behind all that was delivered to it."""

    consumer: Consumer
    epoch: int
    redelivers: int


@dataclass(frozen=True, slots=True)
class PassEntry:
    """The cursor stands behind the last message of this entry: move it before the next one."""

    key: EntryKey


@dataclass(frozen=True, slots=True)
class PassMessages:
    """Nobody is to have these of an entry of `count` messages: acknowledge them."""

    key: EntryKey
    ranges: Sequence[Range]
    count: int


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
    Delivery | Read | CancelReads | WakeAt | ActiveChanged | EndReached | PassEntry | PassMessages | SkipEntry
    | ReportUnreadable | TurnOver
)  # fmt: skip

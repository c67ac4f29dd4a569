"""Events, which the cores take, and instructions, which they return.

The shell carries instructions out in the order given, and hands the outcome to the core as an event. `Confirm` is the only
one that reaches the caller of `append`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from magnetar.proto.errors import MagnetarError
from magnetar.proto.stripe import Stripe

from .metadata import LedgerMetadata


class PendingAdd:
    """An entry on its way. A plain slotted class: one is made per entry."""

    __slots__ = ("acked", "context", "entry", "length")

    def __init__(self, entry: bytes, length: int, context: Any) -> None:
        self.entry = entry  # as stored: header and payload; the same object for every bookie
        self.length = length  # payload bytes of the ledger up to and with this entry
        self.context = context  # what the shell gave to `append`: the confirm callback
        self.acked = 0  # bits: positions of the ensemble that stored it; only ever bits of its write set


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AddFailed:
    """A bookie refused an add, could not be reached, or stayed silent for the add timeout (rule 21)."""

    bookie: str
    entry_id: int
    code: int  # an error code of proto.errors


@dataclass(frozen=True, slots=True)
class AddStored:
    """A bookie stored a re-added entry durably."""

    bookie: str
    entry_id: int


@dataclass(frozen=True, slots=True)
class BookiesChosen:
    """Answer to ChooseBookies: the bookie for each position."""

    bookies: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class NoBookies:
    """Answer to ChooseBookies: there are not as many."""

    reason: str


@dataclass(frozen=True, slots=True)
class MetadataWritten:
    """Answer to WriteMetadata: it is durable under this version."""

    version: int


@dataclass(frozen=True, slots=True)
class MetadataFound:
    """Answer to ReadMetadata, and to WriteMetadata when the version had changed: what is there."""

    metadata: LedgerMetadata
    version: int


@dataclass(frozen=True, slots=True)
class MetadataFailed:
    """Answer to either when the store failed, or the node was deleted."""

    error: MagnetarError


@dataclass(frozen=True, slots=True)
class CloseRequested:
    """The writer's owner wants it closed, after what is outstanding."""


@dataclass(frozen=True, slots=True)
class ForceRequested:
    """The writer's owner wants everything durable that was appended so far (deferred sync)."""


@dataclass(frozen=True, slots=True)
class Detached:
    """The writer's owner leaves the ledger as it is, open, as a crash would."""


@dataclass(frozen=True, slots=True)
class LedgerDeleted:
    """The ledger was deleted by the client that writes it."""


@dataclass(frozen=True, slots=True)
class IdleTick:
    """The explicit-LAC interval is over (rule 19)."""


@dataclass(frozen=True, slots=True)
class RetryDue:
    """The pause that RetryLater asked for is over. `expired`: nothing was confirmed for too long."""

    expired: bool


@dataclass(frozen=True, slots=True)
class ExplicitLacWritten:
    """Answer to WriteExplicitLac: every bookie has stored it."""

    last_add_confirmed: int


@dataclass(frozen=True, slots=True)
class LastConfirmedRead:
    """Answer to ReadLastConfirmed. `code` 0: known; else an error code."""

    bookie: str
    last_add_confirmed: int
    code: int


@dataclass(frozen=True, slots=True)
class EntryRead:
    """What a bookie says of one entry. `code` 0: `entry` is there and verified; `length` is from its header."""

    entry_id: int
    entry: bytes
    length: int
    code: int


@dataclass(frozen=True, slots=True)
class EntriesRead:
    """Answer to ReadEntries, of some of these entries; what is left follows, and is not absent."""

    bookie: str
    answers: Sequence[EntryRead]


@dataclass(frozen=True, slots=True)
class BookieSlow:
    """A read that this bookie was asked for has not been answered for the time after which another one is asked."""

    bookie: str


# --- instructions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendAdds:
    """Send these (entry id, entry) to a bookie, in this order."""

    bookie: str
    adds: Sequence[tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class Confirm:
    """Call the callbacks of these appends, in this order; with an error, all of them failed."""

    first_entry: int
    adds: Sequence[PendingAdd]
    error: MagnetarError | None


@dataclass(frozen=True, slots=True)
class Accepted:
    """Call the callbacks of these appends, in this order: their entries are accepted (deferred sync)."""

    first_entry: int
    adds: Sequence[PendingAdd]


@dataclass(frozen=True, slots=True)
class ForceAdds:
    """These bookies shall make durable what they accepted; their answers to each add say when (deferred sync)."""

    bookies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Send RetryDue after a pause: bookies refused adds with TooManyRequests."""


@dataclass(frozen=True, slots=True)
class ChooseBookies:
    """Pick a bookie for each position, none in `exclude`: the ensemble by position, then those that failed before.

    `metadata`: of the ledger, as it was when this was decided: its striping, and the properties that bind it to bookies.
    """

    positions: tuple[int, ...]
    exclude: tuple[str, ...]
    metadata: LedgerMetadata


@dataclass(frozen=True, slots=True)
class WriteMetadata:
    """Compare-and-set."""

    metadata: LedgerMetadata
    version: int


@dataclass(frozen=True, slots=True)
class ReadMetadata:
    """Read what the store has now."""


@dataclass(frozen=True, slots=True)
class WriteExplicitLac:
    """Write the explicit LAC to these bookies (rule 19)."""

    bookies: tuple[str, ...]
    last_add_confirmed: int


@dataclass(frozen=True, slots=True)
class ReadLastConfirmed:
    """Fence the ledger at this bookie and read its LAC."""

    bookie: str


@dataclass(frozen=True, slots=True)
class ReadEntries:
    """Recovery read of the entries `first` to `last` of a stripe, which has both: fences as well, verifies the digests."""

    bookie: str
    first: int
    last: int
    stripe: Stripe


@dataclass(frozen=True, slots=True)
class Finished:
    """The ledger is closed, with this result."""

    metadata: LedgerMetadata


@dataclass(frozen=True, slots=True)
class Failed:
    """Closing or recovering did not work."""

    error: MagnetarError


Event = (
    AddFailed
    | AddStored
    | BookiesChosen
    | NoBookies
    | MetadataWritten
    | MetadataFound
    | MetadataFailed
    | CloseRequested
    | ForceRequested
    | Detached
    | LedgerDeleted
    | IdleTick
    | RetryDue
    | ExplicitLacWritten
    | LastConfirmedRead
    | EntriesRead
    | BookieSlow
)
Instruction = (
    SendAdds
    | Confirm
    | Accepted
    | ForceAdds
    | RetryLater
    | ChooseBookies
    | WriteMetadata
    | ReadMetadata
    | WriteExplicitLac
    | ReadLastConfirmed
    | ReadEntries
    | Finished
    | Failed
)

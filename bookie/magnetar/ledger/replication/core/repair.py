"""The repair of one ledger: what is done, in which order, and when it is given up for now.

    begin ──> READING ──record──> next step: CHOOSING ──> COPYING ──> WRITING ──written──> next step
                 ^                           │ no bookie     │ failed     │ conflict: the copy counts for nothing
                 └───────────────────────────┴───────────────┴────────────┘
              next step: RECOVERING (an open ledger whose last ensemble lost a bookie, after its grace period)
                         CHECKING (a bookie that is there and may lack entries)
              nothing left to do ──> DONE;  something left that cannot be done now ──> POSTPONED;  ledger deleted ──> DONE

Rules (22):
* Metadata changes by compare-and-set, and only after all copies of a fragment are durable. After a conflict the fragment is
  copied anew: a bookie that collects leftovers raises the version before it drops anything (`leftovers`), so a copy that was
  made under an older version may be gone.
* The last ensemble of an open ledger belongs to its writer. It is never replaced here; after the grace period, and only if
  it still names a lost bookie, the ledger is recovered, which fences and closes it.
* A bookie is replaced if it is not registered and the request says that it is lost, or if it is drained. Read-only bookies
  are registered. What else is wrong is the auditor's to find, after its delay.
* A fragment that cannot be repaired costs itself: the others are repaired, and then the ledger is postponed with the reason.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from magnetar.ledger.core.events import (
    BookiesChosen,
    ChooseBookies,
    MetadataFailed,
    MetadataFound,
    MetadataWritten,
    NoBookies,
    ReadMetadata,
    WriteMetadata,
)
from magnetar.ledger.core.metadata import Ensemble, Fragment, LedgerMetadata
from magnetar.proto.errors import LedgerNotFound

from .request import Reason, RepairRequest

# Others changed the record so often while its entries were being copied: the ledger waits for its turn again.
MAX_CONFLICTS = 5


class ClusterView(NamedTuple):
    """Bookies as they are now; both in sorted order."""

    registered: Mapping[str, None]  # read-only ones included
    draining: Mapping[str, None]


class Grace(NamedTuple):
    """An open ledger's last ensemble that lost a bookie, and since when a worker knows."""

    ensemble: Ensemble
    since_s: float


class RepairState(enum.Enum):
    """See the drawing above."""

    READING = "reading"
    CHOOSING = "choosing"
    COPYING = "copying"
    WRITING = "writing"
    RECOVERING = "recovering"
    CHECKING = "checking"
    DONE = "done"
    POSTPONED = "postponed"


# --- events, beside those of core.events ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Copied:
    """Every entry of the fragment is durable at its new bookies."""


@dataclass(frozen=True, slots=True)
class CopiesFailed:
    """Answer to CopyEntries and CheckCopies. `targets` cannot be written to; without them no source has an entry."""

    reason: str
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Checked:
    """The bookie has every entry that the ledger's record gives it."""


@dataclass(frozen=True, slots=True)
class RecoveryFailed:
    """The ledger could not be recovered."""

    reason: str


Event = (
    MetadataFound
    | MetadataWritten
    | MetadataFailed
    | BookiesChosen
    | NoBookies
    | Copied
    | CopiesFailed
    | Checked
    | RecoveryFailed
)

# --- instructions, beside those of core.events ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChooseCompliant:
    """Choose replacements for as few bookies of a fragment as make it comply with placement; none if it does already."""

    bookies: tuple[str, ...]
    exclude: tuple[str, ...]
    metadata: LedgerMetadata


@dataclass(frozen=True, slots=True)
class CopyEntries:
    """Copy what the positions hold of the fragment to these bookies, durably."""

    metadata: LedgerMetadata
    fragment: Fragment
    targets: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class CheckCopies:
    """Look which entries the bookie lacks, and write them again from other replicas."""

    metadata: LedgerMetadata
    bookie: str


@dataclass(frozen=True, slots=True)
class RecoverLedger:
    """Fence and close it; answered with what its record is then."""


@dataclass(frozen=True, slots=True)
class DeleteCopies:
    """The ledger was deleted: so is what was copied to these bookies."""

    bookies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Repaired:
    """Nothing is left to do: the request can be removed."""


@dataclass(frozen=True, slots=True)
class Postponed:
    """The ledger stays in the queue. `until_s`: loop time of the next attempt; None: after the usual pause."""

    reason: str
    until_s: float | None = None


Instruction = (
    ReadMetadata
    | ChooseBookies
    | ChooseCompliant
    | CopyEntries
    | CheckCopies
    | WriteMetadata
    | RecoverLedger
    | DeleteCopies
    | Repaired
    | Postponed
)


class RepairCore:
    """Sans-I/O. One instruction is outstanding at a time; `handle` takes its answer."""

    def __init__(
        self, ledger_id: int, request: RepairRequest, grace_s: float, grace: Grace | None = None
    ) -> None:
        self.ledger_id = ledger_id
        self.state = RepairState.READING
        # The open last ensemble that an earlier attempt saw; the shell hands it to the next attempt.
        self.grace = grace
        self.replaced = 0  # bookies in the record, by this attempt
        self._request = request
        self._grace_s = grace_s
        self.metadata: LedgerMetadata | None = None  # as it was read last: all instructions rest on it
        self._version = 0
        self._fragment: Fragment | None = None  # that is being repaired
        self._targets: Mapping[int, str] = {}  # its new bookies, by position
        # Bookies that got entries, whether or not the record names them.
        self._copied_to: dict[str, None] = {}
        self._refused: dict[str, None] = {}  # targets that failed; not chosen again
        # First entry of a fragment -> why it is not repaired in this attempt.
        self._given_up: dict[int, str] = {}
        self._waits: str = ""  # why the ledger has to wait although nothing failed
        self._compliant: dict[int, None] = {}  # first entries of fragments that were looked at for placement
        self._to_check = [bookie for bookie, reason in request.bookies.items() if reason is Reason.CHECK]
        self._recovered = False
        self._conflicts = 0

    def begin(self) -> list[Instruction]:
        """The first instruction."""
        return [ReadMetadata()]

    def handle(self, event: Event, now: float, view: ClusterView) -> list[Instruction]:
        """Takes the answer to the last instruction. Empty once it is DONE or POSTPONED."""
        assert self.state not in (RepairState.DONE, RepairState.POSTPONED), f"{event} after the end"
        match event:
            case MetadataFound(metadata, version):
                return self._found(metadata, version, now, view)
            case MetadataWritten(version):
                assert self.state is RepairState.WRITING
                self._version = version
                self.metadata = self._changed()
                self.replaced += len(self._targets)
                return self._next(now, view)
            case MetadataFailed(LedgerNotFound()):
                return self._deleted()
            case MetadataFailed(error):
                # Whether a write was done is not known: the next attempt reads.
                return self._postpone(error.message)
            case BookiesChosen(bookies):
                return self._chosen(bookies, now, view)
            case NoBookies(reason):
                assert self._fragment is not None
                self._given_up[self._fragment.first] = reason
                return self._next(now, view)
            case Copied():
                assert self.state is RepairState.COPYING
                self.state = RepairState.WRITING
                return [WriteMetadata(self._changed(), self._version)]
            case CopiesFailed(reason, targets):
                return self._copies_failed(reason, targets, now, view)
            case Checked():
                return self._next(now, view)
            case RecoveryFailed(reason):
                return self._postpone(reason)

    # --- answers -----------------------------------------------------------------------------------------------------

    def _found(
        self, metadata: LedgerMetadata, version: int, now: float, view: ClusterView
    ) -> list[Instruction]:
        self.metadata, self._version = metadata, version
        if self.state is RepairState.WRITING:
            self._conflicts += 1
            if self._conflicts >= MAX_CONFLICTS:
                return self._postpone(f"its record was changed by others {self._conflicts} times in a row")
        return self._next(now, view)

    def _chosen(self, bookies: Mapping[int, str], now: float, view: ClusterView) -> list[Instruction]:
        assert self.state is RepairState.CHOOSING
        assert self._fragment is not None
        assert self.metadata is not None
        if not bookies:  # the fragment complies with placement, or cannot
            return self._next(now, view)
        assert not set(bookies.values()) & set(self._fragment.bookies), "a bookie is in an ensemble once"
        self._targets = dict(bookies)
        self._copied_to.update(dict.fromkeys(bookies.values()))
        self.state = RepairState.COPYING
        return [CopyEntries(self.metadata, self._fragment, self._targets)]

    def _copies_failed(
        self, reason: str, targets: tuple[str, ...], now: float, view: ClusterView
    ) -> list[Instruction]:
        if self.state is RepairState.CHECKING:
            self._waits = reason
        elif targets:
            self._refused.update(dict.fromkeys(targets))  # the next step chooses others
        else:
            assert self._fragment is not None
            self._given_up[self._fragment.first] = reason
        return self._next(now, view)

    def _deleted(self) -> list[Instruction]:
        copies = tuple(self._copied_to)
        return [*([DeleteCopies(copies)] if copies else []), *self._end()]

    # --- the next step -----------------------------------------------------------------------------------------------

    def _next(self, now: float, view: ClusterView) -> list[Instruction]:
        """The first thing that is left to do, by the record as it is now."""
        metadata = self.metadata
        assert metadata is not None
        replaced = self._to_replace(view)
        open_with_lost = ""
        for fragment in metadata.fragments():
            positions = tuple(
                position
                for position, bookie in enumerate(fragment.bookies)
                if bookie in replaced
                # Nothing is missing in a fragment without entries; only a drained bookie must leave it.
                and not (fragment.empty and replaced[bookie] is Reason.LOST)
            )
            if fragment.last is None:
                lost = [b for b in fragment.bookies if replaced.get(b) is Reason.LOST]
                open_with_lost = ", ".join(lost)
                if positions and not lost:
                    self._waits = (
                        "it is open, and its last ensemble has a drained bookie: its writer has to close it"
                    )
            elif fragment.first not in self._given_up:
                if positions:
                    return self._choose(fragment, positions, replaced)
                if self._request.placement and fragment.first not in self._compliant and not fragment.empty:
                    self._compliant[fragment.first] = None
                    self._fragment, self.state = fragment, RepairState.CHOOSING
                    exclude = (*fragment.bookies, *self._refused)
                    return [ChooseCompliant(fragment.bookies, exclude, metadata)]
        if self._to_check:
            bookie = self._to_check.pop(0)
            if bookie in view.registered:
                self.state = RepairState.CHECKING
                return [CheckCopies(metadata, bookie)]
            self._waits = f"bookie {bookie}, which is to be checked, is not registered"
            return self._next(now, view)
        if open_with_lost:
            return self._recover_or_wait(metadata, open_with_lost, now)
        if self._given_up:
            first, reason = next(iter(self._given_up.items()))
            return self._postpone(f"entries from {first} on: {reason}")
        return self._postpone(self._waits) if self._waits else self._end()

    def _to_replace(self, view: ClusterView) -> dict[str, Reason]:
        return {
            bookie: reason
            for bookie, reason in self._request.bookies.items()
            if (reason is Reason.LOST and bookie not in view.registered)
            or (reason is not Reason.CHECK and bookie in view.draining)
        }

    def _choose(
        self, fragment: Fragment, positions: tuple[int, ...], replaced: Mapping[str, Reason]
    ) -> list[Instruction]:
        assert self.metadata is not None
        exclude = dict.fromkeys((*fragment.bookies, *replaced, *self._refused))
        self._fragment, self.state = fragment, RepairState.CHOOSING
        return [ChooseBookies(positions, tuple(exclude), self.metadata)]

    def _recover_or_wait(self, metadata: LedgerMetadata, lost: str, now: float) -> list[Instruction]:
        ensemble = metadata.last_ensemble
        if self.grace is None or self.grace.ensemble != ensemble:
            self.grace = Grace(ensemble, now)
        until = self.grace.since_s + self._grace_s
        if now < until:
            return self._postpone(
                f"it is open, and its last ensemble lost {lost}: its writer has open_ledger_grace_s to replace it",
                until,
            )
        if self._recovered:
            return self._postpone("it was recovered, and is not closed")
        self._recovered = True
        self.state = RepairState.RECOVERING
        return [RecoverLedger()]

    def _changed(self) -> LedgerMetadata:
        assert self.metadata is not None
        assert self._fragment is not None
        return self.metadata.with_replaced(self._fragment.first, self._targets)

    def _end(self) -> list[Instruction]:
        self.state = RepairState.DONE
        return [Repaired()]

    def _postpone(self, reason: str, until_s: float | None = None) -> list[Instruction]:
        self.state = RepairState.POSTPONED
        return [Postponed(reason, until_s)]

    def check(self) -> None:
        """Asserts the invariants; tests call it after every event."""
        if self.state in (RepairState.COPYING, RepairState.WRITING):
            assert self._fragment is not None
            assert self.metadata is not None
            assert self._fragment.last is not None, "the last ensemble of an open ledger is its writer's"
            assert self._fragment in self.metadata.fragments()
            assert self._targets
        if self.metadata is not None:
            self.metadata.check()

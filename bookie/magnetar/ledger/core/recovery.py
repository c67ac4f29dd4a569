"""Recovery of a ledger without waiting for its writer: fences it, finds its end, closes it.

    begin ──> MARKING ──> FENCING ──> BASE ──> ENTRIES ──> CLOSING ──> done
              (IN_RECOVERY)  (LAC)    (length)  (read, re-add)  (compare-and-set)

* FENCING asks the whole last ensemble for its LAC, fencing it, until every write set has fewer than Qa unknown (rule 13).
* The first entry to recover is max(LAC, first entry of the last ensemble - 1) + 1; the entry before it, BASE, was
  confirmed and is read for the ledger's length up to there.
* An entry exists when one bookie has it, and is absent after Qw-Qa+1 explicit negatives; anything else aborts, which
  truncates nothing and can be repeated (rule 14). Reads use the ensemble as it was when recovery began (rule 15).
* A window of entries is looked for at a time, each at one bookie first (`shares.preferences`), which is asked for all of its
  share at once. What is not found there, or not soon, is asked of the whole write set.
* What exists is added again as it was stored, to Qa bookies at least. Its piggybacked LAC stays the writer's, although a
  higher one is known: an advanced LAC would tell the next recovery to skip entries whose new bookies are not in the
  metadata before the closing compare-and-set (rule 15). So the bytes, the digest in them and all replicas stay equal.
* A bookie that refuses re-adds because it has too much to do is replaced, as one that fails is. If there is no other one it
  gets them again after a pause, until nothing was stored anywhere for too long (the shell's clock): then it has failed.
* Whoever loses a compare-and-set adopts what it finds: CLOSED is the result, anything else starts over (rule 16).

An operator may accept that an end cannot be proved, and names it (`accepted_end`). What can be proved is proved as above.
An entry about which nobody will ever say anything is given up then: up to the accepted end it is left out, as an entry that
was lost, and behind it the ledger ends. A bookie that proves an entry behind the accepted end ends the recovery.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

from magnetar.proto.errors import (
    BookieUnavailable,
    ConnectionLost,
    EntryNotFound,
    InvalidArgument,
    LedgerNotFound,
    MagnetarError,
    NotEnoughBookies,
    QuorumLost,
    RequestTimeout,
    TooManyRequests,
    error_name,
)
from magnetar.proto.ledger_entry import NO_ENTRY

from .events import (
    AddFailed,
    AddStored,
    BookiesChosen,
    BookieSlow,
    ChooseBookies,
    EntriesRead,
    EntryRead,
    Event,
    Failed,
    Finished,
    Instruction,
    LastConfirmedRead,
    MetadataFailed,
    MetadataFound,
    MetadataWritten,
    NoBookies,
    ReadEntries,
    ReadLastConfirmed,
    RetryDue,
    RetryLater,
    SendAdds,
    WriteMetadata,
)
from .metadata import Bookies, LedgerMetadata, LedgerState
from .quorum import LastConfirmedQuorum
from .shares import preferences, stripes_of

# The window: entries that are read or added again at a time. The shell bounds their bytes by delaying reads. Most ledgers of
# a killed broker have few entries behind the base: the first window is small (0.2 ms instead of 6), and each one that was
# full of entries is followed by one twice as large.
WINDOW_ENTRIES = 1024
FIRST_WINDOW_ENTRIES = 32
# Consecutive entries that one bookie is asked for when every bookie has every entry.
RUN_ENTRIES = 128
# False: every replica of an entry is asked at once. Every order of messages with True is one with False as well (the other
# replicas answer later), so the model check explores that.
ONE_REPLICA_FIRST = True
# Each start over means that another recovery, or the writer's ensemble change, has made progress.
MAX_STARTS = 10

_NEGATIVE = frozenset((EntryNotFound.code, LedgerNotFound.code))
_SILENT = frozenset((BookieUnavailable.code, ConnectionLost.code, RequestTimeout.code))


class RecoveryState(enum.Enum):
    """See the drawing above."""

    NEW = "new"
    MARKING = "marking"
    FENCING = "fencing"
    BASE = "base"
    ENTRIES = "entries"
    CLOSING = "closing"
    DONE = "done"


class _Recovered:
    """An entry behind the base: first it is searched for, then it is added again."""

    __slots__ = ("acked", "answered", "asked", "codes", "entry", "given_up", "length", "negatives")

    def __init__(self) -> None:
        self.entry: bytes | None = None
        self.length = 0
        self.negatives = 0
        self.asked = 0  # bits of positions in `_reading`
        self.answered: dict[str, None] = {}
        self.codes: list[int] = []  # error codes of answers that are neither the entry nor "no such entry"
        self.acked = 0  # bits of positions in the last ensemble of `_changed`
        self.given_up = False  # an operator accepts that it is lost


class RecoveryCore:
    """The recovery of one ledger, sans-I/O; `begin` and `handle` are its only mutators."""

    def __init__(
        self, ledger_id: int, metadata: LedgerMetadata, version: int, *, accepted_end: int | None = None
    ) -> None:
        """`accepted_end`: the last entry, as an operator accepts it; see the module."""
        self.ledger_id = ledger_id
        self.state = RecoveryState.NEW
        self.accepted_end = accepted_end
        self.metadata = metadata  # as in the store; ensemble changes made here are in `_changed`
        self.version = version
        self.striping = metadata.striping
        self.starts = 0
        self._reset()

    def _reset(self) -> None:
        self._changed = self.metadata  # what the closing compare-and-set will write, apart from state and end
        self._reading: Bookies = self.metadata.last_ensemble.bookies  # the ensemble when recovery began
        self._quorum = LastConfirmedQuorum(self.striping, self._reading)
        self._base = NO_ENTRY  # last entry known to be confirmed
        self._base_replicas: list[str] = []  # replicas not yet asked for the base
        self._base_codes: list[int] = []
        self._suspects: dict[str, None] = {}  # slow or silent bookies: asked last, for speed
        self.held_bytes = 0  # of found entries that do not have their ack quorum yet
        # From _first on, in order: searched for, or being added again.
        self._entries: dict[int, _Recovered] = {}
        self._first = 0  # all entries below have their ack quorum again
        self._window = min(FIRST_WINDOW_ENTRIES, WINDOW_ENTRIES)
        self._next_read = 0
        self._next_add = 0  # all entries below were found; _first <= _next_add <= _next_read
        self._last: int | None = None  # last entry of the ledger, once known
        self._length = 0  # payload bytes up to _next_add - 1
        self._failing: dict[int, int] = {}  # position -> error code, being replaced
        self._unreplaceable: dict[int, None] = {}  # positions whose bookie failed and has no replacement
        # Positions whose bookie is busy and has no replacement, with the adds that wait for the end of the pause.
        self._busy: dict[int, dict[int, None]] = {}
        self._excluded: dict[str, int] = {}  # failed bookie -> error code

    def begin(self) -> list[Instruction]:
        """Starts (or starts over) with `metadata`."""
        self.starts += 1
        if self.starts > MAX_STARTS:
            return self._fail(
                QuorumLost(f"recovery of {self._name} was overtaken {MAX_STARTS} times; try again")
            )
        self._reset()
        match self.metadata.state:
            case LedgerState.CLOSED:
                return self._finish()
            case LedgerState.OPEN:
                self.state = RecoveryState.MARKING
                return [WriteMetadata(self.metadata.in_recovery(), self.version)]
            case LedgerState.IN_RECOVERY:
                self.state = RecoveryState.FENCING
                return [ReadLastConfirmed(bookie) for bookie in self._reading]

    def handle(self, event: Event) -> list[Instruction]:
        """Takes an event. Answers that belong to an earlier state are ignored."""
        match event:  # the frequent ones first
            case AddStored(bookie, entry_id) if self.state is RecoveryState.ENTRIES:
                return self._added(bookie, entry_id)
            case EntriesRead(bookie, answers) if self.state is RecoveryState.ENTRIES:
                return self._entries_read(bookie, answers)
            case MetadataWritten(version):
                return self._metadata_written(version)
            case MetadataFound(metadata, version):
                self.metadata, self.version = metadata, version
                return self.begin()
            case MetadataFailed(error):
                return self._fail(error)
            case LastConfirmedRead(bookie, last_add_confirmed, code) if self.state is RecoveryState.FENCING:
                return self._last_confirmed_read(bookie, last_add_confirmed, code)
            case LastConfirmedRead(bookie, _, 0):
                self._suspects.pop(bookie, None)  # slow, but alive
                return []
            case EntriesRead(_, answers) if self.state is RecoveryState.BASE:
                return self._base_read(answers[0])
            case BookieSlow(bookie) if self.state in (RecoveryState.BASE, RecoveryState.ENTRIES):
                return self._slow(bookie)
            case AddFailed(bookie, entry_id, code) if self.state is RecoveryState.ENTRIES:
                return self._add_failed(bookie, entry_id, code)
            case RetryDue(expired) if self.state is RecoveryState.ENTRIES:
                return self._retry(expired)
            case BookiesChosen(bookies) if self.state is RecoveryState.ENTRIES:
                return self._replace(dict(bookies))
            case NoBookies(reason) if self.state is RecoveryState.ENTRIES:
                return self._no_replacement(reason)
            case _:
                return []

    # --- metadata ----------------------------------------------------------------------------------------------------

    def _metadata_written(self, version: int) -> list[Instruction]:
        if self.state is RecoveryState.MARKING:
            self.metadata, self.version = self.metadata.in_recovery(), version
            self.starts -= 1  # not a start over
            return self.begin()
        assert self.state is RecoveryState.CLOSING
        assert self._last is not None
        self.metadata, self.version = self._changed.close(self._last, self._length), version
        return self._finish()

    def _finish(self) -> list[Instruction]:
        self.state = RecoveryState.DONE
        return [Finished(self.metadata)]

    def _fail(self, error: MagnetarError) -> list[Instruction]:
        self.state = RecoveryState.DONE
        return [Failed(error)]

    # --- where to begin ----------------------------------------------------------------------------------------------

    def _last_confirmed_read(self, bookie: str, last_add_confirmed: int, code: int) -> list[Instruction]:
        self._quorum.answered(bookie, last_add_confirmed, code)
        if self._quorum.covered or (self._quorum.complete and self.accepted_end is not None):
            self._suspects = dict.fromkeys(self._quorum.silent)
            return self._read_base(self._quorum.last_add_confirmed)
        if self._quorum.complete:
            return self._fail(self._quorum.lost(self.ledger_id))
        return []

    def _read_base(self, last_add_confirmed: int) -> list[Instruction]:
        self._base = max(last_add_confirmed, self.metadata.last_ensemble.first_entry - 1)
        self._first = self._next_read = self._next_add = self._base + 1
        if self.accepted_end is not None and self._base > self.accepted_end:
            return self._fail(self._proved_more(self._base))
        if self._base == NO_ENTRY:
            return self._read_on()
        self.state = RecoveryState.BASE
        bookies = self.metadata.ensemble_of(self._base).bookies
        write_set = [bookies[position] for position in self.striping.write_set(self._base)]
        self._base_replicas = sorted(write_set, key=lambda bookie: bookie in self._suspects)
        return self._ask_base()

    def _ask_base(self) -> list[Instruction]:
        return self._read({self._base_replicas.pop(0): [self._base]}) if self._base_replicas else []

    def _base_read(self, answer: EntryRead) -> list[Instruction]:
        if answer.entry_id != self._base:
            return []
        if answer.code == 0:
            self._length = answer.length
            return self._read_on()
        self._base_codes.append(answer.code)
        if len(self._base_codes) == self.striping.write_quorum:
            if self.accepted_end is not None:  # lost; the length is that of what is found behind it
                return self._read_on()
            return self._fail(self._unreadable(self._base, self._base_codes))
        return self._ask_base()

    # --- entries -----------------------------------------------------------------------------------------------------

    def _read_on(self) -> list[Instruction]:
        """Fills the window, once 25% of it are free, while the end of the ledger is not known."""
        self.state = RecoveryState.ENTRIES
        room = self._first + self._window - self._next_read
        if self._last is not None or room < max(1, self._window // 4):
            return []
        if self._next_read > self._base + 1 and self._window < WINDOW_ENTRIES:
            room += min(self._window, WINDOW_ENTRIES - self._window)
            self._window = min(2 * self._window, WINDOW_ENTRIES)
        if room > RUN_ENTRIES:  # whole runs, so that each is one request
            room -= (self._next_read + room) % RUN_ENTRIES
        wanted: dict[str, list[int]] = {}
        first_asked, run = self.striping.write_sets, 1
        if ONE_REPLICA_FIRST:
            distrusted = sum(1 << p for p, bookie in enumerate(self._reading) if bookie in self._suspects)
            first_asked = preferences(self.striping, self.ledger_id % self.striping.ensemble_size, distrusted)
            run = RUN_ENTRIES if self.striping.cycle == 1 else 1
        for entry_id in range(self._next_read, self._next_read + room):
            self._entries[entry_id] = _Recovered()
            self._ask(entry_id, first_asked[entry_id // run % len(first_asked)], wanted)
        self._next_read += room
        return self._read(wanted)

    def _ask(self, entry_id: int, positions: Iterable[int], wanted: dict[str, list[int]]) -> None:
        """Puts the entry among what is `wanted` of the bookies at these positions that have not been asked for it."""
        found = self._entries[entry_id]
        for position in positions:
            if not found.asked & 1 << position:
                found.asked |= 1 << position
                wanted.setdefault(self._reading[position], []).append(entry_id)

    def _read(self, wanted: dict[str, list[int]]) -> list[Instruction]:
        """As few reads as have exactly these ascending entries of each bookie."""
        return [
            ReadEntries(bookie, first, last, stripe)
            for bookie, ids in wanted.items()
            for first, last, stripe in stripes_of(ids, self.striping.cycle)
        ]

    def wants(self, entry_id: int) -> bool:
        """Whether an answer about this entry still matters; otherwise the shell need not ask."""
        if self.state is RecoveryState.ENTRIES:
            found = self._entries.get(entry_id)
            return found is not None and found.entry is None
        return self.state is RecoveryState.BASE and entry_id == self._base

    @property
    def first_unfinished(self) -> int:
        """The first entry without its ack quorum. The shell reads it even when it delays other reads."""
        return self._base if self.state is RecoveryState.BASE else self._first

    def _slow(self, bookie: str) -> list[Instruction]:
        """From now on other replicas are asked as well as this bookie."""
        self._suspects[bookie] = None
        if self.state is RecoveryState.BASE:
            return self._ask_base()
        wanted: dict[str, list[int]] = {}
        bit = 1 << self._reading.index(bookie) if bookie in self._reading else 0
        for entry_id in range(self._next_add, self._next_read) if self._last is None else ():
            found = self._entries[entry_id]
            if found.entry is None and found.asked & bit and bookie not in found.answered:
                self._ask(entry_id, self.striping.write_set(entry_id), wanted)
        return self._read(wanted)

    def _entries_read(self, bookie: str, answers: Sequence[EntryRead]) -> list[Instruction]:
        counted = [answer for answer in answers if self._entry_read(bookie, answer)]
        if not counted:
            return []
        instructions = self._decide()
        wanted: dict[str, list[int]] = {}
        for answer in counted:
            if answer.code and self.wants(answer.entry_id):
                self._ask(answer.entry_id, self.striping.write_set(answer.entry_id), wanted)
        return instructions + self._read(wanted)

    def _entry_read(self, bookie: str, answer: EntryRead) -> bool:
        """Counts what a bookie says of an entry; False if that does not matter."""
        found = self._entries.get(answer.entry_id)
        if found is None or answer.entry_id < self._next_add or bookie in found.answered:
            return False
        if bookie not in self._reading or not found.asked & 1 << self._reading.index(bookie):
            return False  # an answer to an earlier start: a bookie outside the write set proves nothing
        found.answered[bookie] = None
        if answer.code in _SILENT:
            self._suspects[bookie] = None
        else:
            self._suspects.pop(bookie, None)
        if answer.code in _NEGATIVE:
            found.negatives += 1
        elif answer.code:
            found.codes.append(answer.code)
        elif found.entry is None:
            found.entry, found.length = answer.entry, answer.length
            self.held_bytes += len(answer.entry)
        return True

    def _decide(self) -> list[Instruction]:
        """Goes through the entries in order, as far as it is known whether they exist."""
        instructions: list[Instruction] = []
        before = self._next_add
        while self._last is None and self._next_add < self._next_read:
            found = self._entries[self._next_add]
            if found.entry is not None:
                if self.accepted_end is not None and self._next_add > self.accepted_end:
                    return self._fail(self._proved_more(self._next_add))
                self._length = found.length
                instructions += self._send(self._next_add, found.entry)
                self._next_add += 1
            elif found.negatives >= self.striping.negatives_for_absence:
                self._end_before(self._next_add)
            elif len(found.answered) < self.striping.write_quorum:
                break
            elif self.accepted_end is None:
                return self._fail(self._unreadable(self._next_add, found.codes))
            elif self._next_add <= self.accepted_end:
                found.given_up = True
                self._next_add += 1
            else:
                instructions += self._accept_end()
                break
        if self.state is RecoveryState.DONE or (self._last is None and self._next_add == before):
            return instructions
        if self._unreplaceable and (error := self._unreachable_quorum("", before)):
            return self._fail(error)
        return instructions + self._after_adds()

    def _end_before(self, entry_id: int) -> None:
        self._last = entry_id - 1
        for following in range(entry_id, self._next_read):
            self._drop(following)

    def _accept_end(self) -> list[Instruction]:
        """Asks everybody for everything behind the accepted end, and ends the ledger there when nobody has any of it."""
        wanted: dict[str, list[int]] = {}
        decided = True
        for entry_id in range(self._next_add, self._next_read):
            found = self._entries[entry_id]
            if found.entry is not None:
                return self._fail(self._proved_more(entry_id))
            self._ask(entry_id, self.striping.write_set(entry_id), wanted)
            decided = decided and len(found.answered) == self.striping.write_quorum
        if decided:
            self._end_before(self._next_add)
        return self._read(wanted)

    def _drop(self, entry_id: int) -> None:
        entry = self._entries.pop(entry_id).entry
        if entry is not None:
            self.held_bytes -= len(entry)

    def _send(self, entry_id: int, entry: bytes) -> list[Instruction]:
        bookies = self._changed.last_ensemble.bookies
        for position in self._busy:
            if self.striping.mask(entry_id) & 1 << position:
                self._busy[position][entry_id] = None
        without = (*self._unreplaceable, *self._failing, *self._busy)
        write_set, adds = self.striping.write_set(entry_id), [(entry_id, entry)]
        return [SendAdds(bookies[position], adds) for position in write_set if position not in without]

    def _after_adds(self) -> list[Instruction]:
        """Drops what has its quorum, in order; then closes or reads on."""
        if self._failing:
            return []
        while self._first < self._next_add:
            found = self._entries[self._first]
            if found.acked.bit_count() < self.striping.ack_quorum and not found.given_up:
                break
            self._drop(self._first)
            self._first += 1
        if self._last is not None and self._first > self._last:
            self.state = RecoveryState.CLOSING
            return [WriteMetadata(self._changed.close(self._last, self._length), self.version)]
        return self._read_on()

    def _added(self, bookie: str, entry_id: int) -> list[Instruction]:
        found = self._entries.get(entry_id)
        bookies = self._changed.last_ensemble.bookies
        if found is None or bookie not in bookies:
            return []
        found.acked |= (1 << bookies.index(bookie)) & self.striping.mask(entry_id)
        return self._after_adds() if entry_id == self._first else []

    # --- bookies that fail -------------------------------------------------------------------------------------------

    def _add_failed(self, bookie: str, entry_id: int, code: int) -> list[Instruction]:
        bookies = self._changed.last_ensemble.bookies
        if bookie not in bookies:
            return []
        position = bookies.index(bookie)
        known = position in self._busy or position in self._failing or position in self._unreplaceable
        if code != TooManyRequests.code:
            if self._busy.pop(position, None) is not None and position in self._failing:
                self._failing[position] = code
            known = position in self._failing or position in self._unreplaceable
        elif position in self._busy or not known:
            self._busy.setdefault(position, {})[entry_id] = None
        return [] if known else self._fail_position(position, code)

    def _fail_position(self, position: int, code: int) -> list[Instruction]:
        bookies = self._changed.last_ensemble.bookies
        self._failing[position] = self._excluded[bookies[position]] = code
        exclude = dict.fromkeys((*bookies, *self._excluded))
        return [ChooseBookies((position,), tuple(exclude), self.metadata)]

    def _retry(self, expired: bool) -> list[Instruction]:
        """The pause is over: sends busy bookies what they refused, except entries that have their ack quorum by now."""
        if self._failing:
            return [RetryLater()] if self._busy else []
        if expired and self._busy:  # replace one at a time: there may be enough bookies for some of them
            failed = self._fail_position(self._busy.popitem()[0], TooManyRequests.code)
            return [RetryLater(), *failed] if self._busy else failed
        busy, self._busy = self._busy, {}
        bookies = self._changed.last_ensemble.bookies
        instructions: list[Instruction] = []
        for position, refused in busy.items():
            left = ((e, self._entries[e]) for e in sorted(refused) if e in self._entries)
            adds = [(e, found.entry) for e, found in left if found.entry and not found.acked & 1 << position]
            if adds:
                instructions.append(SendAdds(bookies[position], adds))
        return instructions

    def _replace(self, chosen: dict[int, str]) -> list[Instruction]:
        """The change stays in memory until the closing compare-and-set (rule 15)."""
        bookies = list(self._changed.last_ensemble.bookies)
        for position, bookie in chosen.items():
            bookies[position] = bookie
            self._failing.pop(position, None)
            self._busy.pop(position, None)
        self._changed = self._changed.with_ensemble(self._first, tuple(bookies))
        instructions: list[Instruction] = []
        for entry_id in range(self._first, self._next_add):
            found = self._entries[entry_id]
            if found.given_up:
                continue
            assert found.entry is not None
            for position, bookie in chosen.items():
                if self.striping.mask(entry_id) & 1 << position:
                    found.acked &= ~(1 << position)
                    instructions.append(SendAdds(bookie, [(entry_id, found.entry)]))
        return instructions + self._after_adds()

    def _no_replacement(self, reason: str) -> list[Instruction]:
        """Goes on without the failed bookies if each write set has Qa others; busy bookies stay."""
        self._unreplaceable.update(
            dict.fromkeys(position for position in self._failing if position not in self._busy)
        )
        self._failing.clear()
        error = self._unreachable_quorum(reason, self._first)
        if error:
            return self._fail(error)
        return [*([RetryLater()] if self._busy else []), *self._after_adds()]

    def _unreachable_quorum(self, reason: str, first: int) -> NotEnoughBookies | None:
        for entry_id in range(first, self._next_add):
            if self._entries[entry_id].given_up:
                continue
            write_set = self.striping.write_set(entry_id)
            stored = self._entries[entry_id].acked
            usable = sum(1 for p in write_set if p not in self._unreplaceable or stored & 1 << p)
            if usable < self.striping.ack_quorum:
                failed = ", ".join(
                    f"{bookie} ({error_name(code)})" for bookie, code in self._excluded.items()
                )
                return NotEnoughBookies(
                    f"recovery of {self._name} cannot store entry {entry_id} on {self.striping.ack_quorum} bookies: "
                    f"{failed} did not take it; nothing was truncated. Bring bookies back, or add some (those with "
                    f"TooManyRequests need faster disks or a larger write_cache_bytes), and try again. {reason}".rstrip()
                )
        return None

    def _proved_more(self, entry_id: int) -> MagnetarError:
        return InvalidArgument(
            f"{self._name} cannot end at entry {self.accepted_end}: a bookie that answers proves entry {entry_id}; nothing "
            "was truncated. Look again what is known, and accept that end",
            ledger_id=self.ledger_id,
            entry_id=entry_id,
        )

    def _unreadable(self, entry_id: int, codes: list[int]) -> MagnetarError:
        names = sorted({error_name(code) for code in codes})
        return QuorumLost(
            f"recovery of {self._name} stops at entry {entry_id}: whether it was confirmed is not known "
            f"({', '.join(names)}); bring its bookies back and try again; "
            f"`magnetar cluster recover-ledger {self.ledger_id}` shows what is known",
            ledger_id=self.ledger_id,
            entry_id=entry_id,
        )

    @property
    def _name(self) -> str:
        return f"ledger {self.ledger_id}"

    def check(self) -> None:
        """Asserts the invariants; tests call it after every event."""
        assert not any(position in self._unreplaceable for position in self._busy)
        if self.state is RecoveryState.ENTRIES:
            assert self._first <= self._next_add <= self._next_read
            end = self._next_add if self._last is not None else self._next_read
            assert list(self._entries) == list(range(self._first, end))
            decided = [self._entries[e] for e in range(self._first, self._next_add)]
            assert all((found.entry is None) == found.given_up for found in decided)
            assert self.accepted_end is not None or not any(found.given_up for found in decided)
            assert self._next_read - self._first <= self._window <= WINDOW_ENTRIES
            assert self.held_bytes == sum(len(found.entry or b"") for found in self._entries.values())
            for entry_id, found in self._entries.items():
                assert found.asked & ~self.striping.mask(entry_id) == 0, "asked outside its write set"
                assert found.asked, "nobody was asked"
        if self.state is RecoveryState.CLOSING:
            assert not self._entries, "closed only after every re-add"
            assert not self._failing
        self._changed.check()

"""The adds at one bookie that have not had their last answer: one machine for every transport.

    HELD ──room, connected──> SENT ──answer──> answered
                               ^ └──accepted (deferred)──> ACCEPTED ──answer──> answered
                               └──────────force──────────────┘
    all of them ──silent, too slow, connection lost, closed──> failed, together

HELD: taken, and not sent: the connection is being made, or a bookie of this process has no room in its write cache. SENT:
the bookie owes an answer, and the clock runs. ACCEPTED: the bookie has a deferred add in memory and has said so; it owes
the second answer, when the add is durable, and no clock runs before somebody forces the ledger.

The adds fail together because what became of any of them at the bookie is not known. The machine that comes next begins
empty: the bookie that answers then may have restarted, so no answer of its counts for an earlier add.

**The clock** (rule 21) is a number of ticks, `TICKS_PER_TIMEOUT` in an add timeout; the shell's timer calls `tick` while it
has a reason to. It looks at the oldest add only, because adds are answered in about the order in which they were sent: a
hung bookie is noticed between 1.0 and 1.05 add timeouts, at no cost per add. A slow bookie is not silent: it answers
others, or says that adds wait for room in its write cache (`heard`). Both give it time, up to `MAX_ADD_TIMEOUTS` add
timeouts for one add: a queue of many MB before a slow disk must not look like a hung one, and roll every ledger.

Memory: `limit_bytes` bounds what is held and sent. What is accepted counts no more: its writer bounds that.

A shell calls `add` and `answered` for every entry: together 0.5 us.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

# bookie, ledger id, entry id, code: 0 when the entry is durable there, else a code of proto.errors (or ADD_ACCEPTED).
AddCallback = Callable[[str, int, int, int], None]

TICKS_PER_TIMEOUT = 20
# How long one add may take at a bookie that works, in add timeouts; after that a slow or busy bookie has failed as well.
MAX_ADD_TIMEOUTS = 4


class AddOutcome(enum.Enum):
    """What the shell does with an add."""

    SEND = "send"  # now
    TAKEN = (
        "taken"  # nothing: it is held, or an add of the same entry is under way and its answer serves both
    )
    REFUSED = "refused"  # answers TooManyRequests: `limit_bytes` are outstanding


# Looked up once, not for every entry.
_SEND, _TAKEN, _REFUSED = AddOutcome


class Waited(enum.Enum):
    """What a tick finds."""

    FOR_NOTHING = "nothing is outstanding"
    IN_TIME = "in time"
    SILENT = "silent"  # for an add timeout
    TOO_SLOW = (
        "too slow"  # one add was not answered in MAX_ADD_TIMEOUTS, or the bookie fell silent on the way
    )


class HeldAdd(NamedTuple):
    """An add that is sent when the bookie can be reached, or has room."""

    ledger_id: int
    entry_id: int
    entry: bytes
    deferred: bool


class _DeferredLedger:
    """Deferred adds of one ledger."""

    __slots__ = ("accepted", "forced", "last")

    def __init__(self) -> None:
        self.accepted: dict[int, AddCallback] = {}  # by entry id; none at or below `forced`
        self.last = -1  # entry that was taken last
        self.forced = -1  # `last` at the last force: up to there nothing is ACCEPTED


class OutstandingAdds:
    """Those over one connection, or at one bookie of this process. Adds are known by ledger and entry id."""

    __slots__ = ("_deferred", "_heard_tick", "_held", "_limit_bytes", "_sent", "_tick", "outstanding_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.outstanding_bytes = 0  # of `_sent`
        self._limit_bytes = limit_bytes
        # SENT and HELD: (ledger, entry) -> tick in which the clock began, callback, bytes that count; oldest first.
        self._sent: dict[tuple[int, int], tuple[int, AddCallback, int]] = {}
        self._held: deque[HeldAdd] = deque()  # all of them are in `_sent`, too; in order of arrival
        self._deferred: dict[int, _DeferredLedger] = {}  # by ledger
        self._tick = 0
        self._heard_tick = 0  # in which the bookie was heard last

    # --- for every entry ----------------------------------------------------------------------------------------------

    def add(
        self, ledger_id: int, entry_id: int, entry: bytes, done: AddCallback, deferred: bool, ready: bool
    ) -> AddOutcome:
        """Takes an add. `ready`: the bookie can take it now. `done` is given back by what ends the add."""
        size = len(entry)
        outstanding = self.outstanding_bytes + size
        if outstanding > self._limit_bytes:
            return _REFUSED
        key = (ledger_id, entry_id)
        sent = self._sent
        if key in sent:  # two recoveries of one ledger
            tick, earlier, size = sent[key]
            sent[key] = (tick, _both(earlier, done), size)
            return _TAKEN
        self.outstanding_bytes = outstanding
        sent[key] = (self._tick, done, size)
        if deferred:
            self._deferred_ledger(ledger_id).last = entry_id
        if ready and not self._held:
            return _SEND
        self._held.append(HeldAdd(ledger_id, entry_id, entry, deferred))
        return _TAKEN

    def answered(self, ledger_id: int, entry_id: int) -> AddCallback | None:
        """The last answer of an add: its callback. None for an add that is not outstanding."""
        self._heard_tick = self._tick
        add = self._sent.pop((ledger_id, entry_id), None)
        if add is not None:
            self.outstanding_bytes -= add[2]
            return add[1]
        ledger = self._deferred.get(ledger_id)
        return None if ledger is None else ledger.accepted.pop(entry_id, None)

    # --- everything else ----------------------------------------------------------------------------------------------

    def accepted(self, ledger_id: int, entry_id: int) -> AddCallback | None:
        """The bookie has a deferred add, not durably yet: its callback, which the last answer brings again."""
        self._heard_tick = self._tick
        key = (ledger_id, entry_id)
        add = self._sent.get(key)
        if add is None:
            return None
        tick, done, size = add
        self.outstanding_bytes -= size
        ledger = self._deferred_ledger(ledger_id)
        if entry_id <= ledger.forced:
            self._sent[key] = (tick, done, 0)  # the force came before this answer: the clock runs on
        else:
            del self._sent[key]
            ledger.accepted[entry_id] = done
        return done

    def force(self, ledger_id: int) -> bool:
        """What was taken of the ledger shall become durable: the clock runs for it again. False if there is nothing."""
        ledger = self._deferred.get(ledger_id)
        if ledger is None:
            return False
        if self._held:
            self._held = deque(
                add._replace(deferred=False) if add.ledger_id == ledger_id else add for add in self._held
            )
        ledger.forced = ledger.last
        accepted, ledger.accepted = ledger.accepted, {}
        for entry_id, done in accepted.items():
            self._sent[ledger_id, entry_id] = (self._tick, done, 0)
        return True

    def next_held(self) -> HeldAdd | None:
        """The bookie can take an add: the oldest one that is held, which is sent now."""
        return self._held.popleft() if self._held else None

    def heard(self) -> None:
        """The bookie has said that it is alive, without an answer to an add."""
        self._heard_tick = self._tick

    def tick(self) -> Waited:
        """One tick of the clock. After SILENT and TOO_SLOW the shell calls `fail`."""
        self._tick += 1
        if self._deferred:
            self._forget_finished_ledgers()
        oldest = next(iter(self._sent.values()), None)
        if oldest is None:
            return Waited.FOR_NOTHING
        waited = self._tick - oldest[0]
        silent = min(waited, self._tick - self._heard_tick)
        if silent <= TICKS_PER_TIMEOUT and waited <= MAX_ADD_TIMEOUTS * TICKS_PER_TIMEOUT:
            return Waited.IN_TIME
        return Waited.TOO_SLOW if waited > silent else Waited.SILENT

    def fail(self) -> list[tuple[int, int, AddCallback]]:
        """All of them, held, sent and accepted, as (ledger id, entry id, callback); none is left."""
        failed = [
            (ledger_id, entry_id, done)
            for ledger_id, ledger in self._deferred.items()
            for entry_id, done in ledger.accepted.items()
        ]
        failed += [(ledger_id, entry_id, done) for (ledger_id, entry_id), (_, done, _) in self._sent.items()]
        self._sent.clear()
        self._held.clear()
        self._deferred.clear()
        self.outstanding_bytes = 0
        return failed

    def _deferred_ledger(self, ledger_id: int) -> _DeferredLedger:
        ledger = self._deferred.get(ledger_id)
        if ledger is None:
            ledger = self._deferred[ledger_id] = _DeferredLedger()
        return ledger

    def _forget_finished_ledgers(self) -> None:
        """Forgets ledgers without outstanding adds: a connection may outlive thousands of ledgers."""
        finished = [
            ledger_id
            for ledger_id, ledger in self._deferred.items()
            if not ledger.accepted and (ledger_id, ledger.last) not in self._sent
        ]
        for ledger_id in finished:
            del self._deferred[ledger_id]

    def check(self) -> None:
        """Asserts the invariants; tests call it after every event."""
        assert 0 <= self.outstanding_bytes <= self._limit_bytes
        assert self.outstanding_bytes == sum(size for _, _, size in self._sent.values())
        ticks = [tick for tick, _, _ in self._sent.values()]
        assert ticks == sorted(ticks), "oldest first"
        assert self._heard_tick <= self._tick
        held = [(add.ledger_id, add.entry_id) for add in self._held]
        assert len(set(held)) == len(held)
        assert set(held) <= set(self._sent), "what is held is outstanding"
        for ledger_id, ledger in self._deferred.items():
            assert ledger.forced <= ledger.last
            for entry_id in ledger.accepted:
                assert entry_id > ledger.forced, "accepted and forced: the clock must run"
                assert (ledger_id, entry_id) not in self._sent, "in two states"


def _both(first: AddCallback, second: AddCallback) -> AddCallback:
    def done(bookie: str, ledger_id: int, entry_id: int, code: int) -> None:
        try:
            first(bookie, ledger_id, entry_id, code)
        finally:
            second(bookie, ledger_id, entry_id, code)

    return done

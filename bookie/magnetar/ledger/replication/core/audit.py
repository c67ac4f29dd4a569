"""What an auditor does about bookies that vanish, that are drained, and about time.

A bookie, as the auditor sees it:

    REGISTERED ──vanished──> MISSING ──the delay is over, or a second bookie is MISSING──> LOST ──pass──> QUEUED
         ^                      │                                                           │              │
         └────registered again──┴───────────────────────────────────────────────────────────┴──────────────┘

A *pass* reads the records of all ledgers and queues those that name a LOST bookie, or one that is drained. One pass runs
at a time; what comes up meanwhile waits for the next one. A *full check* is a pass that compares every record with the
registered bookies and with placement; it is due once in an interval, by the wall clock, since it survives auditors.

Rule 22: read-only bookies are registered, so they are alive. The delay ends at once for all when more than one bookie is
MISSING: what is lost next could be the last copy. That counts for losses which this auditor saw. After it was elected, and
after no bookie at all was registered (the metadata store was down, or the whole cluster), several are missing because they
are still starting: each has its whole delay then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# After a pass that failed.
RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class BookiesListed:
    """The bookies that are registered, that were ever registered, and that are drained."""

    registered: tuple[str, ...]
    known: tuple[str, ...] = ()
    draining: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PassEnded:
    """The pass has queued everything it found (`done`), or failed and is to be repeated."""

    done: bool


@dataclass(frozen=True, slots=True)
class CheckRequested:
    """A full check is due."""


@dataclass(frozen=True, slots=True)
class TimeReached:
    """The time of the last WakeAt has come."""


Event = BookiesListed | PassEnded | CheckRequested | TimeReached


@dataclass(frozen=True, slots=True)
class StartPass:
    """Queue all ledgers that name one of these bookies; in a full check also what is wrong otherwise.

    `waiting`: bookies that are missing and not lost yet, about which a full check says nothing.
    """

    lost: tuple[str, ...]
    draining: tuple[str, ...]
    full: bool
    waiting: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CancelPass:
    """Nothing that it looks for is lost any more."""


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send TimeReached at this time; None: no time is waited for."""

    at: float | None


Instruction = StartPass | CancelPass | WakeAt


class AuditorCore:
    """Sans-I/O; an elected auditor begins with a new one."""

    def __init__(self, lost_bookie_delay_s: float) -> None:
        self._delay_s = lost_bookie_delay_s
        self._registered: dict[str, None] = {}
        self._draining: dict[str, None] = {}
        self._missing: dict[str, float] = {}  # bookie -> time at which it counts as lost
        self._starting_until = (
            0.0  # until then the cluster may be starting: several missing bookies have their delay
        )
        self._lost: dict[str, None] = {}  # to be looked for by the next pass
        self._drained: dict[str, None] = {}  # the same for bookies that are drained
        self._queued: dict[str, None] = {}  # lost or drained ones that a pass has queued
        self._pass: StartPass | None = None  # that is running
        self._full_check_due = False
        self._retry_at: float | None = None  # no pass starts before, after one that failed
        self._wake_at: float | None = None

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Takes an event."""
        match event:
            case BookiesListed():
                self._listed(event, now)
            case PassEnded(done):
                self._ended(done, now)
            case CheckRequested():
                self._full_check_due = self._pass is None or not self._pass.full
            case TimeReached():
                self._wake_at = None
        self._find_lost(now)
        return [*self._cancel_pass(), *self._start_pass(now), *self._wake()]

    def _listed(self, event: BookiesListed, now: float) -> None:
        registered = dict.fromkeys(event.registered)
        if registered and not self._registered:
            self._starting_until = now + self._delay_s
            self._missing = dict.fromkeys(self._missing, self._starting_until)
        for bookie in (*self._registered, *event.known):
            if bookie not in registered and not self._known_missing(bookie):
                self._missing[bookie] = now + self._delay_s
        for bookie in registered:
            self._missing.pop(bookie, None)
            self._lost.pop(bookie, None)
            if bookie not in self._draining:
                self._queued.pop(bookie, None)
        self._registered = registered
        draining = dict.fromkeys(event.draining)
        for bookie in draining:
            if bookie not in self._draining:
                self._drained[bookie] = None
        for bookie in self._draining:
            if bookie not in draining:
                self._drained.pop(bookie, None)
                if bookie in registered:
                    self._queued.pop(bookie, None)
        self._draining = draining

    def _known_missing(self, bookie: str) -> bool:
        if bookie in self._missing or bookie in self._lost:
            return True
        return bookie in self._queued and bookie not in self._registered

    def _find_lost(self, now: float) -> None:
        if not self._registered:
            return  # there is nowhere to copy from or to, and most likely the metadata store was down, not every bookie
        at_once = len(self._missing) > 1 and now >= self._starting_until
        for bookie, due in list(self._missing.items()):
            if at_once or due <= now:
                del self._missing[bookie]
                self._queued.pop(bookie, None)
                self._lost[bookie] = None

    def _cancel_pass(self) -> list[Instruction]:
        running = self._pass
        if running is None or running.full or not running.lost:
            return []
        if any(bookie not in self._registered for bookie in running.lost) or running.draining:
            return []
        self._pass = None
        return [CancelPass()]

    def _start_pass(self, now: float) -> list[Instruction]:
        if self._pass is not None or (self._retry_at is not None and now < self._retry_at):
            return []
        self._retry_at = None
        if not (self._lost or self._drained or self._full_check_due):
            return []
        self._pass = StartPass(
            tuple(self._lost), tuple(self._drained), self._full_check_due, tuple(self._missing)
        )
        self._lost.clear()
        self._drained.clear()
        self._full_check_due = False
        return [self._pass]

    def _ended(self, done: bool, now: float) -> None:
        ended, self._pass = self._pass, None
        if ended is None:
            return
        if done:
            self._queued.update(dict.fromkeys((*ended.lost, *ended.draining)))
            return
        self._retry_at = now + RETRY_S
        self._full_check_due = self._full_check_due or ended.full
        for bookie in ended.lost:
            if bookie not in self._registered:
                self._lost[bookie] = None
        for bookie in ended.draining:
            if bookie in self._draining:
                self._drained[bookie] = None

    def _wake(self) -> list[Instruction]:
        times: Iterable[float] = self._missing.values()
        waits = self._pass is None and (self._lost or self._drained or self._full_check_due)
        if not self._registered:
            times = ()
        due = min((*times, *([self._retry_at] if waits and self._retry_at is not None else ())), default=None)
        if due == self._wake_at:
            return []
        self._wake_at = due
        return [WakeAt(due)]

    def figures(self) -> dict[str, int]:
        """For /metrics."""
        return {
            "bookies_missing": len(self._missing),
            "bookies_lost": len(self._lost) + sum(b not in self._registered for b in self._queued),
            "bookies_draining": len(self._draining),
        }

    def check(self) -> None:
        """Asserts the invariants; tests call it after every event."""
        assert not self._missing.keys() & self._registered.keys()
        assert not self._lost.keys() & self._registered.keys()
        assert not self._missing.keys() & self._lost.keys()
        assert not self._drained.keys() - self._draining.keys()
        assert self._pass is not None or not (self._lost or self._drained) or self._retry_at is not None

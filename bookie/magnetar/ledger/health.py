"""What is held against bookies: one record for each bookie that failed or was slow, kept for a whole ledger client.

Writers, readers, recoveries and repairs report here, and placement and reads ask:

    WELL ──a failure──> SUSPECT ──`suspect_bookie_s` later, or once it is back──> WELL
         ──`quarantine_errors` failures within `quarantine_window_s`──> QUARANTINED ──`quarantine_s`──> WELL, all forgotten
         ──a read that it did not answer in time──> SLOW ──`suspect_bookie_s` later──> WELL

A connection that breaks fails every add on it at once: failures of one second are one. Placement takes suspects after the
bookies that are well, and quarantined ones last; reads ask suspects and slow bookies last. Whatever is held against it, a
bookie is still read from where nobody else has an entry, and written to where it is in an ensemble.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from magnetar.proto.errors import (
    BookieReadOnly,
    BookieUnavailable,
    ConnectionLost,
    DiskFull,
    MalformedFrame,
    RequestTimeout,
    StorageFailed,
    error_name,
)

from .directory import BookieDirectory
from .settings import LedgerSettings

_log = logging.getLogger(__name__)

# Codes that are the bookie's fault. TooManyRequests is not among them: a bookie that says so works, and works hard.
_FAULTS = frozenset(
    error.code
    for error in (BookieUnavailable, ConnectionLost, RequestTimeout, StorageFailed, DiskFull, MalformedFrame)
)
_ONE_FAILURE_S = 1.0


@dataclass(slots=True)
class _Record:
    """What is held against one bookie; times are those of the loop."""

    reason: int = 0  # error code of its last failure
    failed_at: float = -math.inf
    returns: int = 0  # of the bookie, at its last failure: more of them end the suspicion
    slow_at: float = -math.inf
    failures: list[float] = field(default_factory=list)  # those that count for quarantine, oldest first
    quarantined_until: float = -math.inf


class BookieHealth:
    """One for each ledger client. `failed` is cheap enough for every add of a connection that broke."""

    def __init__(self, settings: LedgerSettings, bookies: BookieDirectory) -> None:
        self._settings = settings
        self._bookies = bookies
        self._records: dict[str, _Record] = {}  # none of a bookie that is well
        self._loop: asyncio.AbstractEventLoop | None = None  # set by the first call from within a loop
        self._failures = 0
        self._quarantines = 0
        self._readmissions = 0

    def failed(self, bookie: str, code: int) -> None:
        """An add or a read of this bookie ended with the code of an error."""
        if code == BookieReadOnly.code:
            # As good as a bookie can be whose disks are full; it is asked soon.
            self._bookies.suspected(bookie)
        if code not in _FAULTS:
            return
        self._failures += 1
        self._bookies.suspected(bookie)
        now = self._now()
        record = self._records.setdefault(bookie, _Record())
        record.reason, record.failed_at, record.returns = code, now, self._bookies.return_count(bookie)
        settings, failures = self._settings, record.failures
        if not settings.quarantine_errors or record.quarantined_until > now:
            return
        if failures and now - failures[-1] < _ONE_FAILURE_S:
            return
        failures[:] = [at for at in failures if now - at <= settings.quarantine_window_s]
        failures.append(now)
        if len(failures) >= settings.quarantine_errors:
            failures.clear()
            record.quarantined_until = now + settings.quarantine_s
            self._quarantines += 1
            _log.warning(
                "bookie %s failed %d times within %g s, with %s at last: no new ledgers go there for %g s "
                "(quarantine_errors, quarantine_window_s, quarantine_s)",
                bookie,
                settings.quarantine_errors,
                settings.quarantine_window_s,
                error_name(code),
                settings.quarantine_s,
            )

    def slow(self, bookie: str) -> None:
        """A read of this bookie was not answered in `speculative_read_s`."""
        self._records.setdefault(bookie, _Record()).slow_at = self._now()

    def offers(self, writable: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """What placement may choose from, in turn, until it finds enough; so nothing leaves a ledger without an ensemble.

        First without suspects, whose connection may not even be tried again yet; then the quarantined bookies come one by
        one, the first to be released first.
        """
        suspects, quarantined = self.suspects(), [name for name in self.quarantined() if name in writable]
        for readmitted in range(len(quarantined) + 1):
            left_out = quarantined[readmitted:]
            names = tuple(bookie for bookie in writable if bookie not in left_out)
            if readmitted == 0 and any(bookie in suspects for bookie in names):
                yield tuple(bookie for bookie in names if bookie not in suspects)
            self._readmissions += readmitted > 0
            yield names

    def suspects(self) -> tuple[str, ...]:
        """Those that failed within `suspect_bookie_s` and did not come back since. Cheap while there are none."""
        if not self._records:
            return ()
        now = self._now()
        self._forget(now)
        return tuple(
            bookie for bookie, record in self._records.items() if self._is_suspect(bookie, record, now)
        )

    def asked_last(self, bookie: str) -> bool:
        """Whether reads prefer another bookie: it is suspect, or slow."""
        record = self._records.get(bookie)
        if record is None:
            return False
        now = self._now()
        return self._is_recent(record.slow_at, now) or self._is_suspect(bookie, record, now)

    def quarantined(self) -> dict[str, float]:
        """Bookies in quarantine, and the seconds that are left of it; the first to be released first."""
        now = self._now()
        left = {bookie: record.quarantined_until - now for bookie, record in self._records.items()}
        return {
            bookie: left[bookie] for bookie in sorted(left, key=lambda name: left[name]) if left[bookie] > 0
        }

    def figures(self) -> dict[str, int]:
        """For /metrics, which may be read by another thread."""
        now = self._loop.time() if self._loop else 0.0
        return {
            "bookies_quarantined": sum(r.quarantined_until > now for r in list(self._records.values())),
            "bookie_failures_total": self._failures,
            "bookie_quarantines_total": self._quarantines,
            "quarantines_overridden_total": self._readmissions,
        }

    def _is_recent(self, at: float, now: float) -> bool:
        return now - at < self._settings.suspect_bookie_s

    def _is_suspect(self, bookie: str, record: _Record, now: float) -> bool:
        return self._is_recent(record.failed_at, now) and self._bookies.return_count(bookie) <= record.returns

    def _forget(self, now: float) -> None:
        """Drops the records of bookies that are well, and have not failed within the window."""
        kept_s = max(self._settings.suspect_bookie_s, self._settings.quarantine_window_s)
        for bookie, record in list(self._records.items()):
            last = max(record.failed_at, record.slow_at)
            if now - last > kept_s and record.quarantined_until <= now:
                del self._records[bookie]

    def _now(self) -> float:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop.time()

    def check(self) -> None:
        """Asserts the invariants."""
        for record in self._records.values():
            assert record.failures == sorted(record.failures)
            assert len(record.failures) < max(self._settings.quarantine_errors, 1)
            assert record.quarantined_until == -math.inf or record.failed_at > -math.inf

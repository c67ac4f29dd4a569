"""Counts the failures of bookies that writers, readers and recoveries report, and quarantines bookies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

from magnetar.proto.errors import (
    BookieReadOnly,
    BookieUnavailable,
    ConnectionLost,
    DiskFull,
    MalformedFrame,
    RequestTimeout,
    StorageFailed,
)

from .core.quarantine import Quarantine
from .directory import BookieDirectory
from .settings import LedgerSettings

_log = logging.getLogger(__name__)

# Codes that are the bookie's fault. TooManyRequests is not among them: a bookie that says so works, and works hard.
_FAULTS = frozenset(
    error.code
    for error in (BookieUnavailable, ConnectionLost, RequestTimeout, StorageFailed, DiskFull, MalformedFrame)
)


class BookieHealth:
    """One for each ledger client. `failed` is cheap enough for every add of a connection that broke."""

    def __init__(self, settings: LedgerSettings, bookies: BookieDirectory) -> None:
        self._settings = settings
        self._bookies = bookies
        self._quarantine = Quarantine(
            settings.quarantine_errors, settings.quarantine_window_s, settings.quarantine_s
        )
        # Bookie -> (time of its last failure, its `returns` then): a suspect for `suspect_bookie_s`, or until it is back.
        self._suspects: dict[str, tuple[float, int]] = {}
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
        self._suspects[bookie] = (now, self._bookies.returns(bookie))
        if self._quarantine.failed(bookie, now):
            self._quarantines += 1
            _log.warning(
                "bookie %s failed %d times within %g s: no new ledgers go there for %g s "
                "(quarantine_errors, quarantine_window_s, quarantine_s)",
                bookie,
                self._settings.quarantine_errors,
                self._settings.quarantine_window_s,
                self._settings.quarantine_s,
            )

    def offers(self, writable: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """What placement may choose from, in turn, until it finds enough.

        First without suspects, whose connection may not even be tried again yet; those in quarantine come last.
        """
        suspects = self.suspects()
        for number, names in enumerate(self._quarantine.offers(writable, self._now())):
            if number == 0:
                well = tuple(bookie for bookie in names if bookie not in suspects)
                if len(well) < len(names):
                    yield well
            self._readmissions += number > 0
            yield names

    def suspects(self) -> tuple[str, ...]:
        """Those that failed within `suspect_bookie_s` and did not come back since. Cheap while there are none."""
        if not self._suspects:
            return ()
        since = self._now() - self._settings.suspect_bookie_s
        for bookie, (failed_at, returns) in list(self._suspects.items()):
            if failed_at <= since or self._bookies.returns(bookie) > returns:
                del self._suspects[bookie]
        return tuple(self._suspects)

    def quarantined(self) -> dict[str, float]:
        """Bookies in quarantine, and the seconds that are left of it."""
        now = self._now()
        return {bookie: until - now for bookie, until in self._quarantine.quarantined(now).items()}

    def figures(self) -> dict[str, int]:
        """For /metrics, which may be read by another thread."""
        return {
            "bookies_quarantined": self._quarantine.count(self._loop.time()) if self._loop else 0,
            "bookie_failures_total": self._failures,
            "bookie_quarantines_total": self._quarantines,
            "quarantines_overridden_total": self._readmissions,
        }

    def _now(self) -> float:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop.time()

"""What is damaged on this bookie: found by reads, by the scrub and by a rebuild of the index; reported once, never served.

    found -> counted, logged, handed to the repair queue -> resolved when it is written again, repaired or deleted

It is in memory only: what a restart forgets is found again by the next read or the next pass of the scrub. Memory is
bounded: a ledger with many separate ranges becomes one wide range, and beyond a number of ledgers findings are only counted
and handed on. While an entry is recorded here, the bookie says "damaged" where it would say "no such entry" (rule 8).

Damage of files that hold no entries of one ledger (index, journal) is counted apart: another replica cannot heal it.
"""

from __future__ import annotations

import logging
from typing import NamedTuple, Protocol

from magnetar.proto.ranges import RangeSet

_log = logging.getLogger(__name__)
_MAX_RANGES = 1000  # of one ledger
_MAX_LEDGERS = 50_000
_MAX_FILES = 1000
# After this many log lines only figures rise: a dying disk must not fill the log as well.
_MAX_LOGGED = 200


class DamagedRange(NamedTuple):
    """Entries `first` to `last`, both included. `where` names the file or the step, for people."""

    first: int
    last: int
    where: str
    reason: str


class RepairQueue(Protocol):
    """Takes entries that must be repaired from other replicas. Calls return at once and never raise."""

    def damaged(self, ledger_id: int, first: int, last: int, reason: str) -> None:
        """These entries of this bookie need repair. The call may be repeated after a restart."""
        ...

    def resolved(self, ledger_id: int) -> None:
        """Nothing of the ledger is damaged here any more."""
        ...


class Damage:
    """See the module. All calls from the bookie's loop; `report` takes some us."""

    def __init__(self, queue: RepairQueue | None = None) -> None:
        self.queue = queue
        # By ledger, and by where and why. An entry is in one set, and no set is empty.
        self._ranges: dict[int, dict[tuple[str, str], RangeSet]] = {}
        # True once the bookie stops: reads that fail then are no damage.
        self._over = False
        self._files: dict[str, str] = {}
        # Figures: findings ever, entries found and found good again, findings for which there was no room.
        self.found = 0
        self.healed = 0
        self.unrecorded = 0
        self._logged = 0

    def report(self, ledger_id: int, entry_id: int, *, where: str, reason: str) -> None:
        """Records an entry that cannot be served from here. A known one changes nothing."""
        self.report_range(ledger_id, entry_id, entry_id, where=where, reason=reason)

    def report_range(self, ledger_id: int, first: int, last: int, *, where: str, reason: str) -> None:
        """Entries `first` to `last`, both included."""
        if self._over:
            return
        ranges = self._ranges.get(ledger_id)
        if ranges is None:
            if len(self._ranges) >= _MAX_LEDGERS:
                self.found += 1
                self.unrecorded += 1
                self._hand_to_queue(ledger_id, first, last, where, reason)
                return
            ranges = self._ranges[ledger_id] = {}
        if any(known.covers(first, last) for known in ranges.values()):
            return
        self.found += 1
        self._take_out(ranges, first, last)
        ranges.setdefault((where, reason), RangeSet()).add(first, last)
        if sum(map(len, ranges.values())) > _MAX_RANGES:
            first = min(known.starts[0] for known in ranges.values())
            last = max(known.ends[-1] for known in ranges.values())
            ranges.clear()
            ranges[where, "many ranges"] = RangeSet([(first, last)])
        self._hand_to_queue(ledger_id, first, last, where, reason)

    @staticmethod
    def _take_out(ranges: dict[tuple[str, str], RangeSet], first: int, last: int) -> int:
        """How many of these entries were there."""
        found = 0
        for key, known in list(ranges.items()):
            found += known.remove(first, last)
            if not known:
                del ranges[key]
        return found

    def report_file(self, path: str, reason: str) -> None:
        """A file of the index or of a journal is damaged: an operator must act, see the reason."""
        if path in self._files or self._over:
            return
        self.found += 1
        if len(self._files) < _MAX_FILES:
            self._files[path] = reason
        else:
            self.unrecorded += 1
        self._log("%s is damaged: %s", path, reason)

    def _hand_to_queue(self, ledger_id: int, first: int, last: int, where: str, reason: str) -> None:
        span = str(first) if first == last else f"{first} to {last}"
        self._log("entry %s of ledger %d is damaged (%s): %s", span, ledger_id, where, reason)
        if self.queue is not None:
            self.queue.damaged(ledger_id, first, last, reason)

    def _log(self, message: str, *arguments: object) -> None:
        self._logged += 1
        if self._logged <= _MAX_LOGGED:
            _log.error(message, *arguments)
        if self._logged == _MAX_LOGGED:
            _log.error("more damage is only counted (damaged_entries, damage_found)")

    def covers(self, ledger_id: int, entry_id: int) -> bool:
        """Whether the entry is known to be damaged."""
        ranges = self._ranges.get(ledger_id, {})
        return any(known.covers(entry_id, entry_id) for known in ranges.values())

    def has_any(self, ledger_id: int) -> bool:
        """Whether any entry of the ledger is known to be damaged."""
        return ledger_id in self._ranges

    def ledgers(self) -> dict[int, list[DamagedRange]]:
        """All that is known, by ledger."""
        return {
            ledger_id: sorted(
                DamagedRange(first, last, where, reason)
                for (where, reason), known in ranges.items()
                for first, last in known
            )
            for ledger_id, ranges in self._ranges.items()
        }

    def files(self) -> dict[str, str]:
        """Damaged files and why."""
        return dict(self._files)

    def repaired(self, ledger_id: int, first: int, last: int) -> None:
        """Entries `first` to `last` were written again, or found good."""
        ranges = self._ranges.get(ledger_id)
        if ranges is not None:
            self.healed += self._take_out(ranges, first, last)
            if not ranges:
                self.deleted(ledger_id)

    def deleted(self, ledger_id: int) -> None:
        """The ledger was deleted, or all of it was repaired."""
        if self._ranges.pop(ledger_id, None) is not None and self.queue is not None:
            self.queue.resolved(ledger_id)

    def forget_file(self, path: str) -> None:
        """A damaged file was replaced or deleted."""
        self._files.pop(path, None)

    def stop(self) -> None:
        """The bookie stops or has failed: failed reads are no findings from now on."""
        self._over = True

    def figures(self) -> dict[str, int]:
        """For metrics: what is damaged now, and what was ever found."""
        return {
            "damaged_ledgers": len(self._ranges),
            "damaged_entries": sum(
                known.members for ranges in self._ranges.values() for known in ranges.values()
            ),
            "damaged_files": len(self._files),
            "damage_found": self.found,
            "damage_healed": self.healed,
            "damage_unrecorded": self.unrecorded,
        }

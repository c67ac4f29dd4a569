"""All journals of a bookie as one: which ledger belongs to which journal, and the position of each journal.

A ledger's records go to the journal `ledger_id % count`, so their order is that of one file. The positions are a vector: a
checkpoint covers every journal, and each releases its files by its own component of the mark alone (rule 3).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from magnetar.proto.errors import MagnetarError

from ..mark import JournalPosition, Mark
from ..metrics import Distribution, Histogram
from .journal import Journal


class Journals:
    """One journal or more, by the names of their directories, in the order of the settings.

    `take_sequence` gives numbers for their files: no two files ever have the same one.
    """

    def __init__(self, journals: Mapping[str, Journal], take_sequence: Callable[[], int]) -> None:
        self.by_name = dict(journals)
        self.take_sequence = take_sequence
        self.all = tuple(self.by_name.values())
        self._count = len(self.all)

    def of(self, ledger_id: int) -> Journal:
        """Where this ledger's records go, as long as this process lives. 0.1 us."""
        return self.all[ledger_id % self._count]

    def on_failure(self, callback: Callable[[MagnetarError], None]) -> None:
        """The first failure of any journal ends the bookie; each calls back once. Now, if it has failed already."""
        for journal in self.all:
            journal.on_failure = callback
            if journal.failure is not None:
                callback(journal.failure)

    def on_space(self, callback: Callable[[], None]) -> None:
        """Called when `no_space` may have changed."""
        for journal in self.all:
            journal.on_space = callback

    @property
    def no_space(self) -> bool:
        """True while a journal's disk is full: the bookie is read-only then (rule 12)."""
        return any(journal.no_space for journal in self.all)

    def stalled(self) -> tuple[float, str]:
        """The journal in which records have waited longest without any becoming durable: seconds, directory."""
        return max((journal.stalled_s, journal.directory) for journal in self.all)

    def durable_positions(self) -> dict[str, JournalPosition]:
        """Everything before them is durable, and was in the write cache before it was written (rule 1)."""
        return {name: journal.durable_position() for name, journal in self.by_name.items()}

    def release(self, mark: Mark) -> None:
        """Each journal releases its files before its position. Only after the mark is durable (rule 2)."""
        for name, journal in self.by_name.items():
            journal.release(mark[name])

    def stats(self) -> dict[str, int]:
        """Sums over the journals; `journal_queue_*` is what is on its way to the disk."""
        queued = [journal.queued for journal in self.all]
        return {
            "journals": self._count,
            "journal_files": sum(len(journal.files) for journal in self.all),
            "journal_end_offset": sum(journal.device.end_offset for journal in self.all),
            "journal_records": sum(journal.records for journal in self.all),
            "journal_groups": sum(journal.groups for journal in self.all),
            "journal_bytes": int(sum(journal.device.group_bytes.total for journal in self.all)),
            "journal_syncs": sum(journal.device.sync_seconds.count for journal in self.all),
            "journal_rolls": sum(journal.rolls for journal in self.all),
            "journal_queue_records": sum(records for records, _ in queued),
            "journal_queue_bytes": sum(size for _, size in queued),
            "journal_no_space": int(self.no_space),
            "journal_stalled_ms": int(self.stalled()[0] * 1000),
        }

    def histograms(self) -> list[Distribution]:
        """By directory: how long syncs take, and how much one makes durable."""
        shown: tuple[tuple[str, str, Callable[[Journal], Histogram]], ...] = (
            ("journal_sync_seconds", "syncs of a journal", lambda journal: journal.device.sync_seconds),
            (
                "journal_group_entries",
                "records that one sync made durable",
                lambda journal: journal.group_records,
            ),
            (
                "journal_group_bytes",
                "bytes that one sync made durable",
                lambda journal: journal.device.group_bytes,
            ),
        )
        return [
            Distribution(name, text, "journal", {key: of(journal) for key, journal in self.by_name.items()})
            for name, text, of in shown
        ]

    def stop(self, error: MagnetarError) -> None:
        """The bookie has failed: nothing is acknowledged any more."""
        for journal in self.all:
            journal.stop(error)

    async def close(self) -> None:
        """Waits until everything appended is durable and acknowledged."""
        results = await asyncio.gather(*[journal.close() for journal in self.all], return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

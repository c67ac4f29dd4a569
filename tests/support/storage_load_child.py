"""A real bookie that flushes, rolls, collects and compacts all the time, to be killed.

    python -m support.storage_load_child DIRECTORY MODE FIRST-GENERATION

A generation is four ledgers of ENTRIES entries each, interleaved, over two journals and two ledger directories. Two
generations later all but the first of the four are deleted, and the first is fenced. Writes lines to its standard output:
"writers PID PID", then "acked LEDGER ENTRY", "fenced LEDGER", "deleted LEDGER" (before anybody may delete it), and
"collected LOGS COMPACTED" for each round of garbage collection. Ends with exit code 3 when the bookie fails.
"""

import asyncio
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import replace

import uvloop

from magnetar.bookie import Bookie, BookieSettings, open_bookie, os_components
from magnetar.bookie.status import bookie_figures
from magnetar.proto.errors import MagnetarError
from support.bookie_kit import KIB, entry, small_settings
from support.lossy import lossy_components

ENTRIES = 40
IN_FLIGHT = 48


class DeletedLedgers:
    """The metadata store: everything exists but these."""

    def __init__(self, ledgers: Sequence[int] = ()) -> None:
        self.ledgers = dict.fromkeys(ledgers)

    async def next_ledger_id(self) -> int:
        """See ExistingLedgers: above all that there are."""
        return 1 << 62

    async def missing(self, ledger_ids: Sequence[int]) -> list[int]:
        """See ExistingLedgers."""
        return [ledger_id for ledger_id in ledger_ids if ledger_id in self.ledgers]


def payload(ledger_id: int, number: int) -> bytes:
    """What entry `number` holds: from a few bytes to pages."""
    return b"%d:%d." % (ledger_id, number) * (1 + (ledger_id * 31 + number) * 7919 % 700)


def settings(directory: str) -> BookieSettings:
    """Everything small and often."""
    return small_settings(
        f"{directory}/data",
        journal_directories=(f"{directory}/journal-a", f"{directory}/journal-b"),
        ledger_directories=(f"{directory}/ledgers-a", f"{directory}/ledgers-b"),
        journal_file_bytes=256 * KIB,
        journal_spare_bytes=1024 * KIB,
        entry_log_bytes=96 * KIB,
        checkpoint_interval_s=0.03,
        gc_interval_s=0.05,
        minor_compaction_interval_s=0.05,
        minor_compaction_threshold=0.5,
        major_compaction_interval_s=0.05,
        major_compaction_threshold=0.8,
        compaction_bytes_per_s=0,
    )


async def open_loaded_bookie(directory: str, mode: str, deleted: DeletedLedgers) -> Bookie:
    """With its processes, and a metadata store that knows what is deleted."""
    components = (lossy_components if mode == "lossy" else os_components)(random.Random(1))
    return await open_bookie(settings(directory), replace(components, existing_ledgers=deleted))


class Load:
    """Adds until it is killed."""

    def __init__(self, bookie: Bookie, deleted: DeletedLedgers) -> None:
        self.bookie = bookie
        self.deleted = deleted
        self.lines = os.fdopen(1, "w", buffering=1)
        self.room = asyncio.Semaphore(IN_FLIGHT)

    def added(self, ledger_id: int, number: int, code: int) -> None:
        """Called when an add is durable."""
        self.room.release()
        if code == 0:
            self.lines.write(f"acked {ledger_id} {number}\n")

    async def run(self, generation: int) -> None:
        """Generation after generation."""
        first = generation
        while True:
            for number in range(ENTRIES):
                for ledger_id in range(generation * 4, generation * 4 + 4):
                    await self.room.acquire()
                    data = entry(ledger_id, number, payload(ledger_id, number))
                    self.bookie.add(data, recovery=False, done=self.added)
            if generation >= first + 2:
                await self.finish(generation - 2)
            generation += 1

    async def finish(self, generation: int) -> None:
        """One of its ledgers is closed, the others are deleted."""
        await self.bookie.fence(generation * 4)
        self.lines.write(f"fenced {generation * 4}\n")
        for ledger_id in range(generation * 4 + 1, generation * 4 + 4):
            self.lines.write(f"deleted {ledger_id}\n")
            self.deleted.ledgers[ledger_id] = None
        stats = bookie_figures(self.bookie)
        self.lines.write(f"collected {stats['gc_deleted_logs']} {stats['compaction_logs']}\n")


async def main(directory: str, mode: str, first: int) -> None:
    """Opens, and loads until the end."""
    deleted = DeletedLedgers()
    bookie = await open_loaded_bookie(directory, mode, deleted)

    def failed(error: MagnetarError) -> None:
        sys.stderr.write(f"{error}\n")
        os._exit(3)

    bookie.on_failure = failed
    load = Load(bookie, deleted)
    writers = [journal.device.writer_pid for journal in bookie.journals.all]  # type: ignore[attr-defined]
    load.lines.write(f"writers {' '.join(map(str, writers))}\n")
    await load.run(first)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))

"""Data directories of real bookies, for the operator's commands: one that stopped, one that was killed."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from magnetar.bookie import Bookie, BookieSettings
from magnetar.bookie.index.locations import location_pages
from magnetar.bookie.offline.journals import walk_journals
from magnetar.bookie.offline.stopped import StoppedBookie
from magnetar.runtime.files import OsFiles
from support.bookie_kit import KIB, add_all, entry, open_real, small_settings
from support.running_copy import copy_running

T = TypeVar("T")

# Entries by ledger: (count, payload bytes). Ledger 3 is fenced, 4 only has an explicit LAC, 5 only a fence.
LEDGERS = {1: (60, 100), 2: (30, 8 * KIB), 3: (10, 1000)}
# Added after the last checkpoint: they stand in the journals only in the killed one.
LATER = {1: (60, 75), 6: (0, 5)}
CHECKPOINT_S = 3600.0  # only those that are asked for


def rows(walk: Iterable[dict[str, Any]]) -> list[SimpleNamespace]:
    """What a dump prints, its keys as attributes."""
    return [SimpleNamespace(**row) for row in walk]


def payload(ledger_id: int, entry_id: int, size: int) -> bytes:
    """What an entry holds: text that says where it belongs."""
    text = b"<%d:%d>" % (ledger_id, entry_id)
    return (text * (size // len(text) + 1))[:size]


def entries_of(ledger_id: int) -> dict[int, bytes]:
    """Every ledger entry that both images have of a ledger."""
    count, size = LEDGERS.get(ledger_id, (0, 100))
    found = {number: entry(ledger_id, number, payload(ledger_id, number, size)) for number in range(count)}
    for number in range(*LATER.get(ledger_id, (0, 0))):
        found[number] = entry(ledger_id, number, payload(ledger_id, number, 500))
    return found


async def fill(bookie: Bookie) -> None:
    """All of LEDGERS, the states, a checkpoint, then LATER."""
    for ledger_id, (count, _) in LEDGERS.items():
        known = entries_of(ledger_id)
        for start in range(0, count, 20):
            codes = await add_all(bookie, [known[number] for number in range(start, min(start + 20, count))])
            assert not any(codes)
    await bookie.write_last_confirmed(4, 17)
    await bookie.fence(3)
    await bookie.fence(5)
    await bookie.checkpoint()
    for ledger_id, (first, last) in LATER.items():
        known = entries_of(ledger_id)
        assert not any(await add_all(bookie, [known[number] for number in range(first, last)]))


def make_images(directory: Path, **changes: Any) -> tuple[Path, Path]:
    """(stopped, killed): the killed one is a copy of the files as they were while the bookie ran."""
    killed, stopped = directory / "killed", directory / "stopped"

    async def make() -> None:
        bookie = await open_real(str(stopped), checkpoint_interval_s=CHECKPOINT_S, **changes)
        try:
            await fill(bookie)
            copy_running(stopped, killed)
        finally:
            await bookie.close()

    asyncio.run(make())
    return stopped, killed


def settings_of(directory: Path, **changes: Any) -> BookieSettings:
    """As the images were made with."""
    return small_settings(str(directory), **changes)


def with_stopped(directory: Path, work: Callable[[StoppedBookie], T], **changes: Any) -> T:
    """Opens, works, closes."""

    async def main() -> T:
        with await StoppedBookie.open(settings_of(directory, **changes), OsFiles()) as bookie:
            return work(bookie)

    return asyncio.run(main())


def totals(bookie: StoppedBookie) -> dict[int, int]:
    """How many entries of each ledger are here: those that the index has, and those that a start would replay."""
    found = {row[:2] for row in chain.from_iterable(location_pages(bookie.index))}
    replayed = (item for item in rows(walk_journals(bookie, from_mark=True)) if item.kind == "record")
    found |= {(item.ledger_id, item.entry_id) for item in replayed if item.type == "ADD"}
    return Counter(ledger_id for ledger_id, _ in found)


def trace_of(directory: Path) -> dict[str, tuple[str, int]]:
    """Every name below a directory with a hash of its bytes and its time of change. The lock file says who holds it."""
    return {
        str(path.relative_to(directory)): (
            hashlib.blake2b(path.read_bytes()).hexdigest() if path.is_file() else "",
            path.stat().st_mtime_ns,
        )
        for path in sorted(directory.rglob("*"))
        if path.name != "LOCK" or path.parent != directory
    }


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Bit rot."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def entry_logs(directory: Path) -> list[Path]:
    """By id."""
    return sorted((directory / "ledgers").glob("entrylog-*.log"))


def journals(directory: Path) -> Iterator[Path]:
    """By sequence."""
    yield from sorted((directory / "journal").glob("journal-*.log"))

"""Bookies whose garbage is collected: a metadata store in a dictionary, small logs, and a look at what is on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from magnetar.bookie import Bookie, open_bookie
from magnetar.proto.errors import MagnetarError
from magnetar.runtime.files import Files, OsFiles
from support.bookie_kit import KIB, add_all, crash, entry, model_components, small_settings
from support.bookies import StillClock
from support.index_model import ModelStorage

DAY_MS = 86_400_000


class Existing:
    """Metadata: the ledgers that exist, in a dictionary. An ExistingLedgers."""

    def __init__(self) -> None:
        self.ledgers: dict[int, None] = {}
        self.error: MagnetarError | None = None
        # Called before an answer is given.
        self.asked: Callable[[], None] | None = None
        self.questions = 0
        self.next_id = 1 << 62

    async def next_ledger_id(self) -> int:
        """Above all."""
        if self.error is not None:
            raise self.error
        return self.next_id

    async def missing(self, ledger_ids: Sequence[int]) -> list[int]:
        """Those that are not in the dictionary."""
        self.questions += 1
        if self.asked is not None:
            self.asked()
        if self.error is not None:
            raise self.error
        return [ledger_id for ledger_id in ledger_ids if ledger_id not in self.ledgers]


class Collected:
    """Opens the bookie of one directory again and again."""

    def __init__(self, directory: Path | str, files: Files | None = None) -> None:
        self.directory = str(directory)
        self.files = files if files is not None else OsFiles()
        self.storage = ModelStorage()
        self.existing: Existing | None = Existing()
        self.clock = StillClock(1_000 * DAY_MS)
        self.bookie: Bookie | None = None

    async def open(self, **changes: Any) -> Bookie:
        """Logs of 16 KiB, no throttle, no round but those asked for."""
        settings = {"entry_log_bytes": 16 * KIB, "compaction_bytes_per_s": 0, "gc_interval_s": 0.0} | changes
        components = replace(
            model_components(self.storage, self.files), existing_ledgers=self.existing, clock=self.clock
        )
        self.bookie = await open_bookie(small_settings(self.directory, **settings), components)
        return self.bookie

    async def reopen(self, **changes: Any) -> Bookie:
        """After a clean stop."""
        assert self.bookie is not None
        await self.bookie.close()
        return await self.open(**changes)

    async def crash_and_open(self, **changes: Any) -> Bookie:
        """After kill -9."""
        assert self.bookie is not None
        crash(self.bookie)
        return await self.open(**changes)

    async def close(self) -> None:
        """Ends the last one."""
        if self.bookie is not None and self.bookie.failure is None:
            await self.bookie.close()

    async def write(self, ledgers: Sequence[int], numbers: range, size: int = 1000) -> None:
        """Adds entries to ledgers that exist, interleaved, and flushes them, about one log at a time."""
        assert self.bookie is not None
        for ledger_id in ledgers:
            if self.existing is not None:
                self.existing.ledgers[ledger_id] = None
        step = max(1, 16 * KIB // (size * len(ledgers)))
        for start in range(0, len(numbers), step):
            part = numbers[start : start + step]
            codes = await add_all(
                self.bookie, [data(ledger_id, number, size) for number in part for ledger_id in ledgers]
            )
            assert not any(codes)
            await self.bookie.checkpoint()

    def names(self) -> list[str]:
        """What stands in the ledger directories, cookies apart."""
        assert self.bookie is not None
        found = [name for path in self.bookie.layout.ledgers for name in self.files.list(path)]
        return sorted(name for name in found if name.startswith("entrylog-"))

    def log_bytes(self) -> int:
        """Bytes of all entry logs."""
        assert self.bookie is not None
        return sum(info.bytes for info in self.bookie.logs.logs())

    async def check(self, ledger_id: int, numbers: range, size: int = 1000) -> None:
        """All of them can be read."""
        assert self.bookie is not None
        for number in numbers:
            entries, _ = await self.bookie.read(ledger_id, number, number)
            assert entries == [data(ledger_id, number, size)]


def data(ledger_id: int, number: int, size: int = 1000) -> bytes:
    """An entry whose payload tells which it is."""
    return entry(ledger_id, number, (b"%d:%d." % (ledger_id, number) * size)[:size])


def flip(path: str, offset: int) -> None:
    """Damages one byte of a file on the real disk."""
    fd = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([byte[0] ^ 0xFF]), offset)
    finally:
        os.close(fd)

"""Catching planted defects of the storage path, and those that several files of tests plant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from magnetar.bookie.checkpoint import Checkpointer
from support.inline_devices import InlineJournalDevice
from support.sim import SimulationFailed
from support.storage_check import Broken

Patch = pytest.MonkeyPatch
# 10 s of the wide workload; most defects are found within 50.
MOST_CHECKS = 600


def caught_after(checks: Iterator[Callable[[], Any]]) -> int:
    """Checks until the first that fails; they are spread, as neighbours tell the same."""
    try:
        every = list(checks)
    except Broken as error:  # the workload finds it even without a crash
        print(f"without a crash: {str(error)[:200]}")
        return 1
    step = 101
    while len(every) % step == 0:
        every.pop()
    for tried in range(min(len(every), MOST_CHECKS)):
        try:
            every[tried * step % len(every)]()
        except (Broken, SimulationFailed) as error:
            print(f"after {tried + 1} checks: {str(error)[:200]}")
            return tried + 1
    raise AssertionError(f"the planted defect passed {min(len(every), MOST_CHECKS)} checks")


def mark_before_flush(patch: Patch) -> None:
    """Rule 2: the mark is persisted before what it covers is durable."""
    real = Checkpointer._work

    async def work(self: Checkpointer, item: Any) -> Any:
        moved = await self.move_mark(item.mark) if item.mark is not None else None
        return await real(self, item) or moved

    patch.setattr(Checkpointer, "_work", work)


def journal_released_before_the_flush(patch: Patch) -> None:
    """Rule 2: old journals are let go of when the checkpoint begins."""
    real = Checkpointer.run

    async def run(self: Checkpointer, take_mark: Any) -> Any:
        if take_mark is not None:
            take_mark.__self__.release(take_mark())
        return await real(self, take_mark)

    patch.setattr(Checkpointer, "run", run)


def acknowledged_before_the_sync(patch: Patch) -> None:
    """Rule 4: the journal's bytes are written, but not synced, when they are reported durable."""

    def write(self: InlineJournalDevice, parts: list[bytes]) -> None:
        real_sync = self._sync_data
        self._sync_data = False
        try:
            real_write(self, parts)
        finally:
            self._sync_data = real_sync

    real_write = InlineJournalDevice._write
    patch.setattr(InlineJournalDevice, "_write", write)

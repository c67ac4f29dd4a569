"""A bookie whose process lives and whose journal hangs: it says so, to peers, to /health and to /metrics."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from magnetar.bookie.journal.device import JournalDevice
from magnetar.bookie.status import bookie_figures, bookie_info, bookie_problems
from support.bookie_kit import add, add_all, entry, open_inline, open_real, until
from support.index_model import ModelStorage
from support.inline_devices import InlineJournalDevice


def writer_pid(device: JournalDevice) -> int:
    """Of a real device."""
    pid: int = device.writer_pid  # type: ignore[attr-defined]
    return pid


@pytest.mark.real
async def test_a_journal_that_hangs_is_told_while_adds_wait_and_no_longer(tmp_path: Path) -> None:
    bookie = await open_real(str(tmp_path), journal_stall_s=0.2)
    try:
        assert await add(bookie, entry(1, 0)) == 0
        assert bookie_info(bookie)["journal_stalled_s"] == 0
        pid = writer_pid(bookie.journals.all[0].device)
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(0.25)
            assert bookie_info(bookie)["journal_stalled_s"] == 0, "nothing waits: idle is not hung"
            assert bookie_problems(bookie) == {}
            waiting = asyncio.create_task(add_all(bookie, [entry(1, number) for number in range(1, 10)]))
            await until(lambda: "journal_stalled" in bookie_problems(bookie))
            assert bookie_info(bookie)["journal_stalled_s"] >= 0.2
            problem = bookie_problems(bookie)["journal_stalled"]
            assert str(tmp_path / "journal") in problem
            assert "journal_stall_s=0.2" in problem
            stats = bookie_figures(bookie)
            assert stats["journal_stalled_ms"] >= 200
        finally:
            os.kill(pid, signal.SIGCONT)
        assert await waiting == [0] * 9
        assert bookie_info(bookie)["journal_stalled_s"] == 0
        assert bookie_problems(bookie) == {}
    finally:
        await bookie.close()


async def test_a_journal_that_is_slow_and_goes_on_does_not_hang(tmp_path: Path) -> None:
    """The clock starts again with whatever becomes durable, however long the queue is."""
    bookie = await open_inline(str(tmp_path), ModelStorage())
    journal = bookie.journals.all[0]
    await until(lambda: not journal.queued[0])
    device = journal.device
    assert isinstance(device, InlineJournalDevice)
    now = 0.0
    journal._now = lambda: now
    write_groups, device._write_groups = device._write_groups, lambda: None  # type: ignore[method-assign]
    adding = [asyncio.create_task(add(bookie, entry(1, 0)))]
    for number in range(1, 30):
        adding.append(asyncio.create_task(add(bookie, entry(1, number))))
        await asyncio.sleep(0)
        now += 0.15
        assert bookie_info(bookie)["journal_stalled_s"] == pytest.approx(0.15)
        journal._durable(journal._pending[0][0])
    device._write_groups = write_groups  # type: ignore[method-assign]
    write_groups()
    assert not any(await asyncio.gather(*adding))
    await bookie.close()

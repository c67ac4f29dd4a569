"""A bookie without its checkpoints, disk watch, garbage collection or scrub stops loudly: it could not serve for long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from magnetar.bookie import Bookie
from magnetar.bookie.gc.collector import Collector
from magnetar.bookie.journal.journal import Journal
from magnetar.bookie.scrub.scrubber import Scrubber
from magnetar.proto.errors import StorageFailed
from support.bookie_kit import add, entry, open_inline
from support.index_model import ModelStorage

PARTS = [
    (Bookie, "_checkpoint_forever", "bookie checkpoints"),
    (Bookie, "_watch_disk", "bookie disk watch"),
    (Collector, "run", "bookie garbage collection"),
    (Scrubber, "run", "bookie scrub"),
]
ENDS: list[Callable[[], BaseException | None]] = [
    lambda: ValueError("a defect"),
    lambda: asyncio.CancelledError("something that it waited for"),
    lambda: None,
]


@pytest.mark.parametrize("make", ENDS, ids=["raises", "is cancelled from elsewhere", "returns"])
@pytest.mark.parametrize(("owner", "method", "name"), PARTS, ids=[name for _, _, name in PARTS])
async def test_rule_46_a_bookie_whose_work_ends_stops_and_says_so(
    owner: type[Any],
    method: str,
    name: str,
    make: Callable[[], BaseException | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def ends(_: object) -> None:
        if (error := make()) is not None:
            raise error

    monkeypatch.setattr(owner, method, ends)
    bookie = await open_inline(
        str(tmp_path / "b"), ModelStorage(), scrub_interval_s=3600.0, scrub_bytes_per_s=1000
    )
    failed: list[Exception] = []
    bookie.on_failure = failed.append
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert isinstance(bookie.failure, StorageFailed)
    assert f"{name} ended" in str(bookie.failure)
    assert failed == [bookie.failure]
    assert any(
        record.levelno == logging.CRITICAL and name in record.getMessage() for record in caplog.records
    )
    with pytest.raises(StorageFailed):
        await bookie.read(1, 0, 0)
    assert await add(bookie, entry(1, 0)) == StorageFailed.code
    await bookie.close()


@pytest.mark.parametrize("make", ENDS, ids=["raises", "is cancelled from elsewhere", "returns"])
async def test_rule_46_a_journal_that_prepares_no_more_files_stops_its_bookie(
    make: Callable[[], BaseException | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ends(_: object) -> None:
        if (error := make()) is not None:
            raise error

    monkeypatch.setattr(Journal, "_prepare_files", ends)
    bookie = await open_inline(str(tmp_path / "b"), ModelStorage())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert "the preparation of journal files" in str(bookie.failure)
    await bookie.close()

"""What a running bookie answers to `magnetar bookie ...`: from memory and disk, in slices, with damage named."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from magnetar.bookie import Bookie
from magnetar.bookie.shell import BookieShell
from magnetar.proto.errors import (
    BookieReadOnly,
    DataDirectoryError,
    InvalidArgument,
    LedgerNotFound,
    ServiceNotReady,
)
from support.bookie_kit import KIB, add, add_all, entry, open_inline, open_real
from support.index_model import ModelStorage


async def asked(bookie: Bookie, command: str, **arguments: Any) -> list[dict[str, Any]]:
    shell = BookieShell(bookie)
    known = shell.queries() | shell.changes()
    return [found async for found in known[command]({name: str(value) for name, value in arguments.items()})]


@pytest.mark.real
async def test_what_is_in_memory_and_what_was_flushed(tmp_path: Path) -> None:
    bookie = await open_real(str(tmp_path), checkpoint_interval_s=1000.0)
    assert not any(await add_all(bookie, [entry(1, number) for number in range(10)]))
    await bookie.fence(2)
    await bookie.checkpoint()
    assert not any(await add_all(bookie, [entry(1, number) for number in range(10, 15)]))
    assert not any(await add_all(bookie, [entry(3, 7)]))
    rows = {row["ledger_id"]: row for row in await asked(bookie, "ledgers")}
    assert {ledger: row["state"] for ledger, row in rows.items()} == {1: "open", 2: "fenced", 3: "open"}
    assert (rows[1]["entries"], rows[1]["journaled_entries"], rows[1]["ranges"]) == (10, 5, [(0, 14)])
    assert (rows[3]["entries"], rows[3]["journaled_entries"], rows[3]["last_entry"]) == (0, 1, 7)
    assert await asked(bookie, "ledgers", ledger=1) == [rows[1]]
    found = await asked(bookie, "read", ledger=1, first=8, last=11)
    assert [(row["entry_id"], row["source"]) for row in found] == [
        (8, "entry log"),
        (9, "entry log"),
        (10, "write cache"),
        (11, "write cache"),
    ]
    assert [base64.b64decode(row["data"]) for row in found] == [entry(1, number) for number in range(8, 12)]
    kinds = [row["kind"] for row in await asked(bookie, "journal")]
    assert kinds.count("record") > 5
    log = await asked(bookie, "entrylog", log="1")
    assert (log[0]["kind"], log[-1]["kind"], log[-1]["live"]) == ("header", "statistics", 10)
    (info,) = await asked(bookie, "info")
    assert (info["running"], info["problem"]) == (True, "")
    await bookie.close()


@pytest.mark.real
async def test_journals_that_are_released_and_written_meanwhile_are_not_called_damaged(
    tmp_path: Path,
) -> None:
    bookie = await open_real(str(tmp_path), checkpoint_interval_s=1000.0, journal_file_bytes=16 * KIB)

    async def fill(first: int) -> None:
        for start in range(first, first + 60, 10):
            assert not any(await add_all(bookie, [entry(1, n, bytes(500)) for n in range(start, start + 10)]))

    await fill(0)
    shell = BookieShell(bookie)
    outcomes: list[str] = []
    for turn in range(3):
        walk = shell.queries()["journal"]({})
        kinds: list[str] = []
        try:
            async for found in walk:
                kinds.append(found["kind"])
                assert not (found["kind"] == "gap" and found["verdict"].startswith("damage")), found
                if len(kinds) == 5:
                    await fill(60 * (turn + 1))
                    if turn:
                        await bookie.checkpoint()
                        await fill(600 + 60 * turn)
                        await bookie.checkpoint()
            outcomes.append("whole")
        except ServiceNotReady as error:
            outcomes.append("released" if "ask again" in error.message else error.message)
    assert outcomes[0] == "whole"
    assert set(outcomes) <= {"whole", "released"}
    await bookie.close()


@pytest.mark.real
async def test_damage_is_told(tmp_path: Path) -> None:
    bookie = await open_real(str(tmp_path), checkpoint_interval_s=1000.0)
    assert not any(await add_all(bookie, [entry(1, number) for number in range(3)]))
    await bookie.checkpoint()
    await bookie.scrubber.verify_everything()
    (sound,) = await asked(bookie, "verify")
    assert (sound["sound"], sound["findings"]) == (True, [])
    location = bookie.index.get(1, 1)
    assert location is not None
    with (tmp_path / "ledgers" / f"entrylog-{location.log_id:08x}.log").open("r+b") as file:
        file.seek(location.offset + 60)
        file.write(b"\xff")
    found = await asked(bookie, "read", ledger=1)
    assert [bool(row["damage"]) for row in found] == [False, True, False]
    (damaged,) = await asked(bookie, "verify")
    assert damaged["sound"] is False
    assert [(row["ledger_id"], row["entry_id"]) for row in damaged["findings"]] == [(1, 1)]
    await bookie.close()


async def test_read_only_at_once_and_back(tmp_path: Path) -> None:
    storage = ModelStorage()
    bookie = await open_inline(str(tmp_path), storage, disk_check_interval_s=1000.0)
    (answer,) = await asked(bookie, "convert-to-read-only", reason="it is old")
    assert (answer["read_only"], answer["read_only_reason"]) == (True, "it is old")
    assert await add(bookie, entry(1, 0)) == BookieReadOnly.code
    await bookie.close()
    bookie = await open_inline(str(tmp_path), storage, disk_check_interval_s=1000.0)
    assert await add(bookie, entry(1, 0)) == BookieReadOnly.code
    (answer,) = await asked(bookie, "convert-to-read-only", undo="1")
    assert answer["read_only"] is False
    assert await add(bookie, entry(1, 0)) == 0
    await bookie.close()


async def test_wrong_questions(tmp_path: Path) -> None:
    bookie = await open_inline(str(tmp_path), ModelStorage())
    for name in ("ledgers", "read"):
        with pytest.raises(LedgerNotFound):
            await asked(bookie, name, ledger=9)
        with pytest.raises(InvalidArgument, match="ledger is '-1'"):
            await asked(bookie, name, ledger=-1)
    with pytest.raises(DataDirectoryError, match="no entry log"):
        await asked(bookie, "entrylog", log="7")
    with pytest.raises(DataDirectoryError, match="no journal directory 3"):
        await asked(bookie, "journal", journal=3)
    await bookie.close()

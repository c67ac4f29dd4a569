"""Entry logs of a stopped bookie: every record, live or not, and damage told from what was torn."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from magnetar.bookie.offline.entry_logs import find_log, walk_entry_log
from magnetar.bookie.offline.verify import verify
from magnetar.proto.errors import DataDirectoryError
from support.bookie_kit import add, entry, open_real
from support.offline_kit import entry_logs, flip, rows, with_stopped

pytestmark = pytest.mark.real


def walked(directory: Path, log: Path) -> list[SimpleNamespace]:
    return with_stopped(directory, lambda bookie: rows(walk_entry_log(bookie, find_log(bookie, str(log)))))


def records(items: list[SimpleNamespace]) -> list[SimpleNamespace]:
    return [item for item in items if item.kind == "record"]


def end_of(items: list[SimpleNamespace]) -> SimpleNamespace:
    assert items[-1].kind == "statistics"
    return items[-1]


def test_every_record_of_every_log_is_live(stopped: Path) -> None:
    total = 0
    for log in entry_logs(stopped):
        items = walked(stopped, log)
        assert items[0].kind == "header"
        assert not items[0].damage
        entries = [one for one in records(items) if one.type == "entry"]
        assert all(one.live for one in entries)
        end = end_of(items)
        assert (end.live, end.footer, end.damaged, end.torn_bytes) == (len(entries), True, 0, 0)
        assert sum(row["bytes"] for row in end.ledgers) == end.record_bytes
        total += len(entries)
    assert total == 60 + 30 + 10 + 15 + 5


def test_states_are_shown(stopped: Path) -> None:
    states = [
        one for log in entry_logs(stopped) for one in records(walked(stopped, log)) if one.type == "state"
    ]
    assert {(one.ledger_id, one.state.fenced) for one in states if one.state} >= {(3, True), (5, True)}
    assert any("explicit LAC 17" in one.content for one in states if one.ledger_id == 4)


def test_a_damaged_record_is_told_with_its_place(stopped: Path) -> None:
    log = entry_logs(stopped)[0]
    victim = next(one for one in records(walked(stopped, log)) if one.type == "entry")
    flip(log, victim.position + 60)
    broken = [item for item in walked(stopped, log) if item.kind == "broken"]
    assert [(one.position, one.torn, one.live) for one in broken] == [(victim.position, False, True)]


def test_a_damaged_footer_is_told(stopped: Path) -> None:
    log = entry_logs(stopped)[0]
    flip(log, log.stat().st_size - 50)
    assert end_of(walked(stopped, log)).damage


def test_a_damaged_header_is_told(stopped: Path) -> None:
    log = entry_logs(stopped)[0]
    flip(log, 3)
    header = walked(stopped, log)[0]
    assert header.kind == "header"
    assert "does not begin as entry log" in header.damage


def test_garbage_behind_what_was_synced_is_a_torn_tail(killed: Path) -> None:
    log = entry_logs(killed)[-1]
    assert end_of(walked(killed, log)).footer is None
    with log.open("ab") as file:
        file.write(b"\x00" * 100 + b"half of a flush" * 50)
    items = walked(killed, log)
    assert [item.torn for item in items if item.kind == "broken"] == [True]


def test_a_log_is_found_by_id_name_and_path(stopped: Path) -> None:
    log = entry_logs(stopped)[0]
    number = int(log.stem.partition("-")[2], 16)
    for text in (f"{number:x}", f"{number:08x}", log.name, str(log)):
        assert with_stopped(stopped, lambda bookie, text=text: find_log(bookie, text).path) == str(log)  # type: ignore[misc]
    for text in ("ffff", "nonsense"):
        with pytest.raises(DataDirectoryError, match=f"no entry log {text}"):
            with_stopped(stopped, lambda bookie, text=text: find_log(bookie, text))  # type: ignore[misc]


def test_without_an_index_nothing_is_said_to_be_live(stopped: Path) -> None:
    (stopped / "index").rename(stopped / "aside")
    items = walked(stopped, entry_logs(stopped)[0])
    assert {one.live for one in records(items)} == {None}


def test_an_older_copy_of_an_entry_is_not_live(stopped: Path) -> None:
    async def add_again() -> None:
        bookie = await open_real(str(stopped))
        assert await add(bookie, entry(2, 5, b"as it was recovered", lac=5), recovery=True) == 0
        await bookie.close()

    asyncio.run(add_again())
    copies = [
        one
        for log in entry_logs(stopped)
        for one in records(walked(stopped, log))
        if (one.type, one.ledger_id, one.entry_id) == ("entry", 2, 5)
    ]
    assert [one.live for one in copies] == [False, True]
    assert with_stopped(stopped, verify).sound
    flip(Path(entry_logs(stopped)[0]), copies[0].position + 50)
    broken = [item for log in entry_logs(stopped) for item in walked(stopped, log) if item.kind == "broken"]
    assert [one.live for one in broken] == [False]
    findings = with_stopped(stopped, verify).findings
    assert [one.part for one in findings] == ["entry log"]  # no entry is lost, but the disk rots

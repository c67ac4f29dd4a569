"""Journals of a stopped bookie: the same verdicts as a start, without a start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from magnetar.bookie.journal.records import (
    RECORD_HEADER_BYTES,
    RecordType,
    encode_record_header,
    incarnation_of,
)
from magnetar.bookie.offline.journals import walk_journals
from magnetar.bookie.offline.verify import verify
from magnetar.proto.errors import DataDirectoryError, EntryNotFound
from support.bookie_kit import entry, open_real
from support.offline_kit import LATER, flip, journals, rows, with_stopped

pytestmark = pytest.mark.real


def walked(directory: Path, **options: object) -> list[SimpleNamespace]:
    return with_stopped(directory, lambda bookie: rows(walk_journals(bookie, **options)))  # type: ignore[arg-type]


def gaps(items: list[SimpleNamespace]) -> list[str]:
    return [item.verdict for item in items if item.kind == "gap"]


def records(items: list[SimpleNamespace]) -> list[SimpleNamespace]:
    return [item for item in items if item.kind == "record"]


def test_a_killed_bookie_is_dumped_record_by_record(killed: Path) -> None:
    items = walked(killed)
    assert items[0].kind == "journal"
    assert items[0].mark is not None
    adds = [(one.ledger_id, one.entry_id) for one in records(items) if one.type == "ADD"]
    assert [one for one in adds if one[0] == 6] == [(6, number) for number in range(*LATER[6])]
    assert gaps(items)[-1] == "clean end"
    assert set(gaps(items)[:-1]) <= {"complete"}
    offsets = [one.offset for one in records(items)]
    assert offsets == sorted(offsets)
    assert any(one.below_mark for one in records(items))


def test_from_mark_leaves_out_what_the_entry_logs_have(killed: Path) -> None:
    items = records(walked(killed, from_mark=True))
    adds = [(one.ledger_id, one.entry_id) for one in items if one.type == "ADD"]
    assert adds == [(ledger, number) for ledger in LATER for number in range(*LATER[ledger])]
    assert not any(one.below_mark for one in items)


def test_rule_05_what_stands_behind_a_torn_tail_is_not_replayed(killed: Path) -> None:
    """Pages of one unsynced write persist in any order: a good record may stand behind a gap, and no start takes it."""
    last = records(walked(killed))[-1]
    instance = with_stopped(killed, lambda bookie: bookie.cookie.instance)
    file = Path(last.path)
    incarnation = incarnation_of(instance, int(file.stem.removeprefix("journal-"), 16))
    end, gap = last.position + RECORD_HEADER_BYTES + last.payload_bytes, 100
    offset = last.offset + RECORD_HEADER_BYTES + last.payload_bytes
    stray = entry(9999, 0)
    header = encode_record_header(incarnation, offset + gap, offset, RecordType.ADD, stray)
    data = file.read_bytes()
    end += -end % 4096
    file.write_bytes(data[:end] + bytes(gap) + header + stray + data[end + gap + len(header + stray) :])
    items = walked(killed)
    assert gaps(items)[-2:] == ["torn tail", "clean end"]
    assert records(items)[-1].ledger_id == 9999
    assert with_stopped(killed, verify).sound

    async def start() -> None:
        bookie = await open_real(str(killed))
        with pytest.raises(EntryNotFound):
            await bookie.read(9999, 0, 0)
        await bookie.close()

    asyncio.run(start())


def test_rule_05_a_torn_tail_is_no_damage(killed: Path) -> None:
    last = records(walked(killed))[-1]
    while last.type == "SYNCED":  # written when nothing is to be acknowledged any more
        Path(last.path).write_bytes(Path(last.path).read_bytes()[: last.position])
        last = records(walked(killed))[-1]
    flip(Path(last.path), last.position + 50)
    items = walked(killed)
    assert gaps(items)[-1] == "torn tail"
    assert not any(item.kind == "gap" and item.damage for item in items)


def test_rule_05_damage_before_what_was_synced_is_damage(killed: Path) -> None:
    behind = [one for one in records(walked(killed, from_mark=True)) if one.type == "ADD"]
    first, last = behind[0], behind[-1]
    assert last.synced_to > first.offset
    flip(Path(first.path), first.position + 50)
    items = walked(killed)
    assert "damage" in gaps(items)


def test_damage_below_the_mark_is_told_as_such(killed: Path) -> None:
    below = [one for one in records(walked(killed)) if one.below_mark and one.type == "ADD"]
    flip(Path(below[-2].path), below[-2].position + 50)
    assert "damage below the mark" in gaps(walked(killed))
    assert "damage" not in gaps(walked(killed))


def test_a_missing_journal_is_told(killed: Path) -> None:
    mark = next(item for item in walked(killed) if item.kind == "journal").mark
    assert mark is not None
    path = killed / "journal" / f"journal-{mark['sequence']:016x}.log"
    path.unlink()
    states = {item.path: item.state for item in walked(killed) if item.kind == "file"}
    assert states[str(path)] == "missing"  # beside older ones, which may be there still


def test_one_file_alone_needed_or_not(killed: Path) -> None:
    for path in journals(killed):
        items = walked(killed, file=path.name)
        assert [item.path for item in items if item.kind == "file"] == [str(path)]
        assert all(item.kind != "journal" for item in items)
        state = next(item.state for item in items if item.kind == "file")
        assert bool(records(items)) == (state in ("needed", "unneeded"))


def test_what_is_not_there_is_named(killed: Path) -> None:
    with pytest.raises(DataDirectoryError, match="no journal file nope"):
        walked(killed, file="nope")
    with pytest.raises(DataDirectoryError, match="no journal directory 7"):
        walked(killed, journal=7)
    (killed / "mark").write_bytes(b"?" * 80)
    with pytest.raises(DataDirectoryError, match=r"mark .* is damaged"):
        walked(killed)


def test_a_stopped_bookie_has_nothing_to_replay(stopped: Path) -> None:
    assert records(walked(stopped))
    assert not records(walked(stopped, from_mark=True))

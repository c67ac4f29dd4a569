"""`verify`: what is sound is said to be sound, and no damage passes."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from magnetar.bookie.index import RocksLocationIndex
from magnetar.bookie.offline.journals import walk_journals
from magnetar.bookie.offline.verify import Verification, verify
from support.bookie_kit import add, entry, open_real
from support.golden_bookie import golden_settings
from support.offline_kit import entry_logs, fill, flip, rows, totals, trace_of, with_stopped
from support.running_copy import copy_running

PAGE = 4096
GOLDEN = Path(__file__).parents[3] / "golden" / "bookie"


def verified(directory: Path) -> Verification:
    return with_stopped(directory, verify)


def verdicts(result: Verification, part: str) -> set[str]:
    return {check.verdict for check in result.checks if check.part == part}


@pytest.mark.real
@pytest.mark.parametrize("image", ["stopped", "killed"])
def test_an_undamaged_bookie_is_sound(image: str, request: pytest.FixtureRequest) -> None:
    result = verified(request.getfixturevalue(image))
    assert result.sound, result.findings
    parts = {check.part for check in result.checks}
    assert parts == {
        "log ids",
        "cookie",
        "mark",
        "journal",
        "entry log",
        "index files",
        "index",
        "ledger records",
    }
    located = next(check for check in result.checks if check.part == "index")
    assert located.records == (120 if image == "stopped" else 100)


@pytest.mark.real
def test_a_bookie_that_was_repaired_is_sound(stopped: Path) -> None:
    async def repair() -> None:
        bookie = await open_real(str(stopped))
        await bookie.fencing.mark_unknown([1])
        await bookie.checkpoint()
        await bookie.fencing.mark_repaired([1])
        await bookie.checkpoint()
        await bookie.close()

    asyncio.run(repair())
    result = verified(stopped)
    assert result.sound, result.findings


@pytest.mark.real
def test_rule_05_a_torn_tail_is_sound(killed: Path) -> None:
    with entry_logs(killed)[-1].open("ab") as file:
        file.write(b"half of a flush" * 50)
    result = verified(killed)
    assert result.sound, result.findings
    assert "torn tail" in verdicts(result, "entry log")


@pytest.mark.real
def test_a_torn_tail_does_not_excuse_a_header_that_was_synced(killed: Path) -> None:
    log = entry_logs(killed)[-1]
    flip(log, 3)
    with log.open("ab") as file:
        file.write(b"half of a flush" * 50)
    result = verified(killed)
    assert any("does not begin as entry log" in found.text for found in result.findings), result.findings


@pytest.mark.real
def test_every_page_of_an_entry_log(stopped: Path) -> None:
    log = entry_logs(stopped)[0]
    good = log.read_bytes()
    for position in range(PAGE // 2, len(good), PAGE):
        flip(log, position, position % 8)
        result = verified(stopped)
        assert not result.sound, position
        flip(log, position, position % 8)
    assert log.read_bytes() == good


@pytest.mark.real
def test_damage_is_told_by_ledger_and_entry(stopped: Path) -> None:
    log = entry_logs(stopped)[0]
    flip(log, 64 + 40)
    result = verified(stopped)
    found = [finding for finding in result.findings if finding.part == "entry"]
    assert [(one.ledger_id, one.entry_id) for one in found] == [(1, 0)]
    assert found[0].path == str(log)


@pytest.mark.real
def test_rule_08_a_lost_log_damages_every_entry_of_it(stopped: Path) -> None:
    before = next(one.records for one in verified(stopped).checks if one.part == "index")
    for log in entry_logs(stopped):
        log.unlink()
    result = verified(stopped)
    assert len([one for one in result.findings if one.part == "entry"]) == before


@pytest.mark.real
@pytest.mark.parametrize("name", ["cookie", "mark", "log-ids"])
def test_a_damaged_cookie_or_mark(killed: Path, name: str) -> None:
    flip(killed / name, 20)
    result = verified(killed)
    assert not result.sound
    assert verdicts(result, name.replace("-", " ")) == {"damage"}


@pytest.mark.real
@pytest.mark.parametrize("name", ["cookie", "mark", "log-ids", "index", "journal", "ledgers"])
def test_what_is_missing(killed: Path, name: str) -> None:
    path = killed / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    assert not verified(killed).sound


@pytest.mark.real
def test_a_damaged_journal(killed: Path) -> None:
    adds = with_stopped(
        killed,
        lambda bookie: [
            item
            for item in rows(walk_journals(bookie, from_mark=True))
            if item.kind == "record" and item.type == "ADD"
        ],
    )
    flip(Path(adds[0].path), adds[0].position + 50)
    result = verified(killed)
    assert not result.sound
    assert "damage" in verdicts(result, "journal")
    assert len(result.findings) == 1
    assert 0 <= adds[0].position - result.findings[0].position < PAGE  # the padding before it is no record


@pytest.mark.real
def test_a_damaged_index(stopped: Path) -> None:
    tables = sorted((stopped / "index").glob("*.sst"), key=lambda path: path.stat().st_size)
    flip(tables[-1], 200)
    result = verified(stopped)
    assert not result.sound
    assert "damage" in verdicts(result, "index")


@pytest.mark.real
def test_another_bookies_index(stopped: Path, killed: Path, tmp_path: Path) -> None:
    from support.offline_kit import make_images

    other, _ = make_images(tmp_path / "other")
    cookie = (other / "cookie").read_bytes()
    assert cookie == (stopped / "cookie").read_bytes()  # the same seed: another one is made by hand
    from magnetar.bookie.cookie import decode_cookie, encode_cookie

    changed = decode_cookie(cookie, "")
    (stopped / "cookie").write_bytes(encode_cookie(changed._replace(instance=changed.instance + 1)))
    result = verified(stopped)
    assert any("another bookie" in finding.text for finding in result.findings)


@pytest.mark.real
def test_it_leaves_no_trace(killed: Path) -> None:
    before = trace_of(killed)
    verified(killed)
    assert trace_of(killed) == before


@pytest.mark.real
def test_a_table_of_the_index_that_the_scrub_knows(stopped: Path) -> None:
    """A byte that no walk reads: the scrub's checksum tells."""
    import xxhash

    from magnetar.bookie.scrub.progress import encode_progress

    tables = {
        path.name: [path.stat().st_size, xxhash.xxh3_64_intdigest(path.read_bytes())]
        for path in (stopped / "index").glob("*.sst")
    }
    fields = {"verified": {}, "tables": tables, "at": ["", 0]}
    (stopped / "scrub").write_bytes(encode_progress(fields))
    assert verified(stopped).sound
    name = min(tables)
    flip(stopped / "index" / name, tables[name][0] - 200)
    assert any(one.path.endswith(name) for one in verified(stopped).findings)


@pytest.mark.real
def test_a_log_in_two_directories(stopped: Path) -> None:
    (stopped / "l2").mkdir()
    shutil.copy(entry_logs(stopped)[0], stopped / "l2")
    both = (str(stopped / "ledgers"), str(stopped / "l2"))
    result = with_stopped(stopped, verify, ledger_directories=both)
    assert any("is in" in one.text for one in result.findings if one.part == "log ids")


def test_the_golden_directory_is_sound(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(GOLDEN, tmp_path / "bookie"))
    changes = golden_settings(directory)
    before = trace_of(directory)
    result = with_stopped(directory, verify, **changes)
    assert result.sound, result.findings
    assert with_stopped(directory, totals, **changes) == {1: 30, 2: 30, 3: 20}
    assert trace_of(directory) == before


def test_directories_that_the_settings_forget_are_looked_at(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(GOLDEN, tmp_path / "bookie"))
    result = with_stopped(directory, verify)
    assert [one.part for one in result.findings] == ["cookie"]
    assert "ledger_directories no longer names" in result.findings[0].text


@pytest.mark.real
def test_garbage_collection_leaves_it_sound(stopped: Path, tmp_path: Path) -> None:
    images: list[Path] = []

    def keep(name: str) -> None:
        images.append(copy_running(stopped, tmp_path / name))

    async def main() -> None:
        bookie = await open_real(str(stopped))
        try:
            await bookie.delete_ledger(2)
            keep("deleted")
            await bookie.checkpoint()
            keep("flushed")
            await bookie.collector.collect()
            keep("collected")
            assert await add(bookie, entry(8, 0)) == 0
        finally:
            await bookie.close()

    asyncio.run(main())
    sizes = [sum(log.stat().st_size for log in entry_logs(image)) for image in images]
    assert sizes[2] < sizes[1]
    for image in [*images, stopped]:
        result = verified(image)
        assert result.sound, (image.name, result.findings)
        located = with_stopped(image, lambda bookie: bookie.index.list_locations(2))
        assert bool(located) == (image.name in ("deleted", "flushed"))


@pytest.mark.real
def test_entries_of_a_deleted_ledger_may_be_gone(tmp_path: Path) -> None:
    """A flush that was under way when the ledger left the index puts some of its places back; the logs go all the same."""
    directory = tmp_path / "one"

    async def main() -> None:
        bookie = await open_real(str(directory))
        assert await add(bookie, entry(2, 0)) == 0
        await bookie.checkpoint()
        await bookie.delete_ledger(2)
        await bookie.close()

    asyncio.run(main())
    for log in entry_logs(directory):
        log.unlink()
    result = verified(directory)
    assert result.sound, result.findings
    assert next(check.records for check in result.checks if check.part == "index") == 1


@pytest.mark.real
def test_a_crash_between_the_two_halves_of_an_index_flush_is_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The locations were flushed, the ledgers' records not: the next start replays the journal, so nothing is lost."""
    directory, copy = tmp_path / "bookie", tmp_path / "killed"
    flush_ledgers = RocksLocationIndex.flush_ledgers

    async def killed_here(index: RocksLocationIndex) -> None:
        if not copy.exists():
            shutil.copytree(directory, copy)
        await flush_ledgers(index)

    async def run() -> None:
        bookie = await open_real(str(directory), checkpoint_interval_s=3600.0)
        monkeypatch.setattr(RocksLocationIndex, "flush_ledgers", killed_here)
        try:
            await fill(bookie)
        finally:
            await bookie.close()

    asyncio.run(run())
    result = verified(copy)
    assert result.sound, result.findings


@pytest.mark.real
def test_an_entry_log_of_which_nothing_was_synced_is_sound(stopped: Path) -> None:
    log = entry_logs(stopped)[-1]
    unsynced = log.with_name(f"entrylog-{int(log.stem[-8:], 16) + 1:08x}.log")
    unsynced.write_bytes(bytes(10_000))
    result = verified(stopped)
    assert result.sound, result.findings
    damaged = bytearray(log.read_bytes())  # teeth: a header whose log was synced is damage
    damaged[:64] = bytes(64)
    log.write_bytes(damaged)
    assert not verified(stopped).sound

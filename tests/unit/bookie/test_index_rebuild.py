"""The index is made anew from the entry logs: nothing that was acknowledged is said not to exist (rule 8)."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from magnetar.bookie import Bookie, open_bookie, os_components
from magnetar.bookie.cookie import decode_cookie
from magnetar.bookie.index import LedgerRecord, RocksLocationIndex
from magnetar.bookie.layout import DataLayout
from magnetar.bookie.offline import index_rebuild as rebuild_module
from magnetar.bookie.offline.index_rebuild import RebuildReport, rebuild_index
from magnetar.proto.errors import (
    DataDirectoryError,
    EntryDamaged,
    EntryNotFound,
    LedgerFenced,
    LedgerNotFound,
    MagnetarError,
    UnknownLedgerState,
)
from magnetar.runtime.files import OsFiles
from support.bookie_kit import add, add_all, entry, open_real, small_settings

pytestmark = pytest.mark.real


LEDGERS = (1, 2, 3)
COUNT = 60


async def fill(directory: Path, **changes: Any) -> dict[tuple[int, int], bytes]:
    """A stopped bookie with several logs, a fence, an explicit LAC, a deleted ledger and an entry that was added again."""
    bookie = await open_real(str(directory), entry_log_bytes=16 * 1024, **changes)
    entries: dict[tuple[int, int], bytes] = {}
    for start in range(0, COUNT, 20):
        part = {
            (led, n): entry(led, n, bytes([64 + led]) * 300)
            for n in range(start, start + 20)
            for led in LEDGERS
        }
        entries |= part
        assert set(await add_all(bookie, list(part.values()))) == {0}
        await bookie.checkpoint()
    await bookie.fence(2)
    await bookie.write_last_confirmed(3, 70)
    assert await add(bookie, entry(4, 0)) == 0
    await bookie.checkpoint()
    await bookie.delete_ledger(4)
    again = entry(2, 5, b"B" * 300, lac=40)  # what a recovery writes
    assert await add(bookie, again, recovery=True) == 0
    entries[2, 5] = again
    await bookie.close()
    return entries


async def rebuild(directory: Path, **changes: Any) -> RebuildReport:
    layout = DataLayout.at(str(directory))
    logs = {
        log_id: os.path.join(path, name)
        for path in layout.ledgers
        for name in os.listdir(path)
        if (log_id := layout.entry_log_id(name)) is not None
    }
    cookie = decode_cookie(Path(layout.cookie).read_bytes(), layout.cookie)
    return await rebuild_index(
        OsFiles(), layout.index, logs, cookie.instance, open_index=RocksLocationIndex, **changes
    )


async def check(bookie: Bookie, entries: dict[tuple[int, int], bytes]) -> dict[tuple[int, int], str]:
    """What is not served, and why. Nothing wrong is."""
    refused: dict[tuple[int, int], str] = {}
    for key, data in entries.items():
        try:
            found, _ = await bookie.read(key[0], key[1], key[1])
            assert found == [data]
        except MagnetarError as error:
            refused[key] = type(error).__name__
    return refused


async def check_states(bookie: Bookie) -> None:
    assert await add(bookie, entry(2, 999)) == LedgerFenced.code
    assert await bookie.read_last_confirmed(3) == (70, COUNT - 1)
    with pytest.raises(LedgerNotFound):
        await bookie.read(4, 0, 0)
    with pytest.raises(EntryNotFound):
        await bookie.read(1, COUNT, COUNT)


def manifest_without_its_end(data: bytes) -> bytes:
    """Whole records: RocksDB opens, and knows nothing of the newest tables."""
    at, starts = 0, [0]
    while at + 7 <= len(data) and data[at + 6]:
        at += 7 + int.from_bytes(data[at + 4 : at + 6], "little")
        starts.append(at)
    return data[: starts[-5]]


@pytest.mark.parametrize("old", ["sound", "damaged", "fallen back", "gone"])
async def test_everything_comes_back(tmp_path: Path, old: str) -> None:
    entries = await fill(tmp_path)
    index = tmp_path / "index"
    if old == "damaged":
        for path in index.glob("MANIFEST-*"):
            path.write_bytes(path.read_bytes()[:50])
    elif old == "fallen back":
        for path in index.glob("MANIFEST-*"):
            path.write_bytes(manifest_without_its_end(path.read_bytes()))
    elif old == "gone":
        shutil.rmtree(index)
    if old != "sound":
        with pytest.raises(DataDirectoryError, match="rebuild"):
            await open_real(str(tmp_path))
    report = await rebuild(tmp_path)
    assert (report.entries, report.duplicates) == (len(entries) + 1, 1)
    assert report.damaged_bytes == report.torn_bytes == report.kept_places == 0
    assert not report.incomplete
    assert not report.unknown_ledgers
    assert bool(report.old_index_fault) == (old != "sound")
    assert report.old_index == ("" if old == "gone" else str(tmp_path / "index.damaged-1"))
    bookie = await open_real(str(tmp_path))
    assert await check(bookie, entries) == {}
    await check_states(bookie)
    await bookie.close()
    assert (await rebuild(tmp_path)).old_index.endswith("damaged-1" if old == "gone" else "damaged-2")


async def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    await fill(tmp_path)
    before = {path.name: path.read_bytes() for path in (tmp_path / "index").iterdir()}
    report = await rebuild(tmp_path, dry_run=True)
    assert report.entries == LEDGERS.__len__() * COUNT + 1
    assert {path.name: path.read_bytes() for path in (tmp_path / "index").iterdir()} == before
    assert not list((tmp_path / "index.rebuilding").iterdir())


async def test_journals_come_back_by_replay(tmp_path: Path) -> None:
    """A bookie that was killed: its newest entries are in no log."""
    entries = await fill(tmp_path)
    bookie = await open_real(str(tmp_path), checkpoint_interval_s=1000.0)
    more = {(7, n): entry(7, n) for n in range(10)}
    assert set(await add_all(bookie, list(more.values()))) == {0}
    for task in bookie._tasks:
        task.cancel()
    bookie.failure = MagnetarError("killed")
    await bookie.close()
    shutil.rmtree(tmp_path / "index")
    await rebuild(tmp_path)
    bookie = await open_real(str(tmp_path))
    assert await check(bookie, entries | more) == {}
    await bookie.close()


class Killed(Exception):
    """The process dies."""


@pytest.mark.parametrize("call", range(6))
async def test_it_can_be_given_again_after_it_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    entries = await fill(tmp_path)
    (tmp_path / "index" / "CURRENT").write_bytes(b"damaged\n")
    left = call

    def die(real: Any) -> Any:
        def step(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return real(*arguments, **named)

        return step

    with monkeypatch.context() as patch:
        for name in ("rename", "sync_directory"):
            patch.setattr(OsFiles, name, die(getattr(OsFiles, name)))
        patch.setattr(rebuild_module._Rebuild, "finish", die(rebuild_module._Rebuild.finish))
        with contextlib.suppress(Killed):
            await rebuild(tmp_path)
    if call < 4:  # neither the old one nor none at all is good enough
        with pytest.raises(DataDirectoryError, match="rebuild"):
            await open_real(str(tmp_path))
    await rebuild(tmp_path)
    bookie = await open_real(str(tmp_path))
    assert await check(bookie, entries) == {}
    await check_states(bookie)
    await bookie.close()


@pytest.mark.parametrize("old", ["sound", "gone"])
@pytest.mark.parametrize("footer", [True, False])
async def test_rule_08_damage_in_the_logs_is_never_absence(tmp_path: Path, old: str, footer: bool) -> None:
    entries = await fill(tmp_path)
    rng = random.Random(2)
    paths = sorted((tmp_path / "ledgers").glob("entrylog-*.log"))
    for path in paths[:2]:
        data = bytearray(path.read_bytes())
        if not footer:
            data[-8:] = bytes(8)
        for _ in range(4):
            at = rng.randrange(64, len(data) - 400)
            data[at : at + 60] = rng.randbytes(60)
        path.write_bytes(data)
    if old == "gone":
        shutil.rmtree(tmp_path / "index")
    report = await rebuild(tmp_path)
    assert report.damaged_bytes
    bookie = await open_real(str(tmp_path))
    refused = await check(bookie, entries)
    assert refused
    allowed = (
        {EntryDamaged.__name__} if old == "sound" else {UnknownLedgerState.__name__, EntryDamaged.__name__}
    )
    assert set(refused.values()) <= allowed
    if old == "sound":
        assert report.kept_places == len(refused)
        assert not report.unknown_ledgers
    else:
        assert {ledger for ledger, _ in refused} <= set(report.unknown_ledgers)
        for ledger_id in report.unknown_ledgers:
            assert await add(bookie, entry(ledger_id, 2000)) == LedgerFenced.code
    assert report.incomplete == (old == "gone" and not footer)
    if report.incomplete:
        with pytest.raises(UnknownLedgerState):
            await bookie.read(500, 0, 0)
    else:
        with pytest.raises((EntryNotFound, LedgerNotFound)):
            await bookie.read(500, 0, 0)
    await bookie.close()


async def test_a_lost_log_is_told_by_the_old_index(tmp_path: Path) -> None:
    entries = await fill(tmp_path)
    lost = sorted((tmp_path / "ledgers").glob("entrylog-*.log"))[1]
    lost.unlink()
    report = await rebuild(tmp_path)
    assert report.kept_places > 0
    bookie = await open_real(str(tmp_path))
    refused = await check(bookie, entries)
    assert len(refused) == report.kept_places
    assert set(refused.values()) == {EntryDamaged.__name__}
    await bookie.close()


async def test_what_the_logs_do_not_tell_is_taken_from_the_old_index(tmp_path: Path) -> None:
    await fill(tmp_path)
    index = RocksLocationIndex(str(tmp_path / "index"))
    index.put_ledgers([(3, LedgerRecord(True, 71, COUNT - 1, 58)), (80, LedgerRecord(True))])
    await index.flush_ledgers()
    index.close()
    report = await rebuild(tmp_path)
    assert report.old_index_fault == ""
    bookie = await open_real(str(tmp_path))
    assert await add(bookie, entry(3, 999)) == LedgerFenced.code
    assert await add(bookie, entry(80, 0)) == LedgerFenced.code
    assert (await bookie.read_last_confirmed(3))[0] == 71
    await bookie.close()


@pytest.mark.parametrize("old", ["sound", "gone"])
async def test_rule_08_logs_of_a_lost_directory(tmp_path: Path, old: str) -> None:
    entries = await fill(tmp_path)
    lost = sorted((tmp_path / "ledgers").glob("entrylog-*.log"))[0]
    lost.unlink()
    if old == "gone":
        shutil.rmtree(tmp_path / "index")
    report = await rebuild(tmp_path, logs_lost=True)
    assert report.incomplete == (old == "gone")
    bookie = await open_real(str(tmp_path))
    refused = await check(bookie, entries)
    assert refused
    assert set(refused.values()) == {"EntryDamaged" if old == "sound" else "UnknownLedgerState"}
    await bookie.close()


async def test_what_a_rebuilt_index_alone_knows_is_told_to_the_logs(tmp_path: Path) -> None:
    """Else it would be gone with that index: a stale writer could write again."""
    entries = await fill(tmp_path)
    index = RocksLocationIndex(str(tmp_path / "index"))
    index.put_ledgers([(80, LedgerRecord(True)), (81, LedgerRecord(explicit_lac=7)), (82, LedgerRecord())])
    index._db.delete(b"states logged")
    index._db.flush(True)
    await index.flush_ledgers()
    index.close()
    for _ in range(2):
        bookie = await open_real(str(tmp_path))
        await bookie.close()
    shutil.rmtree(tmp_path / "index")
    report = await rebuild(tmp_path)
    assert not report.unknown_ledgers
    bookie = await open_real(str(tmp_path))
    assert await check(bookie, entries) == {}
    assert await add(bookie, entry(80, 0)) == LedgerFenced.code
    assert await bookie.read_last_confirmed(81) == (7, -1)
    await bookie.close()


async def test_the_index_of_another_bookie_is_not_believed(tmp_path: Path) -> None:
    entries = await fill(tmp_path / "ours")
    theirs = small_settings(str(tmp_path / "theirs"))
    other = await open_bookie(theirs, os_components(random.Random(2)))
    assert await add(other, entry(77, 0)) == 0
    await other.close()
    shutil.rmtree(tmp_path / "ours" / "index")
    shutil.copytree(tmp_path / "theirs" / "index", tmp_path / "ours" / "index")
    report = await rebuild(tmp_path / "ours")
    assert (report.entries, report.kept_places) == (len(entries) + 1, 0)
    assert "another bookie" in report.old_index_fault
    bookie = await open_real(str(tmp_path / "ours"))
    assert await check(bookie, entries) == {}
    with pytest.raises(EntryNotFound):
        await bookie.read(77, 0, 0)
    await bookie.close()


async def test_a_repaired_ledger_stays_so_if_the_old_index_can_tell(tmp_path: Path) -> None:
    await fill(tmp_path)
    bookie = await open_real(str(tmp_path))
    await bookie.fencing.mark_unknown([1, 3])
    await bookie.checkpoint()
    await bookie.fencing.mark_repaired([1])
    await bookie.checkpoint()
    await bookie.close()
    assert (await rebuild(tmp_path)).unknown_ledgers == [3]
    shutil.rmtree(tmp_path / "index")
    assert (await rebuild(tmp_path)).unknown_ledgers == [1, 3]


async def test_rule_08_an_index_that_was_put_aside_long_ago_cannot_tell_what_the_logs_have_lost(
    tmp_path: Path,
) -> None:
    entries = await fill(tmp_path)
    await rebuild(tmp_path)
    bookie = await open_real(str(tmp_path), entry_log_bytes=16 * 1024)
    later = [entry(5, number, b"5" * 300) for number in range(60)]
    assert set(await add_all(bookie, later)) == {0}
    await bookie.close()
    shutil.rmtree(tmp_path / "index")  # what was put aside is still there
    assert (tmp_path / "index.damaged-1").exists()
    lost = max((tmp_path / "ledgers").glob("entrylog-*.log"))
    lost.write_bytes(b"?" * lost.stat().st_size)
    report = await rebuild(tmp_path)
    assert report.incomplete
    assert 5 in report.unknown_ledgers
    bookie = await open_real(str(tmp_path))
    refused = await check(bookie, {(5, number): data for number, data in enumerate(later)} | entries)
    assert refused
    assert set(refused.values()) <= {"EntryDamaged", "UnknownLedgerState"}
    # Ledgers are complete here from the first one that was made since, and no earlier one is: it may have had a fence.
    assert await add(bookie, entry(6, 0)) == LedgerFenced.code
    bookie.introduce(msgspec.structs.replace(bookie.introduce(None), next_ledger_id=78))
    assert await add(bookie, entry(78, 0)) == 0
    assert await add(bookie, entry(70, 0)) == LedgerFenced.code
    with pytest.raises(UnknownLedgerState):
        await bookie.read(70, 0, 0)
    with pytest.raises(EntryNotFound):
        await bookie.read(79, 0, 0)
    await bookie.close()
    bookie = await open_real(str(tmp_path))
    assert await add(bookie, entry(78, 1)) == 0
    assert await add(bookie, entry(71, 0)) == LedgerFenced.code
    await bookie.close()
    # Again: the log may be gone by then, and what it held is as lost as before.
    lost.unlink()
    report = await rebuild(tmp_path)
    assert report.incomplete
    bookie = await open_real(str(tmp_path))
    assert await add(bookie, entry(78, 2)) == 0  # not fenced
    with pytest.raises(UnknownLedgerState):
        await bookie.read(70, 0, 0)
    with pytest.raises(EntryNotFound):
        await bookie.read(99, 0, 0)
    await bookie.close()

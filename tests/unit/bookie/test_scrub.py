"""The scrub: damage is found before somebody reads it, is never served, and is never "no such entry" (rule 8)."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from magnetar.bookie import Bookie, open_bookie
from magnetar.bookie.index import LedgerRecord, Location
from magnetar.bookie.index.locations import REBUILD
from magnetar.bookie.scrub import scrubber as scrubber_module
from magnetar.bookie.scrub.progress import Pace, ScrubProgress, decode_progress
from magnetar.bookie.status import bookie_figures
from magnetar.bookie.write_cache import MemTable
from magnetar.proto.errors import EntryDamaged, EntryNotFound, RequestTimeout, StorageFailed
from magnetar.runtime.files import OsFile, OsFiles
from support.bookie_kit import add, add_all, crash, entry, open_inline, open_real, small_settings, until
from support.index_model import ModelLocationIndex, ModelStorage
from support.inline_devices import inline_components
from support.sim import SimClock, SimDisk, SimLoop

PAGE_BYTES = 4096


class Queue:
    """A repair queue that remembers."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int, int]] = []
        self.gone_ledgers: list[int] = []

    def damaged(self, ledger_id: int, first: int, last: int, reason: str) -> None:
        self.told.append((ledger_id, first, last))

    def resolved(self, ledger_id: int) -> None:
        self.gone_ledgers.append(ledger_id)


def some_entries(ledgers: int = 3, count: int = 60, size: int = 900) -> list[bytes]:
    return [
        entry(ledger_id, number, bytes([65 + ledger_id]) * size)
        for number in range(count)
        for ledger_id in range(1, ledgers + 1)
    ]


async def filled(directory: Path, storage: ModelStorage, **changes: Any) -> tuple[Bookie, list[bytes]]:
    """A bookie with some closed logs, opened again after it was filled."""
    changes = {"entry_log_bytes": 32 * 1024, **changes}
    bookie = await open_inline(str(directory), storage, **changes)
    bookie.damage.queue = Queue()
    entries = some_entries()
    for start in range(0, len(entries), 60):
        assert set(await add_all(bookie, entries[start : start + 60])) == {0}
        await bookie.checkpoint()
    await bookie.close()
    bookie = await open_inline(str(directory), storage, **changes)
    bookie.damage.queue = Queue()
    bookie.scrubber._pace._needed = bookie.scrubber._pace._bound = 1e9
    return bookie, entries


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def logs_of(directory: Path) -> list[Path]:
    return sorted((directory / "ledgers").glob("entrylog-*.log"))


async def read_everything(bookie: Bookie, entries: list[bytes]) -> list[tuple[int, int]]:
    """Keys that are damaged; what is served is right, and nothing is said not to exist."""
    damaged = []
    for data in entries:
        key = int.from_bytes(data[:8], "big"), int.from_bytes(data[8:16], "big")
        try:
            found, _ = await bookie.read(*key, key[1])
            assert found == [data]
        except EntryDamaged:
            damaged.append(key)
    return damaged


async def test_a_sound_bookie_has_nothing_to_report(tmp_path: Path) -> None:
    storage = ModelStorage()
    bookie, entries = await filled(tmp_path, storage)
    assert await add(bookie, entry(9, 0)) == 0  # in the current log, then
    await bookie.checkpoint()
    await bookie.scrubber.verify_everything()
    assert bookie.damage.ledgers() == {}
    assert bookie.damage.files() == {}
    logs = [info for info in bookie.logs.logs() if not info.current]
    assert len(logs) > 2
    assert bookie_figures(bookie)["scrub_bytes"] >= sum(info.bytes - 2000 for info in logs)
    live = [bookie.scrubber.exact_live_bytes(info.log_id) for info in logs]
    assert sum(size or 0 for size in live) == sum(len(data) + 32 for data in entries)
    assert bookie.scrubber.exact_live_bytes(999) is None
    await bookie.close()


async def test_rule_08_a_bit_in_every_page_of_every_entry_log_is_found(tmp_path: Path) -> None:
    storage = ModelStorage()
    bookie, entries = await filled(tmp_path, storage)
    rng = random.Random(3)
    flips = 0
    for path in logs_of(tmp_path):
        before = path.read_bytes()
        log_id = int(path.name[9:17], 16)
        unit = scrubber_module._Unit(f"log {log_id:08x}", len(before))
        for start in range(0, len(before), PAGE_BYTES):
            offset = rng.randrange(start, min(start + PAGE_BYTES, len(before)))
            flip(path, offset, rng.randrange(8))
            await bookie.scrubber._verify(unit)
            hit = [
                key
                for key, place in storage.locations.items()
                if place.log_id == log_id and place.offset <= offset < place.offset + place.length + 32
            ]
            told = {
                (ledger, n)
                for ledger, ranges in bookie.damage.ledgers().items()
                for known in ranges
                for n in range(known.first, known.last + 1)
            }
            assert told == set(hit), f"byte {offset} of {path.name}"
            assert str(path) in bookie.damage.files()
            flips += 1
            path.write_bytes(before)
            await bookie.scrubber._recheck_damage()
            await bookie.scrubber._verify(unit)
            assert bookie.damage.ledgers() == {}
            assert bookie.damage.files() == {}
    assert flips > 40
    assert await read_everything(bookie, entries) == []
    await bookie.close()


async def test_damage_is_told_to_the_repair_queue_and_heals_by_a_recovery_add(tmp_path: Path) -> None:
    storage = ModelStorage()
    bookie, entries = await filled(tmp_path, storage)
    queue = bookie.damage.queue
    assert isinstance(queue, Queue)
    place = storage.locations[2, 30]
    path = tmp_path / "ledgers" / f"entrylog-{place.log_id:08x}.log"
    flip(path, place.offset + 100)
    await bookie.scrubber.verify_everything()
    assert queue.told == [(2, 30, 30)]
    assert await read_everything(bookie, entries) == [(2, 30)]
    assert queue.told == [(2, 30, 30)]
    again = next(data for data in entries if data[:16] == entry(2, 30)[:16])
    assert await add(bookie, again, recovery=True) == 0
    assert await read_everything(bookie, entries) == []
    await bookie.checkpoint()
    await bookie.scrubber._recheck_damage()
    assert queue.gone_ledgers == [2]
    assert bookie_figures(bookie)["damage_healed"] == 1
    await bookie.close()


async def test_rule_08_what_the_index_lost_is_damage_once_the_scrub_knows(tmp_path: Path) -> None:
    storage = ModelStorage()
    bookie, _ = await filled(tmp_path, storage)
    place = storage.locations[1, 7]
    storage.damage(1, 7, None)
    with pytest.raises(EntryNotFound):  # nobody can know better yet
        await bookie.read(1, 7, 7)
    await bookie.scrubber.verify_everything()
    with pytest.raises(EntryDamaged, match="read another replica"):
        await bookie.read(1, 7, 7)
    # Garbage collection must not take the only copy for garbage.
    live = bookie.scrubber.exact_live_bytes(place.log_id)
    others = [other for other in storage.locations.values() if other.log_id == place.log_id]
    assert live == sum(other.length + 32 for other in [*others, place])
    await bookie.close()


async def test_what_a_flush_that_waits_for_space_has_written_is_not_lost(tmp_path: Path) -> None:
    """Its log may be closed (its directory failed) while the index knows nothing of it: the entries are in memory."""
    storage = ModelStorage()
    bookie, entries = await filled(tmp_path, storage)
    storage.damage(1, 7, None)
    data = next(one for one in entries if (one[7], one[15]) == (1, 7))
    bookie.cache.put(1, 7, data)
    await bookie.scrubber.verify_everything()
    assert bookie.damage.ledgers() == {}
    assert await bookie.read(1, 7, 7) == ([data], ANY)
    await bookie.close()


async def test_entries_of_deleted_ledgers_are_garbage_and_no_damage(tmp_path: Path) -> None:
    storage = ModelStorage()
    bookie, _ = await filled(tmp_path, storage)
    for key in [key for key in storage.locations if key[0] in (1, 2)]:
        storage.damage(*key, None)
    storage.ledgers[1] = LedgerRecord(deleted_at_ms=5)
    del storage.ledgers[2]
    bookie.ledgers.by_id.clear()
    await bookie.scrubber.verify_everything()
    assert bookie.damage.ledgers() == {}
    await bookie.close()


@pytest.mark.parametrize("place", [Location(77, 64, 100), Location(1, 10**9, 100)])
async def test_a_location_that_points_nowhere_is_found(tmp_path: Path, place: Location) -> None:
    storage = ModelStorage()
    bookie, entries = await filled(tmp_path, storage)
    storage.damage(3, 11, place)
    await bookie.scrubber.verify_everything()
    assert list(bookie.damage.ledgers()) == [3]
    assert await read_everything(bookie, entries) == [(3, 11)]
    await bookie.close()


async def test_a_log_that_is_cut_short_or_gone_is_damage(tmp_path: Path) -> None:
    storage = ModelStorage()
    bookie, entries = await filled(tmp_path, storage)
    first, second = logs_of(tmp_path)[:2]
    first.write_bytes(first.read_bytes()[:5000])
    second.unlink()
    lost = [
        key
        for key, place in storage.locations.items()
        if place.log_id == int(second.name[9:17], 16)
        or (place.log_id == int(first.name[9:17], 16) and place.offset + place.length + 32 > 5000)
    ]
    await bookie.close()
    bookie = await open_inline(str(tmp_path), storage)
    bookie.scrubber._pace._needed = bookie.scrubber._pace._bound = 1e9
    await bookie.scrubber.verify_everything()
    told = [key for key in sorted(lost) if bookie.damage.covers(*key)]
    assert told == sorted(lost)
    assert sorted(await read_everything(bookie, entries)) == sorted(lost)
    await bookie.close()


@pytest.mark.real
async def test_rule_08_bits_of_the_real_index_are_found_by_the_scrub(tmp_path: Path) -> None:
    """Also those that RocksDB does not look at."""
    bookie = await open_real(str(tmp_path), scrub_interval_s=0)
    bookie.scrubber._pace._needed = bookie.scrubber._pace._bound = 1e9
    entries = some_entries(count=200, size=50)
    assert set(await add_all(bookie, entries)) == {0}
    await bookie.checkpoint()
    await bookie.scrubber.verify_everything()
    assert bookie.damage.files() == {}
    tables = sorted((tmp_path / "index").glob("*.sst"))
    assert tables
    rng = random.Random(1)
    flips = 0
    for path in tables:
        before = path.read_bytes()
        for start in range(0, len(before), PAGE_BYTES):
            flip(path, rng.randrange(start, min(start + PAGE_BYTES, len(before))), rng.randrange(8))
            await bookie.scrubber._verify_index_file(path.name)
            assert "index rebuild" in bookie.damage.files()[str(path)]
            bookie.damage.forget_file(str(path))
            path.write_bytes(before)
            flips += 1
        await bookie.scrubber._verify_index_file(path.name)
        assert bookie.damage.files() == {}
    assert flips >= len(tables)
    (manifest,) = (tmp_path / "index").glob("MANIFEST-*")
    flip(manifest, 20)
    flip(tmp_path / "index" / "CURRENT", 3)
    await bookie.scrubber.verify_everything()
    assert sorted(bookie.damage.files()) == sorted([str(manifest), str(tmp_path / "index" / "CURRENT")])
    await bookie.close()


@pytest.mark.real
async def test_a_manifest_may_grow_and_tables_may_come_and_go(tmp_path: Path) -> None:
    bookie = await open_real(str(tmp_path), scrub_interval_s=0)
    bookie.scrubber._pace._needed = bookie.scrubber._pace._bound = 1e9
    index = tmp_path / "index"
    (manifest,) = index.glob("MANIFEST-*")
    listed: list[set[Path]] = []
    sizes: list[int] = []
    for number in range(6):  # RocksDB compacts four tables, and moves those that do not overlap as they are
        assert await add_all(bookie, [entry(1, number), entry(3, number)]) == [0, 0]
        await bookie.checkpoint()
        listed.append(set(index.glob("*.sst")))
        sizes.append(manifest.stat().st_size)
        await bookie.scrubber.verify_everything()
    came = listed[1] - listed[0]
    assert len(came) == 2, "one of each family"
    async with asyncio.timeout(10):
        await until(
            lambda: not any(table.exists() for table in came)
        )  # and went: nothing is compacted any more
    assert sizes == sorted(set(sizes)), "it grew"
    await bookie.scrubber.verify_everything()
    assert bookie.damage.files() == {}
    # What came is compared from now on, and so is the whole of the manifest.
    tables = set(index.glob("*.sst")) - listed[0]
    assert tables
    size = manifest.stat().st_size
    manifest.write_bytes(manifest.read_bytes()[:-10])
    for table in tables:
        flip(table, 100)
    await bookie.scrubber.verify_everything()
    found = bookie.damage.files()
    assert f"it has {size - 10} bytes and had {size}" in found[str(manifest)]
    assert {str(table) for table in tables} <= found.keys()
    await bookie.close()
    # What went is forgotten.
    remembered = decode_progress((tmp_path / "scrub").read_bytes())["tables"]
    assert {name for name in remembered if name.endswith(".sst")} <= {
        path.name for path in index.glob("*.sst")
    }


async def test_pages_that_cannot_be_read_are_damage_of_what_stands_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = ModelStorage()
    bookie, entries = await filled(tmp_path, storage)
    place = storage.locations[2, 30]
    bad = (place.offset + 40) // PAGE_BYTES * PAGE_BYTES
    real = {name: getattr(OsFile, name) for name in ("read_at", "read_cached")}

    def refuse(name: str) -> Any:
        def read(file: OsFile, offset: int, length: int) -> Any:
            if f"{place.log_id:08x}.log" in file.path and offset < bad + PAGE_BYTES and offset + length > bad:
                raise StorageFailed("reading failed: Input/output error")
            return real[name](file, offset, length)

        return read

    hit = [
        key
        for key, other in storage.locations.items()
        if other.log_id == place.log_id
        and other.offset < bad + PAGE_BYTES
        and other.offset + other.length + 32 > bad
    ]
    for name in real:
        monkeypatch.setattr(OsFile, name, refuse(name))
    await bookie.scrubber.verify_everything()
    assert all(bookie.damage.covers(*key) for key in hit)
    damaged = sum(known.last - known.first + 1 for rows in bookie.damage.ledgers().values() for known in rows)
    assert damaged == len(hit) > 2
    assert sorted(await read_everything(bookie, entries)) == sorted(hit)
    monkeypatch.undo()
    for _ in range(3):
        await bookie.scrubber._recheck_damage()
    assert bookie.damage.ledgers() == {}
    assert bookie.failure is None
    await bookie.close()


async def test_a_stopping_bookie_reports_no_damage(tmp_path: Path) -> None:
    storage = ModelStorage()
    bookie, _ = await filled(tmp_path, storage)
    await bookie.close()
    bookie.damage.report(1, 1, where="read", reason="the disk worker is closed")
    bookie.damage.report_file("x", "the disk worker is closed")
    assert bookie.damage.ledgers() == {}
    assert bookie.damage.files() == {}


async def test_rule_45_what_is_on_a_disk_that_does_not_answer_is_verified_later_and_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie, entries = await filled(tmp_path, ModelStorage())
    hung = str(logs_of(tmp_path)[0])
    worker = bookie.components.disk_worker
    real, asked = worker.warm, list[str]()

    async def warm(path: str, offset: int, length: int) -> None:
        asked.append(path)
        if path == hung:
            raise RequestTimeout("the disk does not answer")
        await real(path, offset, length)

    with monkeypatch.context() as patch:
        patch.setattr(worker, "warm", warm)
        patch.setattr(OsFile, "read_cached", lambda *_: None)
        await bookie.scrubber.verify_everything()
        assert (bookie.damage.ledgers(), bookie.damage.files()) == ({}, {})
        assert set(asked) >= {str(path) for path in logs_of(tmp_path)[:-1]}, "the others are verified"
        unit, _ = bookie.scrubber._next_unit()
        assert unit is None or not hung.endswith(f"{unit.name.partition(' ')[2]}.log"), "not at once again"
    bookie.scrubber._postponed.clear()
    await bookie.scrubber.verify_everything()
    assert await read_everything(bookie, entries) == []
    await bookie.close()


# --- pace and progress -----------------------------------------------------------------------------------------------


class Machine:
    """A bookie in virtual time on a simulated disk."""

    def __init__(self, seed: int = 1, **changes: Any) -> None:
        self.loop = SimLoop(seed, limit_seconds=100_000.0)
        self.disk = SimDisk(random.Random(seed), trace=self.loop.trace, consume=self.loop.consume)
        self.index = ModelStorage()
        self.settings = small_settings("/data", **changes)

    def run(self, script: Any) -> Any:
        process = self.loop.start_process("bookie")
        over: asyncio.Future[Any] = self.loop.create_future()

        async def work() -> None:
            try:
                files = self.disk.mount(process)
                components = inline_components(
                    files, random.Random(1), lambda path: ModelLocationIndex(self.index)
                )
                object.__setattr__(components, "clock", SimClock(self.loop))
                bookie = await open_bookie(self.settings, components)
                result = await script(bookie)
                await bookie.close()
                over.set_result(result)
            except BaseException as error:
                if not over.done():
                    over.set_exception(error)
                raise

        process.spawn(work(), name="script")
        try:
            return self.loop.run_until_complete(over)
        finally:
            process.kill()


async def fill(bookie: Bookie, megabytes: int = 3) -> None:
    for start in range(0, megabytes * 32, 8):
        codes = await add_all(
            bookie, [entry(1, number, b"x" * 31 * 1024) for number in range(start, start + 8)]
        )
        assert set(codes) == {0}
        await bookie.checkpoint()


def test_every_byte_is_verified_in_time_and_no_faster_than_the_bound() -> None:
    machine = Machine(scrub_interval_s=3600.0, scrub_bytes_per_s=100_000, checkpoint_interval_s=1000.0)
    rates: list[float] = []

    async def script(bookie: Bookie) -> None:
        await fill(bookie)
        loop = asyncio.get_running_loop()
        begun, before = loop.time(), 0
        while bookie_figures(bookie)["scrub_bytes"] < 2_700_000:
            await asyncio.sleep(10)
            now = bookie_figures(bookie)["scrub_bytes"]
            rates.append((now - before) / 10)
            before = now
        assert loop.time() - begun < 3600
        units = bookie_figures(bookie)["scrub_units"]
        await asyncio.sleep(600)
        assert bookie_figures(bookie)["scrub_units"] == units  # nothing is due
        for _ in range(8):
            await asyncio.sleep(1800)
            assert bookie_figures(bookie)["scrub_oldest_s"] <= 3600
        assert bookie_figures(bookie)["scrub_bytes"] > 4 * 2_700_000

    machine.run(script)
    assert 40_000 < max(rates) < 130_000  # a slice of 256 KB may fall on either side of a look


def test_it_waits_while_the_bookie_is_busy_but_not_for_ever() -> None:
    machine = Machine(scrub_interval_s=3600.0, scrub_bytes_per_s=10_000_000, checkpoint_interval_s=1000.0)

    async def script(bookie: Bookie) -> None:
        await fill(bookie)
        await bookie.scrubber.verify_everything()
        bookie.scrubber._pace._busy = lambda: True
        verified = bookie_figures(bookie)["scrub_units"]
        await asyncio.sleep(3000)
        assert bookie_figures(bookie)["scrub_units"] <= verified + 1
        assert bookie_figures(bookie)["scrub_paused_ms"] > 0
        await asyncio.sleep(900)
        assert bookie_figures(bookie)["scrub_units"] > verified + 10

    machine.run(script)


def test_restarts_do_not_keep_it_from_getting_through() -> None:
    """A process lives for 3 minutes, and one of the logs takes 4."""
    machine = Machine(scrub_interval_s=40_000.0, scrub_bytes_per_s=1000, checkpoint_interval_s=1000.0)
    machine.run(fill)

    async def live(bookie: Bookie) -> list[str]:
        await asyncio.sleep(180)
        missing = [f"log {info.log_id:08x}" for info in bookie.logs.logs() if not info.current]
        return [unit for unit in missing if unit not in bookie.scrubber._progress.verified]

    lives = 0
    while machine.run(live):
        lives += 1
    assert 8 < lives < 30  # 2.8 MB; of each life 30 s are spent otherwise


async def test_a_damaged_progress_is_said_and_begun_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = ModelStorage()
    bookie, _ = await filled(tmp_path, storage)
    progress = bookie.scrubber._progress
    progress.at("log 00000001", 640)
    progress.verified["log 00000002"] = 5
    progress.tables["000012.sst"] = (10, 2**64 - 1)
    await progress.save(bookie.components.disk_worker)
    again = ScrubProgress(OsFiles(), str(tmp_path / "scrub"))
    again.load()
    assert (again.unit, again.offset, again.verified, again.tables) == (
        "log 00000001",
        640,
        {"log 00000002": 5},
        {"000012.sst": (10, 2**64 - 1)},
    )
    for offset in range(0, (tmp_path / "scrub").stat().st_size, 3):
        flip(tmp_path / "scrub", offset)
        again.load()
        assert (again.unit, again.verified) == ("", {})
        flip(tmp_path / "scrub", offset)
        again.load()
        assert again.unit
    assert "begins anew" in caplog.text
    await bookie.close()


async def test_the_rate_follows_what_is_stored() -> None:
    pace = Pace(86400.0, 64 << 20, lambda: False)
    pace.aim(0, 0)
    assert pace.rate == 1 << 20
    pace.aim(1 << 40, 0)
    assert 15e6 < pace.rate < 17e6
    pace.aim(1 << 44, 0)
    assert pace.rate == 64 << 20
    pace.aim(1 << 30, 80_000)
    assert pace.behind
    assert pace.rate == 64 << 20


async def test_a_failing_index_does_not_end_the_scrub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = ModelStorage()
    bookie, _ = await filled(tmp_path, storage)

    def fail(*_: Any) -> Any:
        raise StorageFailed(f"the index failed: Corruption; {REBUILD}")

    monkeypatch.setattr(bookie.index, "walk", fail)
    await bookie.scrubber.verify_everything()
    assert ["index rebuild" in reason for reason in bookie.damage.files().values()] == [True]
    await bookie.close()


async def test_an_index_whose_directory_cannot_be_listed_does_not_end_the_scrub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrubber_module, "_START_DELAY_S", 0.0)
    bookie, _ = await filled(tmp_path, ModelStorage())

    def unlisted() -> dict[str, int]:
        raise StorageFailed("listing the index failed: input/output error")

    monkeypatch.setattr(bookie.scrubber, "_index_files", unlisted)
    run = asyncio.ensure_future(bookie.scrubber.run())
    await until(lambda: bool(bookie.damage.files()))
    assert not run.done()
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    await bookie.close()


async def test_what_a_crash_left_between_log_and_index_was_never_acknowledged(tmp_path: Path) -> None:
    storage = ModelStorage()
    bookie, _ = await filled(tmp_path, storage)
    half = MemTable()
    half.ledgers[1] = {999: entry(1, 999)}  # the journal was slower than the flush, and lost it
    half.entries = 1
    await bookie.logs.append(half)
    await bookie.logs.sync()
    crash(bookie)
    bookie = await open_inline(str(tmp_path), storage, entry_log_bytes=32 * 1024)
    bookie.scrubber._pace._needed = bookie.scrubber._pace._bound = 1e9
    await bookie.scrubber.verify_everything()
    assert not bookie.damage.ledgers()
    with pytest.raises(EntryNotFound):
        await bookie.read(1, 999, 999)
    await bookie.close()

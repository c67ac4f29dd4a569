"""Compaction: what is alive stays readable, space comes back, and no crash at any step loses anything."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from magnetar.bookie import Bookie
from magnetar.bookie.entry_log.records import RECORD_HEADER_BYTES, STATE_ENTRY
from magnetar.bookie.gc.compactor import (
    Compactor,
    compacting_path,
    decode_replaces,
    encode_replaces,
    replaces_log_id,
    replaces_path,
    unfinished_log_id,
)
from magnetar.bookie.index import Location
from magnetar.bookie.read_budget import ReadGrant
from magnetar.bookie.status import bookie_figures
from magnetar.proto.errors import DiskFull, EntryDamaged, LedgerFenced, RequestTimeout, StorageFailed
from support.bookie_kit import KIB, add, add_all, crash, entry, open_real, until
from support.gc_kit import Collected, data, flip

LEDGERS = (1, 2, 3, 4)


@pytest.fixture
async def gc(tmp_path: Path) -> AsyncIterator[Collected]:
    collected = Collected(tmp_path / "bookie")
    yield collected
    await collected.close()


async def sparse(gc: Collected, **changes: object) -> Bookie:
    """Closed logs of which a quarter is alive: ledger 4, when 1 to 3 are gone."""
    await gc.open(**changes)
    await gc.write(LEDGERS, range(20))
    bookie = await gc.reopen(**changes)
    assert gc.existing is not None
    for ledger_id in (1, 2, 3):
        del gc.existing.ledgers[ledger_id]
    return bookie


async def test_what_is_alive_is_copied_and_the_rest_is_space(gc: Collected) -> None:
    bookie = await sparse(gc)
    size, logs = gc.log_bytes(), len(gc.names())
    collected = await bookie.collector.collect()
    assert collected.compacted_logs == logs
    assert len(gc.names()) == 2  # several sources, one copy each time it is full
    assert gc.log_bytes() < size / 3
    assert collected.reclaimed_bytes == size - sum(info.bytes for info in bookie.logs.logs())
    await gc.check(4, range(20))
    assert {ledger for ledger, _ in gc.storage.locations} == {4}
    await gc.check(4, range(20))
    for again in (gc.crash_and_open, gc.reopen):
        await again()
        await gc.check(4, range(20))
    figures = bookie.collector.stats()
    assert figures["compaction_major_runs"] == 1
    assert figures["compaction_logs"] == logs
    assert 0 < figures["compaction_bytes"] < size / 3


async def test_fence_and_explicit_lac_travel_with_the_ledger(gc: Collected) -> None:
    bookie = await gc.open()
    await gc.write(LEDGERS, range(10))
    await bookie.write_last_confirmed(4, 7)
    await bookie.checkpoint()
    await bookie.fence(4)
    await gc.write((1, 2, 3), range(10, 20))
    bookie = await gc.reopen()
    assert gc.existing is not None
    for ledger_id in (1, 2, 3):
        del gc.existing.ledgers[ledger_id]
    assert (await bookie.collector.collect()).compacted_logs
    states = [
        (record.ledger_id, record.data)
        for info in bookie.logs.logs()
        if not info.current
        async for records in bookie.logs.scan(info.log_id)
        for record in records
        if record.entry_id == STATE_ENTRY
    ]
    assert [ledger_id for ledger_id, _ in states] == [4]
    assert await add(bookie, entry(4, 90)) == LedgerFenced.code


async def test_entries_written_anew_meanwhile_keep_their_newer_place(
    gc: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie = await sparse(gc)
    newer = entry(4, 3, b"digested anew by a recovery" * 20, lac=-1)
    finish = Compactor.finish

    async def late(self: Compactor, log_id: int) -> list[int]:
        await add_all(bookie, [newer], recovery=True)
        await bookie.checkpoint()
        return await finish(self, log_id)

    monkeypatch.setattr(Compactor, "finish", late)
    await bookie.collector.collect()
    assert (await bookie.read(4, 3, 3))[0] == [newer]
    await gc.crash_and_open()
    assert gc.bookie is not None
    assert (await gc.bookie.read(4, 3, 3))[0] == [newer]
    await gc.check(4, range(4, 20))


async def test_a_read_that_races_a_compaction_asks_the_index_again(
    gc: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie = await sparse(gc)
    entered, go_on = asyncio.Event(), asyncio.Event()
    read = bookie.logs.reader.read

    async def slow(
        ledger_id: int, wanted: Sequence[tuple[int, Location]], grant: ReadGrant | None = None
    ) -> list[bytes]:
        if not entered.is_set():
            entered.set()
            await go_on.wait()  # it has asked the index, and has not opened the log
        return await read(ledger_id, wanted, grant)

    monkeypatch.setattr(bookie.logs.reader, "read", slow)
    reading = asyncio.create_task(bookie.read(4, 5, 5))
    await entered.wait()
    await bookie.collector.collect()
    go_on.set()
    assert (await reading)[0] == [data(4, 5)]
    assert bookie.damage.ledgers() == {}


async def test_defect_1534_no_log_goes_before_the_index_is_durable_without_it(
    gc: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie = await sparse(gc)
    delete = bookie.logs.delete
    deleted: list[int] = []

    async def checked(log_id: int) -> None:
        durable = [place.log_id for place in gc.storage.locations.values()]
        assert log_id not in durable
        deleted.append(log_id)
        await delete(log_id)

    monkeypatch.setattr(bookie.logs, "delete", checked)
    await bookie.collector.collect()
    assert len(deleted) >= 3
    assert bookie.failure is None
    await gc.crash_and_open()
    await gc.check(4, range(20))


STEPS = ["copied", "named", "renamed", "pointed", "deleted"]


@pytest.mark.parametrize("step", STEPS)
async def test_a_crash_at_each_step_is_finished_by_the_next_start(
    gc: Collected, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    bookie = await sparse(gc)
    reached, never = asyncio.Event(), asyncio.Event()

    async def stop() -> None:
        reached.set()
        await never.wait()

    worker = bookie.components.disk_worker
    replace, rename, delete = worker.replace, worker.rename, worker.delete
    flush = bookie.index.flush_locations

    async def replace_or_stop(path: str, content: bytes) -> None:
        if step == "copied" and path.endswith(".replaces"):
            await stop()
        await replace(path, content)

    async def rename_or_stop(source: str, target: str) -> None:
        if step == "named":
            await stop()
        await rename(source, target)
        if step == "renamed":
            await stop()

    async def flush_or_stop() -> None:
        if step == "pointed" and any(name.endswith(".replaces") for name in gc.names()):
            await stop()
        await flush()

    async def delete_or_stop(path: str) -> None:
        if step == "deleted" and path.endswith(".replaces"):
            await stop()
        await delete(path)

    monkeypatch.setattr(worker, "replace", replace_or_stop)
    monkeypatch.setattr(worker, "rename", rename_or_stop)
    monkeypatch.setattr(worker, "delete", delete_or_stop)
    monkeypatch.setattr(bookie.index, "flush_locations", flush_or_stop)
    collecting = asyncio.create_task(bookie.collector.collect())
    await reached.wait()
    crash(bookie)
    collecting.cancel()
    await asyncio.gather(collecting, return_exceptions=True)
    bookie = await gc.open()
    await gc.check(4, range(20))
    await until(lambda: not any(name.endswith(".replaces") for name in gc.names()))
    assert all(name.endswith(".log") for name in gc.names())
    await bookie.collector.collect()
    await gc.check(4, range(20))
    assert gc.log_bytes() < 60_000 / 2


async def test_a_stop_in_the_middle_leaves_nothing_that_counts(gc: Collected) -> None:
    bookie = await sparse(gc, compaction_bytes_per_s=20_000)
    collecting = asyncio.create_task(bookie.collector.collect())
    await until(lambda: any(name.endswith(".compacting") for name in gc.names()))
    await bookie.close()
    await asyncio.gather(collecting, return_exceptions=True)
    await gc.open()
    assert all(name.endswith(".log") for name in gc.names())
    await gc.check(4, range(20))


async def test_the_throttle_bounds_what_is_read(gc: Collected) -> None:
    bookie = await sparse(gc, compaction_bytes_per_s=400_000)
    size = gc.log_bytes()
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await bookie.collector.collect()
    assert loop.time() - begun > size / 400_000 * 0.5


async def test_a_full_disk_gives_the_copy_up_and_the_next_round_tries_again(
    gc: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie = await sparse(gc)
    worker = bookie.components.disk_worker
    write, names = worker.write, gc.names()

    async def full(path: str, position: int, parts: Sequence[bytes]) -> None:
        if path.endswith(".compacting") and position:
            raise DiskFull("no space")
        await write(path, position, parts)

    with monkeypatch.context() as patch:
        patch.setattr(worker, "write", full)
        assert (await bookie.collector.collect()).compacted_logs == 0
    assert gc.names() == names
    assert bookie.failure is None
    await gc.check(4, range(20))
    assert bookie_figures(bookie)["compaction_given_up"] >= 1
    assert (await bookie.collector.collect()).compacted_logs == len(names)
    await gc.check(4, range(20))


async def test_no_copy_is_begun_that_would_not_fit(gc: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    bookie = await sparse(gc)
    names = gc.names()
    monkeypatch.setattr(gc.files, "free_bytes", lambda path: (1 << 20, 1 << 40))
    assert (await bookie.collector.collect()).compacted_logs == 0
    assert gc.names() == names


async def test_logs_that_do_not_fit_together_are_copied_one_by_one(
    gc: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie = await sparse(gc)
    logs = len(gc.names())
    # Room for one log's 4 KB beside the overhead, not for those of several.
    room = (2 << 20) + 256 * 1024 + 6000
    monkeypatch.setattr(gc.files, "free_bytes", lambda path: (room, 1 << 30))
    bookie.collector.note_space([0])  # the smaller reserve: half of the write cache
    assert (await bookie.collector.collect()).compacted_logs == logs
    assert len(gc.names()) == logs
    await gc.check(4, range(20))


async def test_a_directory_that_cannot_take_the_copy_is_given_up(
    gc: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie = await sparse(gc)
    failures: list[object] = []
    bookie.on_failure = failures.append
    worker = bookie.components.disk_worker
    sync = worker.sync

    async def broken(path: str) -> None:
        if path.endswith(".compacting"):
            raise StorageFailed("the disk does not answer")
        await sync(path)

    monkeypatch.setattr(worker, "sync", broken)
    await asyncio.gather(bookie.collector.collect(), return_exceptions=True)
    assert len(failures) == 1  # it was the only directory
    crash(bookie)
    monkeypatch.undo()
    await gc.open()
    await gc.check(4, range(20))


async def test_a_log_with_a_damaged_live_entry_is_reported_and_kept(gc: Collected) -> None:
    bookie = await sparse(gc)
    place = gc.storage.locations[(4, 5)]
    path = bookie.logs.path_of(place.log_id)
    assert path is not None
    flip(path, place.offset + RECORD_HEADER_BYTES + 100)
    await bookie.collector.collect()
    assert bookie.logs.path_of(place.log_id) == path
    assert list(bookie.damage.ledgers()) == [4]
    with pytest.raises(EntryDamaged):  # rule 8: never "no such entry"
        await bookie.read(4, 5, 5)
    await gc.check(4, range(5))
    await gc.check(4, range(6, 20))
    assert bookie_figures(bookie)["compaction_damaged_logs"] == 1
    # A repair writes the entry again: now the log can go.
    assert await add(bookie, data(4, 5), recovery=True) == 0
    await bookie.checkpoint()
    await bookie.collector.collect()
    assert bookie.logs.path_of(place.log_id) is None
    await gc.check(4, range(20))


async def test_rule_45_a_log_on_a_disk_that_does_not_answer_is_not_damaged_and_compacted_later(
    gc: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie = await sparse(gc)
    silent = gc.storage.locations[(4, 5)].log_id
    failures: list[object] = []
    bookie.on_failure = failures.append
    scan = bookie.logs.scan

    def hanging(log_id: int, **options: Any) -> Any:
        if log_id == silent:
            raise RequestTimeout("the disk has not answered for 4.0 s")
        return scan(log_id, **options)

    monkeypatch.setattr(bookie.logs, "scan", hanging)
    await bookie.collector.collect()
    assert bookie.logs.path_of(silent) is not None
    figures = bookie_figures(bookie)
    assert (figures["compaction_damaged_logs"], figures["compaction_given_up"], failures) == (0, 1, [])
    monkeypatch.undo()
    await bookie.collector.collect()
    assert bookie.logs.path_of(silent) is None
    await gc.check(4, range(20))


async def test_a_directory_that_failed_does_not_keep_the_others_from_being_collected(
    gc: Collected, tmp_path: Path
) -> None:
    ledgers = {"ledger_directories": (str(tmp_path / "l1"), str(tmp_path / "l2"))}
    bookie = await sparse(gc, **ledgers)
    first = next(info for info in bookie.logs.logs() if info.directory == 0)
    bookie.collector._unfinished_compactions.append(first.log_id)  # named, and then its disk failed
    bookie.logs.fail_directory(0, StorageFailed("unlink: input/output error"))
    collected = await bookie.collector.collect()
    assert collected.deleted_logs + collected.compacted_logs > 0
    assert bookie.logs.path_of(first.log_id) is not None
    await gc.check(4, range(20))


async def test_damage_that_nobody_needs_does_not_keep_a_log(gc: Collected) -> None:
    bookie = await sparse(gc)
    place = gc.storage.locations[(1, 5)]
    path = bookie.logs.path_of(place.log_id)
    assert path is not None
    flip(path, place.offset + RECORD_HEADER_BYTES + 100)
    await bookie.collector.collect()
    assert bookie.logs.path_of(place.log_id) is None
    assert bookie.damage.ledgers() == {}
    await gc.check(4, range(20))


async def test_a_log_whose_live_records_are_all_superseded_goes_without_a_copy(gc: Collected) -> None:
    bookie = await gc.open()
    await gc.write([1], range(16))
    await gc.reopen()
    assert gc.bookie is not None
    for number in range(16):
        await add(gc.bookie, data(1, number), recovery=True)
    bookie = await gc.reopen()
    old, new = sorted(info.log_id for info in bookie.logs.logs())[0], gc.storage.locations[(1, 0)].log_id
    assert old != new
    bookie.collector.survey.measured_live_bytes = lambda log_id: 0 if log_id == old else None
    collected = await bookie.collector.collect()
    assert collected.compacted_logs == 1
    assert bookie.logs.path_of(old) is None
    await gc.check(1, range(16))
    assert len(gc.names()) == 1


async def test_each_ledger_directory_is_compacted_by_itself(gc: Collected, tmp_path: Path) -> None:
    directories = tuple(str(tmp_path / f"disk{number}") for number in range(2))
    bookie = await sparse(gc, ledger_directories=directories)
    await gc.write([5], range(5))
    assert gc.existing is not None
    before = {info.directory for info in bookie.logs.logs()}
    await bookie.collector.collect()
    assert before == {0, 1}
    await gc.check(4, range(20))
    await gc.check(5, range(5))


@pytest.mark.real
async def test_with_the_real_processes_and_rocksdb(tmp_path: Path) -> None:
    directory = str(tmp_path / "bookie")
    changes: dict[str, Any] = {"entry_log_bytes": 16 * KIB, "compaction_bytes_per_s": 0, "gc_interval_s": 0.0}
    bookie = await open_real(directory, **changes)
    for start in range(0, 40, 4):
        numbers = range(start, start + 4)
        await add_all(bookie, [data(ledger_id, number) for ledger_id in LEDGERS for number in numbers])
        await bookie.checkpoint()
    for ledger_id in (1, 2, 3):
        await bookie.delete_ledger(ledger_id)
    await bookie.close()
    bookie = await open_real(directory, **changes)
    try:
        before = sum(info.bytes for info in bookie.logs.logs())
        collected = await bookie.collector.collect()
        assert collected.compacted_logs >= 8
        assert sum(info.bytes for info in bookie.logs.logs()) < before / 3
        for attempt in range(2):
            for number in range(40):
                assert (await bookie.read(4, number, number))[0] == [data(4, number)]
            for ledger_id in (1, 2, 3):
                assert await add(bookie, entry(ledger_id, 99), recovery=True) == LedgerFenced.code
            if not attempt:
                await bookie.close()
                bookie = await open_real(directory, **changes)
    finally:
        await bookie.close()


async def test_what_a_crash_leaves_is_told_apart(gc: Collected) -> None:
    bookie = await gc.open()
    await gc.write([1], range(5))
    await bookie.close()
    directory = bookie.layout.ledgers[0]
    names = gc.names()
    Path(compacting_path(directory, 900)).write_bytes(b"half a copy")
    Path(replaces_path(directory, 901)).write_bytes(encode_replaces(901, [1]))  # its copy was never named
    [log_id] = [int(name[9:17], 16) for name in names]
    Path(replaces_path(directory, log_id)).write_bytes(b"damaged")
    await gc.open()
    await until(lambda: gc.names() == names)
    await gc.check(1, range(5))


def test_the_record_of_what_a_copy_replaces() -> None:
    content = encode_replaces(7, [1, 2, 0xFFFFFFFF])
    assert decode_replaces(content, 7) == [1, 2, 0xFFFFFFFF]
    assert decode_replaces(content, 8) is None
    for place in range(len(content)):
        assert decode_replaces(content[:place], 7) is None
        damaged = bytearray(content)
        damaged[place] ^= 1
        assert decode_replaces(bytes(damaged), 7) is None
    assert unfinished_log_id("entrylog-0000000a.compacting") == 10
    assert replaces_log_id("entrylog-0000000a.replaces") == 10
    for name in ("entrylog-0000000a.log", "entrylog-a.replaces", "cookie", "entrylog-0000000a.replaces.tmp"):
        assert unfinished_log_id(name) is None
        assert replaces_log_id(name) is None

"""A disk that is full, or fails to read. Each failing write and sync: tests/crash/test_every_disk_call.py."""

import contextlib
import errno
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import pytest

from magnetar.bookie import Bookie, BookieSettings, open_bookie
from magnetar.bookie.journal.records import FENCE, RecordType, encode_record_header, incarnation_of
from magnetar.bookie.layout import journal_path
from magnetar.proto.errors import BookieReadOnly, DiskFull, LedgerFenced, LedgerNotFound, MagnetarError
from magnetar.runtime.files import file_size
from support.bookie_kit import KIB, add, crash, entry, model_components, small_settings, until
from support.index_model import ModelStorage
from support.sim import SimDisk, SimLoop

SETTINGS = small_settings("/data/bookie", journal_file_bytes=64 * KIB, disk_check_interval_s=0.05)


def simulate(seed: int, main: Callable[[SimDisk, SimLoop, ModelStorage], Coroutine[Any, Any, None]]) -> None:
    loop = SimLoop(seed)
    disk = SimDisk(random.Random(seed))
    disk.mount().make_directory("/data")
    try:
        loop.run(main(disk, loop, ModelStorage()))
    finally:
        loop.close()


def test_rule_12_a_flush_that_finds_the_disk_full_is_tried_again_and_nothing_is_lost() -> None:
    async def main(disk: SimDisk, loop: SimLoop, storage: ModelStorage) -> None:
        bookie = await open_bookie(SETTINGS, model_components(storage, disk.mount()))
        entries = [entry(1, number, b"x" * 1000) for number in range(50)]
        for data in entries[:30]:
            assert await add(bookie, data) == 0
        disk.fail("write", "entrylog", errno.ENOSPC, times=3)
        with pytest.raises(DiskFull):
            await bookie.checkpoint()
        await until(lambda: bookie.read_only)
        assert await add(bookie, entries[30]) == BookieReadOnly.code
        await bookie.fence(5)
        assert (await bookie.read(1, 0, 99))[0] == entries[:30]
        bookie._flush_wanted.set()
        await until(lambda: not bookie.read_only)
        for data in entries[30:]:
            assert await add(bookie, data) == 0
        await bookie.close()
        bookie = await open_bookie(SETTINGS, model_components(storage, disk.mount()))
        assert (await bookie.read(1, 0, 99))[0] == entries
        await bookie.close()

    simulate(1, main)


def test_rule_12_a_disk_that_fills_up_ends_in_read_only_and_not_in_a_crash() -> None:
    async def main(disk: SimDisk, loop: SimLoop, storage: ModelStorage) -> None:
        disk.capacity_bytes = 3 << 20
        settings = small_settings(
            "/data/bookie",
            journal_file_bytes=64 * KIB,
            disk_check_interval_s=0.01,
            disk_minimum_free_bytes=1 << 20,
        )
        bookie = await open_bookie(settings, model_components(storage, disk.mount()))
        failures: list[MagnetarError] = []
        bookie.on_failure = failures.append
        stored, number = 0, 0
        while not bookie.read_only:
            code = await add(bookie, entry(1, number, b"x" * 10_000))
            assert code in (0, BookieReadOnly.code)
            stored += code == 0
            number += 1
        assert stored > 50
        assert failures == []
        assert len((await bookie.read(1, 0, stored - 1, max_bytes=1 << 30))[0]) == stored
        await bookie.fence(1)
        await bookie.close()
        bookie = await open_bookie(settings, model_components(storage, disk.mount()))
        assert len((await bookie.read(1, 0, stored - 1, max_bytes=1 << 30))[0]) == stored
        while not bookie.read_only:  # the start gave the files that it needs no more back
            assert await add(bookie, entry(3, number, b"x" * 10_000)) in (0, BookieReadOnly.code)
            number += 1
        disk.capacity_bytes = 30 << 20
        await until(lambda: not bookie.read_only)
        assert await add(bookie, entry(2, 0)) == 0
        await bookie.close()

    simulate(1, main)


def test_rule_39_a_full_disk_goes_on_taking_recoveries_also_after_a_restart() -> None:
    """As long as there is room for them; then the reserve is given back."""

    async def main(disk: SimDisk, loop: SimLoop, storage: ModelStorage) -> None:
        disk.capacity_bytes = 8 << 20
        settings = small_settings(
            "/data/bookie",
            disk_check_interval_s=0.01,
            disk_minimum_free_bytes=1 << 20,
            disk_recovery_bytes=256 * KIB,
        )
        files = disk.mount()
        files.make_directory("/other")

        def leave(free_bytes: int) -> None:
            size = disk.capacity_bytes - disk.used_bytes() - free_bytes
            file = files.open("/other/filler", create=True)
            file.zero_fill(file.size(), size) if size > 0 else file.truncate(file.size() + size)

        async def recovered(number: int) -> int:
            return await add(bookie, entry(1, number), recovery=True)

        bookie = await open_bookie(settings, model_components(storage, disk.mount()))
        await until(lambda: files.exists("/data/bookie/reserve"))
        assert await add(bookie, entry(1, 0)) == 0
        await bookie.fence(1)
        leave(900 * KIB)
        await until(lambda: bookie.read_only)
        assert await add(bookie, entry(2, 0)) == BookieReadOnly.code
        assert await recovered(1) == 0
        assert files.exists("/data/bookie/reserve")
        leave(100 * KIB)
        await until(lambda: file_size(files, "/data/bookie/reserve") == 32 * KIB)
        assert await recovered(2) == 0
        await bookie.close()
        bookie = await open_bookie(settings, model_components(storage, disk.mount()))
        assert bookie.read_only
        assert await recovered(3) == 0
        leave(64 * KIB)
        await until(lambda: not bookie.disk_space.takes_recoveries)
        assert await recovered(4) == BookieReadOnly.code
        leave(4 << 20)
        await until(lambda: not bookie.read_only)
        await until(lambda: file_size(files, "/data/bookie/reserve") == 256 * KIB)
        assert (await bookie.read(1, 0, 9))[0] == [entry(1, number) for number in range(4)]
        await bookie.close()

    simulate(2, main)


@pytest.mark.parametrize("used_by_recoveries", [False, True])
def test_rule_39_a_start_on_a_disk_without_a_free_byte_serves_reads_fences_and_deletions(
    used_by_recoveries: bool,
) -> None:
    async def main(disk: SimDisk, loop: SimLoop, storage: ModelStorage) -> None:
        disk.capacity_bytes = 8 << 20
        settings = small_settings(
            "/data/bookie",
            disk_check_interval_s=0.01,
            disk_minimum_free_bytes=1 << 20,
            disk_recovery_bytes=512 * KIB,
        )
        files = disk.mount()
        files.make_directory("/other")

        def fill() -> None:
            size = disk.capacity_bytes - disk.used_bytes()
            file = files.open("/other/filler", create=True)
            file.zero_fill(file.size(), size)

        components = model_components(storage, files)
        bookie = await open_bookie(settings, components)
        await until(lambda: file_size(files, "/data/bookie/reserve") == 512 * KIB)
        assert [await add(bookie, entry(1, number)) for number in range(9)] == [0] * 9
        if used_by_recoveries:
            fill()
            await until(lambda: file_size(files, "/data/bookie/reserve") == 64 * KIB)
        crash(bookie)
        fill()
        bookie = await open_bookie(settings, model_components(storage, files))
        fill()
        assert (await bookie.read(1, 0, 8))[0] == [entry(1, number) for number in range(9)]
        identity = bookie.introduce(None)
        bookie.introduce(msgspec.structs.replace(identity, next_ledger_id=500))
        assert bookie.ledgers.next_ledger_id == 500
        await bookie.fence(1)
        await bookie.delete_ledger(2)
        assert bookie.read_only
        assert bookie.failure is None
        await bookie.close()

    simulate(4, main)


@pytest.mark.parametrize("torn", [False, True])
def test_rule_39_a_start_on_a_full_disk_keeps_in_memory_what_it_cannot_flush(torn: bool) -> None:
    """Twice, killed each time: whatever was replayed, fenced and deleted since is there, and flushed once there is room."""

    async def main(disk: SimDisk, loop: SimLoop, storage: ModelStorage) -> None:
        disk.capacity_bytes = 8 << 20
        files = disk.mount()
        files.make_directory("/other")

        def settings(write_cache_bytes: int) -> BookieSettings:
            return small_settings(
                "/data/bookie",
                write_cache_bytes=write_cache_bytes,
                checkpoint_interval_s=100.0,
                journal_file_bytes=256 * KIB,
                disk_check_interval_s=0.01,
                disk_minimum_free_bytes=1 << 20,
                disk_recovery_bytes=512 * KIB,
            )

        def fill() -> None:
            with contextlib.closing(files.open("/other/filler", create=True)) as file:
                file.zero_fill(file.size(), disk.capacity_bytes - disk.used_bytes())

        async def check(bookie: Bookie, fenced: Sequence[int]) -> None:
            for ledger_id in (1, 2):
                found: list[bytes] = []
                while len(found) < len(entries):
                    found += (await bookie.read(ledger_id, len(found), len(entries) - 1))[0]
                assert found == [entry(ledger_id, number, b"x" * 4000) for number in entries]
            for ledger_id in fenced:
                assert await add(bookie, entry(ledger_id, 999)) == LedgerFenced.code
            with pytest.raises(LedgerNotFound):
                await bookie.read(3, 0, 0)

        bookie = await open_bookie(settings(8 << 20), model_components(storage, files))
        await until(lambda: file_size(files, "/data/bookie/reserve") == 512 * KIB)
        entries = range(120)
        for ledger_id in (1, 2, 3):
            for number in entries if ledger_id < 3 else (0,):
                assert not await add(bookie, entry(ledger_id, number, b"x" * 4000))
        await bookie.delete_ledger(3)
        position = bookie.journals.all[0].durable_position()
        crash(bookie)
        if torn:  # a record that nobody waited for, behind a page that never came
            path = journal_path("/data/bookie/journal", position.sequence)
            with contextlib.closing(files.open(path)) as file:
                end = max(at for at in range(0, file.size(), 4096) if any(file.read_at(at, 4096))) + 4096
                header = encode_record_header(
                    incarnation_of(bookie.cookie.instance, position.sequence),
                    position.offset + 4096,
                    0,
                    RecordType.FENCE,
                    FENCE.pack(2),
                )
                file.write_at(end + 4096, [header, FENCE.pack(2)])
        fill()
        for fenced in ([], [1]):
            bookie = await open_bookie(settings(256 * KIB), model_components(storage, files))
            fill()
            assert bookie.read_only
            await check(bookie, fenced)
            await bookie.fence(1 + len(fenced))
            assert await add(bookie, entry(9, 0)) == BookieReadOnly.code
            assert bookie.failure is None
            crash(bookie)
            if fenced:
                disk.lose_power()
                files = disk.mount()
        bookie = await open_bookie(settings(256 * KIB), model_components(storage, files))
        await check(bookie, [1, 2])
        files.delete("/other/filler")
        files.sync_directory("/other")
        await until(lambda: not bookie.read_only)
        assert not await add(bookie, entry(9, 0))
        await bookie.checkpoint()
        assert len(bookie.journals.all[0].files) == 1
        await check(bookie, [1, 2])
        await bookie.close()
        bookie = await open_bookie(settings(256 * KIB), model_components(storage, disk.mount()))
        assert not bookie.replayed_records
        await check(bookie, [1, 2])
        await bookie.close()

    simulate(5, main)


def test_a_disk_that_is_too_small_is_named() -> None:
    async def main(disk: SimDisk, loop: SimLoop, storage: ModelStorage) -> None:
        disk.capacity_bytes = 1 << 20
        settings = small_settings("/data/bookie", disk_minimum_free_bytes=1 << 20)
        bookie = await open_bookie(settings, model_components(storage, disk.mount()))
        assert "the disk is small" in bookie.disk_space.reason
        await bookie.close()

    simulate(3, main)


def test_a_failed_read_is_damage_and_stops_nothing() -> None:
    async def main(disk: SimDisk, loop: SimLoop, storage: ModelStorage) -> None:
        bookie = await open_bookie(SETTINGS, model_components(storage, disk.mount()))
        await add(bookie, entry(1, 0))
        await bookie.checkpoint()
        disk.fail("read", "entrylog", times=10)
        with pytest.raises(MagnetarError) as failure:
            await bookie.read(1, 0, 0)
        assert type(failure.value).__name__ == "EntryDamaged"
        disk.clear_faults()
        assert (await bookie.read(1, 0, 0))[0] == [entry(1, 0)]
        assert bookie.failure is None
        await bookie.close()

    simulate(1, main)

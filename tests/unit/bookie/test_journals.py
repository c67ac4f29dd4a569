"""The journal's settings, what it writes when it falls quiet, and a full disk (rules 4, 5, 12)."""

import asyncio
import errno
import os
import random
import select
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from magnetar.bookie import Bookie, open_bookie
from magnetar.bookie.device import RingJournalDevice
from magnetar.bookie.device.writer_process import (
    CONTROL,
    DURABLE,
    FULL,
    REPORT,
    WRITTEN,
    JournalWriter,
    PlainDisk,
)
from magnetar.bookie.journal.records import Record, RecordType, incarnation_of, scan_journal
from magnetar.bookie.status import bookie_info, bookie_problems
from magnetar.proto.errors import (
    BookieReadOnly,
    DataDirectoryError,
    DiskFull,
    MagnetarError,
    ServiceNotReady,
    StorageFailed,
)
from magnetar.runtime.files import OsFiles
from support.bookie_kit import (
    KIB,
    add,
    add_all,
    crash,
    entry,
    model_components,
    open_inline,
    open_real,
    small_settings,
    until,
)
from support.index_model import ModelStorage
from support.inline_devices import InlineJournalDevice
from support.sim import SimDisk, SimLoop

DIRECTORY = "/data/bookie"


def simulate(main: Callable[[SimDisk, ModelStorage], Coroutine[Any, Any, None]]) -> None:
    loop = SimLoop(1)
    disk = SimDisk(random.Random(1))
    disk.mount().make_directory("/data")
    try:
        loop.run(main(disk, ModelStorage()))
    finally:
        loop.close()


async def open_sim(disk: SimDisk, storage: ModelStorage, **changes: Any) -> Bookie:
    changes = {"disk_check_interval_s": 0.05, "checkpoint_interval_s": 1000.0} | changes
    return await open_bookie(small_settings(DIRECTORY, **changes), model_components(storage, disk.mount()))


def records(bookie: Bookie, path: str) -> list[RecordType]:
    """Types of the records of a journal file, as a recovery reads them."""
    sequence = bookie.journals.all[0].files[-1]
    data = Path(path).read_bytes()
    incarnation = incarnation_of(bookie.cookie.instance, sequence)
    found = scan_journal(lambda at, length: data[at : at + length], len(data), incarnation, 0)
    return [RecordType(item.type) for item in found if isinstance(item, Record)]


def journal_path(bookie: Bookie) -> Path:
    return Path(bookie.layout.journal_file(0, bookie.journals.all[0].files[-1]))


# --- quiet -----------------------------------------------------------------------------------------------------------


async def test_rule_05_damage_at_the_very_end_of_a_quiet_journal_is_told_from_a_torn_tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magnetar.bookie.journal.journal._IDLE_S", 0.05)
    storage = ModelStorage()
    bookie = await open_inline(str(tmp_path), storage, journal_file_bytes=1 << 20)
    for number in range(3):
        assert await add(bookie, entry(1, number)) == 0
    journal = bookie.journals.all[0]
    end = journal.device.end_offset
    await until(lambda: journal.device.end_offset > end and not journal.queued[1])
    path = journal_path(bookie)
    assert records(bookie, str(path)) == [RecordType.BEGIN, *[RecordType.ADD] * 3, RecordType.SYNCED]
    crash(bookie)
    good = path.read_bytes()
    path.write_bytes(good.replace(b"payload of 1:2", b"payload of X:X"))
    with pytest.raises(DataDirectoryError, match="is damaged"):
        await open_inline(str(tmp_path), storage)
    path.write_bytes(good)
    bookie = await open_inline(str(tmp_path), storage)
    assert bookie.replayed_records == 3
    await bookie.close()


def test_a_record_now_and_then_costs_one_sync() -> None:
    """The SYNCED record behind each of them was a second one."""

    async def main(disk: SimDisk, storage: ModelStorage) -> None:
        bookie = await open_sim(disk, storage, journal_file_bytes=1 << 20)
        journal = bookie.journals.all[0]
        await asyncio.sleep(10.0)
        before = journal.device.sync_seconds.count
        for number in range(20):
            assert await add(bookie, entry(1, number)) == 0
            await asyncio.sleep(0.5)
        assert journal.device.sync_seconds.count - before == 20
        await asyncio.sleep(10.0)
        assert journal.device.sync_seconds.count - before == 21
        await bookie.close()

    simulate(main)


def test_a_quiet_journal_says_so_once() -> None:
    async def main(disk: SimDisk, storage: ModelStorage) -> None:
        bookie = await open_sim(disk, storage, journal_file_bytes=1 << 20)
        journal = bookie.journals.all[0]
        await asyncio.sleep(1.0)
        begun = journal.device.end_offset  # BEGIN alone has nothing to say
        for number in range(20):  # busy enough never to fall quiet
            assert await add(bookie, entry(1, number)) == 0
            await asyncio.sleep(0.05)
        busy = journal.device.end_offset - begun
        assert busy == sum(40 + len(entry(1, number)) for number in range(20))
        await asyncio.sleep(10.0)
        assert journal.device.end_offset - begun == busy + 40
        await bookie.checkpoint()
        await asyncio.sleep(10.0)
        assert journal.device.end_offset - begun == busy + 40
        await bookie.close()

    simulate(main)


# --- a full disk -----------------------------------------------------------------------------------------------------


def test_rule_12_a_journal_that_finds_the_disk_full_waits_and_loses_nothing() -> None:
    async def main(disk: SimDisk, storage: ModelStorage) -> None:
        bookie = await open_sim(disk, storage)
        failures: list[MagnetarError] = []
        bookie.on_failure = failures.append
        assert await add(bookie, entry(1, 0)) == 0
        disk.fail("write", "/journal-", errno.ENOSPC, times=4)
        waiting = [asyncio.ensure_future(add(bookie, entry(1, number))) for number in (1, 2)]
        await until(lambda: bookie.journals.no_space)
        assert bookie.read_only
        assert await add(bookie, entry(1, 3)) == BookieReadOnly.code
        assert (await bookie.read(1, 0, 0))[0] == [entry(1, 0)]
        assert not any(task.done() for task in waiting)
        assert await asyncio.gather(*waiting) == [0, 0]
        await until(lambda: not bookie.read_only)
        assert await add(bookie, entry(1, 3)) == 0
        assert failures == []
        crash(bookie)
        bookie = await open_sim(disk, storage)
        assert (await bookie.read(1, 0, 9))[0] == [entry(1, number) for number in range(4)]
        await bookie.close()

    simulate(main)


def test_rule_12_no_room_for_the_next_journal_file_means_read_only_and_fences_go_on() -> None:
    async def main(disk: SimDisk, storage: ModelStorage) -> None:
        bookie = await open_sim(disk, storage)
        await until(lambda: bool(bookie.journals.all[0]._spares))
        full = True
        real = bookie.components.disk_worker.prepare

        async def prepare(path: str, size: int, source: str = "", **options: Any) -> None:
            if full:
                raise DiskFull("no space")
            await real(path, size, source, **options)

        bookie.components.disk_worker.prepare = prepare  # type: ignore[method-assign]
        number = 0
        while not bookie.read_only:
            assert await add(bookie, entry(1, number, b"x" * 2000)) in (0, BookieReadOnly.code)
            number += 1
        assert bookie.journals.no_space
        for ledger in range(10, 15):
            await bookie.fence(ledger)
        assert bookie.failure is None
        full = False
        await until(lambda: not bookie.read_only)
        assert await add(bookie, entry(2, 0)) == 0
        await bookie.close()

    simulate(main)


def test_rule_12_a_bookie_closes_while_its_journal_waits_for_space() -> None:
    async def main(disk: SimDisk, storage: ModelStorage) -> None:
        bookie = await open_sim(disk, storage)
        assert await add(bookie, entry(1, 0)) == 0
        disk.fail("write", "/journal-", errno.ENOSPC, times=1_000_000)
        waiting = asyncio.ensure_future(add(bookie, entry(1, 1)))
        await until(lambda: bookie.journals.no_space)
        await bookie.close()
        assert await waiting == DiskFull.code
        disk.clear_faults()
        bookie = await open_sim(disk, storage)
        assert (await bookie.read(1, 0, 0))[0] == [entry(1, 0)]
        await bookie.close()

    simulate(main)


@pytest.mark.real
@pytest.mark.parametrize("real", [False, True])
async def test_rule_12_a_close_on_a_full_disk_refuses_what_it_cannot_store(
    tmp_path: Path, real: bool
) -> None:
    (tmp_path / "j-1").write_bytes(bytes(64 * KIB))
    failures: list[MagnetarError] = []
    device: Any
    if real:
        if not os.path.exists("/dev/full"):
            pytest.skip("needs /dev/full")
        (tmp_path / "j-1").unlink()
        (tmp_path / "j-1").symlink_to("/dev/full")
        device = RingJournalDevice(str(tmp_path / "j-%d"), ring_bytes=64 * KIB)
    else:

        class FullFile:
            def write_at(self, offset: int, parts: object) -> int:
                raise DiskFull("no space")

            def close(self) -> None:
                pass

        class FullFiles(OsFiles):
            def open(self, path: str, **options: Any) -> Any:
                return FullFile()

        device = InlineJournalDevice(FullFiles(), lambda sequence: str(tmp_path / "j-1"))
    told: list[bool] = []
    device.on_failure = failures.append
    device.on_space = lambda: told.append(device.full)
    await device.start(1, 0)
    device.append(b"", b"lost")
    await until(lambda: bool(told))
    assert told == [True]
    await device.close()
    await asyncio.sleep(0)
    assert [type(failure) for failure in failures] == [DiskFull]
    assert device.durable_offset == 0


class Reports:
    """A writer in this process, over pipes."""

    def __init__(self, disk: PlainDisk) -> None:
        control, self.control = os.pipe()
        self.report, report = os.pipe()
        self.ring = bytearray(64 * KIB)
        self.writer = JournalWriter(disk, memoryview(self.ring), "j-%d", 0, control, report, 4096)
        self.fds = (control, report)

    def run(self, *messages: tuple[int, int]) -> list[tuple[int, ...]]:
        for message in messages:
            os.write(self.control, CONTROL.pack(*message))
        os.close(self.control)
        try:
            self.writer.run()
            return list(REPORT.iter_unpack(os.read(self.report, 65536)))
        finally:
            for fd in (*self.fds, self.report):
                os.close(fd)


class ShortOfSpace(PlainDisk):
    """Takes nothing three times, and only a part in between."""

    def __init__(self) -> None:
        super().__init__(True)
        self.written = bytearray(64 * KIB)
        self.refusals = 3
        self.syncs = 0

    def open(self, path: str) -> None:
        pass

    def write(self, position: int, parts: list[memoryview]) -> None:
        data = b"".join(parts)
        if self.refusals:
            self.refusals -= 1
            self.written[position : position + 10] = data[:10]
            parts.clear()  # as PlainDisk uses it up
            raise OSError(errno.ENOSPC, "no space")
        self.written[position : position + len(data)] = data

    def sync(self) -> None:
        self.syncs += 1


def test_rule_12_the_writer_tries_a_write_again_until_there_is_space(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoPoll:
        def register(self, fd: int, events: int) -> None: ...

        def poll(self, timeout: int) -> list[Any]:
            return []

    monkeypatch.setattr(select, "poll", NoPoll)
    disk = ShortOfSpace()
    reports = Reports(disk)
    reports.ring[:5000] = b"ab" * 2500
    found = reports.run((WRITTEN, 5000))
    assert [row[:3] for row in found] == [(FULL, errno.ENOSPC, 0), (DURABLE, 5000, 8192)]
    assert bytes(disk.written[:5000]) == b"ab" * 2500
    assert disk.syncs == 1


def test_rule_04_the_writer_never_tries_a_sync_again() -> None:
    class FailingSync(ShortOfSpace):
        def sync(self) -> None:
            self.syncs += 1
            raise OSError(errno.ENOSPC, "no space")

    disk = FailingSync()
    disk.refusals = 0
    reports = Reports(disk)
    with pytest.raises(OSError, match="no space"):
        reports.run((WRITTEN, 100))
    assert disk.syncs == 1


def test_rule_04_a_full_disk_that_shows_in_a_sync_stops_the_bookie() -> None:
    async def main(disk: SimDisk, storage: ModelStorage) -> None:
        bookie = await open_sim(disk, storage)
        failures: list[MagnetarError] = []
        bookie.on_failure = failures.append
        disk.fail("sync", "/journal-", errno.ENOSPC)
        assert await add(bookie, entry(1, 0)) == StorageFailed.code
        assert [type(failure) for failure in failures] == [StorageFailed]
        await bookie.close()

    simulate(main)


# --- unsafe, and figures ---------------------------------------------------------------------------------------------


@pytest.mark.real
async def test_without_syncs_everything_works_and_is_called_unsafe(tmp_path: Path) -> None:
    bookie = await open_real(str(tmp_path), journal_sync_data=False)
    assert not any(await add_all(bookie, [entry(1, n) for n in range(10)]))
    assert bookie_info(bookie)["unsafe_no_sync"] is True
    assert "unsafe_no_sync" in bookie_problems(bookie)
    await bookie.close()
    bookie = await open_real(str(tmp_path))
    assert (await bookie.read(1, 0, 99))[0] == [entry(1, n) for n in range(10)]
    assert "unsafe_no_sync" not in bookie_problems(bookie)
    await bookie.close()


@pytest.mark.real
async def test_figures_of_the_journal(tmp_path: Path) -> None:
    bookie = await open_real(str(tmp_path))
    assert not any(await add_all(bookie, [entry(1, n) for n in range(10)]))
    journal = bookie.journals.all[0]
    stats = bookie.journals.stats()
    assert stats["journal_records"] == 10
    assert stats["journal_groups"] == stats["journal_syncs"] == journal.device.sync_seconds.count >= 1
    assert stats["journal_bytes"] == journal.device.end_offset - journal._files[0].base
    assert (stats["journal_queue_records"], stats["journal_queue_bytes"]) == (0, 0)
    assert journal.group_records.total == 10
    assert 0 < journal.device.sync_seconds.total < 30
    await bookie.close()


async def test_a_start_without_syncs_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bookie = await open_inline(str(tmp_path), ModelStorage(), journal_sync_data=False)
    assert "UNSAFE: journal_sync_data is off" in caplog.text
    await bookie.close()


@pytest.mark.real
async def test_a_stop_does_not_wait_for_a_journal_that_hangs_with_a_full_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("device.ring._STOP_TIMEOUT_S", "engine._LET_GO_S"):
        monkeypatch.setattr(f"magnetar.bookie.{place}", 0.1)
    bookie = await open_real(
        str(tmp_path), close_timeout_s=0.2, journal_ring_bytes=(1 << 20) + 32 * KIB, write_cache_bytes=8 << 20
    )
    assert await add(bookie, entry(1, 0)) == 0
    journal = bookie.journals.all[0]
    os.kill(journal.device.writer_pid, signal.SIGSTOP)  # type: ignore[attr-defined]
    waiting = asyncio.ensure_future(
        add_all(bookie, [entry(1, number, bytes(30 * KIB)) for number in range(1, 60)])
    )
    await asyncio.sleep(0)
    assert journal.waiting
    await asyncio.wait_for(bookie.close(), 5.0)
    assert await waiting == [ServiceNotReady.code] * 59

"""Writing by way of the disk worker: order, shared memory that runs out, open files, and what an error means."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from magnetar.bookie.device import ProcessDiskWorker
from magnetar.bookie.disk_worker import DiskWorker
from magnetar.proto.errors import DataDirectoryError, DiskFull, RequestTimeout, StorageFailed
from magnetar.runtime.files import OsFiles
from support.inline_devices import InlineDiskWorker

pytestmark = pytest.mark.real


SLOT = 4096


@pytest.fixture(params=["process", "inline"])
async def worker(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[DiskWorker]:
    files = OsFiles()
    lock = files.lock(str(tmp_path / "LOCK"))
    worker: DiskWorker = (
        ProcessDiskWorker(3 * SLOT, slot_bytes=SLOT)
        if request.param == "process"
        else InlineDiskWorker(files)
    )
    await worker.start(lock)
    lock.release()
    yield worker
    await worker.close()


async def test_a_file_is_made_written_cut_renamed_and_deleted(worker: DiskWorker, tmp_path: Path) -> None:
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    await worker.create(a)
    with pytest.raises(DataDirectoryError):
        await worker.create(a)
    await worker.write(a, 0, [b"one", b"two"])
    await worker.write(a, 6, [b"three"])
    await worker.sync(a)
    assert Path(a).read_bytes() == b"onetwothree"
    await worker.truncate(a, 3)
    await worker.write(a, 3, [b"four"])
    assert Path(a).read_bytes() == b"onefour"
    await worker.rename(a, b)
    # The open file of the old name must not be taken for that of the new one.
    await worker.create(a)
    await worker.write(a, 0, [b"another"])
    assert (Path(a).read_bytes(), Path(b).read_bytes()) == (b"another", b"onefour")
    await worker.write(b, 0, [b"ONE"])
    assert Path(b).read_bytes() == b"ONEfour"
    await worker.delete(a)
    await worker.create(a)
    await worker.write(a, 0, [b"third"])
    assert Path(a).read_bytes() == b"third"
    await worker.write(a, 0, [])
    await worker.write(a, 0, [b""])
    with pytest.raises((StorageFailed, DataDirectoryError)):
        await worker.write(str(tmp_path / "missing"), 0, [b"x"])


async def test_more_than_the_shared_memory_is_written_in_order(worker: DiskWorker, tmp_path: Path) -> None:
    """Each writer waits for its slots; everybody gets some in the end."""
    paths = [str(tmp_path / name) for name in "abc"]
    for path in paths:
        await worker.create(path)
    large = os.urandom(20 * SLOT + 17)
    await asyncio.gather(
        *[worker.write(path, 0, [large[:100], large[100:]]) for path in paths],
        *[worker.write(paths[0], len(large) + n * 1000, [bytes([n]) * 1000]) for n in range(50)],
    )
    for path in paths:
        assert Path(path).read_bytes()[: len(large)] == large
    tail = Path(paths[0]).read_bytes()[len(large) :]
    assert tail == b"".join(bytes([n]) * 1000 for n in range(50))


async def test_writes_to_one_place_are_done_in_the_order_of_the_calls(
    worker: DiskWorker, tmp_path: Path
) -> None:
    path = str(tmp_path / "a")
    await worker.create(path)
    await asyncio.gather(*[worker.write(path, 0, [b"%04d" % n]) for n in range(100)])
    assert Path(path).read_bytes() == b"0099"


async def test_a_writer_that_gives_up_keeps_no_slot(worker: DiskWorker, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    await worker.create(path)
    for turn in range(20):
        writes = [asyncio.ensure_future(worker.write(path, 0, [bytes(6 * SLOT)])) for _ in range(6)]
        for _ in range(turn % 4):
            await asyncio.sleep(0)
        for number, write in enumerate(writes):
            if number % 2:
                write.cancel()
        await asyncio.gather(*writes, return_exceptions=True)
    await worker.write(path, 0, [bytes(6 * SLOT)])
    if isinstance(worker, ProcessDiskWorker):
        # What a cancelled write had asked for is answered like everything else.
        while worker._waiting:
            await asyncio.sleep(0.001)
        assert sorted(worker._free) == [0, SLOT, 2 * SLOT]
        assert not worker._writers


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
async def test_rule_12_no_space_is_a_full_disk_and_nothing_else(worker: DiskWorker) -> None:
    with pytest.raises(DiskFull):
        await worker.write("/dev/full", 0, [bytes(3 * SLOT)])
    with pytest.raises(DiskFull):
        await worker.write("/dev/full", 0, [b"x"])


async def test_rule_04_any_other_failed_write_is_final(tmp_path: Path) -> None:
    lock = OsFiles().lock(str(tmp_path / "LOCK"))
    worker = ProcessDiskWorker(3 * SLOT, slot_bytes=SLOT)
    await worker.start(lock)
    lock.release()
    (tmp_path / "directory").mkdir()
    with pytest.raises(StorageFailed):
        await worker.write(str(tmp_path / "directory"), 0, [b"x"])
    assert len(worker._free) == 3
    await worker.close()
    with pytest.raises(StorageFailed, match="closed"):
        await worker.write(str(tmp_path / "a"), 0, [b"x"])


async def test_a_close_ends_the_writers_that_wait_for_a_slot(tmp_path: Path) -> None:
    lock = OsFiles().lock(str(tmp_path / "LOCK"))
    worker = ProcessDiskWorker(SLOT, slot_bytes=SLOT)
    await worker.start(lock)
    lock.release()
    path = str(tmp_path / "a")
    await worker.create(path)
    writes = [asyncio.ensure_future(worker.write(path, 0, [bytes(SLOT)])) for _ in range(5)]
    await asyncio.sleep(0)
    await worker.close()
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert all(outcome is None or isinstance(outcome, StorageFailed) for outcome in outcomes)
    assert any(isinstance(outcome, StorageFailed) for outcome in outcomes)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
async def test_open_files_of_the_worker_are_few(tmp_path: Path) -> None:
    lock = OsFiles().lock(str(tmp_path / "LOCK"))
    worker = ProcessDiskWorker()
    await worker.start(lock)
    lock.release()
    try:
        paths = [str(tmp_path / f"f{number}") for number in range(60)]
        for path in paths:
            await worker.create(path)
            await worker.write(path, 0, [b"x"])
            await worker.sync(path)
        assert worker._process is not None
        opened = [
            target
            for fd in os.listdir(f"/proc/{worker._process.pid}/fd")
            if "/f" in (target := os.readlink(f"/proc/{worker._process.pid}/fd/{fd}"))
            and str(tmp_path) in target
        ]
        assert len(opened) <= 16
        assert Path(paths[0]).read_bytes() == b"x"
    finally:
        await worker.close()


async def test_a_request_that_meets_a_bug_is_answered_and_its_queue_goes_on(tmp_path: Path) -> None:
    worker = ProcessDiskWorker(3 * SLOT, slot_bytes=SLOT)
    lock = OsFiles().lock(str(tmp_path / "LOCK"))
    await worker.start(lock)
    lock.release()
    async with asyncio.timeout(10):
        with pytest.raises(StorageFailed):
            await worker.create(str(tmp_path / "a\0b"))  # a ValueError there, and not an OSError
        await worker.create(str(tmp_path / "a"))
        await worker.write(str(tmp_path / "a"), 0, [b"goes on"])
    assert (tmp_path / "a").read_bytes() == b"goes on"
    await worker.close()


async def test_rule_45_reads_of_a_directory_that_hangs_end_with_an_error_and_delay_no_other(
    tmp_path: Path,
) -> None:
    """A pipe without a writer stands for a file on a disk that hangs: nobody can open it."""
    lock = OsFiles().lock(str(tmp_path / "LOCK"))
    worker = ProcessDiskWorker(read_timeout_s=1.0)
    await worker.start(lock)
    lock.release()
    for name in ("hung", "well"):
        (tmp_path / name).mkdir()
    pipe, file = str(tmp_path / "hung" / "a"), tmp_path / "well" / "a"
    os.mkfifo(pipe)
    file.write_bytes(b"x")
    reads = [asyncio.ensure_future(worker.warm(pipe, 0, 1)) for _ in range(200)]
    await asyncio.gather(*[worker.warm(str(file), 0, 1) for _ in range(200)])
    assert not any(read.done() and not read.exception() for read in reads)
    for outcome in await asyncio.gather(*reads, return_exceptions=True):
        assert isinstance(outcome, RequestTimeout)
    assert len(worker._waiting) == 64, "the process gets no more, however many are asked"
    assert worker.silent_directories()[str(tmp_path / "hung")] >= 1
    with pytest.raises(RequestTimeout, match="hung"):
        await worker.warm(pipe, 0, 1)
    await worker.warm(str(file), 0, 1)
    # The disk answers again.
    ends = os.open(pipe, os.O_RDWR)
    while worker._waiting:
        await asyncio.sleep(0.001)
    assert worker.silent_directories()[str(tmp_path / "hung")] == 0
    with pytest.raises(StorageFailed):
        await worker.warm(pipe, 0, 1)  # a pipe has no offsets
    os.close(ends)
    await worker.close()


async def test_rule_54_a_disk_that_nobody_uses_is_known_to_hang_for_as_long_as_it_does(
    tmp_path: Path,
) -> None:
    lock = OsFiles().lock(str(tmp_path / "LOCK"))
    worker = ProcessDiskWorker()
    await worker.start(lock)
    lock.release()
    assert worker._process is not None
    directory = str(tmp_path)
    worker.probe(directory)
    while worker._waiting:
        await asyncio.sleep(0.001)
    assert worker.silent_directories().get(directory, 0.0) == 0
    os.kill(worker._process.pid, signal.SIGSTOP)
    worker.probe(directory)
    silent_s = worker.silent_directories()[directory]
    await asyncio.sleep(0.01)
    worker.probe(directory)
    assert len(worker._waiting) == 1, "a disk that hangs is not asked again"
    assert worker.silent_directories()[directory] > silent_s
    os.kill(worker._process.pid, signal.SIGCONT)
    while worker._waiting:
        await asyncio.sleep(0.001)
    assert worker.silent_directories().get(directory, 0.0) == 0
    await worker.close()

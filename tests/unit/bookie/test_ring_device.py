"""The ring and the journal writer process: groups, rolls, the ring's end, failures; and the disk worker."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.bookie.device import ProcessDiskWorker, RingJournalDevice
from magnetar.bookie.disk_worker import DiskWorker
from magnetar.bookie.journal.records import GROUP_ALIGNMENT
from magnetar.proto.errors import DataDirectoryError, MagnetarError, StorageFailed
from magnetar.runtime.files import OsFiles
from support.bookie_kit import until
from support.inline_devices import InlineDiskWorker
from support.lossy import LOSSY_WRITER

pytestmark = [pytest.mark.asyncio(loop_factories=["uvloop", "asyncio"]), pytest.mark.real]
RING = 64 * 1024


class Ring:
    """A device over a directory with prepared files 1 to 3."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.directory = directory
        for sequence in (1, 2, 3):
            self.path(sequence).write_bytes(bytes(256 * 1024))
        self.device = RingJournalDevice(str(directory / "j-%d"), ring_bytes=RING, **options)
        self.failures: list[MagnetarError] = []
        self.durable: list[int] = []
        self.device.on_failure = self.failures.append
        self.device.on_durable = self.durable.append

    def path(self, sequence: int) -> Path:
        return self.directory / f"j-{sequence}"

    async def all_durable(self) -> None:
        await until(lambda: self.device.durable_offset == self.device.end_offset)


@pytest.fixture
async def ring(tmp_path: Path) -> AsyncIterator[Ring]:
    ring = Ring(tmp_path)
    await ring.device.start(1, 1000)
    yield ring
    await ring.device.close()


async def test_a_group_is_aligned_padded_and_written_once(ring: Ring) -> None:
    ring.device.append(b"head", b"x" * 100)
    ring.device.append(b"head", b"y" * 100)
    assert ring.device.durable_offset == 1000
    await ring.all_durable()
    assert ring.durable == [1208]
    assert ring.device.file_position == GROUP_ALIGNMENT
    ring.device.append(b"", b"z")
    await ring.all_durable()
    data = ring.path(1).read_bytes()
    assert data[:208] == b"head" + b"x" * 100 + b"head" + b"y" * 100
    assert not data[208:GROUP_ALIGNMENT].strip(b"\0")
    assert data[GROUP_ALIGNMENT : GROUP_ALIGNMENT + 2] == b"z\0"


async def test_the_stream_goes_round_the_ring_many_times(ring: Ring) -> None:
    rng = random.Random(7)
    expected = b""
    while len(expected) < 3 * RING:
        group = b""
        while len(group) < 10_000:
            part = rng.randbytes(rng.randrange(1, 5000))
            ring.device.append(part[:7], part[7:])
            group += part
        await ring.all_durable()
        expected += group + bytes(-len(group) % GROUP_ALIGNMENT)
    assert ring.path(1).read_bytes()[: len(expected)] == expected


async def test_free_bytes_is_what_is_not_durable_yet(ring: Ring) -> None:
    assert ring.device.free_bytes == RING
    ring.device.append(b"", b"x" * 60_000)
    assert ring.device.free_bytes == RING - 60_000
    await ring.all_durable()
    assert ring.device.free_bytes == RING


async def test_a_roll_takes_effect_exactly_where_it_was_asked_for(ring: Ring) -> None:
    ring.device.append(b"", b"first")
    ring.device.roll(2)
    ring.device.append(b"", b"second")
    ring.device.roll(3)
    ring.device.append(b"", b"third")
    await ring.all_durable()
    assert [ring.path(n).read_bytes()[:7].strip(b"\0") for n in (1, 2, 3)] == [b"first", b"second", b"third"]
    assert ring.device.file_position == GROUP_ALIGNMENT


async def test_close_waits_for_what_was_appended(tmp_path: Path) -> None:
    ring = Ring(tmp_path)
    await ring.device.start(1, 0)
    ring.device.append(b"", b"last words")
    await ring.device.close()
    assert ring.durable == [10]
    assert ring.path(1).read_bytes()[:10] == b"last words"
    assert ring.failures == []


async def test_rule_04_a_writer_that_cannot_write_stops_everything(ring: Ring) -> None:
    ring.device.append(b"", b"good")
    await ring.all_durable()
    ring.device.roll(9)  # there is no such file
    ring.device.append(b"", b"lost")
    await until(lambda: bool(ring.failures))
    assert "j-9" in str(ring.failures[0])
    assert isinstance(ring.failures[0], StorageFailed)
    ring.device.append(b"", b"more")
    await asyncio.sleep(0.01)
    assert ring.durable == [1004]
    assert len(ring.failures) == 1


async def test_a_killed_writer_is_noticed_and_what_it_reported_counts(ring: Ring) -> None:
    ring.device.append(b"", b"good")
    await ring.all_durable()
    os.kill(ring.device.writer_pid, signal.SIGKILL)
    await until(lambda: bool(ring.failures))
    assert "ended with -9" in str(ring.failures[0])
    ring.device.append(b"", b"lost")
    await asyncio.sleep(0.01)
    assert ring.durable == [1004]


async def test_a_writer_that_is_stuck_gets_everything_when_it_goes_on(ring: Ring) -> None:
    """More announcements than the pipe holds: nothing is lost, nothing is announced out of order."""
    ring.device.append(b"", b"x")
    await ring.all_durable()
    os.kill(ring.device.writer_pid, signal.SIGSTOP)
    count = 0
    while not ring.device._outbox:  # it stops a moment after the signal
        ring.device.append(b"", b"y")
        ring.device._announce()
        count += 1
    ring.device.roll(2)
    ring.device.append(b"", b"z")
    os.kill(ring.device.writer_pid, signal.SIGCONT)
    await ring.all_durable()
    assert ring.path(1).read_bytes().count(b"y") == count
    assert ring.path(2).read_bytes()[:1] == b"z"
    assert not ring.device._outbox


async def test_a_lossy_writer_stores_what_it_syncs(tmp_path: Path) -> None:
    ring = Ring(tmp_path, writer=LOSSY_WRITER)
    await ring.device.start(1, 0)
    ring.device.append(b"", b"a" * 9000)
    await ring.all_durable()
    assert ring.path(1).read_bytes().count(b"a") == 9000
    await ring.device.close()


async def test_the_writer_is_lean(ring: Ring) -> None:
    ring.device.append(b"", b"x")
    await ring.all_durable()
    status = Path(f"/proc/{ring.device.writer_pid}/status")
    if not status.exists():
        pytest.skip("no /proc here")
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    assert int(fields["VmRSS"].split()[0]) < 14_000


@pytest.fixture(params=["process", "inline"])
async def worker(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[DiskWorker]:
    files = OsFiles()
    lock = files.lock(str(tmp_path / "LOCK"))
    worker: DiskWorker = ProcessDiskWorker() if request.param == "process" else InlineDiskWorker(files)
    await worker.start(lock)
    lock.release()
    yield worker
    await worker.close()


async def test_the_disk_worker_does_what_it_is_asked(worker: DiskWorker, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    await worker.prepare(str(a), 3_000_000, hurry=True)
    assert a.read_bytes() == bytes(3_000_000)
    a.write_bytes(b"old life")
    await worker.prepare(str(b), 10, str(a))
    assert b.read_bytes() == b"old life" + bytes(2)
    assert not a.exists()
    await worker.prepare(str(a), 3, str(b))  # a journal that grew gives back what it grew by
    assert a.read_bytes() == b"old"
    await worker.prepare(str(b), 3, str(a))
    await worker.sync(str(b))
    await worker.sync(str(tmp_path))
    await worker.warm(str(b), 0, 100_000)
    await worker.replace(str(b), b"new")
    assert b.read_bytes() == b"new"
    await worker.delete(str(b))
    await worker.delete(str(b))
    assert not b.exists()
    with pytest.raises(DataDirectoryError):
        await worker.warm(str(b), 0, 10)
    many = [worker.replace(str(tmp_path / f"m{n}"), b"%d" % n * 10_000) for n in range(50)]
    await asyncio.gather(*many)
    assert (tmp_path / "m49").stat().st_size == 20_000


async def test_a_killed_disk_worker_stops_the_bookie_and_fails_what_waits(tmp_path: Path) -> None:
    lock = OsFiles().lock(str(tmp_path / "LOCK"))
    worker = ProcessDiskWorker()
    failures: list[MagnetarError] = []
    worker.on_failure = failures.append
    await worker.start(lock)
    assert worker._process is not None
    os.kill(worker._process.pid, signal.SIGSTOP)
    waiting = asyncio.ensure_future(worker.sync(str(tmp_path)))
    await asyncio.sleep(0)
    os.kill(worker._process.pid, signal.SIGKILL)
    with pytest.raises(StorageFailed):
        await waiting
    assert len(failures) == 1
    await worker.close()
    lock.release()

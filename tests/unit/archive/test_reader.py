"""The helper process that reads archives: real processes and files; what becomes of those who wait when it hangs or dies."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.archive import reader as archive_reader
from magnetar.archive.reader import ArchiveProcesses
from magnetar.broker import BrokerSettings
from magnetar.broker.log.records import ArchivedLedger, LedgerInfo
from magnetar.proto.batch import encode_batch
from magnetar.proto.entry import encode_entry
from magnetar.proto.errors import ArchiveUnavailable, EntryDamaged
from magnetar.proto.ledger_entry import encode_ledger_entry
from support.archive_kit import ledger_of, write_archive

pytestmark = pytest.mark.real


TOPIC = "persistent://public/default/orders"
COUNT = 30


class Archive:
    """A ledger of 30 entries of 2 KB."""

    def __init__(self, path: Path) -> None:
        self.entries = []
        for number in range(COUNT):
            batch = encode_batch([b"%04d" % number * 500], sequence_id=number, publish_time_ms=5)
            payload = encode_entry([batch], [1], [0], ["p"], first_index=number, append_time_ms=7)
            self.entries.append(encode_ledger_entry(9, number, -1, 0, payload))
        row = ledger_of(self.entries, path)
        self.folder = write_archive(path, TOPIC, row, self.entries)
        info = LedgerInfo(
            row.position_id, row.first_offset, row.entries, row.messages, row.size, row.first_append_ms,
            row.last_append_ms, True, row.stored_id,
        )  # fmt: skip
        self.archived = ArchivedLedger(info, row.archive)

    def expected(self, first: int, count: int) -> list[bytes]:
        return [entry[40:] for entry in self.entries[first : first + count]]


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "archive")


def reader_with(**settings: Any) -> ArchiveProcesses:
    return ArchiveProcesses(BrokerSettings(**settings))


@pytest.fixture
async def reader() -> AsyncIterator[ArchiveProcesses]:
    made = reader_with()
    yield made
    await made.close()


async def read(
    reader: ArchiveProcesses, archive: Archive, first: int, max_bytes: int = 10_000
) -> list[bytes]:
    found = await reader.read(TOPIC, archive.archived, first, COUNT - 1, max_bytes=max_bytes)
    return [entry[40:] for entry in found]


def pid_of(reader: ArchiveProcesses) -> int:
    (helper,) = reader._helpers.values()
    assert helper._process is not None
    return helper._process.pid


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_one_process_reads_for_all_and_ends_when_nobody_asks(archive: Archive) -> None:
    reader = reader_with(archive_reader_idle_ms=200)
    try:
        assert await read(reader, archive, 3) == archive.expected(3, 4)
        pid = pid_of(reader)
        found = await asyncio.gather(*(read(reader, archive, number, 1) for number in range(COUNT)))
        assert found == [archive.expected(number, 1) for number in range(COUNT)]
        assert pid_of(reader) == pid
        figures = reader.figures()
        assert (figures["archive_reads_total"], figures["archive_reader_processes"]) == (COUNT + 1, 1)
        assert figures["archive_read_bytes_total"] > (COUNT + 4) * 2000
        while reader._helpers or reader._ending:
            await asyncio.sleep(0.01)
        assert not runs(pid)
        assert await read(reader, archive, 0) == archive.expected(0, 4)
    finally:
        await reader.close()
    with pytest.raises(ArchiveUnavailable, match="the broker is stopping"):
        await read(reader, archive, 0)


async def test_a_killed_process_costs_the_read_under_way_alone(
    archive: Archive, reader: ArchiveProcesses
) -> None:
    await read(reader, archive, 0)
    pid = pid_of(reader)
    os.kill(pid, signal.SIGSTOP)
    under_way = asyncio.gather(
        *(read(reader, archive, number) for number in range(3)), return_exceptions=True
    )
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    for one in await under_way:
        assert isinstance(one, ArchiveUnavailable)
        assert "ended while it read" in one.message
    assert reader.figures()["archive_read_failures_total"] == 3
    assert await read(reader, archive, 2) == archive.expected(2, 4)
    assert pid_of(reader) != pid


async def test_a_hung_process_is_killed_and_who_waits_fails_with_it(archive: Archive) -> None:
    reader = reader_with(archive_read_timeout_ms=6_000)
    try:
        await read(reader, archive, 0)
        pid = pid_of(reader)
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        found = await asyncio.gather(
            *(read(reader, archive, number) for number in range(15)), return_exceptions=True
        )
        # One time-out for all; one after another they would take 90 s.
        assert 6 <= time.monotonic() - began < 80
        for one in found:
            assert isinstance(one, ArchiveUnavailable)
            assert "did not answer within 6000 ms (archive_read_timeout_ms)" in one.message
        assert not runs(pid)
        assert await read(reader, archive, 7) == archive.expected(7, 4)
    finally:
        await reader.close()


async def test_a_hung_archive_does_not_hold_up_another_one(archive: Archive, tmp_path: Path) -> None:
    reader, other = reader_with(archive_read_timeout_ms=60_000), Archive(tmp_path / "other")
    try:
        await read(reader, archive, 0)
        os.kill(pid_of(reader), signal.SIGSTOP)
        hung = asyncio.ensure_future(read(reader, archive, 0))
        assert await read(reader, other, 0) == other.expected(0, 4)
        assert not hung.done()
    finally:
        await reader.close()
    with pytest.raises(ArchiveUnavailable, match="ended while it read"):
        await hung


async def test_processes_are_few(
    tmp_path: Path, reader: ArchiveProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_reader, "MAX_HELPERS", 2)
    archives = [Archive(tmp_path / f"archive-{number}") for number in range(4)]
    found = await asyncio.gather(*(read(reader, archive, 1) for archive in archives))
    assert found == [archive.expected(1, 4) for archive in archives]
    assert len(reader._helpers) == 2
    for archive in archives:
        assert await read(reader, archive, 5) == archive.expected(5, 4)
        assert len(reader._helpers) == 2


@pytest.mark.parametrize("turns", [1, 3, 5])
async def test_a_cancelled_read_leaves_the_next_one_alone(
    archive: Archive, reader: ArchiveProcesses, turns: int
) -> None:
    """Also one that is under way: the next one begins when its answer, which nobody wants, is there."""
    await read(reader, archive, 0)
    pid = pid_of(reader)
    reads = [asyncio.ensure_future(read(reader, archive, number)) for number in range(6)]
    for _ in range(turns):
        await asyncio.sleep(0)
    for number in (0, 1, 4):
        reads[number].cancel()
    found = await asyncio.gather(*reads, return_exceptions=True)
    for number, one in enumerate(found):
        if number in (0, 1, 4):
            assert isinstance(one, asyncio.CancelledError)
        else:
            assert one == archive.expected(number, 4)
    assert pid_of(reader) == pid


async def test_damage_comes_as_what_it_is(archive: Archive, reader: ArchiveProcesses) -> None:
    (one,) = archive.folder.manifest(TOPIC, 9).files
    path = Path(archive.folder.data_path(TOPIC, 9, one.name))
    path.unlink()
    with pytest.raises(EntryDamaged, match=r"cannot be used: it is not there; bring it back"):
        await read(reader, archive, 0)
    elsewhere = archive.archived._replace(location="file:///not/mounted")
    with pytest.raises(ArchiveUnavailable, match="there is no archive there; is it mounted"):
        await reader.read(TOPIC, elsewhere, 0, 0, max_bytes=1)


async def test_without_pyarrow_one_error_says_what_to_install(archive: Archive, tmp_path: Path) -> None:
    fake = tmp_path / "without"
    fake.mkdir()
    (fake / "pyarrow.py").write_text("raise ModuleNotFoundError(\"No module named 'pyarrow'\")")
    reader = ArchiveProcesses(BrokerSettings(), [str(fake), *sys.path])
    try:
        for _ in range(2):
            with pytest.raises(
                ArchiveUnavailable,
                match=r"install pyarrow where the broker runs: pip install 'magnetar\[archive\]'",
            ):
                await read(reader, archive, 0)
        # Installed meanwhile.
        (fake / "pyarrow.py").unlink()
        assert await read(reader, archive, 0) == archive.expected(0, 4)
    finally:
        await reader.close()


async def test_the_rate_is_bounded(archive: Archive) -> None:
    reader = reader_with(archive_read_bytes_per_s=20_000)
    try:
        await read(reader, archive, 0, 1)  # starts the process
        began = time.monotonic()
        for first in range(0, 16, 4):
            assert await read(reader, archive, first) == archive.expected(first, 4)
        # What was read before the last one is paid for: 4 * 4 * 2 KB, less the last.
        assert time.monotonic() - began > 1.1
    finally:
        await reader.close()


async def test_its_end_comes_with_that_of_its_parent(archive: Archive, tmp_path: Path) -> None:
    """Also while it reads: kill -9 of a process that has one."""
    info = archive.archived.info
    row = ", ".join(repr(getattr(info, name)) for name in info.__struct_fields__)
    program = f"""
import asyncio, os, sys
sys.path[:0] = {sys.path!r}
from magnetar.broker import BrokerSettings
from magnetar.broker.log.records import ArchivedLedger, LedgerInfo
from magnetar.archive.reader import ArchiveProcesses
async def main():
    reader = ArchiveProcesses(BrokerSettings())
    info = LedgerInfo({row})
    await reader.read({TOPIC!r}, ArchivedLedger(info, {archive.archived.location!r}), 0, 0, max_bytes=1)
    (helper,) = reader._helpers.values()
    print(helper._process.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    pid = int(await process.stdout.readline())
    assert runs(pid)
    process.kill()
    await process.wait()
    while runs(pid):
        await asyncio.sleep(0.01)

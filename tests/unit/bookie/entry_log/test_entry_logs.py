"""Entry logs over several ledger directories of a simulated disk: what is full, what fails, what is rolled and deleted."""

import asyncio
import errno
import random
from collections.abc import Callable

import pytest

from magnetar.bookie.entry_log.entry_logs import EntryLogs, LogInfo
from magnetar.bookie.entry_log.ledger_directory import DirectoryState
from magnetar.bookie.entry_log.log_ids import encode_log_ids
from magnetar.bookie.entry_log.log_writer import LogWriter, PlacedSlice
from magnetar.bookie.entry_log.records import (
    STATE_ENTRY,
    Scanned,
    encode_footer,
    encode_log_header,
    encode_record_header,
)
from magnetar.bookie.index import LedgerRecord, Location, decode_ledger_record
from magnetar.bookie.layout import DataLayout
from magnetar.bookie.write_cache import MemTable, WriteCache
from magnetar.proto.errors import DiskFull, EntryDamaged, MagnetarError, StorageFailed
from support.bookie_kit import entry
from support.inline_devices import InlineDiskWorker
from support.sim import SimDisk
from support.sim.files import SimFile

Entries = dict[tuple[int, int], bytes]
Places = dict[tuple[int, int], Location]


def half_of(entries: Entries) -> MemTable:
    cache = WriteCache(1 << 30)
    for (ledger_id, entry_id), data in entries.items():
        cache.put(ledger_id, entry_id, data)
    return cache.swap()


def places_of(placed: list[PlacedSlice]) -> Places:
    return {
        (ledger_id, entry_id): location
        for part in placed
        for ledger_id, entry_id, location in part.locations()
        if entry_id != STATE_ENTRY
    }


class Room:
    """Logs in some directories of one disk, and the calls that reached it."""

    def __init__(self, directories: int = 1, log_bytes: int = 1 << 20) -> None:
        self.disk = SimDisk(random.Random(1))
        self.layout = DataLayout("/d", (), tuple(f"/d/ledgers-{n}" for n in range(directories)), "/d/index")
        self.log_bytes = log_bytes
        files = self.disk.mount()
        for path in self.layout.ledgers:
            files.make_directory(path)
        self.calls: list[tuple[str, str]] = []
        real = self.disk.call

        def spy(kind: str, path: str, detail: object = "") -> None:
            if kind != "read":
                self.calls.append((kind, path.removeprefix("/d/")))
            real(kind, path, detail)

        self.disk.call = spy  # type: ignore[method-assign]
        self.failed: list[int] = []
        self.logs = self.open()

    def open(self) -> EntryLogs:
        files = self.disk.mount()
        self.logs = EntryLogs(files, InlineDiskWorker(files), self.layout, self.log_bytes)
        self.logs.on_directory_failed = lambda number, error: self.failed.append(number)
        self.logs.open()
        return self.logs

    async def flush(self, entries: Entries, states: list[tuple[int, LedgerRecord]] | None = None) -> Places:
        """As a checkpoint does it."""
        half = half_of(entries)
        placed = await self.logs.append(half, states or [])
        while await self.logs.sync():
            placed = await self.logs.append(half, states or [])
        return places_of(placed)

    async def check(self, entries: Entries, places: Places) -> None:
        for (ledger_id, entry_id), data in entries.items():
            where = [(entry_id, places[ledger_id, entry_id])]
            assert await self.logs.reader.read(ledger_id, where) == [data]

    async def counted(self, log_id: int) -> dict[int, int]:
        """Bytes by ledger, record by record."""
        found: dict[int, int] = {}
        async for records in self.logs.scan(log_id):
            for record in records:
                assert record.data is not None
                found[record.ledger_id] = found.get(record.ledger_id, 0) + 32 + record.length
        return found


def some(ledgers: int, number: int = 4, size: int = 300, first: int = 0) -> Entries:
    return {
        (ledger_id, entry_id): entry(ledger_id, entry_id, bytes([ledger_id]) * size)
        for entry_id in range(first, first + number)
        for ledger_id in range(1, ledgers + 1)
    }


async def test_ledgers_are_spread_over_the_directories_and_stay_where_they_are() -> None:
    room = Room(3)
    first, second = some(6), some(6, first=4)
    places = await room.flush(first)
    places |= await room.flush(second)
    await room.check(first | second, places)
    assert [info.directory for info in room.logs.logs()] == [0, 1, 2]
    for info in room.logs.logs():
        assert info.current
        ledgers = {ledger_id for (ledger_id, _), place in places.items() if place.log_id == info.log_id}
        assert ledgers == {ledger_id for ledger_id in range(1, 7) if ledger_id % 3 == info.directory}
        assert (await room.logs.statistics(info.log_id)).ledgers == await room.counted(info.log_id)


async def test_rule_02_a_sync_covers_every_log_and_every_name() -> None:
    room = Room(2, log_bytes=5000)
    await room.flush(some(2, 40))
    for directory in ("ledgers-0", "ledgers-1"):
        calls = [call for call in room.calls if directory in call[1]]
        logs = sorted({path for kind, path in calls if kind == "open"})
        assert len(logs) > 2
        for log, following in zip(logs, [*logs[1:], None], strict=True):
            last_write = max(i for i, call in enumerate(calls) if call == ("write", log))
            last_sync = max(i for i, call in enumerate(calls) if call == ("sync", log))
            if following is None:  # a SYNCED record follows the last sync
                assert calls[last_write - 1] == ("sync_directory", directory)
                assert last_sync == last_write - 2
            else:  # rolled: synced, with its footer, before the next one is begun
                assert last_write < last_sync < calls.index(("open", following))
    room.disk.lose_power()
    logs_before = [info.log_id for info in room.logs.logs()]
    room.open()
    assert [info.log_id for info in room.logs.logs()] == logs_before


async def test_rule_12_a_full_directory_gives_to_the_others_and_takes_again() -> None:
    room = Room(2)
    first = some(4)
    places = await room.flush(first)
    size = room.disk.names.file("/d/ledgers-1/entrylog-00000002.log")
    assert size is not None
    before = size.size
    room.disk.fail("write", "ledgers-1/", errno.ENOSPC)
    second = some(4, first=4)
    places |= await room.flush(second)
    assert room.logs.directory_states == [DirectoryState.WRITABLE, DirectoryState.FULL]
    assert size.size == before
    assert {places[key].log_id for key in second} == {1}
    third = some(4, first=8)
    places |= await room.flush(third)  # not even tried
    assert size.size == before
    room.logs.set_full(1, False)
    fourth = some(4, first=12)
    places |= await room.flush(fourth)
    assert room.logs.directory_states == [DirectoryState.WRITABLE] * 2
    assert {places[key].log_id for key in fourth} == {1, 2}
    await room.check(first | second | third | fourth, places)
    assert room.failed == []


async def test_a_directory_that_the_disk_watch_calls_full_is_used_when_no_other_is_left() -> None:
    room = Room(2)
    room.logs.set_full(0, True)
    places = await room.flush(some(4))
    assert {place.log_id for place in places.values()} == {1}
    assert room.logs.logs()[0].directory == 1
    room.logs.set_full(1, True)
    await room.flush(some(4, first=4))
    assert len(room.logs.logs()) == 2
    assert room.logs.directory_states == [DirectoryState.FULL] * 2


@pytest.mark.parametrize("failures", range(1, 5))
async def test_rule_12_when_all_are_full_nothing_is_left_behind_and_the_counts_are_right(
    failures: int,
) -> None:
    """The known defect: bytes of a flush that was taken back stayed in the counts, and so in the footer."""
    room = Room(2, log_bytes=1 << 20)
    first = some(4)
    places = await room.flush(first)
    used = room.disk.used_bytes()
    entries = some(4, 400, 100, first=4)  # four slices in each directory
    for turn in range(failures):
        for number in (0, 1):
            room.disk.fail("write", f"ledgers-{number}", errno.ENOSPC, skip=turn, times=2)
        with pytest.raises(DiskFull):
            await room.flush(entries)
        assert room.disk.used_bytes() == used
        room.disk.clear_faults()
    places |= await room.flush(entries)
    await room.logs.close()
    assert room.disk.trace.faults["write_ENOSPC"] >= 2 * failures
    room.open()
    await room.check(first | entries, places)
    for info in room.logs.logs():
        statistics = await room.logs.statistics(info.log_id)
        assert statistics.from_footer
        assert statistics.ledgers == await room.counted(info.log_id)
        assert sum(statistics.ledgers.values()) == sum(
            32 + place.length for place in places.values() if place.log_id == info.log_id
        )


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("write", "ledgers-1/entrylog"),
        ("sync", "ledgers-1/entrylog"),
        ("sync_directory", "ledgers-1"),
        ("open", "ledgers-1/entrylog"),
    ],
)
@pytest.mark.parametrize("skip", [0, 1])
async def test_rule_04_a_directory_that_fails_is_left_alone_and_all_of_the_flush_goes_elsewhere(
    kind: str, path: str, skip: int
) -> None:
    room = Room(3, log_bytes=6000)
    first = some(6)
    places = await room.flush(first)
    room.disk.fail(kind, path, errno.EIO, skip=skip)
    second = some(6, 30, first=4)
    places |= await room.flush(second)
    # Nothing names a second file there, so this fault waits for a later call.
    assert bool(room.failed) == ((kind, skip) != ("sync_directory", 1))
    if room.failed:
        failure = room.calls.copy()
        assert room.failed == [1]
        assert room.logs.directory_states[1] is DirectoryState.FAILED
        new = {key: places[key] for key in second}
        gone = [info.log_id for info in room.logs.logs() if info.directory == 1]
        assert not {place.log_id for place in new.values()} & set(gone)
        third = some(6, 10, first=34)
        places |= await room.flush(third)
        await room.check(second | third, {**new, **places})
        later = room.calls[len(failure) :]
        assert not [call for call in later if "ledgers-1" in call[1]]
        await room.logs.close()
        assert not [call for call in room.calls[len(failure) :] if "ledgers-1" in call[1]]
        # Whatever else happens: what was synced there before can still be read.
        await room.check(first, places)
    else:
        assert room.disk.trace.faults[f"{kind}_EIO"] == 0


async def test_rule_04_after_a_failed_sync_the_file_gets_neither_a_write_nor_a_sync() -> None:
    room = Room(2)
    await room.flush(some(2))
    room.disk.fail("sync", "ledgers-0/", errno.EIO)
    entries = some(2, first=4)
    places = await room.flush(entries)
    at = [i for i, call in enumerate(room.calls) if call[0] == "sync" and "ledgers-0/" in call[1]][-1]
    assert not [call for call in room.calls[at + 1 :] if "ledgers-0" in call[1]]
    assert {place.log_id for place in places.values()} == {1 if room.logs.path_of(1) == "/d/ledgers-1" else 2}
    await room.check(entries, places)


@pytest.mark.parametrize("kind", ["write", "sync"])
async def test_rule_04_with_no_directory_left_the_flush_fails_for_good(kind: str) -> None:
    room = Room(2)
    await room.flush(some(2))
    room.disk.fail(kind, "/entrylog", errno.EIO, times=2)
    with pytest.raises(StorageFailed):
        await room.flush(some(2, first=4))
    assert room.logs.directory_states == [DirectoryState.FAILED] * 2
    with pytest.raises(StorageFailed):
        await room.flush(some(2, first=8))


async def test_a_full_directory_and_a_failed_one_leave_the_third() -> None:
    room = Room(3)
    room.disk.fail("write", "ledgers-0/", errno.ENOSPC)
    room.disk.fail("write", "ledgers-1/", errno.EIO)
    entries = some(9)
    places = await room.flush(entries)
    await room.check(entries, places)
    assert room.logs.directory_states == [
        DirectoryState.FULL,
        DirectoryState.FAILED,
        DirectoryState.WRITABLE,
    ]


async def test_states_are_in_the_logs_and_have_no_place() -> None:
    room = Room(2)
    fenced, deleted = LedgerRecord(True, 7), LedgerRecord(True, deleted_at_ms=99)
    places = await room.flush(some(2), [(1, fenced), (77, deleted)])
    assert all(entry_id != STATE_ENTRY for _, entry_id in places)
    states: dict[int, LedgerRecord] = {}
    for info in room.logs.logs():
        async for records in room.logs.scan(info.log_id):
            for record in records:
                if record.entry_id == STATE_ENTRY and record.data is not None:
                    states[record.ledger_id] = decode_ledger_record(record.data)
    assert states == {1: fenced, 77: deleted}
    assert await room.flush({}, [(5, fenced)]) == {}


async def test_a_log_has_so_many_ledgers_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """A footer with a row for each of a million ledgers would hold the loop for 400 ms."""
    monkeypatch.setattr("magnetar.bookie.entry_log.ledger_directory.LOG_LEDGERS", 50)
    room = Room(log_bytes=1 << 30)
    for first in range(0, 400, 20):
        await room.flush({(ledger_id, 0): entry(ledger_id, 0) for ledger_id in range(first, first + 20)})
    await room.logs.close()
    logs = room.logs.logs()
    sizes = [len((await room.logs.statistics(info.log_id)).ledgers) for info in logs]
    assert sum(sizes) == 400
    assert max(sizes) <= 60, "and what one slice of a flush adds"


async def test_log_ids_are_taken_by_several_at_once() -> None:
    room = Room(2)
    calls = len(room.calls)
    found = await asyncio.gather(*(room.logs.take_log_id() for _ in range(100)))
    assert sorted(found) == list(range(found[0], found[0] + 100))
    assert len(room.calls) > calls, "reserved durably"


async def test_log_ids_are_used_once() -> None:
    room = Room(2, log_bytes=2000)
    used: dict[int, None] = {}
    for turn in range(5):
        await room.flush(some(4, 10, first=10 * turn))
        fresh = [info.log_id for info in room.logs.logs()]
        assert not used.keys() & set(fresh)
        used |= dict.fromkeys(fresh)
        extra = await room.logs.take_log_id()
        assert extra not in used
        used[extra] = None
        await room.logs.close()
        for info in room.logs.logs():
            await room.logs.delete(info.log_id)
        assert room.logs.logs() == []
        room.disk.lose_power()
        if turn == 3:
            room.disk.flip_bit("/d/log-ids")
        room.open()
    await room.flush(some(4, 10, first=100))
    used |= dict.fromkeys(info.log_id for info in room.logs.logs())
    room.disk.mount().delete("/d/log-ids")
    room.open()
    for _ in range(200):
        extra = await room.logs.take_log_id()
        assert extra not in used
        used[extra] = None


async def test_a_log_is_deleted_durably_and_is_told_from_a_damaged_one() -> None:
    room = Room(1, log_bytes=2000)
    entries = some(1, 20)
    places = await room.flush(entries)
    with pytest.raises(AssertionError):
        await room.logs.delete(room.logs.logs()[-1].log_id)  # current
    await room.check(entries, places)
    await room.logs.delete(1)
    await room.logs.delete(1)
    room.disk.lose_power()
    assert not room.disk.names.exists("/d/ledgers-0/entrylog-00000001.log")
    assert room.logs.path_of(1) is None
    key = next(key for key, place in places.items() if place.log_id == 1)
    with pytest.raises(EntryDamaged) as caught:
        await room.logs.reader.read(1, [(key[1], places[key])])
    assert caught.value.details["missing_log"] is True
    wrong = places[1, 19]._replace(offset=places[1, 19].offset + 1)
    with pytest.raises(EntryDamaged) as caught:
        await room.logs.reader.read(1, [(19, wrong)])
    assert not caught.value.details.get("missing_log")
    # The file vanished without us.
    room.disk.mount().delete("/d/ledgers-0/entrylog-00000002.log")
    room.open()
    key = next(key for key, place in places.items() if place.log_id == 2)
    with pytest.raises(EntryDamaged) as caught:
        await room.logs.reader.read(1, [(key[1], places[key])])
    assert caught.value.details["missing_log"] is True


@pytest.mark.parametrize("closed", [True, False])
async def test_a_bad_header_is_damage_and_the_log_is_never_empty(closed: bool) -> None:
    """bookkeeper #4607: a log whose header could not be read was taken for empty, and deleted with all its entries."""
    room = Room()
    entries = some(3)
    places = await room.flush(entries)
    whole = (await room.logs.statistics(1)).ledgers
    if closed:
        await room.logs.close()
    inode = room.disk.names.file("/d/ledgers-0/entrylog-00000001.log")
    assert inode is not None
    inode.flip(3, 1)
    room.open()
    told: list[int] = []
    room.logs.reader.on_damaged_log = lambda log_id, reason: told.append(log_id)
    statistics = await room.logs.statistics(1)
    assert statistics.ledgers == whole
    assert not statistics.whole
    assert statistics.damaged_bytes == 64
    assert statistics.from_footer == closed
    # Each entry has a checksum of its own, which is seeded with the log's id.
    await room.check(entries, places)
    assert told == [1]
    assert await room.logs.reader.header_fault(1)


async def test_a_log_of_another_id_under_this_name_serves_nothing() -> None:
    room = Room(1, log_bytes=3000)
    entries = some(1, 20)
    places = await room.flush(entries)
    await room.logs.close()
    room.disk.mount().rename("/d/ledgers-0/entrylog-00000002.log", "/d/ledgers-0/entrylog-00000001.log")
    room.open()
    for (ledger_id, entry_id), place in places.items():
        if place.log_id == 1:
            with pytest.raises(EntryDamaged):
                await room.logs.reader.read(ledger_id, [(entry_id, place)])
    statistics = await room.logs.statistics(1)
    assert statistics.ledgers == {}
    assert not statistics.whole


async def test_one_log_in_two_directories_is_refused() -> None:
    room = Room(2)
    await room.flush(some(1))
    files = room.disk.mount()
    path = room.logs.path_of(1)
    assert path is not None
    files.write_atomically(room.layout.entry_log(0, 1), files.read(path))
    with pytest.raises(MagnetarError, match="two ledger directories"):
        room.open()


async def test_statistics_and_scan_of_what_a_killed_bookie_left() -> None:
    room = Room(1)
    first = some(3)
    await room.flush(first)
    await room.flush(some(3, first=4))
    expected = (await room.logs.statistics(1)).ledgers
    await room.logs.append(half_of(some(3, 40, 2000, first=8)))  # not synced
    room.disk.lose_power()
    room.open()
    statistics = await room.logs.statistics(1)
    assert statistics.whole
    assert not statistics.from_footer
    assert all(statistics.ledgers[ledger_id] >= size for ledger_id, size in expected.items())
    assert await room.logs.statistics(1) is statistics
    found = [record async for records in room.logs.scan(1) for record in records]
    good = {(r.ledger_id, r.entry_id): r.data for r in found if r.data is not None}
    assert good.items() >= first.items()
    assert all(record.torn for record in found if record.data is None)


async def test_a_scan_of_the_current_log_ends_where_it_is_synced() -> None:
    room = Room(1)
    await room.flush(some(2))
    await room.logs.append(half_of(some(2, 4, first=4)))
    found = [record async for records in room.logs.scan(1) for record in records]
    assert {(record.ledger_id, record.entry_id): record.data for record in found} == some(2)


@pytest.mark.parametrize("uncached", [0.0, 0.5])
async def test_unreadable_pages_are_damage_and_what_is_around_them_is_found(
    uncached: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(1)
    entries = some(2, 40, 1000)
    await room.flush(entries)
    await room.logs.close()
    room.open()
    room.disk.uncached_reads = uncached
    bad_page = range(5 * 4096, 6 * 4096)

    def unreadable(real: Callable[..., bytes | None]) -> Callable[..., bytes | None]:
        def read(self: SimFile, offset: int, length: int) -> bytes | None:
            if offset < bad_page.stop and offset + length > bad_page.start:
                raise StorageFailed("reading failed: Input/output error")
            return real(self, offset, length)

        return read

    monkeypatch.setattr(SimFile, "read_at", unreadable(SimFile.read_at))
    monkeypatch.setattr(SimFile, "read_cached", unreadable(SimFile.read_cached))
    found: list[Scanned] = [record async for records in room.logs.scan(1) for record in records]
    good = {(record.ledger_id, record.entry_id): record.data for record in found if record.data is not None}
    assert entries.items() >= good.items()
    bad = [record for record in found if record.data is None]
    assert len(entries) - 6 <= len(good) < len(entries)
    assert bad
    assert not any(record.torn for record in bad)


async def test_a_scan_is_throttled() -> None:
    room = Room(1)
    await room.flush(some(1, 50, 4000))
    slept: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await real(0)

    asyncio.sleep = sleep  # type: ignore[assignment]
    try:
        async for _ in room.logs.scan(1, bytes_per_s=10_000):
            pass
    finally:
        asyncio.sleep = real
    assert max(slept) > 1


async def test_a_compacted_log_is_adopted() -> None:
    room = Room(2)
    entries = some(2, 5)
    files = room.disk.mount()
    worker = InlineDiskWorker(files)
    log_id = await room.logs.take_log_id()
    writer = LogWriter(worker, "/d/ledgers-1/copy.compacting", log_id)
    locations = await writer.append([(*key, data) for key, data in entries.items()])
    await writer.finish()
    await writer.sync()
    path = room.layout.entry_log(1, log_id)
    await worker.rename(writer.path, path)
    await worker.sync("/d/ledgers-1")
    room.logs.adopt(LogInfo(log_id, 1, path, writer.position, False))
    await room.check(entries, dict(zip(entries, locations, strict=True)))
    assert (await room.logs.statistics(log_id)).ledgers == writer.ledgers
    room.disk.lose_power()
    room.open()
    await room.check(entries, dict(zip(entries, locations, strict=True)))
    assert await room.logs.take_log_id() > log_id


async def test_a_log_without_synced_records_is_read() -> None:
    room = Room(1)
    data = encode_log_header(3)
    entries = some(2, 3)
    places: Places = {}
    ledgers: dict[int, int] = {}
    for (ledger_id, entry_id), payload in entries.items():
        places[ledger_id, entry_id] = Location(3, len(data), len(payload))
        ledgers[ledger_id] = ledgers.get(ledger_id, 0) + 32 + len(payload)
        data += encode_record_header(3, ledger_id, entry_id, payload) + payload
    for footer in (encode_footer(3, ledgers, len(data)), b""):
        room.disk.mount().write_atomically(room.layout.log_ids, encode_log_ids(4))
        room.disk.mount().write_atomically(room.layout.entry_log(0, 3), data + footer)
        room.open()
        assert await room.logs.reader.header_fault(3) == ""
        await room.check(entries, places)
        statistics = await room.logs.statistics(3)
        assert statistics == (ledgers, len(data + footer), 0, 0, bool(footer))
    await room.flush(entries)
    assert [info.log_id for info in room.logs.logs()] == [3, 4]


async def test_an_empty_flush_makes_no_log() -> None:
    room = Room(2)
    await room.flush({})
    await room.logs.close()
    assert room.logs.logs() == []
    assert not [call for call in room.calls if "entrylog" in call[1]]


def test_records_are_sorted_within_a_ledger() -> None:
    entries: Entries = {(2, n): b"%d" % n for n in (5, 1, 3)} | {(1, 0): b"x"}
    half = half_of(entries)
    assert [row[:2] for row in half.records()] == [(2, 1), (2, 3), (2, 5), (1, 0)]
    assert [row[:2] for row in half.records(lambda ledger_id: ledger_id == 2)] == [(2, 1), (2, 3), (2, 5)]


async def test_a_half_is_let_go_of_in_slices() -> None:
    half = half_of({(n % 3, n): b"x" for n in range(10_000)} | {(n, 0): b"y" for n in range(100, 5000)})
    await half.release()
    assert half.ledgers == {}

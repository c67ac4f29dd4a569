"""The storage engine in one process, over the real file system, with everything in the loop."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from magnetar.bookie import Bookie
from magnetar.bookie.cookie import decode_cookie
from magnetar.bookie.status import bookie_info
from magnetar.proto.errors import (
    BookieReadOnly,
    DataDirectoryError,
    DiskFull,
    EntryDamaged,
    EntryNotFound,
    InvalidSetting,
    LedgerFenced,
    LedgerNotFound,
    MagnetarError,
    MessageTooLarge,
    ServiceNotReady,
    StorageFailed,
    TooManyRequests,
)
from magnetar.runtime.files import OsFiles
from support.bookie_kit import (
    KIB,
    add,
    add_all,
    crash,
    entry,
    open_inline,
    open_real,
    small_settings,
    until,
)
from support.index_model import ModelStorage


class Opener:
    """Opens the bookie of one directory again and again, and closes the last one."""

    def __init__(self, directory: Path) -> None:
        self.directory = str(directory)
        self.storage = ModelStorage()
        self.files = OsFiles()
        self.bookie: Bookie | None = None

    async def __call__(self, **changes: object) -> Bookie:
        self.bookie = await open_inline(self.directory, self.storage, self.files, **changes)
        return self.bookie

    async def crash_and_open(self, **changes: object) -> Bookie:
        assert self.bookie is not None
        crash(self.bookie)
        return await self(**changes)

    async def close_and_open(self, **changes: object) -> Bookie:
        assert self.bookie is not None
        await self.bookie.close()
        return await self(**changes)


@pytest.fixture
async def reopen(tmp_path: Path):  # type: ignore[no-untyped-def]
    opener = Opener(tmp_path / "bookie")
    yield opener
    if opener.bookie is not None and opener.bookie.failure is None:
        await opener.bookie.close()


async def test_what_was_added_is_read_from_each_place(reopen: Opener) -> None:
    bookie = await reopen()
    entries = [entry(7, number) for number in range(50)]
    assert await add_all(bookie, entries) == [0] * 50
    assert await bookie.read(7, 0, 49) == (entries, 48)  # write cache
    await bookie.checkpoint()
    assert bookie.cache.size == 0
    assert await bookie.read(7, 0, 49) == (entries, 48)  # entry log
    assert bookie.read_cache.size > 0
    assert await bookie.read(7, 10, 20) == (entries[10:21], 48)  # read cache
    bookie = await reopen.close_and_open()
    assert bookie.replayed_records == 0
    assert await bookie.read(7, 0, 49) == (entries, 48)
    assert await bookie.read_last_confirmed(7) == (48, 49)


async def test_rule_01_add_is_in_the_write_cache_before_it_is_in_the_journal(reopen: Opener) -> None:
    bookie = await reopen()
    seen: list[bool] = []
    real_add = bookie.journals.all[0].add

    def spy(data: bytes, done: object, ledger_id: int, entry_id: int) -> None:
        seen.append(bookie.cache.get(ledger_id, entry_id) is data)
        real_add(data, done, ledger_id, entry_id)  # type: ignore[arg-type]

    bookie.journals.all[0].add = spy  # type: ignore[method-assign, assignment]
    assert await add(bookie, entry(1, 0)) == 0
    assert seen == [True]


async def test_the_callback_never_comes_from_inside_add(reopen: Opener) -> None:
    bookie = await reopen()
    await bookie.fence(2)
    answers: list[int] = []
    too_large = entry(1, 1, b"x" * 40 * KIB)
    for data in (entry(1, 0), entry(2, 0), too_large):
        bookie.add(data, recovery=False, done=lambda ledger, number, code: answers.append(code))
        assert answers == []
    await until(lambda: len(answers) == 3)
    assert sorted(answers) == [0, MessageTooLarge.code, LedgerFenced.code]


async def test_rule_02_checkpoint_order(reopen: Opener) -> None:
    bookie = await reopen()
    steps: list[str] = []

    def record(name: str, owner: object, attribute: str) -> None:
        real = getattr(owner, attribute)

        def wrapper(*arguments: object) -> object:
            steps.append(name)
            return real(*arguments)

        setattr(owner, attribute, wrapper)

    record("mark taken", bookie.journals, "durable_positions")
    record("swap", bookie.cache, "swap")
    record("append", bookie.logs, "append")
    record("sync logs", bookie.logs, "sync")
    record("index locations", bookie.index, "put_locations")
    record("sync locations", bookie.index, "flush_locations")
    record("index ledgers", bookie.index, "put_ledgers")
    record("sync ledgers", bookie.index, "flush_ledgers")
    record("mark persisted", bookie.checkpointer, "move_mark")
    record("journals released", bookie.journals, "release")
    await add(bookie, entry(1, 0))
    await bookie.checkpoint()
    assert steps == [
        "mark taken", "swap", "append", "sync logs", "index locations", "sync locations",
        "index ledgers", "sync ledgers", "mark persisted", "journals released",
    ]  # fmt: skip


async def test_rule_03_the_mark_never_moves_backwards(reopen: Opener) -> None:
    bookie = await reopen()
    await add(bookie, entry(1, 0))
    await bookie.checkpoint()
    mark = bookie.checkpointer.mark
    at = mark["journal"]
    assert await bookie.checkpointer.move_mark({"journal": at._replace(offset=at.offset - 1)}) is None
    assert await bookie.checkpointer.move_mark({"journal": at._replace(sequence=0, offset=10**9)}) is None
    assert bookie.checkpointer.mark == mark
    await add(bookie, entry(1, 1))
    assert await bookie.checkpointer.run(None) is None  # a flush under memory pressure
    assert bookie.checkpointer.mark == mark


async def test_rule_05_replay_is_idempotent(reopen: Opener) -> None:
    bookie = await reopen()
    entries = [entry(1, number, b"x" * 1000) for number in range(100)]
    await add_all(bookie, entries[:60])
    await bookie.checkpoint()
    await add_all(bookie, entries[60:])
    for _ in range(3):
        bookie = await reopen.crash_and_open()
        assert (await bookie.read(1, 0, 99, max_bytes=10**6))[0] == entries
    assert bookie.replayed_records == 0  # flushed after the replay, and a new journal begun


async def test_rule_05_a_missing_marked_journal_refuses_to_start(reopen: Opener) -> None:
    bookie = await reopen()
    await add(bookie, entry(1, 0))
    path = Path(bookie.layout.journal_file(0, bookie.checkpointer.mark["journal"].sequence))
    crash(bookie)
    aside = path.rename(path.with_suffix(".aside"))
    with pytest.raises(DataDirectoryError, match="missing"):
        await reopen()
    aside.rename(path)
    bookie = await reopen()
    assert (await bookie.read(1, 0, 0))[0] == [entry(1, 0)]


async def test_rule_05_damage_refuses_to_start_and_changes_nothing(reopen: Opener) -> None:
    bookie = await reopen(journal_file_bytes=1 << 20)
    for number in range(5):
        await add(bookie, entry(1, number))
    path = Path(bookie.layout.journal_file(0, bookie.journals.all[0].files[-1]))
    crash(bookie)
    good = path.read_bytes()
    at = good.index(b"payload of 1:1")
    path.write_bytes(good[:at] + b"X" + good[at + 1 :])
    before = {file: file.read_bytes() for file in Path(reopen.directory).rglob("*") if file.is_file()}
    for _ in range(2):
        with pytest.raises(DataDirectoryError, match="damaged at or after byte"):
            await reopen()
    del before[Path(reopen.directory) / "LOCK"]
    assert all(file.read_bytes() == data for file, data in before.items())
    path.write_bytes(good)
    bookie = await reopen()
    assert len((await bookie.read(1, 0, 9))[0]) == 5


async def test_rule_05_damage_below_the_mark_is_reported_and_passed(
    reopen: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    bookie = await reopen(journal_file_bytes=1 << 20)
    for number in range(3):
        await add(bookie, entry(1, number))
    await bookie.checkpoint()
    await add(bookie, entry(1, 3))
    path = Path(bookie.layout.journal_file(0, bookie.journals.all[0].files[-1]))
    crash(bookie)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"payload of 1:1", b"payload of X:X"))
    bookie = await reopen()
    assert (await bookie.read(1, 0, 9))[0] == [entry(1, number) for number in range(4)]
    assert "below the mark" in caplog.text


async def test_rule_05_a_torn_tail_is_no_damage(reopen: Opener) -> None:
    bookie = await reopen(journal_file_bytes=1 << 20)
    for number in range(3):
        await add(bookie, entry(1, number))
    path = Path(bookie.layout.journal_file(0, bookie.journals.all[0].files[-1]))
    crash(bookie)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"payload of 1:2", b"payload of X:X"))
    bookie = await reopen()
    assert (await bookie.read(1, 0, 9))[0] == [entry(1, 0), entry(1, 1)]
    # The next crash must not take the tail that was cut for damage, though a later file was begun.
    await add(bookie, entry(1, 2))
    bookie = await reopen.crash_and_open()
    assert (await bookie.read(1, 0, 9))[0] == [entry(1, number) for number in range(3)]


async def test_rule_06_a_fence_survives_a_crash_even_of_an_unknown_ledger(reopen: Opener) -> None:
    bookie = await reopen()
    with pytest.raises(EntryNotFound):
        await bookie.read(9, 0, 0, fence=True)
    assert await bookie.read_last_confirmed(9) == (-1, -1)
    bookie = await reopen.crash_and_open()
    assert await add(bookie, entry(9, 0)) == LedgerFenced.code
    bookie = await reopen.close_and_open()
    assert await add(bookie, entry(9, 0)) == LedgerFenced.code
    assert await bookie.read_last_confirmed(9) == (-1, -1)


async def test_rule_06_a_fence_is_answered_only_once_it_is_durable_and_fencers_share_it(
    reopen: Opener,
) -> None:
    bookie = await reopen(journal_file_bytes=1 << 20)
    await add(bookie, entry(1, 0))
    device = bookie.journals.all[0].device
    before = device.durable_offset
    fencers = [asyncio.ensure_future(bookie.read_last_confirmed(4, fence=True)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(fencer.done() for fencer in fencers)
    assert bookie.ledgers.load(4).fenced
    fencers[0].cancel()
    assert await asyncio.gather(*fencers[1:]) == [(-1, -1)] * 2
    assert device.durable_offset - before == 48  # one record


async def test_rule_07_recovery_adds_pass_the_fence(reopen: Opener) -> None:
    bookie = await reopen()
    await add(bookie, entry(1, 0))
    await bookie.fence(1)
    assert await add(bookie, entry(1, 1)) == LedgerFenced.code
    assert await add(bookie, entry(1, 1), recovery=True) == 0
    with pytest.raises(LedgerFenced):
        await bookie.write_last_confirmed(1, 0)
    with pytest.raises(EntryNotFound):
        await bookie.read(1, 2, 2)


async def test_rule_08_damage_is_not_absence(reopen: Opener) -> None:
    bookie = await reopen()
    await add_all(bookie, [entry(1, number) for number in range(3)])
    await bookie.close()
    (log,) = Path(bookie.layout.ledgers[0]).glob("entrylog-*")
    data = log.read_bytes()
    log.write_bytes(data.replace(b"payload of 1:1", b"payload of X:X"))
    bookie = await reopen()
    assert (await bookie.read(1, 0, 2))[0] == [entry(1, 0)]
    with pytest.raises(EntryDamaged):
        await bookie.read(1, 1, 2)
    assert (await bookie.read(1, 2, 2))[0] == [entry(1, 2)]
    with pytest.raises(EntryNotFound):
        await bookie.read(1, 3, 3)
    log.write_bytes(data[: data.index(b"payload of 1:2")])
    with pytest.raises(EntryDamaged):
        await (await reopen.crash_and_open()).read(1, 2, 2)
    log.unlink()
    with pytest.raises(EntryDamaged):
        await (await reopen.crash_and_open()).read(1, 0, 0)


async def test_a_copy_in_another_place_is_damage(reopen: Opener) -> None:
    """A record that was written well, but is not the one asked for."""
    bookie = await reopen()
    await add_all(bookie, [entry(1, number) for number in range(3)])
    await bookie.close()
    storage = reopen.storage
    storage.damage(1, 1, storage.locations[1, 2])
    bookie = await reopen()
    with pytest.raises(EntryDamaged):
        await bookie.read(1, 1, 1)


async def test_an_entry_added_again_is_the_newer_one(reopen: Opener) -> None:
    bookie = await reopen()
    first, again = entry(1, 0, b"same", lac=-1), entry(1, 0, b"same", lac=5)
    await add(bookie, first)
    await bookie.checkpoint()
    assert (await bookie.read(1, 0, 0))[0] == [first]
    await add(bookie, again, recovery=True)
    assert (await bookie.read(1, 0, 0))[0] == [again]
    await bookie.checkpoint()
    assert (await bookie.read(1, 0, 0))[0] == [again]
    bookie = await reopen.crash_and_open()
    assert (await bookie.read(1, 0, 0)) == ([again], 5)


async def test_explicit_last_confirmed_survives_and_never_falls(reopen: Opener) -> None:
    bookie = await reopen()
    await add(bookie, entry(1, 0))
    await bookie.write_last_confirmed(1, 5)
    await bookie.write_last_confirmed(1, 3)
    assert await bookie.read_last_confirmed(1) == (5, 0)
    bookie = await reopen.crash_and_open()
    assert await bookie.read_last_confirmed(1) == (5, 0)
    bookie = await reopen.close_and_open()
    assert await bookie.read_last_confirmed(1) == (5, 0)
    with pytest.raises(LedgerNotFound):
        await bookie.read_last_confirmed(2)


async def test_a_read_is_bounded_in_bytes_and_stops_at_a_hole(reopen: Opener) -> None:
    bookie = await reopen()
    entries = [entry(1, number, b"x" * 1000) for number in (0, 1, 2, 4)]
    await add_all(bookie, entries)
    for _ in range(2):
        assert len((await bookie.read(1, 0, 9, max_bytes=1))[0]) == 1
        assert len((await bookie.read(1, 0, 9, max_bytes=2100))[0]) == 2
        assert len((await bookie.read(1, 0, 9))[0]) == 3
        assert (await bookie.read(1, 4, 9))[0] == entries[3:]
        await bookie.checkpoint()


async def test_journal_files_are_rolled_released_and_recycled(reopen: Opener) -> None:
    bookie = await reopen()
    for number in range(100):
        assert await add(bookie, entry(1, number, b"x" * 5000)) == 0
        if number % 10 == 9:
            await bookie.checkpoint()
    assert bookie.journals.all[0].files[-1] > 5
    await bookie.checkpoint()
    await until(lambda: not bookie.journals.all[0]._released)
    assert len(bookie.journals.all[0].files) == 1
    names = list(Path(bookie.layout.journals[0]).iterdir())
    assert sum(path.stat().st_size for path in names) <= 256 * KIB + 64 * KIB + 8 * KIB
    bookie = await reopen.crash_and_open()
    assert len((await bookie.read(1, 0, 99, max_bytes=10**6))[0]) == 100


async def test_a_journal_that_outran_its_files_gets_as_many_as_the_write_cache_needs(
    reopen: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that did not keeps one ready."""
    bookie = await reopen(write_cache_bytes=160 * KIB, checkpoint_interval_s=1000.0)
    journal, worker = bookie.journals.all[0], bookie.components.disk_worker
    await until(lambda: len(journal._spares) == 1)
    gate, prepare = asyncio.Event(), worker.prepare

    async def slow(path: str, size: int, source: str = "", *, hurry: bool = False) -> None:
        await gate.wait()
        await prepare(path, size, source, hurry=hurry)

    monkeypatch.setattr(worker, "prepare", slow)
    await add_all(bookie, [entry(1, number, b"x" * 5000) for number in range(4)])  # more than the first file
    await until(lambda: not journal._spares and not journal._outran)
    await add_all(bookie, [entry(1, number, b"x" * 5000) for number in range(4, 18)])  # than the second
    assert journal._outran
    gate.set()
    # The two files in use hold 72 KB of the 160 + 64 KB.
    await until(lambda: sum(size for _, size in journal._spares) == 192 * KIB)
    await bookie.checkpoint()
    assert sum(size for _, size in journal._spares) <= 256 * KIB


async def test_replay_over_many_files_and_more_than_the_write_cache(reopen: Opener) -> None:
    bookie = await reopen(write_cache_bytes=4 << 20, checkpoint_interval_s=1000.0)
    for number in range(100):
        assert await add(bookie, entry(1, number, b"x" * 5000)) == 0
    assert len(bookie.journals.all[0].files) > 5
    bookie = await reopen.crash_and_open(write_cache_bytes=64 * KIB)
    assert bookie.replayed_records == 100
    assert len((await bookie.read(1, 0, 99, max_bytes=10**6))[0]) == 100
    bookie = await reopen.crash_and_open()
    assert bookie.replayed_records == 0


async def test_a_missing_file_in_the_middle_is_damage(reopen: Opener) -> None:
    bookie = await reopen(write_cache_bytes=4 << 20, checkpoint_interval_s=1000.0)
    for number in range(40):
        await add(bookie, entry(1, number, b"x" * 5000))
    middle = Path(bookie.layout.journal_file(0, bookie.journals.all[0].files[1]))
    crash(bookie)
    data = middle.read_bytes()
    middle.unlink()
    with pytest.raises(DataDirectoryError, match="damaged"):
        await reopen()
    middle.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataDirectoryError, match="damaged"):
        await reopen()
    middle.write_bytes(data)
    bookie = await reopen()
    assert len((await bookie.read(1, 0, 99, max_bytes=10**6))[0]) == 40


async def test_a_full_write_cache_holds_adds_back_and_lets_them_in_again(reopen: Opener) -> None:
    bookie = await reopen(write_cache_bytes=64 * KIB)
    resumed: list[bool] = []
    bookie.on_accepting.append(lambda: resumed.append(bookie.accepting))
    entries = [entry(1, number, b"x" * 3000) for number in range(14)]
    codes = asyncio.ensure_future(add_all(bookie, entries))
    await asyncio.sleep(0)
    assert not bookie.accepting
    assert await codes == [0] * 14
    assert resumed == [True]
    assert len((await bookie.read(1, 0, 99, max_bytes=10**6))[0]) == 14


async def test_adds_that_wait_too_long_or_are_too_many_are_refused(reopen: Opener) -> None:
    bookie = await reopen(add_backpressure_timeout_s=0.05, write_cache_bytes=64 * KIB)
    flush = asyncio.Event()
    real = bookie.logs.append

    async def held(half: object, states: object = ()) -> object:
        await flush.wait()
        return await real(half, states)  # type: ignore[arg-type]

    bookie.logs.append = held  # type: ignore[method-assign, assignment]
    try:
        codes = await add_all(bookie, [entry(1, number, b"x" * 3000) for number in range(40)])
    finally:
        flush.set()
    assert codes.count(TooManyRequests.code) >= 10
    assert codes.count(0) >= 10
    assert len(codes) == 40
    assert bookie.accepting
    await bookie.checkpoint()
    assert await add(bookie, entry(1, 99)) == 0


async def test_rule_04_after_a_failed_sync_nothing_is_acknowledged(reopen: Opener) -> None:
    bookie = await reopen()
    failures: list[MagnetarError] = []
    bookie.on_failure = failures.append
    assert await add(bookie, entry(1, 0)) == 0
    file = bookie.journals.all[0].device._file  # type: ignore[attr-defined]
    real_sync = type(file).sync

    def failing(self: object) -> None:
        raise StorageFailed("the disk is gone")

    type(file).sync = failing
    try:
        assert await add(bookie, entry(1, 1)) == StorageFailed.code
    finally:
        type(file).sync = real_sync
    await until(lambda: bool(failures))
    assert await add(bookie, entry(1, 2)) == StorageFailed.code
    with pytest.raises(StorageFailed):
        await bookie.read(1, 0, 0)
    assert len(failures) == 1
    await bookie.close()
    bookie = await reopen()
    assert (await bookie.read(1, 0, 0))[0] == [entry(1, 0)]


async def test_rule_12_read_only_below_the_minimum_and_back(reopen: Opener) -> None:
    bookie = await reopen(disk_check_interval_s=0.01)
    assert await add(bookie, entry(1, 0)) == 0
    real = reopen.files.free_bytes
    reopen.files.free_bytes = lambda path: (1000, 10**6)  # type: ignore[method-assign]
    object.__setattr__(bookie.settings, "disk_minimum_free_bytes", 2000)
    await until(lambda: bookie.read_only)
    assert bookie_info(bookie)["read_only"]
    assert await add(bookie, entry(1, 1)) == BookieReadOnly.code
    assert (await bookie.read(1, 0, 0, fence=True))[0] == [entry(1, 0)]
    reopen.files.free_bytes = real  # type: ignore[method-assign]
    await until(lambda: not bookie.read_only)
    assert await add(bookie, entry(2, 1)) == 0
    assert await add(bookie, entry(1, 1)) == LedgerFenced.code


async def test_a_full_ring_holds_records_back_in_order(reopen: Opener) -> None:
    bookie = await reopen(write_cache_bytes=32 << 20)
    entries = [entry(1, number, b"x" * 20_000) for number in range(300)]
    answered = asyncio.ensure_future(add_all(bookie, entries))
    await asyncio.sleep(0)
    waited = bookie.journals.all[0].waiting
    fenced = asyncio.ensure_future(bookie.fence(9))  # waits its turn, behind the entries
    assert await answered == [0] * 300
    await fenced
    assert (waited, bookie.journals.all[0].waiting) == (True, False)
    bookie = await reopen.crash_and_open(write_cache_bytes=32 << 20)
    assert (await bookie.read(1, 0, 299, max_bytes=1 << 30))[0] == entries
    assert bookie.ledgers.load(9).fenced


async def test_close_waits_for_records_that_wait_for_the_ring(reopen: Opener) -> None:
    bookie = await reopen(write_cache_bytes=32 << 20)
    entries = [entry(1, number, b"x" * 20_000) for number in range(300)]
    answered = asyncio.ensure_future(add_all(bookie, entries))
    await asyncio.sleep(0)
    bookie = await reopen.close_and_open(write_cache_bytes=32 << 20)
    assert await answered == [0] * 300
    assert (await bookie.read(1, 0, 299, max_bytes=1 << 30))[0] == entries


async def test_an_add_to_a_ledger_that_the_index_cannot_tell_of_is_answered_and_stops_the_bookie(
    reopen: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie = await reopen()
    stopped: list[MagnetarError] = []
    bookie.on_failure = stopped.append

    def fail(_ledger_id: int) -> None:
        raise StorageFailed("the index failed: Corruption")

    monkeypatch.setattr(bookie.ledgers._index, "get_ledger", fail)
    assert await add(bookie, entry(7, 0)) == StorageFailed.code
    assert [error.message for error in stopped] == ["the index failed: Corruption"]


async def test_an_index_that_fails_while_adds_wait_answers_each_of_them_once(
    reopen: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie = await reopen(write_cache_bytes=64 * KIB)
    bookie.on_failure = lambda error: None
    answers: list[tuple[int, int]] = []
    for number in range(30):
        data = entry(number, 0, b"x" * 3000)
        bookie.add(data, recovery=False, done=lambda ledger, entry_id, code: answers.append((ledger, code)))
    assert bookie.adds.waiting > 2

    def fail(_ledger_id: int) -> None:
        raise StorageFailed("the index failed: Corruption")

    monkeypatch.setattr(bookie.ledgers._index, "get_ledger", fail)
    await until(lambda: len(answers) >= 30)
    await asyncio.sleep(0)
    assert sorted(ledger for ledger, _ in answers) == list(range(30))
    assert bookie.accepting


async def test_a_journal_that_never_comes_back_leaves_nobody_waiting_when_the_bookie_closes(
    reopen: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie = await reopen(close_timeout_s=0.05)
    assert await add(bookie, entry(1, 0)) == 0
    device = bookie.journals.all[0].device
    monkeypatch.setattr(device, "_write_groups", lambda: None)
    waiting = asyncio.ensure_future(add(bookie, entry(1, 1)))
    fencing = asyncio.ensure_future(bookie.fence(2))
    await asyncio.sleep(0)

    async def hang(*, wait: bool = True) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(device, "close", hang)
    await bookie.close()
    assert await waiting == ServiceNotReady.code
    with pytest.raises(ServiceNotReady):
        await fencing
    with pytest.raises(ServiceNotReady):  # one that had passed the door before
        await bookie.fencing.fence(3)


async def test_rule_12_a_bookie_that_waits_for_space_does_not_turn_writable_while_it_tries_again(
    reopen: Opener,
) -> None:
    bookie = await reopen()
    await add(bookie, entry(1, 0))
    real, seen = bookie.logs.append, []

    async def full(half: object, states: object = ()) -> object:
        await asyncio.sleep(0)
        seen.append(bookie.checkpointer.stopped_by_full_disk)
        if len(seen) < 3:
            raise DiskFull("no space")
        return await real(half, states)  # type: ignore[arg-type]

    bookie.logs.append = full  # type: ignore[method-assign, assignment]
    for _ in range(2):
        with pytest.raises(DiskFull):
            await bookie.checkpoint()
    await bookie.checkpoint()
    assert seen == [False, True, True]
    assert not bookie.checkpointer.stopped_by_full_disk


async def test_a_journal_that_fails_before_the_bookie_is_open_fails_the_start(
    reopen: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def leave(bookie: Bookie) -> None:
        bookie.journals.all[0]._device_failed(StorageFailed("the writer is gone"))

    with monkeypatch.context() as patch:
        patch.setattr("magnetar.bookie.startup._leave_journals", leave)
        with pytest.raises(StorageFailed, match="the writer is gone"):
            await reopen()
    bookie = await reopen()
    assert await add(bookie, entry(1, 0)) == 0


@pytest.mark.real
async def test_a_start_that_fails_at_its_end_lets_go_of_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def leave(bookie: Bookie) -> None:
        raise StorageFailed("no cookie")

    with monkeypatch.context() as patch:
        patch.setattr("magnetar.bookie.startup._leave_journals", leave)
        with pytest.raises(StorageFailed, match="no cookie"):
            await open_real(str(tmp_path / "b"))
    bookie = await open_real(str(tmp_path / "b"), lock_timeout_s=0.5)
    await bookie.close()


async def test_states_that_cannot_be_forgotten_are_not_looked_through_for_each_new_one(
    reopen: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magnetar.bookie.ledgers._MAX_STATES", 40)
    monkeypatch.setattr("magnetar.bookie.ledgers._FORGOTTEN_AT_ONCE", 20)
    bookie = await reopen()
    times = 0
    real = bookie.ledgers._forget

    def forget() -> None:
        nonlocal times
        times += 1
        real()

    monkeypatch.setattr(bookie.ledgers, "_forget", forget)
    assert await add_all(bookie, [entry(ledger, 0) for ledger in range(80)]) == [0] * 80
    assert times <= 10
    await bookie.checkpoint()
    assert await add_all(bookie, [entry(ledger, 0) for ledger in range(80, 90)]) == [0] * 10
    assert len(bookie.ledgers.by_id) < 80


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_entry_bytes", 257 << 20),
        ("checkpoint_interval_s", 0.0),
        ("disk_check_interval_s", 0.0),
        ("bookie_id", "a/b"),  # regression: a bookie /cookies/a/b ran, and "a" counted as lost for ever
    ],
)
def test_settings_that_cannot_work_are_refused(name: str, value: float | str) -> None:
    with pytest.raises(InvalidSetting, match=name):
        small_settings("data", write_cache_bytes=1 << 30, journal_ring_bytes=1 << 30, **{name: value})


async def test_an_introduction_never_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each broker that registers brings the next ledger id: the disk worker writes it into the cookie."""
    bookie = await open_inline(str(tmp_path), ModelStorage())
    started = bookie.introduce(None)

    def blocks(*arguments: object) -> None:
        raise AssertionError("the loop would wait for two syncs")

    with monkeypatch.context() as patch:
        patch.setattr(bookie.components.files, "write_atomically", blocks)
        assert bookie.introduce(msgspec.structs.replace(started, next_ledger_id=7)).next_ledger_id == 7
    await until(lambda: decode_cookie(Path(bookie.layout.cookie).read_bytes(), "").next_ledger_id == 7)
    await bookie.close()


async def test_of_two_introductions_the_cookie_of_the_second_is_written_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk worker writes in the order in which it is asked."""
    bookie = await open_inline(str(tmp_path), ModelStorage())
    started = bookie.introduce(None)
    worker = bookie.components.disk_worker
    replace, asked = worker.replace, list[int]()

    async def recorded(path: str, data: bytes) -> None:
        asked.append(decode_cookie(data, "").next_ledger_id)
        await replace(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(worker, "replace", recorded)
        for next_id in (7, 8):
            bookie.introduce(msgspec.structs.replace(started, next_ledger_id=next_id))
        await until(lambda: len(asked) == 2)
    assert asked == [7, 8]
    await bookie.close()
    assert decode_cookie(Path(bookie.layout.cookie).read_bytes(), "").next_ledger_id == 8


async def test_a_cookie_that_was_not_written_is_written_after_the_next_introduction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two introductions find the disk full: what the first wanted is no more on the disk than what the second did."""
    bookie = await open_inline(str(tmp_path), ModelStorage())
    started = bookie.introduce(None)

    async def full(path: str, data: bytes) -> None:
        raise DiskFull("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(bookie.components.disk_worker, "replace", full)
        for next_id in (7, 8):
            bookie.introduce(msgspec.structs.replace(started, next_ledger_id=next_id))
        await until(lambda: bookie.cookie.next_ledger_id not in (7, 8))
    bookie.introduce(msgspec.structs.replace(started, next_ledger_id=7))
    await until(lambda: decode_cookie(Path(bookie.layout.cookie).read_bytes(), "").next_ledger_id == 7)
    await bookie.close()

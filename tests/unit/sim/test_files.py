"""The simulated disk: each thing it can do to a program is seen to happen, and what is durable never suffers."""

import errno
import os
import random
from collections.abc import Callable

import pytest

from magnetar.proto.errors import DataDirectoryError, DiskFull, StorageFailed
from magnetar.runtime.files import Files, OsFiles
from support.sim import ProcessKilled, SimDisk, SimFiles, SimLoop

PAGE = 4096


def mounted(seed: int = 0, **options: float) -> SimFiles:
    disk = SimDisk(random.Random(seed), **options)  # type: ignore[arg-type]
    files = disk.mount()
    files.make_directory("/data")
    return files


def crash(files: SimFiles) -> SimFiles:
    files.die()
    files.disk.lose_power()
    return files.disk.mount()


def outcomes(seeds: int, run: Callable[[SimFiles], None], look: Callable[[SimFiles], object]) -> set[object]:
    found = set()
    for seed in range(seeds):
        files = mounted(seed)
        run(files)
        found.add(look(crash(files)))
    return found


def test_synced_bytes_in_a_synced_directory_always_survive() -> None:
    for seed in range(100):
        files = mounted(seed)
        file = files.open("/data/f", create=True)
        file.write_at(0, [b"a" * 5000, b"b" * 5000])
        file.sync()
        files.sync_directory("/data")
        file.write_at(20_000, [b"lost perhaps"])
        assert crash(files).read("/data/f")[:10_000] == b"a" * 5000 + b"b" * 5000


def test_unsynced_pages_survive_in_any_combination_and_torn_at_sectors() -> None:
    def write(files: SimFiles) -> None:
        file = files.open("/data/f", create=True)
        file.write_at(0, [b"0" * 3 * PAGE])
        file.sync()
        files.sync_directory("/data")
        file.write_at(0, [b"1" * 3 * PAGE])

    def pages(files: SimFiles) -> object:
        data = files.read("/data/f")
        assert len(data) == 3 * PAGE
        kinds = ""
        for start in range(0, len(data), PAGE):
            page = data[start : start + PAGE]
            sectors = {page[at : at + 512] for at in range(0, PAGE, 512)}
            assert sectors <= {b"0" * 512, b"1" * 512}
            kinds += "t" if len(sectors) == 2 else page[:1].decode()
        return kinds

    found = outcomes(400, write, pages)
    assert {"000", "111", "001", "010", "100", "011"} <= found
    assert any("t" in str(kinds) for kinds in found)


def test_unsynced_growth_may_come_back_short_or_as_zeros() -> None:
    def write(files: SimFiles) -> None:
        file = files.open("/data/f", create=True)
        file.sync()
        files.sync_directory("/data")
        file.write_at(0, [b"x" * PAGE])
        file.write_at(PAGE, [b"y" * 100])

    found = outcomes(300, write, lambda files: files.read("/data/f"))
    assert b"" in found
    assert b"x" * PAGE + b"y" * 100 in found
    assert bytes(PAGE + 100) in found
    assert b"x" * PAGE in found


def test_unsynced_names_are_lost_one_by_one() -> None:
    def write(files: SimFiles) -> None:
        for name in "abc":
            files.open(f"/data/{name}", create=True).sync()

    found = outcomes(200, write, lambda files: tuple(files.list("/data")))
    assert {(), ("a",), ("b",), ("a", "b"), ("a", "b", "c"), ("c",)} <= found


def test_unsynced_rename_shows_the_old_file_or_the_new_one() -> None:
    def write(files: SimFiles) -> None:
        files.write_atomically("/data/f", b"old")
        file = files.open("/data/g", create=True)
        file.write_at(0, [b"new"])
        file.sync()
        files.sync_directory("/data")
        files.rename("/data/g", "/data/f")

    found = outcomes(50, write, lambda files: (files.read("/data/f"), files.exists("/data/g")))
    assert found == {(b"old", True), (b"new", False)}


def test_unsynced_delete_may_bring_the_file_back() -> None:
    def write(files: SimFiles) -> None:
        files.write_atomically("/data/f", b"old")
        files.delete("/data/f")

    assert outcomes(50, write, lambda files: files.exists("/data/f")) == {True, False}


def test_write_atomically_crashed_at_every_call_leaves_the_old_or_the_new() -> None:
    seen = set()
    for call in range(12):
        for seed in range(20):
            files = mounted(seed)
            files.write_atomically("/data/f", b"old" * 2000)
            start = files.disk.calls
            files.disk.at_call(start + call, files.die)
            try:
                files.write_atomically("/data/f", b"new" * 2000)
                seen.add("returned")
            except ProcessKilled:
                assert files.disk.trace.faults["crash_at_call"] == 1
            data = crash(files).read("/data/f")
            assert data in (b"old" * 2000, b"new" * 2000)
            seen.add(data[:3].decode())
    assert seen == {"old", "new", "returned"}


def test_failed_sync_poisons_the_file_and_its_bytes_are_gone() -> None:
    files = mounted()
    file = files.open("/data/f", create=True)
    files.sync_directory("/data")
    file.write_at(0, [b"never durable"])
    files.disk.fail("sync", "/data/f")
    with pytest.raises(StorageFailed):
        file.sync()
    for attempt in (file, files.open("/data/f")):
        with pytest.raises(StorageFailed):
            attempt.sync()
        with pytest.raises(StorageFailed):
            attempt.write_at(0, [b"x"])
    assert file.read_at(0, 13) == b"never durable"  # the page cache still shows it
    assert files.disk.trace.faults["sync_EIO"] == 1
    assert b"never" not in crash(files).read("/data/f")


def sync_fails(files: SimFiles) -> None:
    file = files.open("/data/f", create=True)
    file.write_at(0, [b"0" * 3 * PAGE])
    file.sync()
    files.sync_directory("/data")
    file.write_at(0, [b"1" * 3 * PAGE])
    files.disk.fail("sync", "/data/f")
    with pytest.raises(StorageFailed) as raised:
        file.sync()
    assert raised.value.details["errno"] == errno.EIO


def test_failed_sync_may_have_saved_any_pages_but_never_all() -> None:
    def pages(files: SimFiles) -> object:
        data = files.read("/data/f")
        return "".join(data[start : start + 1].decode() for start in range(0, len(data), PAGE))

    assert outcomes(100, sync_fails, pages) == {"000", "001", "010", "100", "011", "101", "110"}


@pytest.mark.parametrize("cause", ["drop_cache", "memory"])
def test_cache_that_drops_the_pages_of_a_failed_sync_shows_that_they_are_lost(cause: str) -> None:
    files = mounted()
    sync_fails(files)
    file = files.open("/data/f", read_only=True)
    assert file.read_at(0, 3 * PAGE) == b"1" * 3 * PAGE
    if cause == "drop_cache":
        file.drop_cache(0, 3 * PAGE)
    else:
        files.disk.uncached_reads = 1.0
        assert file.read_cached(0, 3 * PAGE) is None
    assert b"0" * PAGE in file.read_at(0, 3 * PAGE)


def test_pages_of_a_failed_sync_are_not_saved_by_a_sync_after_it() -> None:
    files = mounted()
    file = files.open("/data/f", create=True)
    files.sync_directory("/data")
    file.write_at(0, [b"never durable"])
    files.disk.fail("sync")
    with pytest.raises(StorageFailed):
        file.sync()
    files.disk.mount().open("/data/f").sync()  # another process, or one that tries again as rule 4 forbids
    assert b"never" not in crash(files).read("/data/f")


@pytest.mark.parametrize(
    ("kind", "code", "error"),
    [
        ("write", errno.EIO, StorageFailed),
        ("write", errno.ENOSPC, DiskFull),
        ("read", errno.EIO, StorageFailed),
        ("truncate", errno.EIO, StorageFailed),
        ("open", errno.EACCES, DataDirectoryError),
        ("rename", errno.EIO, StorageFailed),
        ("delete", errno.EIO, StorageFailed),
        ("mkdir", errno.EROFS, DataDirectoryError),
        ("sync_directory", errno.EIO, StorageFailed),
    ],
)
def test_every_kind_of_call_can_fail_at_its_nth_time(kind: str, code: int, error: type[Exception]) -> None:
    files = mounted()
    files.write_atomically("/data/f", b"data")
    file = files.open("/data/f")
    calls: dict[str, Callable[[], object]] = {
        "write": lambda: file.write_at(0, [b"x"]),
        "read": lambda: file.read_at(0, 1),
        "truncate": lambda: file.truncate(3),
        "open": lambda: files.open(f"/data/new{files.disk.calls}", create=True),
        "rename": lambda: files.rename("/data/f", "/data/f"),
        "delete": lambda: files.delete("/data/f"),
        "mkdir": lambda: files.make_directory(f"/data/d{files.disk.calls}"),
        "sync_directory": lambda: files.sync_directory("/data"),
    }
    files.disk.fail(kind, "/data", code, skip=1)
    if kind == "delete":
        files.disk._faults[0].skip = 0
    else:
        calls[kind]()
    with pytest.raises(error) as raised:
        calls[kind]()
    assert raised.type is error
    assert files.disk.trace.faults[f"{kind}_{errno.errorcode[code]}"] == 1


def test_full_disk_refuses_writes_and_takes_them_again() -> None:
    files = mounted(capacity_bytes=10 * PAGE)
    file = files.open("/data/f", create=True)
    file.write_at(0, [bytes(8 * PAGE)])
    with pytest.raises(DiskFull):
        file.write_at(8 * PAGE, [bytes(3 * PAGE)])
    assert files.free_bytes("/data") == (0, 10 * PAGE)
    assert files.disk.trace.faults["disk_full"] == 1
    file.write_at(0, [b"an overwrite needs no room"])
    files.disk.capacity_bytes *= 2
    file.write_at(8 * PAGE, [bytes(3 * PAGE)])


def test_write_that_meets_a_full_disk_has_written_what_fits() -> None:
    """A short count of pwritev first, and the error by the next call: OsFile goes on as long as something fits."""
    files = mounted(capacity_bytes=4 * PAGE)
    file = files.open("/data/f", create=True)
    file.write_at(0, [b"a" * 100])
    with pytest.raises(DiskFull):
        file.write_at(100, [b"b" * 5 * PAGE])
    assert file.read_at(0, 10 * PAGE) == b"a" * 100 + b"b" * (4 * PAGE - 100)


def test_zeros_need_room_as_well() -> None:
    files = mounted(capacity_bytes=4 * PAGE)
    file = files.open("/data/f", create=True)
    with pytest.raises(DiskFull):
        file.zero_fill(0, 5 * PAGE)
    assert file.size() == 4 * PAGE
    file.zero_fill(0, 4 * PAGE)


def test_read_cached_says_none_by_chance_only_when_asked_to() -> None:
    files = mounted()
    file = files.open("/data/f", create=True)
    file.write_at(0, [b"data"])
    assert {file.read_cached(0, 4) for _ in range(50)} == {b"data"}
    files.disk.uncached_reads = 0.5
    assert {file.read_cached(0, 4) for _ in range(50)} == {b"data", None}
    assert files.disk.trace.faults["uncached_read"] > 5


def test_flipped_bit_is_one_bit_and_survives() -> None:
    files = mounted()
    files.write_atomically("/data/f", bytes(10_000))
    files.disk.flip_bit("/data/f")
    assert sum(byte.bit_count() for byte in files.read("/data/f")) == 1
    assert sum(byte.bit_count() for byte in crash(files).read("/data/f")) == 1


def test_lock_is_exclusive_and_free_when_its_process_is_dead() -> None:
    loop = SimLoop(0)
    disk = SimDisk(loop.rng)
    first, second = loop.start_process("first"), loop.start_process("second")
    one, two = disk.mount(first), disk.mount(second)
    one.make_directory("/data")
    lock = one.lock("/data/lock")
    with pytest.raises(DataDirectoryError) as raised:
        two.lock("/data/lock")
    assert raised.value.details["locked"]
    lock.release()
    two.lock("/data/lock")
    second.kill()
    one.lock("/data/lock")
    with pytest.raises(ProcessKilled):
        two.exists("/data")
    loop.close()


def test_page_cache_survives_the_kill_of_a_process() -> None:
    files = mounted()
    files.open("/data/f", create=True).write_at(0, [b"unsynced"])
    files.die()
    assert files.disk.mount().read("/data/f") == b"unsynced"


@pytest.mark.parametrize("seed", range(5))
def test_behaves_as_the_real_disk_does(seed: int, tmp_path: object) -> None:
    """The same random calls on SimFiles and OsFiles see the same bytes, names and error classes."""
    rng = random.Random(seed)
    root = str(tmp_path)
    simulated = SimDisk(random.Random(0)).mount()
    simulated.make_directory(root)
    for _ in range(300):
        name = os.path.join(root, rng.choice("abc"))
        other = os.path.join(root, rng.choice("abc"))
        offset, length = rng.randrange(20_000), rng.randrange(9_000)
        data = rng.randbytes(length)
        action = rng.choice(
            ("write", "write", "read", "truncate", "zero", "rename", "delete", "list", "atomic", "excl")
        )
        assert _act(simulated, action, name, other, offset, data, root) == _act(
            OsFiles(), action, name, other, offset, data, root
        )


def _act(files: Files, action: str, name: str, other: str, offset: int, data: bytes, root: str) -> object:
    try:
        match action:
            case "write":
                return files.open(name, create=True).write_at(offset, [data[:10], data[10:]])
            case "read":
                return files.open(name, read_only=True).read_at(offset, len(data))
            case "truncate":
                files.open(name).truncate(offset)
            case "zero":
                files.open(name).zero_fill(offset, len(data))
                return files.open(name).size()
            case "rename":
                files.rename(name, other)
            case "delete":
                files.delete(name)
            case "atomic":
                files.write_atomically(name, data)
            case "excl":
                return files.open(name, exclusive=True).size()
            case _:
                pass
        return [(entry, files.read(f"{root}/{entry}")) for entry in files.list(root)]
    except (DataDirectoryError, StorageFailed) as error:
        return type(error)

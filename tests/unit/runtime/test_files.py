"""The real disk: what each call promises, and what a failing one does."""

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from magnetar.proto.errors import DataDirectoryError, DiskFull, StorageFailed
from magnetar.runtime.files import OsFiles, wait_for_lock


@pytest.fixture
def files() -> OsFiles:
    return OsFiles()


def test_parts_are_written_one_after_another(files: OsFiles, tmp_path: Path) -> None:
    file = files.open(str(tmp_path / "f"), create=True)
    assert file.write_at(4, [b"ab", memoryview(b"cde"), bytearray(b"f")]) == 6
    assert file.read_at(0, 100) == b"\0\0\0\0abcdef"
    assert file.read_at(6, 2) == b"cd"
    assert file.read_at(50, 2) == b""
    assert file.size() == 10
    file.close()
    file.close()


def test_more_parts_than_one_system_call_takes(files: OsFiles, tmp_path: Path) -> None:
    file = files.open(str(tmp_path / "f"), create=True)
    parts = [b"%05d" % number for number in range(3000)]
    assert file.write_at(0, parts) == 15_000
    assert file.read_at(0, 15_000) == b"".join(parts)
    file.close()


def test_a_short_write_goes_on_where_it_stopped(
    files: OsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev
    monkeypatch.setattr(
        os, "pwritev", lambda fd, parts, offset: real(fd, [b"".join(map(bytes, parts))[:3]], offset)
    )
    file = files.open(str(tmp_path / "f"), create=True)
    assert file.write_at(0, [b"abcd", b"", b"efgh", b"i"]) == 9
    assert file.read_at(0, 20) == b"abcdefghi"
    file.close()


def test_a_short_read_goes_on_where_it_stopped(
    files: OsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = files.open(str(tmp_path / "f"), create=True)
    file.write_at(0, [b"abcdefghi"])
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, length, offset: real(fd, min(length, 2), offset))
    assert file.read_at(1, 7) == b"bcdefgh"
    assert file.read_at(5, 100) == b"fghi"
    file.close()


def test_read_cached_serves_what_the_page_cache_has(files: OsFiles, tmp_path: Path) -> None:
    file = files.open(str(tmp_path / "f"), create=True)
    file.write_at(0, [b"x" * 10_000])
    assert file.read_cached(0, 10_000) == b"x" * 10_000
    assert file.read_cached(9_000, 5_000) == b"x" * 1_000
    assert file.read_cached(20_000, 10) == b""
    file.will_need(0, 10_000)
    file.close()


def test_read_cached_does_not_wait_for_the_disk(
    files: OsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = files.open(str(tmp_path / "f"), create=True)
    file.write_at(0, [b"x" * 100])
    answers: list[int | BlockingIOError] = [40, BlockingIOError()]

    def partly_cached(_fd: int, _buffers: object, _offset: int, _flags: int) -> int:
        answer = answers.pop(0)
        if isinstance(answer, BlockingIOError):
            raise answer
        return answer

    monkeypatch.setattr(os, "preadv", partly_cached)
    assert file.read_cached(0, 100) is None
    file.close()


def test_read_cached_reads_where_the_file_system_cannot_tell(
    files: OsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = files.open(str(tmp_path / "f"), create=True)
    file.write_at(0, [b"abc"])
    asked = 0

    def unsupported(*_args: object) -> int:
        nonlocal asked
        asked += 1
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "preadv", unsupported)
    assert file.read_cached(0, 3) == b"abc"
    assert file.read_cached(1, 3) == b"bc"
    assert asked == 1
    file.close()


def test_zero_fill_and_truncate(files: OsFiles, tmp_path: Path) -> None:
    file = files.open(str(tmp_path / "f"), create=True)
    file.write_at(0, [b"x" * 10])
    file.zero_fill(5, (1 << 20) + 10)
    assert file.size() == (1 << 20) + 15
    assert os.stat(file.path).st_blocks * 512 >= 1 << 20
    file.truncate(7)
    assert file.read_at(0, 100) == b"xxxxx\0\0"
    file.sync()
    file.close()


def test_rule_04_a_failed_sync_is_never_retried(
    files: OsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = files.open(str(tmp_path / "f"), create=True)
    other = files.open(str(tmp_path / "other"), create=True)
    file.write_at(0, [b"abc"])
    real = os.fdatasync

    def broken(_fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", broken)
    with pytest.raises(StorageFailed, match="may be lost"):
        file.sync()
    monkeypatch.setattr(os, "fdatasync", real)
    for attempt in (file.sync, lambda: file.write_at(0, [b"x"]), lambda: file.truncate(0)):
        with pytest.raises(StorageFailed):
            attempt()
    assert file.read_at(0, 3) == b"abc"
    file.close()
    again = files.open(str(tmp_path / "f"))
    with pytest.raises(StorageFailed):
        again.sync()
    again.close()
    other.write_at(0, [b"x"])
    other.sync()
    other.close()


def test_rule_12_a_full_disk_poisons_nothing(
    files: OsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = files.open(str(tmp_path / "f"), create=True)
    real = os.pwritev

    def full(*_args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(DiskFull, match="free some space"):
        file.write_at(0, [b"x"])
    monkeypatch.setattr(os, "pwritev", real)
    file.write_at(0, [b"x"])
    file.sync()
    file.close()


def test_write_atomically_replaces_and_leaves_nothing(files: OsFiles, tmp_path: Path) -> None:
    path = str(tmp_path / "f")
    (tmp_path / "f.tmp").write_bytes(b"left by a crash, and longer than what follows")
    files.write_atomically(path, b"one")
    files.write_atomically(path, b"two")
    assert files.read(path) == b"two"
    assert files.list(str(tmp_path)) == ["f"]


def test_rule_12a_write_atomically_syncs_file_then_name_then_directory(
    files: OsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def note(name: str) -> None:
        real = getattr(os, name)

        def called(*args: object) -> object:
            calls.append(name)
            return real(*args)

        monkeypatch.setattr(os, name, called)

    for name in ("fdatasync", "replace", "fsync"):
        note(name)
    files.write_atomically(str(tmp_path / "f"), b"x")
    assert calls == ["fdatasync", "replace", "fsync"]


def test_names(files: OsFiles, tmp_path: Path) -> None:
    files.make_directory(str(tmp_path / "a" / "b"))
    files.make_directory(str(tmp_path / "a" / "b"))
    files.open(str(tmp_path / "a" / "z"), create=True).close()
    assert files.list(str(tmp_path / "a")) == ["b", "z"]
    files.rename(str(tmp_path / "a" / "z"), str(tmp_path / "a" / "y"))
    files.sync_directory(str(tmp_path / "a"))
    assert files.exists(str(tmp_path / "a" / "y"))
    assert not files.exists(str(tmp_path / "a" / "z"))
    files.delete(str(tmp_path / "a" / "y"))
    files.delete(str(tmp_path / "a" / "y"))
    free, total = files.free_bytes(str(tmp_path))
    assert 0 < free <= total


def test_what_may_not_be_seen_is_not_said_to_be_missing(
    files: OsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: `bookie info` on another user's directory said that it does not exist, and a start found no cookie."""
    (tmp_path / "file").write_bytes(b"")
    assert not files.exists(str(tmp_path / "file" / "below"))

    def denied(path: str) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "stat", denied)
    with pytest.raises(DataDirectoryError, match="Permission denied") as raised:
        files.exists("/data/cookie")
    assert raised.value.details == {"path": "/data/cookie", "errno": errno.EACCES}


def test_errors_name_the_path(files: OsFiles, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    for attempt in (
        lambda: files.open(missing),
        lambda: files.read(missing),
        lambda: files.list(missing),
        lambda: files.rename(missing, missing + "2"),
        lambda: files.free_bytes(missing),
    ):
        with pytest.raises(DataDirectoryError, match="missing"):
            attempt()
    files.open(missing, create=True).close()
    with pytest.raises(DataDirectoryError, match="exists"):
        files.open(missing, exclusive=True)
    with pytest.raises(DataDirectoryError):
        files.make_directory(missing)
    read_only = files.open(missing, read_only=True)
    with pytest.raises(StorageFailed):
        read_only.write_at(0, [b"x"])
    read_only.close()


def test_a_second_lock_is_refused_and_names_the_holder(files: OsFiles, tmp_path: Path) -> None:
    lock = files.lock(str(tmp_path / "LOCK"))
    with pytest.raises(DataDirectoryError, match=f"process {os.getpid()}") as caught:
        OsFiles().lock(str(tmp_path / "LOCK"))
    assert caught.value.details["locked"]
    lock.release()
    lock.release()
    files.lock(str(tmp_path / "LOCK")).release()


def test_a_lock_on_a_read_only_file_system_excludes_as_well(
    files: OsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "LOCK")
    files.lock(path).release()
    real = os.open

    def read_only_open(name: str, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(name, flags, mode)

    monkeypatch.setattr(os, "open", read_only_open)
    lock = files.lock(path)
    with pytest.raises(DataDirectoryError, match="in use by another process"):
        OsFiles().lock(path)
    lock.release()


@pytest.mark.real
async def test_rule_12b_a_helper_that_inherited_the_lock_still_holds_it(
    files: OsFiles, tmp_path: Path
) -> None:
    path = str(tmp_path / "LOCK")
    lock = files.lock(path)
    orphan = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "import os; os.read(0, 1)"],
        stdin=subprocess.PIPE,
        pass_fds=[lock.fileno()],
    )
    assert orphan.stdin is not None
    try:
        lock.release()
        with pytest.raises(DataDirectoryError, match="in use"):
            files.lock(path)
        waiting = asyncio.ensure_future(wait_for_lock(files, path, timeout_s=10))
        await asyncio.sleep(0)
        assert not waiting.done()
    finally:
        orphan.stdin.close()
        orphan.wait()
    (await waiting).release()


async def test_waiting_for_a_lock_ends(files: OsFiles, tmp_path: Path) -> None:
    lock = files.lock(str(tmp_path / "LOCK"))
    with pytest.raises(DataDirectoryError, match="in use"):
        await wait_for_lock(files, str(tmp_path / "LOCK"), timeout_s=0.03)
    lock.release()

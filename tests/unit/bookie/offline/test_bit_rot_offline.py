"""Scorecard 13, offline: a bit flipped in every page, sectors that cannot be read; `verify` agrees with a start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import xxhash

from magnetar.bookie.journal.records import Record
from magnetar.bookie.journal.recovery import replay_journals
from magnetar.bookie.offline.journals import journal_directories, walk_journals
from magnetar.bookie.offline.stopped import StoppedBookie
from magnetar.bookie.offline.verify import Verification, verify
from magnetar.bookie.scrub.progress import encode_progress
from magnetar.proto.errors import DataDirectoryError, StorageFailed
from magnetar.runtime.files import File, OsFiles
from support.offline_kit import entry_logs, flip, rows, settings_of, with_stopped

pytestmark = pytest.mark.real


PAGE = 4096


def offline_verdict(bookie: StoppedBookie) -> bool:
    """True if the dump says that a start is refused."""
    return any(item.kind == "gap" and item.verdict == "damage" for item in rows(walk_journals(bookie)))


async def start_verdict(bookie: StoppedBookie) -> bool:
    """True if the replay of a start refuses."""

    def apply(_: Record) -> bool:
        return True

    async def make_room() -> None:
        raise AssertionError("nothing needs room")

    try:
        for directory in journal_directories(bookie):
            assert directory.mark is not None
            await replay_journals(
                bookie.files, directory.path, bookie.cookie.instance, directory.mark, apply, make_room
            )
    except DataDirectoryError:
        return True
    return False


def test_rule_05_every_page_of_the_journals_is_judged_as_a_start_judges_it(killed: Path) -> None:
    async def main() -> int:
        refused = 0
        with await StoppedBookie.open(settings_of(killed), OsFiles()) as bookie:
            needed = [
                item for item in rows(walk_journals(bookie)) if item.kind == "file" and item.state == "needed"
            ]
            for file in needed:
                for page in range(0, file.bytes, PAGE):
                    for position in (page + 30, page + 1000):  # in a header, in a payload or in padding
                        flip(Path(file.path), position)
                        said = offline_verdict(bookie)
                        assert said == await start_verdict(bookie), position
                        refused += said
                        flip(Path(file.path), position)
        return refused

    assert asyncio.run(main()) >= 3


def test_every_page_of_the_index(stopped: Path) -> None:
    files = [
        path
        for path in sorted((stopped / "index").iterdir())
        if path.suffix == ".sst" or path.name.startswith("MANIFEST-")
    ]
    tables = {path.name: [path.stat().st_size, xxhash.xxh3_64_intdigest(path.read_bytes())] for path in files}
    (stopped / "scrub").write_bytes(encode_progress({"verified": {}, "tables": tables, "at": ["", 0]}))
    assert with_stopped(stopped, verify).sound
    for path in files:
        for position in range(min(PAGE // 2, path.stat().st_size - 1), path.stat().st_size, PAGE):
            flip(path, position, position % 8)
            assert not with_stopped(stopped, verify).sound, (path.name, position)
            flip(path, position, position % 8)


class _BadFile:
    """A file with a range that cannot be read."""

    def __init__(self, file: File, bad: range) -> None:
        self._file = file
        self._bad = bad

    def read_at(self, offset: int, length: int) -> bytes:
        data = self._file.read_at(offset, length)
        if offset < self._bad.stop and self._bad.start < offset + len(data):
            raise StorageFailed(f"reading {self._file.path} failed: Input/output error", path=self._file.path)
        return data

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


class BadSectors(OsFiles):
    """A disk with one bad range in one file."""

    def __init__(self, path: Path, bad: range) -> None:
        super().__init__()
        self._path = str(path)
        self._bad = bad

    def open(self, path: str, **options: bool) -> File:  # type: ignore[override]
        file = super().open(path, **options)
        return _BadFile(file, self._bad) if path == self._path else file  # type: ignore[return-value]


def verified_on(directory: Path, files: OsFiles) -> Verification:
    async def main() -> Verification:
        with await StoppedBookie.open(settings_of(directory), files) as bookie:
            return verify(bookie)

    return asyncio.run(main())


def test_a_bad_sector_damages_the_entries_in_it_and_no_others(stopped: Path) -> None:
    log = entry_logs(stopped)[0]
    found = verified_on(stopped, BadSectors(log, range(PAGE, 2 * PAGE))).findings
    entries = [one for one in found if one.part == "entry"]
    assert entries
    # Each record there has 172 bytes: all that touch the sector, and none else.
    places = [one.position for one in entries]
    assert min(places) > PAGE - 172
    assert max(places) < 2 * PAGE
    assert len(places) == max(places) // 172 - min(places) // 172 + 1


@pytest.mark.parametrize("name", ["cookie", "mark", "journal", "index"])
def test_what_cannot_be_read_is_not_sound(killed: Path, name: str) -> None:
    path = killed / name
    if name == "journal":
        needed = [
            item.path
            for item in with_stopped(killed, lambda bookie: rows(walk_journals(bookie)))
            if item.kind == "file" and item.state == "needed"
        ]
        path = Path(needed[-1])
    elif name == "index":
        path = sorted(path.glob("*.sst"))[0]
    assert not verified_on(killed, BadSectors(path, range(PAGE))).sound

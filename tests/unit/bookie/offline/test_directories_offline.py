"""Several journal and ledger directories: looked at, one of them lost, moved, or all of them replaced."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from magnetar.bookie.directories import forget_ledger_directory, rename_directory
from magnetar.bookie.index import ALL_LEDGERS
from magnetar.bookie.offline.identity import (
    accept_new_disks,
    check_identity,
    inspect_directories,
)
from magnetar.bookie.offline.index_rebuild import rebuild
from magnetar.bookie.offline.journals import walk_journals
from magnetar.bookie.offline.stopped import StoppedBookie
from magnetar.bookie.offline.verify import verify
from magnetar.proto.errors import DataDirectoryError, EntryDamaged, MagnetarError
from magnetar.runtime.files import OsFiles
from support.bookie_kit import open_real
from support.offline_kit import entries_of, make_images, rows, settings_of, totals, trace_of, with_stopped

pytestmark = pytest.mark.real


def places(directory: Path) -> dict[str, Any]:
    return {
        "journal_directories": (str(directory / "j0"), str(directory / "j1")),
        "ledger_directories": (str(directory / "l0"), str(directory / "l1")),
        "index_directory": str(directory / "elsewhere" / "index"),
    }


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the two images."""
    directory = tmp_path_factory.mktemp("wide")
    make_images(directory, **places(directory / "stopped"))
    return directory


@pytest.fixture
def killed(wide: Path, tmp_path: Path) -> Path:
    """A copy; the directories lie below the data directory, so that they keep their names."""
    return Path(shutil.copytree(wide / "killed", tmp_path / "killed"))


def looked_at(directory: Path, work: Any) -> Any:
    return with_stopped(directory, work, **places(directory))


def test_everything_is_found_in_all_of_them(killed: Path) -> None:
    before = trace_of(killed)
    assert looked_at(killed, totals) == {1: 75, 2: 30, 3: 10, 6: 5}
    result = looked_at(killed, verify)
    assert result.sound, result.findings
    logs = {Path(check.path).parent.name for check in result.checks if check.part == "entry log"}
    assert logs == {"l0", "l1"}
    walked = looked_at(killed, lambda bookie: rows(walk_journals(bookie)))
    assert [item.name for item in walked if item.kind == "journal"] == ["j0", "j1"]
    reports = looked_at(killed, lambda bookie: inspect_directories(bookie, bookie.cookie))
    assert [(row.name, row.copy, row.in_settings) for row in reports] == [
        ("j0", "ours", True),
        ("j1", "ours", True),
        ("l0", "ours", True),
        ("l1", "ours", True),
    ]
    assert trace_of(killed) == before


def test_a_journal_that_only_the_mark_names_is_looked_at_too(killed: Path) -> None:
    fewer = places(killed) | {"journal_directories": (str(killed / "j0"),)}
    with_all = looked_at(killed, totals)
    assert with_stopped(killed, totals, **fewer) == with_all


def test_rule_09_an_emptied_disk_is_refused_until_it_is_declared_lost(killed: Path) -> None:
    shutil.rmtree(killed / "l1")
    (killed / "l1").mkdir()
    problem = looked_at(killed, check_identity)
    assert "its cookie is missing" in problem
    assert not looked_at(killed, verify).sound
    with pytest.raises(DataDirectoryError, match="entries do not exist"):
        rebuilt(killed)
    looked_at(killed, lambda bookie: forget_ledger_directory(bookie.files, bookie.layout, str(killed / "l1")))
    assert looked_at(killed, check_identity) == ""
    damaged = {
        (one.ledger_id, one.entry_id) for one in looked_at(killed, verify).findings if one.part == "entry"
    }
    assert damaged
    rebuilt(killed)  # it changes nothing of that: the old index knows them
    assert {
        (one.ledger_id, one.entry_id) for one in looked_at(killed, verify).findings if one.part == "entry"
    } == damaged
    assert asyncio.run(refused_reads(killed)) == damaged


async def refused_reads(directory: Path) -> set[tuple[int, int]]:
    """Starts the bookie; entries that it says to be damaged. It must serve all others."""
    bookie = await open_real(str(directory), **places(directory))
    refused: set[tuple[int, int]] = set()
    try:
        for ledger_id in (1, 2, 3, 6):
            for entry_id, data in entries_of(ledger_id).items():
                try:
                    read, _ = await bookie.read(ledger_id, entry_id, entry_id)
                    assert read == [data]
                except EntryDamaged:
                    refused.add((ledger_id, entry_id))
    finally:
        await bookie.close()
    return refused


def rebuilt(directory: Path) -> Any:
    async def main() -> Any:
        with await StoppedBookie.open(settings_of(directory, **places(directory)), OsFiles()) as bookie:
            return await rebuild(bookie)

    return asyncio.run(main())


def test_rule_08_with_directory_and_index_lost_nothing_is_denied(killed: Path) -> None:
    shutil.rmtree(killed / "l1")
    shutil.rmtree(killed / "elsewhere" / "index")
    looked_at(killed, lambda bookie: forget_ledger_directory(bookie.files, bookie.layout, str(killed / "l1")))
    rebuilt(killed)
    assert looked_at(killed, lambda bookie: bookie.index.incomplete_below()) == ALL_LEDGERS

    async def deny() -> MagnetarError | None:
        bookie = await open_real(str(killed), **places(killed))
        try:
            await bookie.read(777, 0, 0)
        except MagnetarError as error:
            return error
        finally:
            await bookie.close()
        return None

    assert type(asyncio.run(deny())).__name__ in ("UnknownLedgerState", "EntryDamaged")


def test_rule_08_an_index_lost_long_after_a_directory_is_made_anew_as_incomplete(killed: Path) -> None:
    shutil.rmtree(killed / "l1")
    looked_at(killed, lambda bookie: forget_ledger_directory(bookie.files, bookie.layout, str(killed / "l1")))
    assert asyncio.run(refused_reads(killed))  # it has run since, and knows the directory as a new one
    shutil.rmtree(killed / "elsewhere" / "index")
    assert rebuilt(killed).incomplete
    assert looked_at(killed, lambda bookie: bookie.index.incomplete_below()) == ALL_LEDGERS


def test_what_is_there_cannot_be_declared_lost(killed: Path) -> None:
    before = trace_of(killed)
    for directory in (killed / "l0", killed / "nowhere"):
        with pytest.raises(DataDirectoryError):
            looked_at(
                killed,
                lambda bookie, one=directory: forget_ledger_directory(bookie.files, bookie.layout, str(one)),
            )
    assert trace_of(killed) == before


def test_a_directory_that_was_mounted_elsewhere(killed: Path) -> None:
    before = looked_at(killed, totals)
    (killed / "j1").rename(killed / "j9")
    moved = places(killed) | {"journal_directories": (str(killed / "j0"), str(killed / "j9"))}
    assert "mounted elsewhere" in with_stopped(killed, check_identity, **moved)
    with_stopped(
        killed,
        lambda bookie: rename_directory(bookie.files, bookie.layout, str(killed / "j1"), str(killed / "j9")),
        **moved,
    )
    assert with_stopped(killed, check_identity, **moved) == ""
    assert with_stopped(killed, totals, **moved) == before


def test_rule_09_new_disks_for_a_bookie_that_lost_all(tmp_path: Path, killed: Path) -> None:
    data = tmp_path / "fresh" / "bookie"
    cookie = asyncio.run(accept_new_disks(settings_of(data), OsFiles(), "b7", random.Random(3)))
    assert (cookie.bookie_id, cookie.repairing) == ("b7", True)
    with pytest.raises(DataDirectoryError, match="did not lose its disks"):
        asyncio.run(accept_new_disks(settings_of(data), OsFiles(), "b7", random.Random(3)))
    before = trace_of(killed)
    with pytest.raises(DataDirectoryError):
        asyncio.run(
            accept_new_disks(settings_of(killed, **places(killed)), OsFiles(), "b7", random.Random(3))
        )
    assert trace_of(killed) == before

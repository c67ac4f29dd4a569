"""Several journal and ledger directories: what may come and go between starts, and what is refused (rules 3, 5, 9, 12a)."""

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from magnetar.bookie import Bookie, open_bookie
from magnetar.bookie.cookie import JOURNAL_ROLE, read_cookie, write_cookie
from magnetar.bookie.directories import (
    forget_ledger_directory,
    is_ours,
    open_data_directory,
    rename_directory,
    replace_cookie,
)
from magnetar.bookie.layout import DataLayout
from magnetar.proto.errors import (
    DataDirectoryError,
    EntryDamaged,
    InvalidSetting,
    LedgerFenced,
    MagnetarError,
    UnknownLedgerState,
)
from magnetar.runtime.files import OsFiles
from support.bookie_kit import add, add_all, crash, entry, model_components, open_real, small_settings, until
from support.index_model import ModelStorage

FILES = OsFiles()


class Machine:
    """A bookie's directories; each opening names those that the settings have."""

    def __init__(self, root: Path, seed: int = 1) -> None:
        self.root = root
        self.seed = seed
        self.storage = ModelStorage()
        self.journals = [str(root / f"journal-{n}") for n in "abc"]
        self.ledgers = [str(root / f"ledgers-{n}") for n in "abc"]
        self.data = str(root / "data")

    async def open(
        self, journals: str = "ab", ledgers: str = "ab", *, cluster: int = 0, **changes: Any
    ) -> Bookie:
        components = replace(model_components(self.storage, seed=self.seed), cluster=cluster)
        return await open_bookie(self.settings(journals, ledgers, **changes), components)

    def settings(self, journals: str = "ab", ledgers: str = "ab", **changes: Any) -> Any:
        return small_settings(
            self.data,
            journal_directories=tuple(self.journals["abc".index(name)] for name in journals),
            ledger_directories=tuple(self.ledgers["abc".index(name)] for name in ledgers),
            **changes,
        )

    def layout(self, journals: str = "ab", ledgers: str = "ab") -> DataLayout:
        return DataLayout.of(self.settings(journals, ledgers))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def some(first: int, last: int) -> list[bytes]:
    return [entry(ledger, number) for number in range(first, last) for ledger in range(4)]


async def check_all(bookie: Bookie, last: int) -> None:
    for ledger in range(4):
        entries, _ = await bookie.read(ledger, 0, last - 1)
        assert entries == [entry(ledger, number) for number in range(last)]


def journals_in(directory: str) -> list[str]:
    return [name for name in FILES.list(directory) if DataLayout.journal_sequence(name) is not None]


async def test_rule_05_every_journal_is_replayed(machine: Machine) -> None:
    bookie = await machine.open()
    assert not any(await add_all(bookie, some(0, 5)))
    await bookie.checkpoint()
    assert not any(await add_all(bookie, some(5, 10)))
    await bookie.fence(2)
    await bookie.fence(3)
    assert [journal.device.end_offset > 1000 for journal in bookie.journals.all] == [True, True]
    crash(bookie)
    bookie = await machine.open()
    assert bookie.replayed_records == 22
    await check_all(bookie, 10)
    assert await add(bookie, entry(2, 10)) == await add(bookie, entry(3, 10)) != 0
    await bookie.close()


async def test_no_two_journal_files_ever_have_the_same_sequence(machine: Machine) -> None:
    bookie = await machine.open()
    for number in range(60):
        assert await add(bookie, entry(number % 3, number, b"x" * 5000)) == 0
    await bookie.checkpoint()
    sequences = [name for directory in machine.journals[:2] for name in journals_in(directory)]
    assert len(sequences) == len(set(sequences)) > 4
    await bookie.close()


async def test_journal_directories_come_and_go_between_starts(machine: Machine) -> None:
    bookie = await machine.open("a")
    assert not any(await add_all(bookie, some(0, 5)))
    crash(bookie)
    bookie = await machine.open("ab")
    assert not any(await add_all(bookie, some(5, 10)))
    crash(bookie)
    bookie = await machine.open("bc")  # what "a" holds is replayed before it is left
    assert set(bookie.checkpointer.mark) == set(machine.journals[1:])
    assert FILES.list(machine.journals[0]) == []
    assert bookie.cookie.journal_directories == tuple(machine.journals[1:])
    await check_all(bookie, 10)
    assert not any(await add_all(bookie, some(10, 12)))
    crash(bookie)
    shutil.rmtree(machine.journals[0])  # nobody misses it
    bookie = await machine.open("acb")
    await check_all(bookie, 12)
    await bookie.close()


async def test_rule_05_a_left_journal_directory_that_is_needed_and_missing_refuses_to_start(
    machine: Machine,
) -> None:
    bookie = await machine.open("ab")
    assert not any(await add_all(bookie, some(0, 5)))
    crash(bookie)
    Path(machine.journals[0]).rename(machine.root / "aside")
    with pytest.raises(DataDirectoryError, match=r"journal-a.* is missing"):
        await machine.open("b")
    (machine.root / "aside").rename(machine.journals[0])
    bookie = await machine.open("b")
    await check_all(bookie, 5)
    await bookie.close()


async def test_rule_03_each_journal_is_released_by_its_own_component(machine: Machine) -> None:
    bookie = await machine.open(checkpoint_interval_s=1000.0, write_cache_bytes=8 << 20)
    before = bookie.journals.durable_positions()
    for number in range(50):
        for ledger in (0, 1):
            assert await add(bookie, entry(ledger, number, b"x" * 5000)) == 0
    first, second = bookie.journals.all
    assert len(first.files) > 2
    assert len(second.files) > 2
    now = bookie.journals.durable_positions()
    needed = list(second.files)
    # The first component lies far beyond every sequence of the second journal's files; only the second one counts there.
    bookie.journals.release(
        {machine.journals[0]: now[machine.journals[0]], machine.journals[1]: before[machine.journals[1]]}
    )
    assert len(first.files) == 1
    assert second.files == needed
    # Both journals hold what no flush has seen yet: a checkpoint that covers one of them alone does not move the mark.
    mark = bookie.checkpointer.mark
    behind = dict(now)
    behind[machine.journals[1]] = mark[machine.journals[1]]._replace(sequence=0)
    assert await bookie.checkpointer.move_mark(behind) is None
    assert await bookie.checkpointer.move_mark({machine.journals[0]: now[machine.journals[0]]}) is None
    assert bookie.checkpointer.mark == mark
    await bookie.close()


async def test_ledger_directories_can_be_added_and_an_empty_one_left_out(machine: Machine) -> None:
    bookie = await machine.open(ledgers="a")
    assert not any(await add_all(bookie, some(0, 5)))
    await bookie.close()
    bookie = await machine.open(ledgers="ac")
    await check_all(bookie, 5)
    await bookie.close()
    assert not [name for name in FILES.list(machine.ledgers[2]) if name.startswith("entrylog")]
    bookie = await machine.open(ledgers="a")
    assert FILES.list(machine.ledgers[2]) == []
    await bookie.close()
    with pytest.raises(DataDirectoryError, match=r"no longer names .*ledgers-a, which holds entries"):
        await machine.open(ledgers="b")


async def refused(machine: Machine, match: str, journals: str = "ab", ledgers: str = "ab") -> None:
    with pytest.raises(DataDirectoryError, match=match):
        await machine.open(journals, ledgers)


@pytest.mark.parametrize("kind", ["journal", "ledgers"])
async def test_rule_09_a_disk_that_is_missing_emptied_swapped_or_foreign_refuses_to_start(
    machine: Machine, tmp_path: Path, kind: str
) -> None:
    other = Machine(tmp_path / "other", seed=2)
    await (await other.open()).close()
    bookie = await machine.open()
    assert not any(await add_all(bookie, some(0, 5)))
    crash(bookie)
    a, b = (Path(path) for path in (machine.journals if kind == "journal" else machine.ledgers)[:2])
    aside = tmp_path / "aside"

    a.rename(aside)
    await refused(machine, rf"{a} is missing.*is its disk mounted")
    a.mkdir()
    await refused(machine, rf"{a} is not the {kind} directory .* as on an empty disk")
    a.rmdir()
    b.rename(a)
    aside.rename(b)
    await refused(machine, r"disks were swapped")
    b.rename(aside)
    a.rename(b)
    foreign = Path((other.journals if kind == "journal" else other.ledgers)[0])
    foreign.rename(a)
    await refused(machine, rf"{a} belongs to bookie")
    a.rename(foreign)
    wrong = Path((machine.ledgers if kind == "journal" else machine.journals)[0])
    keep = tmp_path / "keep"
    wrong.rename(keep)
    aside.rename(wrong)
    keep.rename(a)
    await refused(machine, r"directory .* of this bookie, not a")
    a.rename(keep)
    wrong.rename(a)
    keep.rename(wrong)

    bookie = await machine.open()  # all disks are where they were
    await check_all(bookie, 5)
    await bookie.close()


async def test_rule_09_directories_without_their_cookie_are_not_taken_by_a_new_bookie(
    machine: Machine,
) -> None:
    await (await machine.open()).close()
    (Path(machine.data) / "cookie").rename(machine.root / "cookie")
    await refused(machine, r"belongs to bookie .* holds no cookie")
    shutil.rmtree(machine.data)
    await refused(machine, r"belongs to bookie .* holds no cookie")


async def test_rule_09_a_journal_directory_in_place_of_the_data_directory(machine: Machine) -> None:
    await (await machine.open()).close()
    with pytest.raises(DataDirectoryError, match="is the journal directory"):
        open_data_directory(FILES, DataLayout.at(machine.journals[0]), "", random.Random(1))


async def test_rule_09_a_new_directory_that_holds_data_is_not_overwritten(machine: Machine) -> None:
    await (await machine.open()).close()
    directory = Path(machine.ledgers[2])
    directory.mkdir()
    (directory / "entrylog-00000001.log").write_bytes(b"whose?")
    await refused(machine, r"knows nothing of", ledgers="abc")
    assert (directory / "entrylog-00000001.log").read_bytes() == b"whose?"


async def test_rule_12a_a_start_that_was_cut_short_anywhere_is_a_start_like_any_other(
    machine: Machine,
) -> None:
    """The copies are there, the cookie does not name them yet."""
    layout = machine.layout()
    FILES.make_directory(machine.data)
    cookie = open_data_directory(FILES, layout, "", random.Random(1))
    (Path(machine.data) / "cookie").unlink()
    bare = cookie._replace(journal_directories=(), ledger_directories=())
    write_cookie(FILES, layout, bare)
    assert open_data_directory(FILES, layout, "", random.Random(2)) == cookie
    assert all(is_ours(FILES, layout, cookie, JOURNAL_ROLE, path) for path in layout.journals)


async def test_a_lost_ledger_directory_is_damage_and_the_rest_goes_on(machine: Machine) -> None:
    bookie = await machine.open(ledgers="a")
    assert not any(await add_all(bookie, some(0, 5)))
    await bookie.close()
    layout = machine.layout(ledgers="a")
    with pytest.raises(DataDirectoryError, match="nothing of it is lost"):
        forget_ledger_directory(FILES, layout, machine.ledgers[0])
    with pytest.raises(DataDirectoryError, match="is no ledger directory"):
        forget_ledger_directory(FILES, layout, machine.ledgers[2])
    shutil.rmtree(machine.ledgers[0])
    await refused(machine, "is missing", ledgers="a")
    assert forget_ledger_directory(FILES, layout, machine.ledgers[0]).ledger_directories[0].lost
    bookie = await machine.open(ledgers="b")
    for ledger in range(4):
        with pytest.raises(EntryDamaged):
            await bookie.read(ledger, 0, 0)
    assert not any(await add_all(bookie, [entry(ledger, 5) for ledger in range(4)]))
    await bookie.close()
    bookie = await machine.open(ledgers="ba")  # a new disk in its place
    assert [row.lost for row in bookie.cookie.ledger_directories] == [False, False]
    assert (await bookie.read(1, 5, 5))[0] == [entry(1, 5)]
    with pytest.raises(EntryDamaged):
        await bookie.read(1, 0, 0)
    await bookie.close()


async def test_a_directory_that_is_mounted_elsewhere_is_told(machine: Machine) -> None:
    bookie = await machine.open("a", "a")
    assert not any(await add_all(bookie, some(0, 5)))
    await bookie.checkpoint()
    assert not any(await add_all(bookie, some(5, 7)))
    crash(bookie)
    for old, new in ((machine.journals[0], machine.journals[2]), (machine.ledgers[0], machine.ledgers[2])):
        Path(old).rename(new)
        await refused(machine, "mounted elsewhere|is missing", "c", "c")
        rename_directory(FILES, machine.layout("c", "c"), old, new)
    with pytest.raises(DataDirectoryError, match="is not what was"):
        rename_directory(FILES, machine.layout("c", "c"), machine.journals[1], machine.ledgers[2])
    bookie = await machine.open("c", "c")
    await check_all(bookie, 7)
    await bookie.close()


def introduce_to_store(bookie: Bookie, next_ledger_id: int) -> None:
    """As somebody who has registered this start in a store with so many ledgers."""
    bookie.introduce(msgspec.structs.replace(bookie.introduce(None), next_ledger_id=next_ledger_id))


async def test_rule_09_a_replaced_bookie_denies_nothing_that_was_there_before_it(machine: Machine) -> None:
    layout = machine.layout()
    replace_cookie(FILES, layout, "b1", random.Random(3))
    with pytest.raises(DataDirectoryError, match="did not lose its disks"):
        replace_cookie(FILES, layout, "b1", random.Random(3))
    bookie = await machine.open()
    for reading in (
        bookie.list_entries(7),
        bookie.read(7, 0, 0),
        bookie.read_last_confirmed(7),
        bookie.read(7, 0, 0, fence=True),
        bookie.read_last_confirmed(7, fence=True),
        bookie.read_last_confirmed(7),  # known by now, as fenced
    ):
        with pytest.raises(UnknownLedgerState):
            await reading
    # The first who has registered it says which ledgers there were before.
    assert await add(bookie, entry(7, 1)) == LedgerFenced.code
    introduce_to_store(bookie, 9)
    assert not bookie.cookie.repairing
    await until(lambda: read_cookie(FILES, layout) == bookie.cookie)
    for _ in range(2):
        for ledger in (7, 8):
            with pytest.raises(UnknownLedgerState):
                await bookie.read(ledger, 0, 0)
            with pytest.raises(UnknownLedgerState):
                await bookie.read_last_confirmed(ledger)
            assert await add(bookie, entry(ledger, 1)) != 0  # fenced
        with pytest.raises(MagnetarError) as failure:
            await bookie.read(9, 0, 0)
        assert type(failure.value).__name__ in ("EntryNotFound", "LedgerNotFound")
        crash(bookie)
        bookie = await machine.open()
    assert await add(bookie, entry(7, 0), recovery=True) == 0
    await bookie.fencing.mark_repaired([7])
    await bookie.checkpoint()
    assert (await bookie.read(7, 0, 5))[0] == [entry(7, 0)]
    assert (await bookie.read_last_confirmed(7))[1] == 0
    await bookie.close()


async def test_rule_09_data_of_another_cluster_is_refused(machine: Machine) -> None:
    await (await machine.open()).close()  # of a release that knew no clusters
    await (await machine.open(cluster=5)).close()
    with pytest.raises(DataDirectoryError, match="belongs to another cluster"):
        await machine.open(cluster=6)
    bookie = await machine.open()
    assert bookie.cookie.cluster == 5
    await bookie.close()


def test_directories_that_collide_are_refused(tmp_path: Path) -> None:
    one = str(tmp_path / "one")
    for changes in (
        {"journal_directories": (one, one)},
        {"journal_directories": (one,), "ledger_directories": (one + "/",)},
        {"ledger_directories": (one,), "index_directory": one},
        {"journal_directories": ("",)},
        {"journal_directories": (str(tmp_path),)},
    ):
        with pytest.raises(InvalidSetting):
            small_settings(str(tmp_path), **changes)


def test_a_directory_below_the_data_directory_moves_with_it(tmp_path: Path) -> None:
    settings = small_settings(
        str(tmp_path), journal_directories=(str(tmp_path / "fast" / "j"), str(tmp_path.parent / "k"))
    )
    layout = DataLayout.of(settings)
    assert [layout.name_of(path) for path in layout.journals] == ["fast/j", str(tmp_path.parent / "k")]
    assert [layout.directory(layout.name_of(path)) for path in layout.journals] == list(layout.journals)


@pytest.mark.real
async def test_real_processes_on_several_directories(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "journal_directories": (str(tmp_path / "j1"), str(tmp_path / "j2")),
        "ledger_directories": (str(tmp_path / "l1"), str(tmp_path / "l2")),
        "index_directory": str(tmp_path / "deep" / "index"),
    }
    bookie = await open_real(str(tmp_path / "data"), **changes)
    writers = {journal.device.writer_pid for journal in bookie.journals.all}  # type: ignore[attr-defined]
    assert len(writers) == 2
    assert not any(await add_all(bookie, some(0, 5)))
    await bookie.close()
    bookie = await open_real(str(tmp_path / "data"), **changes)
    await check_all(bookie, 5)
    await bookie.close()
    assert not (tmp_path / "data" / "index").exists()

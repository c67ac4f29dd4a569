"""What a bookie says of itself: info, load, problems, metrics."""

import asyncio
import errno
from pathlib import Path

import pytest

from magnetar.bookie import open_bookie
from magnetar.bookie.disk_space import clear_read_only, set_read_only
from magnetar.bookie.metrics import Histogram
from magnetar.bookie.status import RISING_FIGURES, bookie_figures, bookie_info, bookie_problems
from magnetar.cli.wiring.metrics import service_metrics
from magnetar.proto.errors import BookieReadOnly, InvalidSetting, StorageFailed
from magnetar.runtime.files import OsFiles
from support.bookie_kit import (
    KIB,
    add,
    add_all,
    crash,
    entry,
    model_components,
    open_inline,
    small_settings,
    until,
)
from support.index_model import ModelStorage
from support.sim import SimDisk, SimLoop
from unit.bookie.test_disk_faults import simulate


class Space(OsFiles):
    """The real disk, with as much space as a test says, by directory name."""

    def __init__(self) -> None:
        super().__init__()
        self.free: dict[str, int] = {}

    def free_bytes(self, path: str) -> tuple[int, int]:
        return self.free.get(Path(path).name, 900 << 20), 1000 << 20

    def device(self, path: str) -> int:
        return hash(Path(path).name) % 1000


async def test_load_is_of_the_last_interval_and_costs_an_add_nothing(tmp_path: Path) -> None:
    bookie = await open_inline(str(tmp_path), ModelStorage(), disk_check_interval_s=1000.0)
    bookie.load.sample()
    began = asyncio.get_running_loop().time()
    await add_all(bookie, [entry(1, number, b"x" * 500) for number in range(100)])
    await bookie.checkpoint()
    await add_all(bookie, [entry(1, number, b"x" * 500) for number in range(100, 150)])
    await bookie.read(1, 0, 49)
    await asyncio.sleep(0.02)
    bookie.load.sample()
    elapsed = asyncio.get_running_loop().time() - began
    load = bookie_info(bookie)["load"]
    assert load["adds_per_s"] == pytest.approx(150 / elapsed, rel=0.5)
    assert load["add_bytes_per_s"] == pytest.approx(150 * 540 / elapsed, rel=0.5)
    assert load["reads_per_s"] == pytest.approx(50 / elapsed, rel=0.5)
    assert 0 < load["write_cache_ratio"] < 1
    await asyncio.sleep(0.01)
    bookie.load.sample()
    assert bookie_info(bookie)["load"]["adds_per_s"] == 0
    await bookie.close()


async def test_replayed_entries_are_no_load(tmp_path: Path) -> None:
    storage = ModelStorage()
    bookie = await open_inline(str(tmp_path), storage)
    await add_all(bookie, [entry(1, number) for number in range(100)])
    crash(bookie)
    bookie = await open_inline(str(tmp_path), storage)
    assert bookie.replayed_records >= 100
    await asyncio.sleep(0.01)
    bookie.load.sample()
    assert bookie_info(bookie)["load"]["adds_per_s"] == 0
    await bookie.close()


async def test_rule_12_a_full_directory_is_named_and_the_bookie_read_only_when_none_is_left(
    tmp_path: Path,
) -> None:
    files = Space()
    settings = small_settings(
        str(tmp_path / "data"),
        ledger_directories=(str(tmp_path / "one"), str(tmp_path / "two")),
        disk_minimum_free_bytes=10 << 20,
        disk_check_interval_s=0.005,
    )
    bookie = await open_bookie(settings, model_components(ModelStorage(), files))
    assert bookie_problems(bookie) == {}
    info = bookie_info(bookie)
    assert (info["free_bytes"], info["total_bytes"]) == (1800 << 20, 2000 << 20)
    files.free["one"] = 5 << 20
    await until(lambda: bool(bookie_problems(bookie)))
    assert list(bookie_problems(bookie)) == [f"directory {tmp_path / 'one'}"]
    assert not bookie.read_only
    assert await add(bookie, entry(1, 0)) == 0
    await bookie.checkpoint()
    assert not list((tmp_path / "one").glob("entrylog*"))
    files.free["two"] = 0
    await until(lambda: bookie.read_only)
    assert "no space in" in bookie_info(bookie)["read_only_reason"]
    assert "read_only" in bookie_problems(bookie)
    assert await add(bookie, entry(1, 1)) == BookieReadOnly.code
    assert await add(bookie, entry(1, 1), recovery=True) == 0  # rule 39: one of them has room for recoveries
    files.free["one"] = 0
    await until(lambda: not bookie.disk_space.takes_recoveries)
    assert await add(bookie, entry(1, 2), recovery=True) == BookieReadOnly.code
    await bookie.fence(1)
    assert (await bookie.read(1, 0, 9))[0] == [entry(1, 0), entry(1, 1)]
    del files.free["one"]
    await until(lambda: not bookie.read_only)
    assert await add(bookie, entry(2, 0)) == 0
    for name in ("journal", "data"):
        files.free[name] = 0
        await until(lambda: bookie.read_only)
        del files.free[name]
        await until(lambda: not bookie.read_only)
    await bookie.close()


async def test_a_bookie_that_its_operator_made_read_only_takes_part_in_recoveries(tmp_path: Path) -> None:
    bookie = await open_inline(str(tmp_path), ModelStorage(), disk_check_interval_s=0.005)
    files = OsFiles()
    assert await add(bookie, entry(1, 0)) == 0
    set_read_only(files, bookie.layout, "leaves on Friday")
    await until(lambda: bookie.read_only)
    assert bookie_problems(bookie)["read_only"] == "leaves on Friday"
    assert await add(bookie, entry(1, 1)) == BookieReadOnly.code
    await bookie.fence(1)
    assert await add(bookie, entry(1, 1), recovery=True) == 0
    clear_read_only(files, bookie.layout)
    await until(lambda: not bookie.read_only)
    assert await add(bookie, entry(2, 0)) == 0
    await bookie.close()


async def test_the_unsafe_mode_is_named(tmp_path: Path) -> None:
    bookie = await open_inline(str(tmp_path), ModelStorage(), journal_sync_data=False)
    assert "power failure" in bookie_problems(bookie)["unsafe_no_sync"]
    assert bookie_info(bookie)["unsafe_no_sync"] is True
    assert bookie_figures(bookie)["unsafe_no_sync"] == 1
    await bookie.close()


async def test_metrics_show_every_figure_and_every_histogram(tmp_path: Path) -> None:
    bookie = await open_inline(str(tmp_path), ModelStorage())
    await add_all(bookie, [entry(1, number, b"x" * 1000) for number in range(200)])
    await bookie.read(1, 150, 160)
    await bookie.checkpoint()
    await bookie.read(1, 0, 10)
    await bookie.read(1, 0, 10)
    text = (await service_metrics(None, bookie).render()).decode()
    for name in bookie_figures(bookie):
        assert f"\nmagnetar_bookie_{name}{'_total' if name in RISING_FIGURES else ''} " in text, name
    assert "magnetar_bookie_entries_added_total 200.0" in text
    for source in ("write_cache", "read_cache", "entry_log"):
        assert f'magnetar_bookie_read_seconds_count{{source="{source}"}} 1.0' in text
    assert 'magnetar_bookie_journal_sync_seconds_bucket{journal="journal",le="+Inf"}' in text
    assert "magnetar_bookie_flush_seconds_count 1.0" in text
    assert 'magnetar_bookie_directory_state{path="' in text
    assert {*bookie_figures(bookie)} >= RISING_FIGURES, RISING_FIGURES - {*bookie_figures(bookie)}
    await bookie.close()


def test_a_histogram_puts_a_value_under_the_first_bound_that_holds_it() -> None:
    histogram = Histogram((1, 10, 100))
    for value in (0, 1, 2, 10, 11, 5000):
        histogram.observe(value)
    histogram.observe(50, times=3)
    assert histogram.counts == [2, 2, 4, 1]
    assert (histogram.count, histogram.total) == (9, 5174)


def test_a_ledger_directory_whose_disk_cannot_be_asked_has_failed() -> None:
    async def main(disk: SimDisk, loop: SimLoop, storage: ModelStorage) -> None:
        files = disk.mount()
        real = files.free_bytes
        settings = small_settings(
            "/data/bookie", ledger_directories=("/one", "/two"), disk_check_interval_s=0.01
        )
        bookie = await open_bookie(settings, model_components(storage, files))

        def free_bytes(path: str) -> tuple[int, int]:
            if path == "/one":
                raise StorageFailed("looking at /one failed", errno=errno.EIO)
            return real(path)

        files.free_bytes = free_bytes  # type: ignore[method-assign]
        await until(lambda: "directory /one" in bookie_problems(bookie))
        assert bookie.failure is None
        assert await add(bookie, entry(1, 0, b"x" * KIB)) == 0
        await bookie.checkpoint()
        assert (await bookie.read(1, 0, 0))[0] == [entry(1, 0, b"x" * KIB)]
        await bookie.close()

    simulate(1, main)


async def test_a_bookie_tells_where_it_stands(tmp_path: Path) -> None:
    settings = small_settings(str(tmp_path / "data"), rack="r 7", zone="north")
    bookie = await open_bookie(settings, model_components(ModelStorage(), OsFiles()))
    info = bookie_info(bookie)
    assert (info["rack"], info["zone"]) == ("r 7", "north")
    await bookie.close()


@pytest.mark.parametrize("name", ["rack", "zone"])
@pytest.mark.parametrize("label", [" a", "a\n", "a/b", "x" * 256])
def test_labels_that_are_no_names_are_refused(name: str, label: str) -> None:
    with pytest.raises(InvalidSetting, match=f"{name} is .* plain name"):
        small_settings("data", **{name: label})

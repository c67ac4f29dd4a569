"""A benchmark as a child process: what it says, what its failure says, and that it ends when the comparison does."""

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.compare import driver
from bench.compare.driver import Drivers, Part, Side, run_alone
from bench.compare.errors import CompareFailed
from bench.compare.main import run_folder

SIDE = Side("main (abc)", Path(sys.executable))


def benchmark(folder: Path, code: str) -> Drivers:
    """`python -m bench` is this code, with sys, json and the path of the JSON file as `out`."""
    package = folder / "bench"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        f"import json, pathlib, sys\nout = pathlib.Path(sys.argv[-1])\n{code}"
    )
    return Drivers(folder, quick=True, settle_s=0.5)


@pytest.mark.real
def test_a_run_is_one_round_of_one_workload(tmp_path: Path) -> None:
    drivers = benchmark(
        tmp_path,
        "figure = dict(label=' '.join(sys.argv[1:-1]), unit='', higher=True, rounds=[1])\n"
        "out.write_text(json.dumps(dict(figures=dict(a=figure), others=0.5)))\n",
    )
    found = drivers.run(SIDE, Part("ledger", "b"))
    assert found.others == 0.5
    assert found.figures["a"].label == "ledger --rounds 1 --settle 0.5 --quick --only b --no-limits --json"
    assert drivers.run(SIDE, Part("", "a")).figures["a"].label.startswith("--rounds 1")


@pytest.mark.real
def test_a_benchmark_that_fails_is_quoted(tmp_path: Path) -> None:
    drivers = benchmark(tmp_path, "sys.exit('bench: no such setting: broker.new')\n")
    with pytest.raises(
        CompareFailed, match=r"\(a\) of main \(abc\) ended with 1:\nbench: no such setting(.|\n)*--bench"
    ):
        drivers.run(SIDE, Part("", "a"))


@pytest.mark.real
def test_a_benchmark_that_writes_nothing_or_nonsense_is_named(tmp_path: Path) -> None:
    drivers = benchmark(tmp_path, "if '--only' in sys.argv and 'b' in sys.argv: out.write_text('{')\n")
    for part in (Part("", "a"), Part("", "b")):
        with pytest.raises(CompareFailed, match=r"of main \(abc\): "):
            drivers.run(SIDE, part)


@pytest.mark.real
def test_a_report_of_the_run_before_is_not_read_again(tmp_path: Path) -> None:
    drivers = benchmark(
        tmp_path, "if 'a' in sys.argv: out.write_text(json.dumps(dict(figures={}, others=0)))\n"
    )
    drivers.run(SIDE, Part("", "a"))
    with pytest.raises(CompareFailed):
        drivers.run(SIDE, Part("", "b"))


@pytest.mark.real
def test_a_base_that_lacks_what_the_benchmarks_import_is_told_before_anything_runs(tmp_path: Path) -> None:
    drivers = benchmark(tmp_path, "from magnetar.client import what_a_later_revision_has\n")
    with pytest.raises(
        CompareFailed, match=r"main \(abc\) does not have: .*what_a_later_revision_has(.|\n)*--bench BASE"
    ):
        drivers.check(SIDE, [Part("", "a"), Part("ledger", "b")])


@pytest.mark.real
def test_one_side_does_not_see_the_code_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    drivers = benchmark(
        tmp_path,
        "figure = dict(label=repr(sys.path), unit='', higher=True, rounds=[])\n"
        "out.write_text(json.dumps(dict(figures=dict(a=figure), others=0)))\n",
    )
    assert "elsewhere" not in drivers.run(SIDE, Part("", "a")).figures["a"].label


# A benchmark with a service: it removes its data when it is interrupted. One that is "deaf" does not listen.
BENCHMARK = """
import pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
service = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(folder / "data").touch()
(folder / "pid").write_text(str(service.pid))
try:
    time.sleep(600)
finally:
    service.kill()
    service.wait()
    (folder / "data").unlink()
"""


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell without job control starts what runs in its background with SIGINT ignored, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.real
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("manner", ["listening", "deaf"])
def test_an_interrupt_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manner: str) -> None:
    monkeypatch.setattr(driver, "STOP_S", 3600.0 if manner == "listening" else 0.1)
    os.mkfifo(tmp_path / "pid")
    services: list[int] = []

    def interrupt() -> None:
        service = int((tmp_path / "pid").read_text())  # waits for the benchmark to write it
        services.append(os.pidfd_open(service))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with (tmp_path / "output").open("w") as output, pytest.raises(KeyboardInterrupt):
        run_alone([sys.executable, "-c", BENCHMARK, str(tmp_path), manner], tmp_path, output.fileno())
    thread.join()
    select.select(services, [], [])  # the service ends with the comparison
    os.close(services[0])
    assert (tmp_path / "data").exists() == (manner == "deaf"), "a benchmark that listens cleans up"


def test_a_run_has_a_folder_and_the_only_one(tmp_path: Path) -> None:
    (tmp_path / "run-of-a-killed-one").mkdir()
    (tmp_path / "env-1").mkdir()
    with run_folder(tmp_path) as mine:
        (mine / "data").touch()
        assert {path.name for path in tmp_path.iterdir()} == {mine.name, "env-1", "lock"}
        with pytest.raises(CompareFailed, match="another comparison"), run_folder(tmp_path):
            pass
        assert mine.exists()
    assert not mine.exists()
    with pytest.raises(KeyboardInterrupt), run_folder(tmp_path) as mine:
        raise KeyboardInterrupt
    assert not mine.exists()

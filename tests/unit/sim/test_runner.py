"""The runner notices failures, dead processes and runs that differ, and says how to replay them."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sim.runner import judge, main, play_all, played, replay_command
from sim.worker import TESTS, Worker

pytestmark = pytest.mark.slow


@pytest.mark.real
def test_runner_finds_what_goes_wrong_and_nothing_else() -> None:
    wrong = judge("selftest", play_all("selftest", range(9), twice=True))
    assert [text.split("\n")[0] for text in wrong] == [
        "seed 3 failed:",
        "seed 5 failed:",
        wrong[2].split("\n")[0],
    ]
    assert "an invariant that does not hold" in wrong[0]
    assert replay_command("selftest", 3) in wrong[0]
    assert "ended with code 9" in wrong[1]
    assert "seed 7 is not deterministic" in wrong[2]


@pytest.mark.real
def test_runner_wants_every_fault_to_fire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.scenarios.selftest.EXPECTED_FAULTS", ("selftest", "never"))
    results = play_all("selftest", [0] * 20)
    assert judge("selftest", results) == ["the fault 'never' never fired"]


def test_one_seed_can_be_replayed_with_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--seed", "3", "--trace"]) == 1
    printed = capsys.readouterr().out
    assert "FAULT selftest" in printed
    assert "an invariant that does not hold" in printed


@pytest.mark.real
def test_each_seed_finds_modules_that_no_other_seed_has_used() -> None:
    reports = [report for (report,) in play_all("selftest", range(10, 22))]
    assert [report.counts["earlier"] for report in reports] == [0] * 12


@pytest.mark.real
def test_seed_that_takes_too_much_memory_fails_alone() -> None:
    (wrong,) = judge("selftest", play_all("selftest", [9, 10]))
    assert wrong.startswith("seed 9 failed:")
    assert "MemoryError" in wrong


@pytest.mark.real
def test_seed_that_hangs_fails_alone_and_tells_where() -> None:
    (wrong,) = judge("selftest", play_all("selftest", [-1, 10]))
    assert wrong.startswith("seed -1 failed:\nTimeout (")
    assert "selftest.py" in wrong


@pytest.mark.real
def test_replay_has_the_trace_of_the_run_whatever_the_hash_seed() -> None:
    ((report,),) = play_all("selftest", [3])
    for hash_seed in ("11", "12"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": TESTS}
        command = [sys.executable, "-m", "sim.runner", "selftest", "--seed", "3"]
        again = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert f"trace {report.trace_hash}\n" in again.stdout


@pytest.mark.real
def test_failures_are_printed_at_once_and_kept_with_the_figures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kept = tmp_path / "figures.json"
    assert main(["selftest", "--seeds", "9", "--progress", "0", "--json", str(kept)]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"selftest: \d of 9 seeds in \d+ s, .* a second, 1 failed, about 0 min to go", printed)
    assert printed.index("seed 3 failed:") < printed.index("9 of 9 seeds in") < printed.index("2 failed\n")
    for seed in (3, 5):
        assert (
            printed.count(f"replay: {replay_command('selftest', seed)}") == 2
        )  # with the failure, and at the end
    figures = json.loads(kept.read_text())
    assert (figures["state"], figures["asked"], figures["seeds"]) == ("complete", 9, 9)
    assert figures["counts"] == {"earlier": 0, "runs": 7}
    assert figures["faults"] == {"selftest": 8}  # the process of seed 5 took its own along
    assert sorted(figures["failures"]) == ["3", "5"]


# Its command inherits a SIGINT that is ignored.
BACKGROUND_JOB = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]


@pytest.mark.real
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_soak_tells_what_it_has_and_leaves_no_process(
    number: signal.Signals, tmp_path: Path
) -> None:
    kept = tmp_path / "figures.json"
    options = ["--first", "10", "--seeds", "1000000", "--progress", "0.1", "--json", str(kept)]
    with subprocess.Popen(
        [*BACKGROUND_JOB, sys.executable, "-m", "sim.runner", "selftest", *options],
        env={**os.environ, "PYTHONPATH": TESTS},
        stdout=subprocess.PIPE,
        text=True,
    ) as soak:
        assert soak.stdout is not None
        assert " of 1000000 seeds" in soak.stdout.readline()
        assert json.loads(kept.read_text())["state"] == "running"
        tasks = Path(f"/proc/{soak.pid}/task").iterdir()
        children = [child for task in tasks for child in (task / "children").read_text().split()]
        assert children  # one of two, if the other has not begun yet
        soak.send_signal(number)
        printed = soak.stdout.read()
    assert soak.returncode == 130
    assert re.search(r"interrupted after \d+ of 1000000 seeds\nselftest: \d+ seeds", printed)
    assert printed.endswith("all invariants held\n")
    figures = json.loads(kept.read_text())
    assert figures["state"] == "interrupted"
    assert figures["seeds"] == figures["counts"]["runs"] > 0
    assert [child for child in children if Path(f"/proc/{child}").exists()] == []


@pytest.mark.real
def test_seeds_that_are_not_asked_for_any_more_are_given_up() -> None:
    results = played("selftest", range(10, 1_000_000))
    assert len([next(results) for _ in range(5)]) == 5
    results.close()  # type: ignore[attr-defined]


@pytest.mark.real
def test_worker_that_is_killed_fails_its_seed_and_the_next_goes_to_another() -> None:
    worker = Worker(1)
    try:
        assert not worker.play("selftest", 0).error
        assert worker._process is not None
        worker._process.kill()
        worker._process.wait()
        assert "the worker process ended with code -9" in worker.play("selftest", 1).error
        assert not worker.play("selftest", 2).error
    finally:
        worker.close()

"""The runner notices failures, dead processes and runs that differ, and says how to replay them."""

import pytest

from sim.runner import judge, main, play_all, replay_command

pytestmark = pytest.mark.slow


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


def test_runner_wants_every_fault_to_fire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.scenarios.selftest.EXPECTED_FAULTS", ("selftest", "never"))
    results = play_all("selftest", [0] * 20)
    assert judge("selftest", results) == ["the fault 'never' never fired"]


def test_one_seed_can_be_replayed_with_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--seed", "3", "--trace"]) == 1
    printed = capsys.readouterr().out
    assert "FAULT selftest" in printed
    assert "an invariant that does not hold" in printed

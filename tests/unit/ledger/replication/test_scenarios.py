"""Every tests/scenarios/repair_*.txt: the cores of self-repair do what stands there, step by step."""

import os
from pathlib import Path

import pytest

from support.repair_scenario import run_scenario

SCENARIOS = sorted((Path(__file__).parents[3] / "scenarios").glob("repair_*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_rule_22_scenario(path: Path) -> None:
    text = path.read_text()
    done = run_scenario(text)
    if os.environ.get("MAGNETAR_REWRITE"):
        path.write_text(done)
    assert done == text


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 15

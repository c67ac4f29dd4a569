"""Every tests/scenarios/repair_*.txt: the cores of self-repair do what stands there, step by step."""

from pathlib import Path

import pytest

from support.repair_scenario import run_scenario
from support.text_scenarios import check, scenario_files

SCENARIOS = scenario_files("repair")


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_rule_22_scenario(path: Path) -> None:
    check(path, run_scenario)


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 15

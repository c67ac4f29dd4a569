"""Every tests/scenarios/dispatch_*.txt: the core does what stands there, step by step."""

from pathlib import Path

import pytest

from support.dispatch_scenario import run_scenario
from support.text_scenarios import check, scenario_files

SCENARIOS = scenario_files("dispatch")


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    check(path, run_scenario)


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 8

"""The scenarios of the balancer's core: tests/scenarios/balance_*.txt."""

from pathlib import Path

import pytest

from support.balance_scenario import run_scenario
from support.text_scenarios import check, scenario_files

SCENARIOS = scenario_files("balance")


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    check(path, run_scenario)

"""Every tests/scenarios/ledger_*.txt and adds_*.txt: the cores do what stands there, step by step."""

from pathlib import Path

import pytest

from support import adds_scenario, ledger_scenario
from support.text_scenarios import check, scenario_files

SCENARIOS = {
    **dict.fromkeys(scenario_files("ledger"), ledger_scenario.run_scenario),
    **dict.fromkeys(scenario_files("adds"), adds_scenario.run_scenario),
}


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    check(path, SCENARIOS[path])


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 40

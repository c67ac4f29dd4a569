"""The text scenarios of Pulsar's protocol: see support.pulsar_scenario."""

from pathlib import Path

import pytest

from support.pulsar_scenario import run_pulsar_scenario
from support.text_scenarios import check, scenario_files
from support.virtual_time import in_virtual_time


@pytest.mark.parametrize("path", scenario_files("pulsar"), ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    @in_virtual_time
    async def run() -> None:
        done.append(await run_pulsar_scenario(path.read_text()))

    done: list[str] = []
    run()
    check(path, lambda _: done[0])

"""The short forms of the simulation; `make sim SEEDS=N` plays more (see sim.runner).

A failure names its seed and the command that replays it.
"""

import pytest

from sim.failed_once import FAILED_ONCE
from sim.runner import judge, play_all
from support.long_form import LONG, long_form

pytestmark = [pytest.mark.sim, pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.real]

# Scenario -> how many seeds a test plays, and how many of them twice. `make sim` plays more; twenty or more, as there, must
# show each of its faults (sim.report).
SHORT_FORM = {
    "broker": (1, 0), "standalone": (2, 1), "ledgers": (6, 2), "deferred": (4, 1), "repair": (3, 0), "cluster": (2, 1),
    "once": (1, 0), "once_delayed": (1, 0), "once_standalone": (1, 0), "exclusive": (1, 0), "terminated": (1, 0),
    "delayed": (1, 0), "once_policies": (1, 0), "mixed": (4, 1), "mixed_once": (2, 0),
}  # fmt: skip
DISK_CALLS = 440  # a little more than the workload of every_call makes


@pytest.mark.parametrize(
    ("scenario", "seeds", "twice"), [(name, *counts) for name, counts in SHORT_FORM.items()], ids=SHORT_FORM
)
def test_storm_loses_nothing_and_ends_at_rest(scenario: str, seeds: int, twice: int) -> None:
    """And the first seeds have the same trace in two processes."""
    results = play_all(scenario, range(twice), twice=True) + play_all(scenario, range(twice, seeds))
    wrong = judge(scenario, results)
    assert not wrong, "\n\n".join(wrong)


@long_form
@pytest.mark.parametrize("scenario", FAILED_ONCE)
def test_seeds_that_failed_once_hold(scenario: str) -> None:
    wrong = judge(scenario, play_all(scenario, list(FAILED_ONCE[scenario])))
    assert not wrong, "\n\n".join(wrong)


def test_power_loss_at_disk_calls_of_a_short_workload() -> None:
    """Every 22nd call; the long form, or `python -m sim.runner every_call --seeds 440`, takes them all."""
    wrong = judge("every_call", play_all("every_call", range(0, DISK_CALLS, 1 if LONG else 22)))
    assert not wrong, "\n\n".join(wrong)


def test_journal_that_acknowledges_before_it_syncs_is_caught() -> None:
    wrong = judge("unsynced", play_all("unsynced", range(3)))
    # The bookie itself notices, since later records tell that these were durable once (rule 5). In one run of twenty no
    # power cut falls between an acknowledgement and what would have been its sync.
    assert len(wrong) >= 2
    assert all("where acknowledged entries stand" in text or "lost:" in text for text in wrong), wrong

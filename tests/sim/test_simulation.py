"""The short forms of the simulation; `make sim SEEDS=N` plays more (see sim.runner).

A failure names its seed and the command that replays it.
"""

import pytest

from sim.runner import judge, play_all

pytestmark = [pytest.mark.sim, pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.real]

FAILED_ONCE = [
    ("cluster", 41),  # a broker whose session could not be closed did not stop
    ("cluster", 42),  # a broker that was told to stop while it had no session took bundles in the next one
    ("cluster", 110),  # a bundle was divided twice at one hash, which damaged the bounds of its namespace
    ("cluster", 6),  # a broker that had stood still sent receipts of acknowledgements before it was fenced
    ("cluster", 9),  # look-ups that came together made two ends for one arrival, and none held the bundle
    ("cluster", 10),  # a request whose deletion was lost stayed for ever
    ("cluster", 17),  # a broker that could not write what it says of itself gave up its session, and went on
    (
        "cluster",
        24,
    ),  # a topic that was being closed when the session was lost sent receipts in the next session
    (
        "cluster",
        310,
    ),  # a part that was found before the answer to a split was divided, and then held as a whole again
    (
        "cluster",
        449,
    ),  # topics that had not arrived were unloaded one after another; a receipt waited for a deletion
    ("standalone", 120),  # the checker held a consumer to what a seek had taken back from it
    ("standalone", 156),  # the checker wanted a dead letter that a seek had passed over before it was written
    ("standalone", 112),  # bytes written after a cut of the network arrived behind those that the cut took
    ("deferred", 624),  # so rough that nothing was written, and the storm did not become mild enough
    (
        "ledgers",
        1072,
    ),  # the reader of a closed ledger that was deleted asked a bookie that was gone, for ever
]
# Scenario -> how many seeds a test plays. Twenty or more, as in `make sim`, must show each of its faults (sim.report).
SHORT_FORM = {"broker": 5, "standalone": 8, "ledgers": 20, "deferred": 12, "repair": 8, "cluster": 5}
DISK_CALLS = 440  # a little more than the workload of every_call makes


@pytest.mark.parametrize(("scenario", "seeds"), SHORT_FORM.items(), ids=SHORT_FORM)
def test_storm_loses_nothing_and_ends_at_rest(scenario: str, seeds: int) -> None:
    wrong = judge(scenario, play_all(scenario, range(seeds)))
    assert not wrong, "\n\n".join(wrong)


def test_same_seed_has_the_same_trace_in_two_processes() -> None:
    wrong = judge("standalone", play_all("standalone", [0], twice=True))
    wrong += judge("ledgers", play_all("ledgers", [0, 1], twice=True))
    wrong += judge("repair", play_all("repair", [0], twice=True))
    wrong += judge("cluster", play_all("cluster", [0], twice=True))
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("scenario", dict(FAILED_ONCE))
def test_seeds_that_failed_once_hold(scenario: str) -> None:
    wrong = judge(scenario, play_all(scenario, [seed for name, seed in FAILED_ONCE if name == scenario]))
    assert not wrong, "\n\n".join(wrong)


def test_power_loss_at_disk_calls_of_a_short_workload() -> None:
    """Every seventh call; `python -m sim.runner every_call --seeds 440` takes them all."""
    wrong = judge("every_call", play_all("every_call", range(0, DISK_CALLS, 7)))
    assert not wrong, "\n\n".join(wrong)


def test_journal_that_acknowledges_before_it_syncs_is_caught() -> None:
    wrong = judge("unsynced", play_all("unsynced", range(4)))
    # The bookie itself notices, since later records tell that these were durable once (rule 5). In one run of twenty no
    # power cut falls between an acknowledgement and what would have been its sync.
    assert len(wrong) >= 3
    assert all("where acknowledged entries stand" in text or "lost:" in text for text in wrong), wrong

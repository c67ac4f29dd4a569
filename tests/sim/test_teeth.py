"""A few planted defects, each by a seed that notices it: so `make test` shows that the simulation of ledgers has teeth.

`make teeth` (`python -m sim.runner ledgers --defect all --seeds 200`) tries all of sim.defects, and takes an hour. A seed
means another history once anything draws from the generator that did not before: then the next ones are played as well,
and the last lines of the run say which number to write here.
"""

from collections.abc import Callable, Iterator

import pytest

from sim.defects import CLUSTER_DEFECTS, DEFECTS
from sim.runner import catches
from sim.worker import Worker

pytestmark = [pytest.mark.sim, pytest.mark.slow, pytest.mark.timeout(600)]

# defect -> a seed, and the rules that may notice it: which of them comes first is the matter of the seed
PLANTS: dict[str, tuple[int, *tuple[str, ...]]] = {
    "recovery_does_not_fence": (0, "fence"),
    "normal_adds_pass_the_fence": (0, "although it had been fenced"),
    "recovery_adds_do_not_pass_the_fence": (0, "to a recovery as fenced"),
    "writer_ignores_that_it_was_recovered": (2, "took its state back from IN_RECOVERY"),
    "damage_is_answered_as_absence": (3, "denied what it had acknowledged"),
    "replacement_is_in_the_ensemble_already": (0, "wrote the invalid ensemble"),
    "read_only_bookie_does_not_fence": (0, "refused to fence"),
    "entries_are_not_replayed": (0, "denied what it had acknowledged", "and it is on"),
    "bookies_are_not_asked_who_they_are": (0, "denied what it had acknowledged"),
}
REPAIR_PLANTS: dict[str, tuple[int, *tuple[str, ...]]] = {
    "repair_names_the_copy_before_it_is_durable": (1, "does not have entry"),
    "dropping_leftovers_forgets_the_fence": (3, "lost the fence"),
}
STANDALONE_PLANTS: dict[str, tuple[int, *tuple[str, ...]]] = {
    "hole_dropped_on_reload": (0, "acknowledged with receipt"),
    "hand_over_without_draining": (1, "as first occurrence", "another message of its key"),
}
CLUSTER_PLANTS: dict[str, tuple[int, *tuple[str, ...]]] = {
    "bundle_taken_though_it_has_an_owner": (0, "had taken the topic over", "is served by", "exists already"),
    "owner_node_outlives_its_session": (0, "names session"),
    "validity_is_not_read_from_the_clock": (54, "had taken the topic over", "is served by"),
    "split_without_compare_and_set": (0, "the namespace has no such bundle"),
    "some_look_ups_are_never_answered": (0, "has held a look-up"),
    "some_look_ups_are_answered_late": (0, "has held a look-up"),
}
# A seed takes seconds: the others are for `make teeth`.
ONCE_PLANTS: dict[str, tuple[int, *tuple[str, ...]]] = {
    "snapshot_without_its_position": (1, "stored twice", "is acknowledged", "as first occurrence"),
}
DELAYED_PLANTS: dict[str, tuple[int, *tuple[str, ...]]] = {
    "early_after_a_restart": (0, "early"),
}
EXCLUSIVE_PLANTS: dict[str, tuple[int, *tuple[str, ...]]] = {
    "epoch_is_not_durable": (0, "two exclusive producers"),
}
MIXED_PLANTS: dict[str, tuple[int, *tuple[str, ...]]] = {
    "receipts_out_of_order": (0, "waits for a receipt"),
}
SCENARIO_PLANTS = {
    "ledgers": PLANTS,
    "repair": REPAIR_PLANTS,
    "standalone": STANDALONE_PLANTS,
    "cluster": CLUSTER_PLANTS,
    "once": ONCE_PLANTS,
    "delayed": DELAYED_PLANTS,
    "exclusive": EXCLUSIVE_PLANTS,
    "mixed": MIXED_PLANTS,
}
SEEDS = 40
SOON = 3
CONTROL_SEED = 1


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """It has imported the simulation once, for all defects."""
    one = Worker(1)
    yield one
    one.close()


@pytest.mark.real
@pytest.mark.parametrize(
    ("scenario", "defect"),
    [(scenario, defect) for scenario, plants in SCENARIO_PLANTS.items() for defect in plants],
)
def test_planted_defect_is_noticed_by_the_rule_that_it_breaks(
    scenario: str, defect: str, worker: Worker, record_property: Callable[[str, object], None]
) -> None:
    first, *rules = SCENARIO_PLANTS[scenario][defect]
    caught, played = catches(worker, scenario, defect, range(first, first + SEEDS), 1)
    assert caught, f"{defect} was not noticed by {played} seeds from {first} on"
    assert any(rule in caught[0].error for rule in rules), caught[0].error
    if played > SOON:
        record_property("pin", f"{scenario} {defect}: {caught[0].seed}")


@pytest.mark.real
def test_without_deduplication_the_storm_of_once_stores_messages_twice(worker: Worker) -> None:
    for seed in range(CONTROL_SEED, CONTROL_SEED + SEEDS):
        report = worker.play("once_control", seed)
        assert not report.error, report.error
        if report.counts["duplicates"]:
            return
    raise AssertionError("no seed shows any")


def test_there_are_plants_enough() -> None:
    assert len(DEFECTS) >= 30
    assert len(CLUSTER_DEFECTS) >= 20

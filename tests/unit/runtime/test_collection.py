"""What the garbage collector is kept from."""

import gc
import sys
from collections.abc import Iterator

import pytest

from magnetar.runtime.collection import FREEZE_AT, FreezeInSteps


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.mark.parametrize(
    ("phase", "generation", "old", "frozen"),
    [
        ("stop", 2, FREEZE_AT, 1),
        ("stop", 2, FREEZE_AT - 1, 0),  # what comes and goes is not frozen
        ("start", 2, FREEZE_AT, 0),  # there may be garbage among them
        ("stop", 1, FREEZE_AT, 0),
        ("stop", 0, FREEZE_AT, 0),
    ],
)
def test_what_a_full_collection_leaves_is_frozen_when_it_is_much(
    phase: str, generation: int, old: int, frozen: int
) -> None:
    freezes: list[None] = []
    FreezeInSteps(lambda: old, lambda: freezes.append(None))(phase, {"generation": generation})
    assert len(freezes) == frozen


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="it has no full collections of its own")
def test_no_collection_looks_at_more_than_a_step_however_much_there_is() -> None:
    looked_at: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            looked_at.append(sum(len(gc.get_objects(generation=one)) for one in range(3)))

    steps = FreezeInSteps()
    held: list[list[object]] = []
    steps.begin()
    gc.callbacks.append(note)
    try:
        before = gc.get_freeze_count()
        for _ in range(300_000):
            held.append([held])
        assert gc.get_freeze_count() - before > 250_000
    finally:
        gc.callbacks.remove(note)
        steps.end()
    assert len(looked_at) > 5
    assert max(looked_at) < 50_000
    steps.end()
    assert steps not in gc.callbacks

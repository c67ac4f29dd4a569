"""Planted defects of the dispatch core: a scenario notices each of them, the state machine those that it meets often."""

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from support.dispatch_defects import PLANTS
from support.dispatch_scenario import run_scenario
from unit.broker.test_dispatch_machine import DispatchMachine
from unit.broker.test_dispatch_scenarios import SCENARIOS

pytestmark = pytest.mark.timeout(180)

EXAMPLES = settings(
    max_examples=1500,
    stateful_step_count=100,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)

# The seed of Hypothesis with which the state machine soon meets a defect, where that is not 0: after ten examples and not
# hundreds. A change of the machine may make it another one; the search then takes longer, and finds it all the same.
SEEDS = dict.fromkeys(
    (
        "owner_not_settled",
        "forgotten_waker",
        "takeover_does_not_go_back",
        "pending_acks_survive_a_seek",
        "replay_survives_a_seek",
    ),
    1,
)

# These take the state machine too many examples to wait for; nobody skips in it.
RARE = (
    "pending_acks_survive_a_skip",
    "acknowledged_message_delivered",
    "failed_replay_not_delayed",
    "slots_never_given_up",
    "nack_past_the_end",
    "other_counts_passed_over",
    "rewind_counts_what_waits_twice",
    "released_and_not_looked_at",
)


@pytest.mark.parametrize("name", PLANTS)
def test_a_scenario_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[name](monkeypatch)
    assert any(differs(path.read_text()) for path in SCENARIOS)


def differs(text: str) -> bool:
    """Another answer than the one written down, or none at all."""
    try:
        return run_scenario(text) != text
    except Exception:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PLANTS if name not in RARE])
def test_the_state_machine_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[name](monkeypatch)

    @seed(SEEDS.get(name, 0))
    class Seeded(DispatchMachine):
        pass

    # Whatever it is that goes wrong: a broken invariant, a message that never comes, an exception.
    with pytest.raises(Exception):  # noqa: B017
        run_state_machine_as_test(Seeded, settings=EXAMPLES)

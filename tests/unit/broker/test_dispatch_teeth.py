"""Planted defects of the dispatch core: a scenario notices each of them, the state machine those that it meets often."""

import pytest
from hypothesis import HealthCheck, Phase, settings
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
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
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
    # Whatever it is that goes wrong: a broken invariant, a message that never comes, an exception.
    with pytest.raises(Exception):  # noqa: B017
        run_state_machine_as_test(DispatchMachine, settings=EXAMPLES)

"""Planted defects of placement and balance (support.balance_defects): some test notices each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis.strategies import SearchStrategy

from support.balance_defects import PLANTS
from support.balance_scenario import run_scenario
from unit.broker.ownership.balance import test_balancer, test_leader, test_placement
from unit.broker.ownership.balance.test_balancer import (
    CHANGES,
    LOADS,
    never_makes_the_spread_worse,
    rests_after_a_move,
)
from unit.broker.ownership.balance.test_scenarios import SCENARIOS

# Of the others a text scenario notices that the core decides something else.
ELSEWHERE: dict[str, Callable[[], None]] = {
    "destination_judged_too_early": test_balancer.test_reports_that_show_a_move_already,
    "dead_broker_chosen": test_placement.test_a_broker_that_died_is_not_chosen,
    "herd": test_placement.test_the_bundles_of_a_tenth_of_the_brokers_spread_by_reports_that_are_old,
    "placed_not_counted": test_placement.test_one_process_counts_what_it_has_placed,
    "stale_leader_acts": test_leader.test_a_leader_whose_session_ends_in_a_round_requests_nothing_more,
}
# Of these a property does, on clusters that Hypothesis makes.
BY_PROPERTY: dict[str, tuple[Sequence[SearchStrategy[Any]], Callable[..., None]]] = {
    "no_cooldown": ([LOADS, CHANGES], rests_after_a_move),
    "moves_above_the_limit": ([LOADS], never_makes_the_spread_worse),
}


@pytest.mark.parametrize("name", [name for name in PLANTS if name not in ELSEWHERE])
def test_a_scenario_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[name](monkeypatch)
    assert any(differs(path.read_text()) for path in SCENARIOS)


def differs(text: str) -> bool:
    """Another answer than the one written down, or an invariant that is broken."""
    try:
        return run_scenario(text) != text
    except AssertionError:
        return True


@pytest.mark.parametrize("name", ELSEWHERE)
def test_another_test_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ELSEWHERE[name]()
    PLANTS[name](monkeypatch)
    with pytest.raises(AssertionError):
        ELSEWHERE[name]()


@pytest.mark.parametrize("name", BY_PROPERTY)
def test_a_property_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[name](monkeypatch)
    # The examples are drawn alike every time, and the first that fails is enough.
    strategies, holds = BY_PROPERTY[name]
    careful = settings(
        max_examples=500, derandomize=True, database=None, deadline=None, phases=[Phase.generate]
    )
    with pytest.raises(AssertionError):
        careful(given(*strategies)(holds))()

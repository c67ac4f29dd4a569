"""Where bundles without an owner go."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.broker.ownership.balance.core.facts import UNBOUND, BrokerFacts, NamespaceBinding
from magnetar.broker.ownership.balance.core.placement import BundlePlacement
from magnetar.broker.ownership.balance.settings import BalanceSettings

SETTINGS = BalanceSettings()


def bundle(number: int) -> str:
    """A bundle's name."""
    return f"t/ns{number}/0x00000000_0xffffffff"


def placement(*brokers: BrokerFacts, seed: int = 1, now: float = 0.0, **changes: Any) -> BundlePlacement:
    """That knows these brokers."""
    made = BundlePlacement(BalanceSettings(**changes), Random(seed).randrange)
    made.update(brokers, now)
    return made


def place(
    made: BundlePlacement, count: int, binding: NamespaceBinding = UNBOUND, now: float = 1.0
) -> Counter[str]:
    """How many of so many bundles each broker got."""
    got: Counter[str] = Counter()
    for number in range(count):
        owner = made.place(bundle(number), binding, now)
        assert owner is not None
        got[owner] += 1
        made.check()
    return got


def test_the_less_loaded_one() -> None:
    assert place(placement(BrokerFacts("a", cpu=0.9), BrokerFacts("b", cpu=0.1)), 5) == {"b": 5}


@pytest.mark.parametrize("state", ["draining", "stopping", "unheard-of"])
def test_only_ready_brokers(state: str) -> None:
    got = place(
        placement(BrokerFacts("a", state=state), BrokerFacts("b", cpu=0.8), BrokerFacts("c", cpu=0.8)), 100
    )
    assert "a" not in got


def test_a_broker_that_died_is_not_chosen() -> None:
    made = placement(BrokerFacts("a"), BrokerFacts("b", cpu=0.5), BrokerFacts("c", cpu=0.5))
    made.place(bundle(0), UNBOUND, 0.0)
    made.update([BrokerFacts("b", cpu=0.5), BrokerFacts("c", cpu=0.5)], 1.0)
    assert "a" not in place(made, 100)


def test_nobody() -> None:
    assert placement().place(bundle(0), UNBOUND, 0.0) is None
    assert placement(BrokerFacts("a", state="draining")).place(bundle(0), UNBOUND, 0.0) is None


def test_what_is_asked_twice_is_answered_alike_until_it_is_in_the_reports() -> None:
    brokers = [BrokerFacts(f"b{number}") for number in range(50)]
    made = placement(*brokers)
    first = made.place(bundle(0), UNBOUND, 0.0)
    assert {made.place(bundle(0), UNBOUND, 5.0) for _ in range(50)} == {first}
    assert first is not None
    assert made.place(bundle(0), UNBOUND, 5.0, exclude=first) != first
    made.update(brokers, 100.0)
    made.check()
    assert len({made.place(bundle(number), UNBOUND, 100.0) for number in range(50)}) > 10


ZONES = [
    BrokerFacts("a1", "a"),
    BrokerFacts("a2", "a", cpu=0.4),
    BrokerFacts("b1", "b"),
    BrokerFacts("g1", "b", group="g"),
]


@pytest.mark.parametrize(
    ("binding", "wanted"),
    [
        (NamespaceBinding(zone="a"), "a1 a2"),
        (NamespaceBinding(zone="c"), "a1 a2 b1 g1"),
        (NamespaceBinding(group="g"), "g1"),
        (NamespaceBinding(group="g", zone="a", strict=True), "g1"),
        (NamespaceBinding(group="x"), "a1 a2 b1 g1"),
        (NamespaceBinding(group="x", zone="a"), "a1 a2"),
        (NamespaceBinding(group="x", strict=True), ""),
    ],
)
def test_zones_names_and_groups(binding: NamespaceBinding, wanted: str) -> None:
    got: Counter[str | None] = Counter()
    for seed in range(40):
        got[placement(*ZONES, seed=seed).place(bundle(0), binding, 0.0)] += 1
    assert {name for name in got if name} <= set(wanted.split())
    assert (None in got) == (not wanted)


def test_a_dedicated_group_takes_only_what_is_bound_to_it() -> None:
    made = placement(*ZONES, dedicated_groups=("g",))
    assert "g1" not in place(made, 100)
    bound = NamespaceBinding(group="g")
    assert placement(*ZONES, dedicated_groups=("g",)).place(bundle(0), bound, 0.0) == "g1"


def test_an_overloaded_zone_is_passed_over_until_all_are() -> None:
    prefers = NamespaceBinding(zone="a")
    made = placement(BrokerFacts("a1", "a", cpu=0.9), BrokerFacts("b1", "b", cpu=0.8))
    assert made.place(bundle(0), prefers, 0.0) == "b1"
    made = placement(BrokerFacts("a1", "a", cpu=0.95), BrokerFacts("b1", "b", cpu=0.9))
    assert made.place(bundle(0), prefers, 0.0) == "a1"


@pytest.mark.parametrize(
    "full",
    [{"bundles": 5_000}, {"topics": 50_000}, {"connections": 20_000}],
    ids=lambda full: next(iter(full)),
)
def test_limits_hold_even_where_nobody_has_room(full: dict[str, Any]) -> None:
    made = placement(BrokerFacts("a", cpu=0.9), BrokerFacts("b")._replace(**full))
    assert place(made, 10) == {"a": 10}
    assert placement(BrokerFacts("b")._replace(**full)).place(bundle(0), UNBOUND, 0.0) is None


def test_the_bundles_of_a_tenth_of_the_brokers_spread_by_reports_that_are_old() -> None:
    """No herd: 30 processes place 3,000 bundles at 90 brokers, of which one looks much less loaded than the others."""
    rows = [BrokerFacts(f"b{number:02d}", cpu=0.5, bundles=100, report=1) for number in range(89)]
    rows.append(BrokerFacts("idle", cpu=0.02, bundles=100, report=1))
    got: Counter[str] = Counter()
    for seed in range(30):
        made = placement(*rows, seed=seed)
        for number in range(100):
            owner = made.place(bundle(seed * 100 + number), UNBOUND, 5.0)
            assert owner is not None
            got[owner] += 1
    mean = 3_000 / 90
    assert got["idle"] <= 3 * mean, "what looks idle gets about twice its share, and not everything"
    assert max(got.values()) <= 3 * mean
    assert len(got) == 90


def test_one_process_counts_what_it_has_placed() -> None:
    rows = [BrokerFacts(f"b{number}", cpu=0.4, bundles=100, report=1) for number in range(10)]
    got = place(placement(*rows), 1_000)
    assert max(got.values()) - min(got.values()) <= 15, got


def test_what_a_report_shows_is_not_counted_again() -> None:
    rows = [BrokerFacts("a", report=1), BrokerFacts("b", cpu=0.15, bundles=2, report=1)]
    made = placement(*rows)
    assert place(made, 2, now=0.0) == {"a": 2}
    # The same report as before: what was placed is on top of it.
    made.update(rows, 5.0)
    assert made.place(bundle(10), UNBOUND, 5.0) == "b"
    # A report from well after it.
    made.update([BrokerFacts("a", cpu=0.05, bundles=2, report=2), rows[1]], 20.0)
    assert made.place(bundle(20), UNBOUND, 20.0) == "a"
    made.check()


@given(
    st.lists(
        st.builds(
            BrokerFacts,
            name=st.text("abc", min_size=1, max_size=3),
            zone=st.sampled_from("ab"),
            state=st.sampled_from(["ready", "ready", "draining", "stopping"]),
            cpu=st.floats(0, 1.2),
            bundles=st.integers(0, 30),
            topics=st.integers(0, 30),
            connections=st.integers(0, 30),
            group=st.sampled_from(["", "g"]),
        ),
        unique_by=lambda one: one.name,
    ),
    st.builds(
        NamespaceBinding,
        zone=st.sampled_from(["", "a"]),
        group=st.sampled_from(["", "g"]),
        strict=st.booleans(),
    ),
    st.integers(0, 1 << 30),
)
@settings(max_examples=300, deadline=None)
def test_whoever_is_chosen_may_have_it(
    brokers: list[BrokerFacts], binding: NamespaceBinding, seed: int
) -> None:
    made = placement(*brokers, seed=seed, max_bundles=20, max_topics=20, max_connections=20)
    by_name = {one.name: one for one in brokers}
    for number in range(5):
        owner = made.place(bundle(number), binding, float(number))
        made.check()
        if owner is None:
            continue
        chosen = by_name[owner]
        assert chosen.state == "ready"
        assert chosen.bundles < 20
        assert chosen.topics <= 20
        assert chosen.connections < 20
        if binding.strict and binding.group:
            assert chosen.group == binding.group

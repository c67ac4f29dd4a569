"""What holds for every round, on clusters that Hypothesis makes; and a day in virtual time."""

from __future__ import annotations

import math
from random import Random
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.broker.ownership.balance.core.balancer import BalancerCore
from magnetar.broker.ownership.balance.core.facts import (
    BrokerFacts,
    BundleOwner,
    ClusterSnapshot,
    Move,
    Split,
)
from magnetar.broker.ownership.balance.settings import BalanceSettings
from support.balance_model import ModelCluster, run_day
from support.balance_scenario import row_of

SETTINGS = BalanceSettings(split_messages_per_s=1e9, max_moves_per_broker=3, max_moves_per_round=6)


class Loads(NamedTuple):
    """Brokers, and bundles as (owner, share of a core, topics)."""

    brokers: int
    bundles: list[tuple[int, float, int]]


LOADS = st.integers(2, 6).flatmap(
    lambda brokers: st.builds(
        Loads,
        st.just(brokers),
        st.lists(
            st.tuples(st.integers(0, brokers - 1), st.floats(0, 0.3), st.integers(1, 100)),
            min_size=1,
            max_size=40,
        ),
    )
)


class Small:
    """A cluster whose reports are true and whose owners do at once what is requested."""

    def __init__(self, loads: Loads) -> None:
        self.now = 0.0
        self.core = BalancerCore(SETTINGS)
        self.names = [f"b{number}" for number in range(loads.brokers)]
        self.owner: dict[str, str] = {}
        self.share: dict[str, float] = {}
        self.topics: dict[str, int] = {}
        self.moved: list[tuple[float, Move]] = []
        self.moved_at: dict[str, float] = {}  # as the owners' nodes say
        for number, (owner, share, topics) in enumerate(loads.bundles):
            bundle = f"t/n/0x{number:08x}_0x{number:08x}"
            self.owner[bundle], self.share[bundle] = self.names[owner], share
            self.topics[bundle] = topics

    def loads(self) -> dict[str, float]:
        """By broker."""
        found = dict.fromkeys(self.names, 0.0)
        for bundle, owner in self.owner.items():
            found[owner] += self.share[bundle]
        return found

    def round(self) -> list[Move]:
        """One round, and what it wants is done."""
        self.now += SETTINGS.balance_interval_s
        loads = self.loads()
        reports = {
            name: [
                row_of(bundle, self.share[bundle], self.topics[bundle])
                for bundle, owner in self.owner.items()
                if owner == name
            ]
            for name in self.names
        }
        snapshot = ClusterSnapshot(
            [BrokerFacts(name, cpu=loads[name]) for name in self.names],
            [
                BundleOwner(bundle, owner, moved_ago_s=self.now - self.moved_at.get(bundle, -math.inf))
                for bundle, owner in self.owner.items()
            ],
            reports,
        )
        moves = []
        for decision in self.core.round(snapshot, self.now):
            assert not isinstance(decision, Split), "ranges of one hash are never split"
            if decision is not None:
                assert self.owner[decision.bundle] == decision.source
                self.owner[decision.bundle] = decision.to
                self.moved_at[decision.bundle] = self.now
                moves.append(decision)
        self.core.check()
        self.moved += [(self.now, move) for move in moves]
        return moves


def unevenness(loads: dict[str, float]) -> float:
    """The sum of the squares: less is more even."""
    return sum(load * load for load in loads.values())


@given(LOADS)
@settings(max_examples=150, deadline=None)
def test_a_round_never_makes_the_spread_worse_and_keeps_its_limits(loads: Loads) -> None:
    never_makes_the_spread_worse(loads)


def test_reports_that_show_a_move_already() -> None:
    """A broker that gave a bundle away reports so at once, and is no idler than it says. Hypothesis found it."""
    bundles = [
        (0, 0.25, 1),
        (0, 0.25, 1),
        (1, 0.25, 1),
        (1, 0.125, 1),
        (1, 0.125, 1),
        (2, 0.25, 1),
        (2, 0.21875, 1),
    ]
    never_makes_the_spread_worse(Loads(5, bundles))


def never_makes_the_spread_worse(loads: Loads) -> None:
    """In any of some rounds; nor is any limit passed."""
    cluster = Small(loads)
    for _ in range(8):
        before = cluster.loads()
        moves = cluster.round()
        after = cluster.loads()
        assert len(moves) <= SETTINGS.max_moves_per_round
        for name in cluster.names:
            assert sum(name in (one.source, one.to) for one in moves) <= SETTINGS.max_moves_per_broker
        if moves:
            assert unevenness(after) < unevenness(before) + 1e-9
            assert max(after.values()) <= max(before.values()) + 1e-9
            assert min(after.values()) >= min(before.values()) - 1e-9


@given(LOADS)
@settings(max_examples=60, deadline=None)
def test_it_converges_and_then_does_nothing(loads: Loads) -> None:
    cluster = Small(loads)
    quiet = 0
    for _ in range(400):
        quiet = 0 if cluster.round() else quiet + 1
    assert quiet > 100, "nothing was moved for an hour"


CHANGES = st.lists(st.tuples(st.integers(0, 39), st.floats(0, 0.5)), max_size=30)


@given(LOADS, CHANGES)
@settings(max_examples=60, deadline=None)
def test_no_bundle_is_moved_twice_within_its_cooldown(loads: Loads, changes: list[tuple[int, float]]) -> None:
    rests_after_a_move(loads, changes)


@given(LOADS, CHANGES)
@settings(max_examples=60, deadline=None)
def test_nor_does_a_new_leader_move_it_within_its_cooldown(
    loads: Loads, changes: list[tuple[int, float]]
) -> None:
    moves_rest(loads, changes, leaders=True)


def rests_after_a_move(loads: Loads, changes: list[tuple[int, float]]) -> None:
    """Every bundle, whatever the loads do meanwhile."""
    moves_rest(loads, changes, leaders=False)


def moves_rest(loads: Loads, changes: list[tuple[int, float]], *, leaders: bool) -> None:
    """`leaders`: each change has a leader of its own."""
    cluster = Small(loads)
    bundles = list(cluster.owner)
    for at, share in changes:
        cluster.share[bundles[at % len(bundles)]] = share
        if leaders:
            cluster.core = BalancerCore(SETTINGS)
        for _ in range(3):
            cluster.round()
    last: dict[str, float] = {}
    for now, move in cluster.moved:
        assert now - last.get(move.bundle, -1e9) >= SETTINGS.move_cooldown_s
        last[move.bundle] = now


@given(st.integers(1, 8), st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_an_idle_cluster_does_nothing(brokers: int, seed: int) -> None:
    cluster = ModelCluster(Random(seed), brokers=brokers, bundles=60, topics=600, mean_load=0.02)
    for _ in range(12):
        cluster.step()
    assert sum(cluster.measured.moves) == 0
    assert cluster.measured.splits == 0


def test_a_day_without_ping_pong() -> None:
    """Load that follows the hours, hot spots, joins, leaves."""
    day, cluster = run_day(brokers=10, bundles=200)
    unbalanced, _ = run_day(brokers=10, bundles=200, balance=False)
    assert day.spread < 0.25 < 2 * 0.25 < unbalanced.spread
    assert day.apart < 0.05, "the spread is above twice the threshold in few rounds"
    assert day.returns == 0, "nothing goes back to where it came from within an hour"
    assert day.most_of_a_bundle <= 6
    assert day.moves_per_hour < 20
    assert cluster.measured.longest_slice_s


def test_many_brokers_in_slices() -> None:
    """200 brokers and 20,000 bundles: the core offers to let others run after a few thousand rows at most."""
    cluster = ModelCluster(Random(1), brokers=200, bundles=20_000, topics=200_000)
    snapshot = cluster.snapshot()
    slices = sum(decision is None for decision in cluster.core.round(snapshot, 30.0))
    assert slices >= 20_000 / 2_000 * 2

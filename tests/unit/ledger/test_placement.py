"""Placement: every write set and every replacement, over all small clusters and drawn larger ones."""

import itertools
import logging
import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.ledger import Labels, LedgerSettings
from magnetar.ledger.core import arrangement
from magnetar.ledger.core.arrangement import arrange, can_span, spread_out
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.placement.policy import RACK, RANDOM, ZONE, Candidates, Placement, capped_weights
from magnetar.proto.errors import InvalidSetting, NotEnoughBookies


def candidates(zones: Mapping[str, str], free: Mapping[str, int] | None = None) -> Candidates:
    """Bookies by name, with their zone, which is their rack as well."""
    return Candidates(
        tuple(sorted(zones)),
        lambda bookie: Labels(zones[bookie], zones[bookie]),
        lambda bookie: (free or {}).get(bookie, 0),
    )


def spans(striping: Striping, labels: Sequence[str]) -> list[int]:
    """Known labels in each write set."""
    return [
        len({labels[position] for position in write_set if labels[position]})
        for write_set in striping.write_sets
    ]


def named(counts: Sequence[int], unlabelled: int = 0) -> list[tuple[str, str]]:
    """So many bookies of zones a, b, c..."""
    order = [
        (f"{zone}{n}", zone) for zone, count in zip("abcdefgh", counts, strict=False) for n in range(count)
    ]
    return order + [(f"u{n}", "") for n in range(unlabelled)]


def possible(striping: Striping, order: Sequence[tuple[str, str]], spread: int) -> bool:
    """By trying everything."""
    labels = sorted(label for _, label in order)
    return any(
        min(spans(striping, labelled)) >= spread
        for labelled in set(itertools.permutations(labels, striping.ensemble_size))
    )


STRIPINGS = [Striping(size, quorum, 1) for size in range(1, 6) for quorum in range(1, size + 1)]


@pytest.mark.parametrize("striping", STRIPINGS, ids=lambda s: f"{s.ensemble_size}-{s.write_quorum}")
def test_the_ring_is_filled_if_and_only_if_it_can_be(striping: Striping) -> None:
    """All clusters of up to four zones with up to three bookies each, and some without a zone."""
    size, quorum = striping.ensemble_size, striping.write_quorum
    rng = random.Random(3)
    for counts in itertools.combinations_with_replacement(range(4), 4):
        for unlabelled in (0, 2):
            order = named(counts, unlabelled)
            if not size <= len(order) <= 9:
                continue
            rng.shuffle(order)
            for spread in range(1, quorum + 1):
                found = arrange(striping, order, spread)
                if spread == 1:
                    assert found == tuple(bookie for bookie, _ in order[:size])
                    continue
                assert (found is not None) == possible(striping, order, spread), (counts, unlabelled, spread)
                if found is not None:
                    assert len(set(found)) == size
                    assert min(spans(striping, [dict(order)[bookie] for bookie in found])) >= spread
                    assert can_span(striping, order, spread)


@pytest.mark.parametrize("striping", STRIPINGS, ids=lambda s: f"{s.ensemble_size}-{s.write_quorum}")
def test_every_replacement_keeps_the_property_where_one_can(striping: Striping) -> None:
    """Every ensemble of three zones, every position lost, every bookie that may be left."""
    size, quorum = striping.ensemble_size, striping.write_quorum
    for labels in itertools.product("abc", repeat=size):
        for lost in range(size):
            kept = {p: (f"k{p}", label) for p, label in enumerate(labels) if p != lost}
            for left in (("a",), ("b", "a"), ("a", "a", "c")):
                order = [(f"n{n}", label) for n, label in enumerate(left)]
                for spread in range(2, quorum + 1):
                    found = arrange(striping, order, spread, kept)
                    fitting = [
                        bookie
                        for bookie, label in order
                        if all(
                            number >= spread
                            for write_set, number in zip(
                                striping.write_sets,
                                spans(striping, [*labels[:lost], label, *labels[lost + 1 :]]),
                            )
                            if lost in write_set
                        )
                    ]
                    if not fitting:
                        assert found is None
                        continue
                    assert found is not None
                    assert found[lost] == fitting[0], "the first in the order that fits"
                    assert all(found[p] == bookie for p, (bookie, _) in kept.items())


@pytest.mark.parametrize("spread", range(2, 7))
def test_any_neighbours_differ_when_laid_out_in_columns(spread: int) -> None:
    """All counts of up to eight labels, rings of up to 26: found if and only if no label would stand too often."""
    for size in range(spread, 27):
        blocks = size // spread
        for seed in range(40):
            rng = random.Random(seed * 100 + size)
            counts = [rng.randint(0, blocks + 1) for _ in range(rng.randint(spread - 1, 8))]
            found = arrangement._in_columns(size, named(counts), spread)
            assert (found is not None) == (sum(min(count, blocks) for count in counts) >= size)
            if found is not None:
                assert len(set(found)) == size
                labels = [bookie[0] for bookie in found]
                assert min(spans(Striping(size, spread, 1), labels)) == spread, (size, counts)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_large_rings_with_zones_enough(data: st.DataObject) -> None:
    quorum = data.draw(st.integers(1, 5))
    size = quorum * data.draw(st.integers(1, max(1, 30 // quorum)))
    zones = data.draw(st.integers(quorum, 7))
    share = -(-size // quorum)
    counts = [data.draw(st.integers(share, 2 * share)) for _ in range(zones)]
    order = named(counts)
    random.Random(data.draw(st.integers(0, 1000))).shuffle(order)
    found = arrange(Striping(size, quorum, 1), order, quorum)
    assert found is not None
    assert min(spans(Striping(size, quorum, 1), [bookie[0] for bookie in found])) == quorum


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_policies_over_the_life_of_an_ensemble(data: st.DataObject) -> None:
    """What is there, each write set has: for a new ledger, and after each of many replacements."""
    size = data.draw(st.integers(2, 7))
    quorum = data.draw(st.integers(2, size))
    striping = Striping(size, quorum, 1)
    kind = data.draw(st.sampled_from([RACK, ZONE]))
    counts = data.draw(st.lists(st.integers(0, 5), min_size=2, max_size=4))
    zones = dict(named(counts, data.draw(st.integers(0, 3))))
    rng = random.Random(data.draw(st.integers(0, 1 << 30)))
    policy = Placement(kind, minimum=2, strict=False, max_weight_ratio=data.draw(st.sampled_from([0.0, 3.0])))
    if len(zones) < size:
        with pytest.raises(NotEnoughBookies, match="ensemble_size"):
            policy.ensemble(striping, candidates(zones), rng)
        return
    ensemble = policy.ensemble(striping, candidates(zones), rng)
    assert len(set(ensemble)) == size
    known = len({zone for zone in zones.values() if zone})
    wanted = min(quorum, known, 2) if kind is RACK else min(quorum, known)
    best = next(
        k for k in range(max(wanted, 1), 0, -1) if k == 1 or arrange(striping, list(zones.items()), k)
    )
    if best > 1:
        assert min(spans(striping, [zones[bookie] for bookie in ensemble])) >= best
    gone: list[str] = []
    for _ in range(data.draw(st.integers(0, 6))):
        position = data.draw(st.integers(0, size - 1))
        gone.append(ensemble[position])
        left = [bookie for bookie in zones if bookie not in ensemble and bookie not in gone]
        ask = (striping, [position], ensemble, candidates(zones), [*ensemble, *gone], rng)
        if not left:
            with pytest.raises(NotEnoughBookies):
                policy.replacements(*ask)
            return
        before = min(spans(striping, [zones[bookie] for bookie in ensemble]))
        (chosen,) = policy.replacements(*ask).values()
        assert chosen in left
        trial = {b: [zones[b if p == position else o] for p, o in enumerate(ensemble)] for b in left}
        reachable = max(min(spans(striping, labels)) for labels in trial.values())
        if min(reachable, before, wanted) > 1:
            assert min(spans(striping, trial[chosen])) >= min(reachable, before, wanted)
        ensemble = tuple(chosen if p == position else bookie for p, bookie in enumerate(ensemble))


def test_what_cannot_be_spread_is_spread_as_far_as_it_goes_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = Placement(ZONE, minimum=2, strict=False)
    striping = Striping(3, 2, 2)
    poor, rich = candidates(dict(named([4, 1]))), candidates(dict(named([2, 2, 2])))
    with caplog.at_level(logging.INFO, "magnetar.ledger.placement.policy"):
        for seed in range(5):
            ensemble = policy.ensemble(striping, poor, random.Random(seed))
            assert sorted(spans(striping, [bookie[0] for bookie in ensemble])) == [1, 2, 2]
        assert len(caplog.records) == 1
        assert "a: a0, a1, a2, a3; b: b0" in caplog.text
        policy.ensemble(striping, rich, random.Random(1))
        assert "again" in caplog.records[-1].message
        policy.ensemble(striping, poor, random.Random(1))
        assert len(caplog.records) == 3


def test_a_fallback_takes_three_zones_of_two_where_it_cannot_have_three() -> None:
    striping = Striping(5, 3, 2)  # five in a ring cannot repeat three zones
    policy = Placement(ZONE, minimum=2, strict=False)
    for seed in range(20):
        ensemble = policy.ensemble(striping, candidates(dict(named([2, 2, 2]))), random.Random(seed))
        assert min(spans(striping, [bookie[0] for bookie in ensemble])) == 2


@pytest.mark.parametrize(
    ("counts", "unlabelled", "sizes", "missing"),
    [
        (
            [3],
            0,
            (2, 2),
            "spans 2 zones; the bookies to choose from: a: a0, a1, a2; start bookies in more zones or",
        ),
        ([3], 2, (2, 2), r"no zone: u0, u1; give each bookie its zone in its settings \(\[bookie\] zone\)"),
        ([0], 3, (2, 2), r"no zone: u0, u1, u2; give each bookie its zone"),
        ([3, 3], 0, (3, 2), "make ensemble_size a multiple of write_quorum or set placement_strict=false"),
        ([1, 3], 0, (4, 2), "finds no ensemble of 4 in which every write set of 2 bookies spans 2 zones"),
    ],
)
def test_strict_refuses_and_says_what_is_missing(
    counts: list[int], unlabelled: int, sizes: tuple[int, int], missing: str
) -> None:
    policy = Placement(ZONE, minimum=2, strict=True)
    with pytest.raises(NotEnoughBookies, match=missing):
        policy.ensemble(Striping(*sizes, 1), candidates(dict(named(counts, unlabelled))), random.Random(1))


def test_strict_replacements() -> None:
    policy = Placement(ZONE, minimum=2, strict=True)
    striping = Striping(4, 2, 2)
    zones = {"a0": "a", "b0": "b", "a1": "a", "b1": "b", "a2": "a", "u": ""}
    ask = (striping, [1], ["a0", "b0", "a1", "b1"])
    with pytest.raises(NotEnoughBookies, match="finds no replacement in which"):
        policy.replacements(*ask, candidates(zones), ["a0", "b0", "a1", "b1"], random.Random(1))
    chosen = policy.replacements(
        *ask, candidates(zones | {"b2": "b"}), ["a0", "b0", "a1", "b1"], random.Random(1)
    )
    assert chosen == {1: "b2"}


def test_racks_are_named_within_their_zone() -> None:
    labels = {
        "x": Labels("r1", "a"),
        "y": Labels("r1", "b"),
        "z": Labels("r1", "a"),
    }
    policy = Placement(RACK, minimum=2, strict=True)
    told = Candidates(tuple(labels), lambda bookie: labels[bookie], lambda _: 0)
    for seed in range(10):
        assert "y" in policy.ensemble(Striping(2, 2, 1), told, random.Random(seed))


def test_minimum_racks() -> None:
    striping = Striping(3, 3, 2)
    told = candidates(dict(named([3, 1, 1])))
    policy = Placement(RACK, minimum=3, strict=True)
    for seed in range(10):
        assert {b[0] for b in policy.ensemble(striping, told, random.Random(seed))} == set("abc")
    with pytest.raises(NotEnoughBookies, match="spans 3 racks"):
        policy.ensemble(striping, candidates(dict(named([3, 3]))), random.Random(1))


def test_weights_are_proportional_and_capped() -> None:
    assert capped_weights({"a": 10, "b": 20, "c": 30, "d": 1000, "e": 0}, 3.0) == {
        "a": 10,
        "b": 20,
        "c": 30,
        "d": 90,
        "e": 30,
    }
    assert capped_weights({"a": 0, "b": 0}, 3.0) == {"a": 1, "b": 1}
    free = {"a": 10, "b": 20, "c": 30}
    told = candidates(dict.fromkeys(free, ""), free)
    rng = random.Random(5)
    choose = Placement(RANDOM, max_weight_ratio=3.0)
    drawn = Counter(choose.ensemble(Striping(1, 1, 1), told, rng)[0] for _ in range(6000))
    assert {name: round(count / 1000) for name, count in drawn.items()} == {"a": 1, "b": 2, "c": 3}
    chosen = Counter(
        choose.replacements(Striping(1, 1, 1), [0], ["a"], told, ["a"], rng)[0] for _ in range(2000)
    )
    assert 1100 < chosen["c"] < 1300


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("placement", ["random", "rack", "zone"])
def test_placement_is_decided_by_the_seed(placement: str, weighted: bool) -> None:
    told = candidates(dict(named([5, 5, 5])), {"a1": 7})
    striping = Striping(6, 3, 2)
    policy = Placement.of(LedgerSettings(placement=placement, placement_weighted=weighted))
    first = policy.ensemble(striping, told, random.Random(7))
    assert first == policy.ensemble(striping, told, random.Random(7))
    rings = {policy.ensemble(striping, told, random.Random(seed)) for seed in range(20)}
    assert len(rings) > 15, "and differs with it"
    exclude = [*first, "c4"]
    chosen = policy.replacements(striping, [1, 3], first, told, exclude, random.Random(9))
    assert chosen == policy.replacements(striping, [1, 3], first, told, exclude, random.Random(9))
    assert sorted(chosen) == [1, 3]
    assert not set(chosen.values()) & set(exclude)
    with pytest.raises(NotEnoughBookies):
        policy.replacements(striping, [1, 3], first, told, told.names[:14], random.Random(9))


def test_the_greedy_way_never_fails() -> None:
    for size in (1, 3, 8, 64):
        order = named([size])
        assert sorted(spread_out(Striping(size, 1, 1), order)) == sorted(bookie for bookie, _ in order)


def test_a_search_without_end_is_given_up() -> None:
    """The counts fit, no arrangement was ever found, and there are more of them than anybody can try."""
    striping, order = Striping(23, 6, 2), named([4, 17, 18])
    assert can_span(striping, order, 3)
    search = arrangement._Search(striping, order, {}, 3, False)
    assert not search.fill(0)
    assert arrangement.MAX_STEPS < search.steps <= arrangement.MAX_STEPS + 24
    assert arrange(striping, order, 3) is None


@pytest.mark.parametrize(
    ("given", "named_in_error"),
    [
        ({"placement": "moon"}, "placement='moon' is not known; it can be random, rack or zone"),
        ({"placement_strict": True}, "set placement to rack or zone"),
        ({"placement": "rack", "placement_minimum_racks": 0}, "placement_minimum_racks=0"),
        ({"placement_minimum_zones": 0}, "placement_minimum_zones=0"),
        ({"placement_max_weight_ratio": 0.5}, "placement_max_weight_ratio=0.5"),
        ({"quarantine_errors": -1}, "quarantine_errors=-1"),
        ({"quarantine_s": 0}, "quarantine_s=0"),
        ({"quarantine_window_s": 0}, "quarantine_window_s=0"),
        ({"bookie_info_interval_s": 0}, "bookie_info_interval_s=0"),
        ({"minimum_write_quorum": 65}, "minimum_write_quorum=65 must be 0 .off. or a number of bookies"),
        ({"minimum_write_quorum": -1}, "minimum_write_quorum=-1"),
        ({"ack_quorum": 3}, "ensemble_size=3, write_quorum=2, ack_quorum=3"),
        ({"write_quorum": 4}, "ensemble_size=3, write_quorum=4"),
    ],
)
def test_wrong_settings_end_in_one_error_that_names_them(
    given: dict[str, object], named_in_error: str
) -> None:
    with pytest.raises(InvalidSetting, match=named_in_error):
        LedgerSettings(**given)  # type: ignore[arg-type]

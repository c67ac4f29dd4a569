"""The statistics of a comparison: intervals by order statistics, verdicts, and how many rounds would settle one."""

import itertools
import math
import random

import pytest
from bench.compare.verdict import (
    BETTER,
    FEW,
    MOST_ROUNDS,
    NOISY,
    NOT_WORSE,
    SAME,
    WORSE,
    compare,
    estimate,
    fewest_rounds,
    judge,
    means_outside,
    rounds_more,
)

BASE = [100.0, 102.0, 98.0, 101.0, 99.0, 100.0]


def test_the_worked_case_of_the_docstring() -> None:
    found = compare(BASE, [90, 93, 88, 92, 89, 91], higher=True)
    assert found.interval is not None
    assert (found.base, found.ours) == (100.0, 90.5)
    assert found.change == pytest.approx(0.105, abs=5e-4)
    assert found.interval == pytest.approx((0.097, 0.114), abs=5e-4)
    assert (found.verdict, found.rounds_more) == (WORSE, 0)


def test_worse_and_better_follow_the_direction_of_the_figure() -> None:
    slower = [value * 1.2 for value in BASE]
    assert compare(BASE, slower, higher=False).verdict == WORSE
    assert compare(BASE, slower, higher=True).verdict == BETTER
    assert compare(slower, BASE, higher=False).verdict == BETTER
    assert compare(slower, BASE, higher=True).verdict == WORSE


def test_a_change_is_the_same_share_for_a_rate_and_for_its_time() -> None:
    rates, faster = BASE, [value * 1.07 for value in reversed(BASE)]
    as_times = compare([1 / value for value in rates], [1 / value for value in faster], higher=False)
    as_rates = compare(rates, faster, higher=True)
    assert as_times.change == pytest.approx(as_rates.change)
    assert as_times.interval == pytest.approx(as_rates.interval)


def test_what_both_sides_share_in_a_round_is_no_noise() -> None:
    minutes = [1.0, 3.0, 0.5, 2.0, 5.0, 0.9]  # of a machine that others use as well
    found = compare(BASE, BASE, higher=True)
    base = [value * minute for value, minute in zip(BASE, minutes)]
    ours = [value * minute * 1.001 for value, minute in zip(BASE, minutes)]
    assert found.interval == (0.0, 0.0)
    assert compare(base, ours, higher=True).verdict == SAME


def test_one_stalled_round_does_not_make_a_verdict() -> None:
    base, ours = [100.0] * 12, [100.0] * 11 + [700.0]
    assert compare(base, ours, higher=False).verdict == SAME


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.06, 0.09, WORSE),
        (0.05, 0.09, NOISY),  # the threshold itself is not excluded
        (-0.09, -0.06, BETTER),
        (-0.05, 0.05, SAME),
        (-0.02, 0.01, SAME),
        (-0.09, 0.01, NOT_WORSE),
        (-0.09, 0.09, NOISY),
        (0.01, 0.09, NOISY),
    ],
)
def test_judgement_by_where_the_interval_lies(low: float, high: float, verdict: str) -> None:
    assert judge((low, high), 0.05) == verdict


def test_the_threshold_is_a_share_not_a_logarithm() -> None:
    ours = [value * 1.051 for value in BASE]
    assert compare(BASE, ours, higher=False).verdict == WORSE
    assert compare(BASE, [value * 1.049 for value in BASE], higher=False).verdict == SAME
    assert compare(BASE, ours, higher=False, threshold=0.10).verdict == SAME


def signed_rank_tail(rounds: int, total: int) -> float:
    """The chance of a rank sum of at most `total`, counted pattern by pattern."""
    patterns = itertools.product((0, 1), repeat=rounds)
    sums = [sum(rank * sign for rank, sign in enumerate(signs, 1)) for signs in patterns]
    return sum(found <= total for found in sums) / len(sums)


@pytest.mark.parametrize("rounds", range(1, 13))
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_means_outside_are_as_many_as_the_confidence_allows(rounds: int, confidence: float) -> None:
    cut = means_outside(rounds, confidence)
    allowed = (1 - confidence) / 2
    if cut is None:
        assert signed_rank_tail(rounds, 0) > allowed
    else:
        assert signed_rank_tail(rounds, cut) <= allowed
        assert signed_rank_tail(rounds, cut + 1) > allowed


def test_six_rounds_are_the_fewest_for_95_percent() -> None:
    assert fewest_rounds(0.95) == 6
    assert means_outside(6, 0.95) == 0  # the interval reaches from the lowest to the highest change
    assert estimate([0.06, 0.01, 0.02, 0.05, 0.03, 0.04], 0.95)[1] == (0.01, 0.06)
    assert means_outside(8, 0.95) == 3  # as tables of the test have it
    assert means_outside(10, 0.95) == 8


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    draw = random.Random(5)
    trials, truth, held = 2000, 0.03, 0
    for _ in range(trials):
        _, interval = estimate([truth + draw.choice((0.01, 0.1)) * draw.gauss(0, 1) for _ in range(8)], 0.95)
        assert interval is not None
        held += interval[0] <= truth <= interval[1]
    assert 0.94 <= held / trials <= 0.975  # 0.961 for eight rounds


def test_the_same_code_is_never_called_worse() -> None:
    draw = random.Random(6)
    for _ in range(300):
        base, ours = ([100 * math.exp(draw.gauss(0, 0.05)) for _ in range(8)] for _ in range(2))
        assert compare(base, ours, higher=True).verdict != WORSE


def test_too_few_rounds_say_how_many_are_missing() -> None:
    found = compare(BASE[:4], BASE[:4], higher=True)
    assert (found.interval, found.verdict, found.rounds_more) == (None, FEW, 2)


def test_values_that_have_no_ratio_are_left_out() -> None:
    found = compare([*BASE, 0.0], [*BASE, 100.0], higher=True)
    assert found.change == 0.0
    nothing = compare([0.0] * 8, [0.0] * 8, higher=False)
    assert (nothing.verdict, nothing.rounds_more) == (FEW, 6)


def test_sides_of_unequal_length_are_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="zip"):
        compare(BASE, BASE[:-1], higher=True)


def test_rounds_grow_with_the_square_of_what_is_missing() -> None:
    # Twice as wide as it may be: four times the rounds.
    assert rounds_more(8, 0.0, (-0.10, 0.10), 0.05) == 24
    # The nearer end counts where the change itself is above the threshold.
    assert rounds_more(8, 0.10, (0.00, 0.30), 0.05) == 24
    assert rounds_more(8, 0.0, (-0.30, 0.051), 0.05) == 1
    assert rounds_more(8, 0.05, (0.0, 0.1), 0.05) == MOST_ROUNDS
    assert rounds_more(8, 0.0499, (0.0, 0.1), 0.05) == MOST_ROUNDS


def test_so_many_rounds_more_do_settle_it() -> None:
    draw = random.Random(7)

    def values(rounds: int) -> list[float]:
        return [100 * math.exp(draw.gauss(0, 0.06)) for _ in range(rounds)]

    settled = asked = 0
    while asked < 40:
        found = compare(values(8), values(8), higher=True)
        if found.verdict != NOISY or found.rounds_more >= 100:
            continue
        asked += 1
        rounds = 8 + found.rounds_more
        settled += compare(values(rounds), values(rounds), higher=True).verdict != NOISY
    assert settled >= 24, "most of what is promised holds; the estimate itself is a draw"

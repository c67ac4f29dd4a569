"""Is it slower? Pairs of values, one pair a round, to an interval for the change, and a verdict.

Both sides of a pair run one after the other, so a slow minute of the machine hits both, and the order alternates (A B, B A,
A B...), so that a machine that gets slower favours neither. What is compared is the change within a pair, as a logarithm:
+0.1 is 10.5 % worse, whether the figure is a rate or a time. If both sides are equally fast, a pair is as likely to show +x
as -x, whatever the noise looks like: each of its values could have stood on the other side. Nothing is assumed but that
symmetry, and that the noise of one round says nothing about that of the next.

The estimate is the Hodges-Lehmann one: the median of the means of any two rounds (a round with itself included). Its
interval is that of Wilcoxon's signed-rank test, by order statistics of the same means. A stalled round moves it little.
Six rounds are the fewest that allow 95 %.

    base 100, 102, 98, 101, 99, 100 msg/s    ours 90, 93, 88, 92, 89, 91     10.5 % worse, 9.6 % to 11.4 %: "worse"

Verdicts, with a threshold of 5 % in either direction:

    interval                                     verdict
    all of it above the threshold                worse
    all of it below the opposite threshold       better
    between the two thresholds                   same
    below the threshold, across the opposite     not worse
    across the threshold                         too noisy: so many rounds more would settle it
    none, there are too few rounds               too few rounds: so many more are needed

"worse" is wrong in at most 2.5 % of the figures that are exactly at the threshold, and in practice never for those that did
not change. A figure that is 3 % slower is "same": compare with a lower threshold, and more rounds, to see that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

WORSE, BETTER, SAME, NOT_WORSE, NOISY, FEW = (
    "worse",
    "better",
    "same",
    "not worse",
    "too noisy",
    "too few rounds",
)
VERDICTS = (WORSE, NOISY, FEW, NOT_WORSE, SAME, BETTER)  # as one wants to read them
MOST_ROUNDS = 200  # more are not promised to anybody


class Comparison(NamedTuple):
    """One figure. Changes are shares: 0.03 is 3 % worse than the base, -0.03 is better."""

    base: float  # medians of the values themselves
    ours: float
    change: float
    # At the confidence asked for; None when there are too few rounds for it.
    interval: tuple[float, float] | None
    verdict: str
    # How many more rounds it takes to tell, for NOISY and FEW; MOST_ROUNDS means as many or more.
    rounds_more: int


def compare(
    base: Sequence[float],
    ours: Sequence[float],
    *,
    higher: bool,
    threshold: float = 0.05,
    confidence: float = 0.95,
) -> Comparison:
    """Values of the same rounds, in the same order; `higher`: whether high values are good.

    A pair with a value that is not positive says nothing about a ratio and is left out.
    """
    changes = [
        math.log(one / other if higher else other / one)
        for one, other in zip(base, ours, strict=True)
        if one > 0 and other > 0
    ]
    limit = math.log1p(threshold)
    middle, interval = estimate(changes, confidence)
    if interval is None:
        verdict, more = FEW, fewest_rounds(confidence) - len(changes)
    else:
        verdict, more = judge(interval, limit), 0
        if verdict == NOISY:
            more = rounds_more(len(changes), middle, interval, limit)
    return Comparison(
        median(base),
        median(ours),
        math.expm1(middle),
        None if interval is None else (math.expm1(interval[0]), math.expm1(interval[1])),
        verdict,
        more,
    )


def estimate(changes: Sequence[float], confidence: float) -> tuple[float, tuple[float, float] | None]:
    """The Hodges-Lehmann estimate (0.0 of nothing) and its interval; None when there are too few changes for one."""
    means = sorted(
        (changes[first] + changes[second]) / 2
        for first in range(len(changes))
        for second in range(first, len(changes))
    )
    if not means:
        return 0.0, None
    cut = means_outside(len(changes), confidence)
    return median(means), None if cut is None else (means[cut], means[-1 - cut])


def means_outside(rounds: int, confidence: float) -> int | None:
    """How many of the sorted means lie outside of the interval at either end; None when even all of them are too few.

    Of 2 ** rounds equally likely patterns of signs, so many have a rank sum as low as this.
    """
    patterns = [1]  # by rank sum
    for rank in range(1, rounds + 1):
        longer = [*patterns, *([0] * rank)]
        for total, count in enumerate(patterns):
            longer[total + rank] += count
        patterns = longer
    allowed = (1 - confidence) / 2 * 2**rounds
    below, cut = 0, None
    for total, count in enumerate(patterns):
        below += count
        if below > allowed:
            break
        cut = total
    return cut


def fewest_rounds(confidence: float) -> int:
    """That allow an interval: six for 0.95."""
    rounds = 1
    while means_outside(rounds, confidence) is None:
        rounds += 1
    return rounds


def judge(interval: tuple[float, float], limit: float) -> str:
    """The table above; all values are logarithms."""
    low, high = interval
    if low > limit:
        return WORSE
    if high < -limit:
        return BETTER
    if high <= limit:
        return SAME if low >= -limit else NOT_WORSE
    return NOISY


def rounds_more(rounds: int, middle: float, interval: tuple[float, float], limit: float) -> int:
    """Until the end of the interval that crosses the threshold is on the estimate's side of it.

    An interval narrows with the square root of the rounds; the estimate is taken to stay where it is.
    """
    low, high = interval
    reach = middle - low if middle > limit else high - middle
    distance = abs(middle - limit)
    if distance * math.sqrt(MOST_ROUNDS) <= reach:
        return MOST_ROUNDS
    needed = math.ceil(rounds * (reach / distance) ** 2)
    return min(MOST_ROUNDS, max(1, needed - rounds))

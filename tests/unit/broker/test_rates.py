"""Token buckets and throttles: within 5 % over ten seconds, at most twice the rate in any 100 ms, never stop and go."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.broker.dispatch.core.consumer import Consumer
from magnetar.broker.resources.rates import Limit, Throttle, TokenBucket

WINDOW_S = 0.1


def run(throttles: list[Throttle], late: list[float], step: int, seconds: float) -> list[tuple[float, int]]:
    """Users that always have something to do, whose timers are late by turns: when how much was done, in order."""
    done: list[tuple[float, int]] = []
    wake = [0.0] * len(throttles)
    calls = 0
    while min(wake) < seconds:
        user = wake.index(min(wake))
        now, throttle = wake[user], throttles[user]
        if (wait := throttle.ready(now)) > 0:
            calls += 1
            wake[user] = now + wait + late[calls % len(late)]
            continue
        amount = min(step, throttle.room(counts_bytes=False))
        throttle.spend(amount, 100 * amount)
        done.append((now, amount))
    return sorted(done)


def most_in_a_window(done: list[tuple[float, int]]) -> int:
    """The most that any window of 100 ms has."""
    most, start, total = 0, 0, 0
    for time, amount in done:
        total += amount
        while done[start][0] <= time - WINDOW_S:
            total -= done[start][1]
            start += 1
        most = max(most, total)
    return most


@settings(max_examples=60, deadline=None)
@given(
    rate=st.integers(200, 1_000_000),
    users=st.integers(1, 4),
    late=st.lists(st.floats(0, 0.03), min_size=1, max_size=7),
    step=st.integers(1, 5_000),
)
def test_a_rate_is_kept_and_is_smooth(rate: int, users: int, late: list[float], step: int) -> None:
    own, shared = TokenBucket(rate), TokenBucket(3 * rate)
    throttles = [Throttle([Limit(own, False), Limit(shared, False)]) for _ in range(users)]
    done = run(throttles, late, max(step, rate // 2_000), 10.0)
    total = sum(amount for _, amount in done)
    assert abs(total - 10 * rate) <= 0.05 * 10 * rate
    assert most_in_a_window(done) <= 2 * rate * WINDOW_S
    gaps = [after - before for (before, _), (after, _) in pairwise(done)]
    assert max(gaps) <= 0.02 + 0.02 + max(late) + 1e-6  # a quantum, what was overspent, and the timer


@settings(max_examples=60, deadline=None)
@given(
    amounts=st.lists(st.integers(1, 50_000), min_size=1, max_size=50),
    pauses=st.lists(st.floats(0, 5), max_size=50),
)
def test_whatever_is_spent_and_however_long_it_rests_the_rate_is_not_exceeded(
    amounts: list[int], pauses: list[float]
) -> None:
    """Single batches may be larger than all credit: they are paid for before the next one."""
    bucket, now, done = TokenBucket(1_000), 0.0, list[tuple[float, int]]()
    throttle = Throttle([Limit(bucket, False)])
    for number, amount in enumerate(amounts):
        while (wait := throttle.ready(now)) > 0:
            now += wait
        throttle.spend(amount, 0)
        done.append((now, amount))
        if number < len(pauses) and pauses[number] > 2.5:
            throttle.rest()
            now += pauses[number]
    for first, (begin, _) in enumerate(done):
        total = 0
        for end, amount in done[first:]:
            assert total <= 1_000 * (end - begin + 0.05 + 0.02) + 1e-6  # and then one more, whatever its size
            total += amount


def test_those_that_share_a_bucket_have_turns_and_who_rests_saves_nothing_up() -> None:
    shared = TokenBucket(1_000)
    users = [Throttle([Limit(shared, False)]) for _ in range(50)]
    waits = [user.ready(0.0) for user in users]
    assert waits == sorted(waits)
    assert waits[-1] > 0.9  # behind 49 others, of which each gets a quantum
    for user in users:
        user.rest()
    assert shared.reserve(0.0, 1) == 0.0


def test_a_rate_below_one_a_quantum_and_messages_with_bytes() -> None:
    slow = Throttle([Limit(TokenBucket(2), False)])
    assert sum(amount for _, amount in run([slow], [0.0], 1, 10.0)) in (20, 21)
    both = Throttle([Limit(TokenBucket(1_000_000), False), Limit(TokenBucket(10_000), True)])
    assert 950 <= sum(amount for _, amount in run([both], [0.001], 1, 10.0)) <= 1_050


def test_rates_of_a_consumer_are_its_own() -> None:
    consumer = Consumer("a", 0, port=None)  # type: ignore[arg-type]
    consumer.count_rates(0.0)
    consumer.delivered_messages, consumer.delivered_bytes = 50, 7_000
    consumer.redelivered_messages, consumer.acked_messages = 20, 30
    consumer.count_rates(5.0)
    assert consumer.rates.per_second == (0.0, 0.0, 0.0, 0.0)
    consumer.count_rates(10.0)
    assert consumer.rates.per_second == (5.0, 700.0, 2.0, 3.0)

"""Token buckets that give what they have evenly, and what one user of several of them may still do. Pure: time comes in.

A bucket keeps one number, the time until which all that was reserved is paid for:

    reserve(now, amount):  waits until `due`, or not at all if that is past;  then due += amount / rate

    due lies behind now by BURST_S at most: what a late timer missed is made up for, and no more than that is saved up.

So in any window of T seconds at most rate * (T + BURST_S) is given, and one `amount` more. A user takes QUANTUM_S of the
rate at a time: in 100 ms at most 1.7 times the rate, without a pause that is longer than a quantum.

A user of several buckets (messages and bytes; of the topic, and of the broker, which it shares with others) has a
`Throttle`. It takes credit from each bucket, and pays with what it really did, which may be more: whole batches. A bucket
that is shared is asked only when those before it have been waited for, and hands out turns: nobody has to try again.

>>> bucket = TokenBucket(100.0)
>>> [round(bucket.reserve(0.0, 2), 3) for _ in range(6)]
[0.0, 0.0, 0.0, 0.01, 0.03, 0.05]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

BURST_S = 0.05
QUANTUM_S = 0.02
UNLIMITED_AMOUNT = 1 << 62


class TokenBucket:
    """`rate`: messages or bytes per second, above 0."""

    __slots__ = ("_due_s", "rate")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._due_s = float("-inf")

    @property
    def quantum(self) -> float:
        """What is taken at a time."""
        return max(self.rate * QUANTUM_S, 1)

    def reserve(self, now_s: float, amount: float) -> float:
        """Seconds after which the caller may use `amount`, which is its own from here on."""
        due = max(self._due_s, now_s - BURST_S)
        self._due_s = due + amount / self.rate
        return max(due - now_s, 0.0)

    def begin_anew(self, rate: float) -> None:
        """With another rate: what was reserved until some time was so by the old one."""
        self.rate = rate
        self._due_s = float("-inf")

    def give_back(self, amount: float) -> None:
        """The caller does not use so much of what it reserved."""
        self._due_s -= amount / self.rate


class Limit(NamedTuple):
    """A bucket, and what it counts."""

    bucket: TokenBucket
    counts_bytes: bool


class Throttle:
    """What one user of some buckets may do. `ready` before it does anything, `spend` after it, `rest` when it is idle."""

    __slots__ = ("_at", "_credit", "_limits", "_until_s", "open")

    def __init__(self, limits: Iterable[Limit]) -> None:
        """The order is that in which they are waited for: those that are shared with most others come last."""
        self._limits = list(limits)
        self._credit = [0.0] * len(self._limits)  # below 0: what is still to be paid
        self._at = 0  # those before it have been waited for
        self._until_s = float("-inf")  # when what was reserved last may be used
        self.open = False  # there is credit of each

    def ready(self, now_s: float) -> float:
        """Seconds to wait before the next call; 0: it is `open`."""
        if now_s < self._until_s:
            return self._until_s - now_s
        while not self.open:
            while self._at < len(self._limits) and self._credit[self._at] > 0:
                self._at += 1
            if self._at == len(self._limits):
                self._at, self.open = 0, True
                break
            bucket = self._limits[self._at].bucket
            bucket.reserve(now_s, -self._credit[self._at])  # what is owed comes first
            self._credit[self._at] = bucket.quantum
            wait_s = bucket.reserve(now_s, bucket.quantum)
            if wait_s > 0:
                self._until_s = now_s + wait_s
                return wait_s
        return 0.0

    def room(self, *, counts_bytes: bool) -> int:
        """How much may be done before `ready` is to be asked again; UNLIMITED_AMOUNT: any amount."""
        credits = [
            have for have, limit in zip(self._credit, self._limits) if limit.counts_bytes == counts_bytes
        ]
        return max(int(min(credits)), 1) if credits else UNLIMITED_AMOUNT

    def spend(self, messages: int, size: int) -> None:
        """So much was done."""
        for number, limit in enumerate(self._limits):
            self._credit[number] -= size if limit.counts_bytes else messages
            if self._credit[number] <= 0:
                self.open = False

    def rest(self) -> None:
        """There is nothing to do: what is left of its credit is for others."""
        for number, credit in enumerate(self._credit):
            if credit > 0:
                self._limits[number].bucket.give_back(credit)
                self._credit[number] = 0.0
        self._at, self._until_s, self.open = 0, float("-inf"), False


def limits_of(messages: float, size: float) -> list[Limit]:
    """A second, with buckets of their own; 0 or less: any number."""
    rates = ((messages, False), (size, True))
    return [Limit(TokenBucket(rate), counts_bytes) for rate, counts_bytes in rates if rate > 0]


class Buckets:
    """The same for many that share them, while the rates may change."""

    __slots__ = ("_of_bytes", "_of_messages")

    def __init__(self) -> None:
        self._of_messages = TokenBucket(1)
        self._of_bytes = TokenBucket(1)

    def limits(self, messages: float, size: float) -> list[Limit]:
        """From now on, also for throttles that were made of these before."""
        found = []
        for bucket, rate, counts_bytes in (
            (self._of_messages, messages, False),
            (self._of_bytes, size, True),
        ):
            if rate > 0:
                if rate != bucket.rate:
                    bucket.begin_anew(rate)
                found.append(Limit(bucket, counts_bytes))
        return found

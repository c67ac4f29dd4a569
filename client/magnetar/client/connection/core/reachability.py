"""Reachability: which brokers could not be connected to, and when to try them again.

    no failure --connecting fails--> closed for a pause --the pause is over--> the next one who asks tries again
         ^                             ^      |                                   |
         |                             |      v fails at once, with the same error v
         +------- connected -----------+---------------- fails: a longer pause ----+

So ten thousand producers of a broker that is gone make a connection attempt now and then, and not one each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from magnetar.proto.errors import MagnetarError

Address = tuple[str, int]  # host and port

FIRST_PAUSE_S = 0.1
# A broker that restarts is tried again this soon; attachments have pauses of their own.
LONGEST_PAUSE_S = 1.0
# An attempt that hung keeps others from hanging for as long as it did, within this.
LONGEST_AFTER_HANGING_S = 5.0
# Those that are not asked for any more are forgotten.
MAX_ADDRESSES = 1000


@dataclass(frozen=True, slots=True)
class _Failure:
    error: MagnetarError
    at: float
    pause: float  # from `at` on


class Reachability:
    """Which brokers of one cluster can be reached. Times are those of one clock, in seconds; `chance` returns 0 <= x < 1."""

    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance = chance
        self._failures: dict[Address, _Failure] = {}  # the oldest first

    def failed(self, address: Address, now: float, duration: float, error: MagnetarError) -> None:
        """Connecting failed after `duration` seconds."""
        before = self._failures.pop(address, None)
        grown = FIRST_PAUSE_S if before is None else min(2 * before.pause, LONGEST_PAUSE_S)
        pause = max(grown, min(duration, LONGEST_AFTER_HANGING_S))
        self._failures[address] = _Failure(error, now, pause * (0.5 + 0.5 * self._chance()))
        if len(self._failures) > MAX_ADDRESSES:
            del self._failures[next(iter(self._failures))]

    def worked(self, address: Address) -> None:
        """Connected."""
        self._failures.pop(address, None)

    def refusal(self, address: Address, now: float) -> MagnetarError | None:
        """What connecting fails with now, without trying; None: try."""
        failure = self._failures.get(address)
        return failure.error if failure is not None and now < failure.at + failure.pause else None

    def in_order(self, addresses: Iterable[Address]) -> list[Address]:
        """Those that failed behind those that did not; the one that failed last comes last."""
        failed = list(self._failures)
        return sorted(addresses, key=lambda address: failed.index(address) if address in failed else -1)

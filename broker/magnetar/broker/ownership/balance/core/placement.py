"""Which broker takes a bundle that nobody owns.

The less loaded one of two that are drawn at random, from the best tier (`survey`) that has room. Two draws bound what
one broker gets to twice its share, even when every broker of the cluster decides by reports that are ten seconds old and a
tenth of all bundles must be placed: choosing the least loaded of all would send them to one broker. What this process has
placed since a broker's last report is counted on top of that report. Whoever asks again for the same bundle meanwhile gets
the same answer: each of its topics is looked up.

>>> from random import Random
>>> from magnetar.broker.ownership.balance.core.facts import UNBOUND
>>> placement = BundlePlacement(BalanceSettings(), Random(1).randrange)
>>> placement.update([BrokerFacts("a:1", cpu=0.9), BrokerFacts("b:1", cpu=0.1)], now=0.0)
>>> placement.place("t/ns/0x00000000_0xffffffff", UNBOUND, now=0.0)
'b:1'
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..settings import BalanceSettings
from .facts import BrokerFacts, NamespaceBinding
from .survey import ReadyBroker, ReadyBrokers

# A broker that has the mean number of bundles counts as loaded by this much: idle bundles spread as well, since they
# may become busy. Small beside any load that matters.
_BUNDLES_SHARE = 0.05
# What is assumed of a bundle at most, where few bundles share what other things cost.
_MOST_OF_UNKNOWN = 0.1
# Draws of two before all brokers of a tier are looked at: almost always the first two have room.
_DRAWS = 4


class _Placed(NamedTuple):
    at: float
    bundle: str
    share: float


class BundlePlacement:
    """State of one process that places. `update` with each list of brokers that it learns of, then `place`."""

    def __init__(self, settings: BalanceSettings, randrange: Callable[[int], int]) -> None:
        """`randrange`: of a `random.Random`."""
        self._settings = settings
        self._randrange = randrange
        self._ready = ReadyBrokers((), settings)
        self._mean_bundles = 1.0
        self._mean_share = 0.0  # of one bundle
        self._placed: dict[str, deque[_Placed]] = {}  # since the report that is known; oldest first
        self._chosen: dict[str, str] = {}  # bundle -> broker, of what is in _placed
        self._reports: dict[str, tuple[int, float]] = {}  # broker -> its report, and when this process saw it

    def update(self, brokers: Sequence[BrokerFacts], now: float) -> None:
        """The brokers that are registered now. What was placed at one that is gone is forgotten."""
        for broker in brokers:
            seen = self._reports.get(broker.name)
            if seen is None or seen[0] != broker.report:
                self._reports[broker.name] = (broker.report, now)
        self._ready = ReadyBrokers(brokers, self._settings)
        by_name = self._ready.by_name
        self._reports = {broker.name: self._reports[broker.name] for broker in brokers}
        for name in [name for name in self._placed if name not in by_name]:
            self._forget(self._placed.pop(name), name)
        bundles = sum(one.facts.bundles for one in by_name.values())
        self._mean_bundles = max(bundles / len(by_name), 1.0) if by_name else 1.0
        cpu = sum(one.facts.cpu for one in by_name.values())
        self._mean_share = min(cpu / bundles, _MOST_OF_UNKNOWN) if bundles else 0.0
        for name, placed in self._placed.items():
            self._drop_reported(name, placed, now)
            ready = by_name[name]
            for one in placed:
                ready.comes(one.share, 0)

    def place(
        self,
        bundle: str,
        binding: NamespaceBinding,
        now: float,
        *,
        exclude: str = "",
        counted: bool = True,
    ) -> str | None:
        """The broker that takes it; None if no broker may have it or all that may are full.

        It is assumed to cost what bundles do on the mean. `exclude` is a broker that could not be reached. Not `counted`:
        perhaps nobody will take it.
        """
        known = self._chosen.get(bundle)
        if known is not None and known != exclude:
            return known
        tiers: Sequence[Sequence[ReadyBroker]] = self._ready.tiers(binding)
        if exclude:
            tiers = [[one for one in tier if one.facts.name != exclude] for tier in tiers]
        chosen = next((found for tier in tiers if (found := self._draw(tier, self._settings.overload))), None)
        if chosen is None:  # all are overloaded: better there than nowhere
            chosen = next((found for tier in tiers if (found := self._draw(tier, None))), None)
        if chosen is None or not counted:
            return None if chosen is None else chosen.facts.name
        chosen.comes(self._mean_share, 0)
        self._placed.setdefault(chosen.facts.name, deque()).append(_Placed(now, bundle, self._mean_share))
        self._chosen[bundle] = chosen.facts.name
        return chosen.facts.name

    def _drop_reported(self, name: str, placed: deque[_Placed], now: float) -> None:
        """What was placed well before the last report is in it; what is old was never asked for, or costs nothing."""
        reported = self._reports[name][1] - self._settings.report_interval_s
        oldest = now - self._settings.load_settle_s
        done = []
        while placed and (placed[0].at <= reported or placed[0].at <= oldest):
            done.append(placed.popleft())
        self._forget(done, name)

    def _forget(self, done: Iterable[_Placed], name: str) -> None:
        for one in done:
            if self._chosen.get(one.bundle) == name:
                del self._chosen[one.bundle]

    def _draw(self, tier: Sequence[ReadyBroker], overload: float | None) -> ReadyBroker | None:
        count = len(tier)
        for _ in range(_DRAWS if count > 1 else 0):
            first = self._randrange(count)
            second = (first + 1 + self._randrange(count - 1)) % count
            pair = [tier[at] for at in (first, second) if self._fits(tier[at], overload)]
            if pair:
                return min(pair, key=self._score)
        fitting = [one for one in tier if self._fits(one, overload)]
        if not fitting:
            return None
        return min((fitting[self._randrange(len(fitting))] for _ in range(2)), key=self._score)

    def _fits(self, broker: ReadyBroker, overload: float | None) -> bool:
        return (overload is None or broker.cpu < overload) and self._ready.has_room(broker)

    def _score(self, broker: ReadyBroker) -> float:
        return broker.cpu + _BUNDLES_SHARE * broker.bundles / self._mean_bundles

    def check(self) -> None:
        """Asserts the invariants; tests call it after every event."""
        assert self._placed.keys() <= self._ready.by_name.keys()
        for bundle, name in self._chosen.items():
            assert any(one.bundle == bundle for one in self._placed[name]), bundle
        for name, placed in self._placed.items():
            broker = self._ready.by_name[name]
            assert broker.bundles >= broker.facts.bundles + len(placed), name
            assert all(a.at <= b.at for a, b in zip(placed, list(placed)[1:])), name

"""A cluster of brokers in virtual time, as the balancer sees it: loads that follow the day, hot spots, joins and leaves.

One step is one round of the balancer. Between two rounds the owners carry out what was requested, brokers that are lost have
their bundles placed, and most brokers report anew: a report is a few seconds old, some are a whole round old.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from magnetar.broker.ownership.balance.core.balancer import BalancerCore
from magnetar.broker.ownership.balance.core.facts import (
    UNBOUND,
    BrokerFacts,
    BundleLoad,
    BundleOwner,
    ClusterSnapshot,
    Move,
    NamespaceBinding,
    Split,
    bundle_range,
    namespace_of,
)
from magnetar.broker.ownership.balance.core.placement import BundlePlacement
from magnetar.broker.ownership.balance.settings import BalanceSettings

DAY_S = 86_400
ZONES = ("a", "b", "c")
_PHASES = 24  # a namespace's busiest hour
_MESSAGES_OF_A_CORE = 25_000.0  # in, and as many out
_HOUR_ROUNDS = 120
_STALE_REPORTS = 0.2  # of the brokers do not report in a round
_PLACERS = 20  # brokers that are asked for owners after a loss, each with reports and a chance of its own


@dataclass(slots=True)
class ModelBundle:
    """`rate`: messages a second on the mean of the day."""

    name: str
    rate: float
    topics: int
    phase: int
    hot: float = 1.0  # times its usual rate
    owner: str = ""


@dataclass
class Measured:
    """What a run showed, by round."""

    spread: list[float] = field(default_factory=list)  # of the true loads: busiest less idlest
    busiest: list[float] = field(default_factory=list)
    moves: list[int] = field(default_factory=list)
    splits: int = 0
    moves_of: Counter[str] = field(default_factory=Counter)
    returns: int = 0  # moves back to the owner before, within an hour
    round_cpu_s: list[float] = field(default_factory=list)
    longest_slice_s: list[float] = field(default_factory=list)


class ModelCluster:
    """See the module. `capacity`: messages a second that take a whole core."""

    def __init__(
        self,
        rng: Random,
        *,
        brokers: int,
        bundles: int,
        topics: int,
        mean_load: float = 0.45,
        settings: BalanceSettings | None = None,
        preferring: int = 0,
    ) -> None:
        """`preferring`: so many namespaces of 100 prefer zone a."""
        self.settings = settings or BalanceSettings()
        self.now = 0.0
        self.measured = Measured()
        self.core = BalancerCore(self.settings)
        self.brokers = {name: self._new_broker(name) for name in map(self._name, range(brokers))}
        self.bundles: dict[str, ModelBundle] = {}
        self.bindings: dict[str, NamespaceBinding] = {}
        self.transfers: dict[str, str] = {}
        self.capacity = 1.0
        self._rng = rng
        self._reports: dict[str, list[BundleLoad]] = {}
        self._moved: dict[str, tuple[float, str]] = {}  # bundle -> when it moved last, and from where
        self._next_broker = brokers
        self._make_bundles(bundles, topics, preferring)
        names = list(self.brokers)
        for bundle in self.bundles.values():
            bundle.owner = rng.choice(names)
        self.capacity = sum(one.rate for one in self.bundles.values()) / (mean_load * brokers)
        self.report(everybody=True)

    @staticmethod
    def _name(number: int) -> str:
        return f"broker-{number}:7650"

    def _new_broker(self, name: str) -> BrokerFacts:
        return BrokerFacts(name, zone=ZONES[int(name[7:-5]) % len(ZONES)])

    def _make_bundles(self, count: int, topics: int, preferring: int) -> None:
        rng, each = self._rng, 16
        size = (1 << 32) // each
        for number in range(count):
            tenant, part = divmod(number, each)
            namespace = f"t{tenant % 100}/n{tenant}"
            name = f"{namespace}/0x{part * size:08x}_0x{(part + 1) * size - 1:08x}"
            rate = rng.lognormvariate(0.0, 1.0)
            self.bundles[name] = ModelBundle(name, rate, max(topics // count, 1), tenant % _PHASES)
            if tenant % 100 < preferring:
                self.bindings[namespace] = NamespaceBinding(zone="a")

    # --- what happens to it --------------------------------------------------------------------------------------------

    def join(self, count: int) -> list[str]:
        """New brokers, with nothing."""
        names = [self._name(self._next_broker + number) for number in range(count)]
        self._next_broker += count
        self.brokers.update((name, self._new_broker(name)) for name in names)
        return names

    def leave(self, names: list[str]) -> tuple[int, float, int]:
        """They die. How many bundles were placed, the CPU seconds that took, and the most that one broker got."""
        for name in names:
            del self.brokers[name]
            self._reports.pop(name, None)
        orphans = [one for one in self.bundles.values() if one.owner not in self.brokers]
        placers = [
            BundlePlacement(self.settings, Random(self._rng.random()).randrange) for _ in range(_PLACERS)
        ]
        rows = list(self.brokers.values())
        began = time.thread_time()
        for placer in placers:
            placer.update(rows, self.now)
        got: Counter[str] = Counter()
        for number, bundle in enumerate(orphans):
            binding = self.bindings.get(namespace_of(bundle.name), UNBOUND)
            owner = placers[number % len(placers)].place(bundle.name, binding, self.now)
            assert owner is not None, "there is a broker with room"
            bundle.owner = owner
            got[owner] += 1
        return len(orphans), time.thread_time() - began, max(got.values(), default=0)

    def heat(self, count: int, times: float) -> list[str]:
        """Bundles that are so much busier from now on; `cool` ends it."""
        names = self._rng.sample(list(self.bundles), count)
        for name in names:
            self.bundles[name].hot = times
        return names

    def cool(self, names: list[str]) -> None:
        """As before; parts of bundles that were split as well."""
        for name in names:
            namespace, (first, last) = namespace_of(name), bundle_range(name)
            for one in self.bundles.values():
                if one.hot > 1 and namespace_of(one.name) == namespace:
                    begin, end = bundle_range(one.name)
                    if first <= begin and end <= last:
                        one.hot = 1.0

    # --- a round -------------------------------------------------------------------------------------------------------

    def step(self, *, balance: bool = True) -> None:
        """One interval passes, and one round is held."""
        self.now += self.settings.balance_interval_s
        self._carry_out()
        loads = self.report()
        self.measured.spread.append(max(loads.values()) - min(loads.values()))
        self.measured.busiest.append(max(loads.values()))
        if balance:
            self._balance()

    def snapshot(self) -> ClusterSnapshot:
        """As the leader reads it."""
        return ClusterSnapshot(
            list(self.brokers.values()),
            [BundleOwner(one.name, one.owner) for one in self.bundles.values()],
            dict(self._reports),
            list(self.transfers),
            self.bindings,
        )

    def _balance(self) -> None:
        snapshot = self.snapshot()
        # A full collection would visit the model's bundles, which a leader does not have.
        gc.freeze()
        try:
            self._measured_round(snapshot)
        finally:
            gc.unfreeze()

    def _measured_round(self, snapshot: ClusterSnapshot) -> None:
        moves = 0
        longest = 0.0
        began = at = time.thread_time()
        for decision in self.core.round(snapshot, self.now):
            now = time.thread_time()
            longest, at = max(longest, now - at), now
            if isinstance(decision, Move):
                moves += 1
                self._note(decision)
            elif isinstance(decision, Split):
                self.measured.splits += 1
                self._split(self.bundles[decision.bundle])
        self.core.check()
        self.measured.round_cpu_s.append(time.thread_time() - began)
        self.measured.longest_slice_s.append(longest)
        self.measured.moves.append(moves)

    def _note(self, move: Move) -> None:
        self.transfers[move.bundle] = move.to
        self.measured.moves_of[move.bundle] += 1
        at, source = self._moved.get(move.bundle, (-math.inf, ""))
        if source == move.to and self.now - at < 3600:
            self.measured.returns += 1
        self._moved[move.bundle] = (self.now, move.source)

    def _carry_out(self) -> None:
        for name, to in list(self.transfers.items()):
            bundle = self.bundles.get(name)
            if bundle is not None and to in self.brokers:
                if self._rng.random() < 0.1:
                    continue  # its topics are still being closed
                bundle.owner = to
            del self.transfers[name]

    def _split(self, bundle: ModelBundle) -> None:
        first, last = bundle_range(bundle.name)
        middle = (first + last) // 2
        del self.bundles[bundle.name]
        part = self._rng.uniform(0.3, 0.7)
        topics = bundle.topics // 2
        for a, b, share, count in (
            (first, middle, part, topics),
            (middle + 1, last, 1 - part, bundle.topics - topics),
        ):
            name = f"{namespace_of(bundle.name)}/0x{a:08x}_0x{b:08x}"
            self.bundles[name] = ModelBundle(
                name, bundle.rate * share, count, bundle.phase, bundle.hot, bundle.owner
            )

    def report(self, *, everybody: bool = False) -> dict[str, float]:
        """Brokers write their loads; the true ones are returned."""
        rng, hour = self._rng, self.now / 3600
        of_day = [1 + 0.6 * math.sin(2 * math.pi * (hour - phase) / 24) for phase in range(_PHASES)]
        rows: dict[str, list[BundleLoad]] = {name: [] for name in self.brokers}
        load = dict.fromkeys(self.brokers, 0.02)
        scale = 1 / self.capacity
        random = rng.random
        for bundle in self.bundles.values():
            rate = bundle.rate * of_day[bundle.phase] * bundle.hot * (0.9 + 0.2 * random())
            load[bundle.owner] += rate * scale
            # A message in and one out, of 500 bytes: its weight is then that of three messages.
            messages = _MESSAGES_OF_A_CORE * rate * scale
            rows[bundle.owner].append(
                BundleLoad(bundle.name, bundle.topics, messages, 500 * messages, messages, 500 * messages)
            )
        for name, broker in self.brokers.items():
            if everybody or not broker.report or rng.random() >= _STALE_REPORTS:
                cpu = round(min(load[name], 1.0) + 0.01 * rng.random(), 2)
                topics = sum(row.topics for row in rows[name])
                self.brokers[name] = broker._replace(
                    cpu=cpu, bundles=len(rows[name]), topics=topics, report=broker.report + 1
                )
                self._reports[name] = rows[name]
        return load


class Day(NamedTuple):
    """Of a run, without its first hour, in which bundles that were dealt at random are spread."""

    spread: float  # mean over the day
    worst_spread: float  # of a round
    apart: float  # share of rounds with a spread above twice the threshold
    busiest: float
    moves_per_hour: float
    most_moves_per_hour: int
    most_of_a_bundle: int
    returns: int
    splits: int
    idle_moves: int  # in the last hour, in which nothing happens


def run_day(
    *, brokers: int = 30, bundles: int = 1_500, hours: int = 24, balance: bool = True, seed: int = 1
) -> tuple[Day, ModelCluster]:
    """A day of a cluster. Events: a hot spot of two hours every four hours, brokers that die, brokers that join."""
    settings = BalanceSettings(split_messages_per_s=1e9, split_bytes_per_s=1e12)
    cluster = ModelCluster(
        Random(seed), brokers=brokers, bundles=bundles, topics=bundles * 10, settings=settings, preferring=0
    )
    rng = Random(seed + 1)
    hot: list[str] = []
    for number in range(hours * _HOUR_ROUNDS):
        hour, rest = divmod(number, _HOUR_ROUNDS)
        if rest == 0:
            if hour % 4 == 1:
                hot = cluster.heat(max(brokers // 10, 1), 8.0)
            if hour % 4 == 3:
                cluster.cool(hot)
            if hour % 6 == 2:
                cluster.leave(rng.sample(sorted(cluster.brokers), max(brokers // 10, 1)))
            if hour % 6 == 4:
                cluster.join(max(brokers // 10, 1))
        cluster.step(balance=balance)
    return _day(cluster.measured, settings), cluster


def _day(measured: Measured, settings: BalanceSettings) -> Day:
    spread, moves = measured.spread[_HOUR_ROUNDS:], measured.moves[_HOUR_ROUNDS:] or [0]
    hours = [sum(moves[at : at + _HOUR_ROUNDS]) for at in range(0, len(moves), _HOUR_ROUNDS)]
    return Day(
        statistics.mean(spread),
        max(spread),
        sum(one > 2 * settings.shed_threshold for one in spread) / len(spread),
        max(measured.busiest[_HOUR_ROUNDS:]),
        statistics.mean(hours),
        max(hours),
        max(measured.moves_of.values(), default=0),
        measured.returns,
        measured.splits,
        sum(moves[-_HOUR_ROUNDS:]),
    )

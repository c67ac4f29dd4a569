"""What the elected balancer decides in a round: splits, and moves from brokers that have too much to those with little.

A ready broker, beside the mean of all ready brokers that serve the same namespaces (`pool_of`):

    within ──cpu > mean + shed_threshold──> above ──for `shed_rounds` rounds──> gives bundles away, each round until within
           ──cpu < mean - shed_threshold──> below ──for `shed_rounds` rounds──> gets bundles from brokers above the mean
           ──too many bundles or topics───> full  ──for `shed_rounds` rounds──> gives its idlest bundles away

`round` is a generator: it yields decisions, and None where the caller may let others run. In this order: splits, brokers
that are full, brokers above, bundles that their namespace prefers elsewhere (half of what is left), brokers below.

A new leader starts with a new core: nothing is moved before it has seen `shed_rounds` rounds itself. What was moved before
its time rests as well: the owner's node says since when it is there.

Bundles that are too busy to be moved whole are split:

    quiet ──above a limit──> hot ──for `shed_rounds` rounds──> split, then its parts rest (`Rests`)
      ^                       │
      └────────below──────────┘

A bundle of one topic is never split: that topic would be as hot as before. Nor is one whose namespace has
`max_bundles_per_namespace` bundles, or whose range is one hash. So a hot topic among N is alone after log2(N) splits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from ..settings import BalanceSettings
from .facts import BundleLoad, ClusterSnapshot, Decision, Split, bundle_range, namespace_of
from .moves import Moves, Rests, UnseenMoves
from .survey import SLICE_ROWS, ClusterSurvey, ReadyBroker


class _Streaks:
    """How many rounds running something was true of a broker, or of a bundle."""

    def __init__(self, rounds: int) -> None:
        self._wanted = rounds
        self._rounds: dict[str, int] = {}

    def count(self, names: Sequence[str]) -> dict[str, None]:
        """One more round for these, none for the others; those that have had enough of them."""
        self._rounds = {name: self._rounds.get(name, 0) + 1 for name in names}
        return dict.fromkeys(name for name, rounds in self._rounds.items() if rounds >= self._wanted)

    def forget(self, name: str) -> None:
        """It begins at none."""
        self._rounds.pop(name, None)

    def check(self) -> None:
        """Asserts the invariant."""
        assert all(rounds > 0 for rounds in self._rounds.values())


class Splitting:
    """Which bundles are split."""

    def __init__(self, settings: BalanceSettings, rests: Rests) -> None:
        self.made = 0
        self._settings = settings
        self._rests = rests  # of moves: the parts of what was moved or split are not moved at once
        self._split_rests = Rests()  # a bundle that was moved may be split, one that was split may not
        self._hot = _Streaks(settings.shed_rounds)  # bundles above a limit

    def above(self, load: BundleLoad) -> str:
        """The limit that a bundle is above, in words; "" if none."""
        limits = self._settings
        messages = load.messages_in + load.messages_out
        if messages > limits.split_messages_per_s:
            return f"{messages:.0f} messages/s are above split_messages_per_s={limits.split_messages_per_s:g}"
        size = load.bytes_in + load.bytes_out
        if size > limits.split_bytes_per_s:
            return f"{size:.0f} bytes/s are above split_bytes_per_s={limits.split_bytes_per_s:g}"
        if load.topics > limits.split_topics:
            return f"{load.topics} topics are above split_topics={limits.split_topics}"
        return ""

    def round(self, hot: Mapping[str, str], survey: ClusterSurvey, now: float) -> Iterator[Split]:
        """`hot`: bundles above a limit, with the limit."""
        self._split_rests.forget_ended(now)
        due = [bundle for bundle in self._hot.count(list(hot)) if bundle not in survey.requested]
        counts = self._bundle_counts(due, survey) if due else {}
        most = self.made + self._settings.max_splits_per_round
        for bundle in due:
            namespace = namespace_of(bundle)
            if self.made < most and self.may_split(survey.load_of[bundle], counts[namespace], now):
                counts[namespace] += 1
                yield self._split(bundle, hot[bundle], survey, now)

    def split_one(self, bundle: str, reason: str, survey: ClusterSurvey, now: float) -> Split | None:
        """A bundle that is too large for another reason, if it may be split."""
        count = self._bundle_counts([bundle], survey)[namespace_of(bundle)]
        if bundle in survey.requested or not self.may_split(survey.load_of[bundle], count, now):
            return None
        return self._split(bundle, reason, survey, now)

    def may_split(self, load: BundleLoad, bundles_of_namespace: int, now: float) -> bool:
        """Whether a split would help and is allowed."""
        first, last = bundle_range(load.bundle)
        return (
            load.topics > 1
            and first < last
            and bundles_of_namespace < self._settings.max_bundles_per_namespace
            and not self._split_rests.resting(load.bundle, now)
        )

    def _split(self, bundle: str, reason: str, survey: ClusterSurvey, now: float) -> Split:
        """It and its parts rest until the parts have been seen for as long as anything is before it is judged.

        That is shorter than after a move: no topic notices a split, and what is too hot may need several.
        """
        until = now + self._settings.shed_rounds * self._settings.balance_interval_s
        self._split_rests.rest(bundle, until)
        self._rests.rest(bundle, until)
        self._hot.forget(bundle)
        survey.requested[bundle] = None
        self.made += 1
        return Split(bundle, survey.owner_of[bundle], reason)

    @staticmethod
    def _bundle_counts(bundles: Iterable[str], survey: ClusterSurvey) -> dict[str, int]:
        """Of their namespaces. A request may be a split that has not been carried out: it counts as one more."""
        counts = dict.fromkeys(map(namespace_of, bundles), 0)
        for bundle in chain(survey.owner_of, survey.requested):
            namespace = namespace_of(bundle)
            if namespace in counts:
                counts[namespace] += 1
        return counts

    def check(self) -> None:
        """Asserts the invariants; tests call it after every round."""
        self._hot.check()


class BalancerCore:
    """Sans-I/O. Run each `round` to its end before the next one begins."""

    def __init__(self, settings: BalanceSettings) -> None:
        self.moves = 0
        self.spread = 0.0  # of the last round: the busiest broker's share less the idlest one's
        self.mean = 0.0
        self._settings = settings
        self._rests = Rests()
        self._unseen = UnseenMoves(settings)
        self._splitting = Splitting(settings, self._rests)
        self._above = _Streaks(settings.shed_rounds)
        self._below = _Streaks(settings.shed_rounds)
        self._full = _Streaks(settings.shed_rounds)
        self._ready_since: dict[str, float] = {}  # of brokers that are ready

    def round(self, snapshot: ClusterSnapshot, now: float) -> Iterator[Decision | None]:
        """Decisions for the cluster as it was read at `now`; None after each slice of work."""
        self._rests.forget_ended(now)
        survey = ClusterSurvey(snapshot, self._settings)
        yield from survey.read()
        for bundle, moved_ago_s in survey.moved.items():  # perhaps by a request of the leader before
            self._rests.rest(bundle, now + self._settings.move_cooldown_s - moved_ago_s)
        self._unseen.apply(survey, now)
        ready = survey.ready.by_name
        self._ready_since = {name: self._ready_since.get(name, now) for name in ready}
        self._measure(list(ready.values()))
        hot: dict[str, str] = {}
        for number, (bundle, load) in enumerate(survey.load_of.items(), 1):
            if (limit := self._splitting.above(load)) and survey.owner_of[bundle] in ready:
                hot[bundle] = limit
            if number % SLICE_ROWS == 0:
                yield None
        yield from self._splitting.round(hot, survey, now)
        moves = Moves(
            survey, self._settings, self._rests, self._unseen, lambda name: self._stable(name, now), now
        )
        before = self.moves
        for decision in self._moves(survey, moves, now):
            self.moves = before + moves.made
            yield decision

    def _moves(self, survey: ClusterSurvey, moves: Moves, now: float) -> Iterator[Decision | None]:
        settings, ready = self._settings, survey.ready.by_name
        means = self._means(ready.values())

        def mean(one: ReadyBroker) -> float:
            return means[self._pool_of(one)]

        full = self._full.count(
            [
                n
                for n, c in ready.items()
                if c.least_bundles > settings.max_bundles or c.least_topics > settings.max_topics
            ]
        )
        above = self._above.count(
            [n for n, c in ready.items() if c.least_cpu > mean(c) + settings.shed_threshold]
        )
        below = self._below.count([n for n, c in ready.items() if c.cpu < mean(c) - settings.shed_threshold])
        for name in full:
            yield None
            yield from moves.unfill(
                ready[name],
                f"{name} has {ready[name].facts.bundles} bundles and {ready[name].facts.topics} topics: above its limits",
            )
        for source in sorted((ready[name] for name in above), key=lambda one: -one.least_cpu):
            yield None
            made = moves.made
            yield from moves.shed(source, mean(source), self._judged(source, mean(source), "above"))
            if moves.made == made and source.least_cpu > mean(source) + settings.shed_threshold:
                yield from self._split_too_large(source, mean(source), survey, moves, now)
        yield from moves.prefer(max((settings.max_moves_per_round - moves.made) // 2, 1))
        pools: dict[str, list[ReadyBroker]] = {}
        for one in ready.values():
            if one.least_cpu > mean(one):
                pools.setdefault(self._pool_of(one), []).append(one)
        for to in sorted((ready[name] for name in below), key=lambda one: one.cpu):
            yield None
            reason = self._judged(to, mean(to), "below")
            yield from moves.fill(to, pools.get(self._pool_of(to), []), mean(to), reason)

    def _split_too_large(
        self, source: ReadyBroker, mean: float, survey: ClusterSurvey, moves: Moves, now: float
    ) -> Iterator[Decision]:
        """A broker that is above, and whose bundles nobody has room for whole: one is split, and a part moves later."""
        bundle = moves.too_large(source, mean)
        if bundle is None:
            return
        share, name = survey.share_of(bundle), source.facts.name
        reason = f"it takes {share:.2f} of a core at {name}, more than another broker has room for"
        if (split := self._splitting.split_one(bundle, reason, survey, now)) is not None:
            yield split

    def _judged(self, one: ReadyBroker, mean: float, side: str) -> str:
        rounds = self._settings.shed_rounds
        return (
            f"{one.facts.name} is at {one.facts.cpu:.2f} of a core, {side} the mean of {mean:.2f} by more than "
            f"shed_threshold={self._settings.shed_threshold:g} in {rounds} rounds"
        )

    def _pool_of(self, one: ReadyBroker) -> str:
        """Brokers of a dedicated group are compared with each other."""
        group = one.facts.group
        return group if group in self._settings.dedicated_groups else ""

    def _means(self, ready: Iterable[ReadyBroker]) -> dict[str, float]:
        pools: dict[str, list[float]] = {}
        for one in ready:
            pools.setdefault(self._pool_of(one), []).append(one.facts.cpu)
        return {pool: sum(found) / len(found) for pool, found in pools.items()}

    def _measure(self, ready: Sequence[ReadyBroker]) -> None:
        loads = [one.facts.cpu for one in ready] or [0.0]
        self.spread = max(loads) - min(loads)
        self.mean = sum(loads) / len(loads)

    def _stable(self, name: str, now: float) -> bool:
        return now - self._ready_since[name] >= self._settings.zone_stable_s

    def figures(self) -> dict[str, float]:
        """For /metrics."""
        return {
            "balancer_moves_total": self.moves,
            "balancer_splits_total": self._splitting.made,
            "balancer_resting_bundles": len(self._rests),
            "balancer_unseen_moves": len(self._unseen),
            "balancer_spread": round(self.spread, 4),
            "balancer_mean_load": round(self.mean, 4),
        }

    def check(self) -> None:
        """Asserts the invariants; tests call it after every round."""
        for streaks in (self._above, self._below, self._full):
            streaks.check()
        self._unseen.check()
        self._splitting.check()

"""Moves of bundles: where each may go in a round, what is cheap to move, and those that reports do not show yet.

Every move of a round satisfies these; `_move` asserts most of them:

* its bundle is owned by its source, does not rest, and there is no request about it;
* its destination is ready and has room; it is not worse for the namespace than the source, unless that is overloaded;
* both brokers have had fewer than `max_moves_per_broker` moves, and the round fewer than its budget.

The ways of choosing (`Moves.shed`, `fill`, `prefer`, `unfill`) add what makes each of them end: `shed` leaves the
destination below what the source had, `fill` leaves the source above the destination, so either lowers the spread.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..settings import BalanceSettings
from .facts import Move, NamespaceBinding, bundle_range, namespace_of
from .survey import NEVER, SLICE_ROWS, ClusterSurvey, ReadyBroker

# A bundle of less is not worth the stall of its topics.
MIN_SHARE = 0.001
# Brokers that are asked for a bundle on behalf of one that has too little.
_SOURCES_TRIED = 20


class Rests:
    """Bundles that were moved or split a moment ago: neither they nor parts of them are moved or split again.

    By namespace, since a part of a resting bundle is found by its range.
    """

    def __init__(self) -> None:
        self._until: dict[str, dict[str, float]] = {}  # namespace -> bundle -> end of its rest

    def __len__(self) -> int:
        return sum(map(len, self._until.values()))

    def rest(self, bundle: str, until: float) -> None:
        """From now on until that time, or as long as it rests anyway."""
        resting = self._until.setdefault(namespace_of(bundle), {})
        resting[bundle] = max(until, resting.get(bundle, until))

    def resting(self, bundle: str, now: float) -> bool:
        """Whether it, or a bundle that it was part of, rests."""
        resting = self._until.get(namespace_of(bundle))
        if not resting:
            return False
        if (until := resting.get(bundle)) is not None:
            return now < until
        first, last = bundle_range(bundle)
        return any(
            now < until and begin <= first and last <= end
            for one, until in resting.items()
            for begin, end in (bundle_range(one),)
        )

    def forget_ended(self, now: float) -> None:
        """Those whose rest has ended."""
        for namespace, resting in list(self._until.items()):
            left = {bundle: until for bundle, until in resting.items() if now < until}
            if left:
                self._until[namespace] = left
            else:
                del self._until[namespace]


@dataclass(slots=True)
class _Unseen:
    move: Move
    topics: int
    decided_at: float
    done_at: float | None = None


class UnseenMoves:
    """Moves that were decided and that the brokers' reports do not show yet; as many as within a few minutes.

        decided ──the owner is the destination──> done ──load_settle_s──> seen: the reports alone count
           └──the request is gone, the owner the same, load_settle_s over──> impossible: forgotten

    Until then the bundle counts at neither broker when that is judged as a source, and at both when they are destinations.
    """

    def __init__(self, settings: BalanceSettings) -> None:
        self._settings = settings
        self._moves: dict[str, _Unseen] = {}  # by bundle

    def __len__(self) -> int:
        return len(self._moves)

    def add(self, move: Move, topics: int, now: float) -> None:
        """Was decided now."""
        self._moves[move.bundle] = _Unseen(move, topics, now)

    def apply(self, survey: ClusterSurvey, now: float) -> None:
        """Forgets what is seen or impossible, and changes the survey's brokers by the others."""
        by_name = survey.ready.by_name
        for bundle, unseen in list(self._moves.items()):
            if self._over(unseen, survey, now):
                del self._moves[bundle]
                continue
            move = unseen.move
            if (source := by_name.get(move.source)) is not None:
                source.leaves(move.share, unseen.topics)
            if (to := by_name.get(move.to)) is not None:
                to.comes(move.share, unseen.topics)

    def _over(self, unseen: _Unseen, survey: ClusterSurvey, now: float) -> bool:
        move, settle_s = unseen.move, self._settings.load_settle_s
        owner = survey.owner_of.get(move.bundle)
        if owner == move.to and unseen.done_at is None:
            unseen.done_at = now
        if unseen.done_at is not None:
            return owner != move.to or now - unseen.done_at >= settle_s
        if owner not in (None, move.source):
            return True  # somebody else took it
        waiting = move.bundle in survey.requested
        return not waiting and now - unseen.decided_at >= settle_s

    def check(self) -> None:
        """Asserts the invariants; tests call it after every round."""
        for bundle, unseen in self._moves.items():
            assert unseen.move.bundle == bundle
            assert unseen.done_at is None or unseen.done_at >= unseen.decided_at


class Moves:
    """Of one round, on a survey that was read and adjusted."""

    def __init__(
        self,
        survey: ClusterSurvey,
        settings: BalanceSettings,
        rests: Rests,
        unseen: UnseenMoves,
        stable: Callable[[str], bool],
        now: float,
    ) -> None:
        """`stable`: whether a broker has been ready for long enough for bundles to return to it."""
        self.made = 0
        self._survey = survey
        self._settings = settings
        self._rests = rests
        self._unseen = unseen
        self._stable = stable
        self._now = now
        self._budget = max(settings.max_moves_per_round - len(survey.snapshot.requested), 0)
        self._cheapest: dict[str, list[tuple[str, float]]] = {}  # by source
        self._least: dict[tuple[NamespaceBinding, int, bool], list[ReadyBroker]] = {}

    # --- ways of choosing ----------------------------------------------------------------------------------------------

    def shed(self, source: ReadyBroker, mean: float, reason: str) -> Iterator[Move]:
        """Until a broker above the mean is above it by half the threshold at most."""
        half = self._settings.shed_threshold / 2
        for bundle, share in self._cheapest_of(source):
            if source.least_cpu <= mean + half or not self._may_move(source):
                return
            if source.least_cpu - share < mean - half or not self._movable(bundle):
                continue
            to = self._relief(bundle, share, source, mean)
            if to is not None:
                yield self._move(bundle, share, source, to, reason)

    def too_large(self, source: ReadyBroker, mean: float) -> str | None:
        """The bundle of which half could be moved from a broker above the mean, although the whole cannot."""
        found = max(self._cheapest_of(source), key=lambda one: one[1], default=None)
        if (
            found is None
            or found[0] in self._survey.requested
            or self._relief(found[0], found[1] / 2, source, mean) is None
        ):
            return None
        return found[0]

    def _relief(self, bundle: str, share: float, source: ReadyBroker, mean: float) -> ReadyBroker | None:
        """Who may take that much of a bundle from a broker above the mean."""
        threshold = self._settings.shed_threshold
        worst = NEVER - 1 if source.least_cpu > self._settings.overload else self._tier(source, bundle)
        # Where all that the bundle may have are above the mean, a real difference counts.
        return self._destination(
            bundle, share, source, worst, max(mean + threshold / 2, source.least_cpu - threshold)
        )

    def fill(
        self, to: ReadyBroker, sources: Sequence[ReadyBroker], mean: float, reason: str
    ) -> Iterator[Move]:
        """From the busiest of the sources, until a broker below the mean is below it by half the threshold at most."""
        enough = mean - self._settings.shed_threshold / 2
        heap = [(-one.least_cpu, one.facts.name) for one in sources if one is not to and self._may_move(one)]
        heapq.heapify(heap)
        tried = 0
        by_name = self._survey.ready.by_name
        while heap and to.cpu < enough and self._may_move(to) and tried < _SOURCES_TRIED:
            source = by_name[heapq.heappop(heap)[1]]
            if source.least_cpu <= mean:
                return
            move = self._one_for(to, source, mean, reason)
            if move is None:
                tried += 1
                continue
            yield move
            if self._may_move(source):
                heapq.heappush(heap, (-source.least_cpu, source.facts.name))

    def _one_for(self, to: ReadyBroker, source: ReadyBroker, mean: float, reason: str) -> Move | None:
        most = min(mean - to.cpu, (source.least_cpu - to.cpu) / 2)
        ready = self._survey.ready
        for bundle, share in self._cheapest_of(source):
            if share > most or not self._movable(bundle):
                continue
            binding = self._survey.binding_of(bundle)
            if ready.tier(to.facts.name, binding) > ready.tier(source.facts.name, binding):
                continue
            if ready.has_room(to, self._survey.topics_of(bundle)):
                return self._move(bundle, share, source, to, reason)
        return None

    def prefer(self, most_moves: int) -> Iterator[Move | None]:
        """Bundles of bound namespaces, to brokers that the namespace prefers to their owners. None: a slice is done."""
        survey, settings = self._survey, self._settings
        bindings = survey.snapshot.bindings
        if not bindings:
            return
        until = self.made + most_moves
        for number, (bundle, owner) in enumerate(survey.owner_of.items(), 1):
            if number % SLICE_ROWS == 0:
                yield None
            if self.made >= until:
                return
            source = survey.ready.by_name.get(owner)
            if namespace_of(bundle) not in bindings or source is None:
                continue
            tier = self._tier(source, bundle)
            if tier == 0 or not self._may_move(source) or not self._movable(bundle):
                continue
            share = survey.share_of(bundle)
            most = float("inf") if tier == NEVER else settings.overload - settings.shed_threshold
            to = self._destination(bundle, share, source, tier - 1, most, stable=True)
            if to is not None:
                where = "may not have it" if tier == NEVER else "is not what its namespace prefers"
                yield self._move(bundle, share, source, to, f"{owner} {where}")

    def unfill(self, source: ReadyBroker, reason: str) -> Iterator[Move]:
        """The idlest bundles of a broker that has too many bundles or topics."""
        survey, settings = self._survey, self._settings
        for bundle in sorted(survey.owned_by[source.facts.name], key=survey.share_of):
            too_many = (
                source.least_bundles > settings.max_bundles or source.least_topics > settings.max_topics
            )
            if not too_many or not self._may_move(source):
                return
            if source.least_bundles <= settings.max_bundles and not survey.topics_of(bundle):
                continue
            if self._movable(bundle):
                share = survey.share_of(bundle)
                to = self._destination(
                    bundle,
                    share,
                    source,
                    self._tier(source, bundle),
                    max(settings.overload, source.least_cpu),
                )
                if to is not None:
                    yield self._move(bundle, share, source, to, reason)

    # --- what they share -----------------------------------------------------------------------------------------------

    def _tier(self, source: ReadyBroker, bundle: str) -> int:
        return self._survey.ready.tier(source.facts.name, self._survey.binding_of(bundle))

    def _may_move(self, broker: ReadyBroker) -> bool:
        return self.made < self._budget and broker.moves < self._settings.max_moves_per_broker

    def _movable(self, bundle: str) -> bool:
        return bundle not in self._survey.requested and not self._rests.resting(bundle, self._now)

    def _cheapest_of(self, source: ReadyBroker) -> list[tuple[str, float]]:
        """Its bundles, those first of which few topics stall for much of a core."""
        name = source.facts.name
        found = self._cheapest.get(name)
        if found is None:
            survey = self._survey
            shares = [(bundle, survey.share_of(bundle)) for bundle in survey.owned_by[name]]
            found = [one for one in shares if one[1] >= MIN_SHARE]
            found.sort(key=lambda one: ((survey.topics_of(one[0]) + 1) / one[1], one[0]))
            self._cheapest[name] = found
        return found

    def _destination(
        self, bundle: str, share: float, source: ReadyBroker, worst: int, most: float, *, stable: bool = False
    ) -> ReadyBroker | None:
        """The least loaded broker of the best tier, up to `worst`, that has at most `most` of a core afterwards."""
        survey = self._survey
        binding, topics = survey.binding_of(bundle), survey.topics_of(bundle)
        for tier in range(min(worst, NEVER - 1) + 1):
            for one in self._least_loaded(binding, tier, stable):
                if one is not source and one.cpu + share <= most and survey.ready.has_room(one, topics):
                    return one
        return None

    def _least_loaded(self, binding: NamespaceBinding, tier: int, stable: bool) -> list[ReadyBroker]:
        """The two least loaded brokers with room, of which one may be the source. Any move makes them anew."""
        key = (binding, tier, stable)
        found = self._least.get(key)
        if found is None:
            ready = self._survey.ready
            found = self._least[key] = heapq.nsmallest(
                2,
                (
                    one
                    for one in ready.tiers(binding)[tier]
                    if self._may_move(one)
                    and ready.has_room(one)
                    and (not stable or self._stable(one.facts.name))
                ),
                key=lambda one: one.cpu,
            )
        return found

    def _move(self, bundle: str, share: float, source: ReadyBroker, to: ReadyBroker, reason: str) -> Move:
        survey, topics = self._survey, self._survey.topics_of(bundle)
        assert survey.owner_of[bundle] == source.facts.name
        assert source is not to
        assert self._may_move(source)
        assert self._may_move(to)
        assert self._movable(bundle)
        source.leaves(share, topics)
        to.comes(share, topics)
        source.moves += 1
        to.moves += 1
        self.made += 1
        self._least.clear()
        survey.requested[bundle] = None
        self._rests.rest(bundle, self._now + self._settings.move_cooldown_s)
        move = Move(bundle, source.facts.name, to.facts.name, share, reason)
        self._unseen.add(move, topics, self._now)
        return move

"""Which bundles are split, because they are too busy to be moved whole.

    quiet ──above a limit──> hot ──for `shed_rounds` rounds──> split, then its parts rest (`rests`)
      ^                       │
      └────────below──────────┘

A bundle of one topic is never split: that topic would be as hot as before. Nor is one whose namespace has
`max_bundles_per_namespace` bundles, or whose range is one hash. So a hot topic among N is alone after log2(N) splits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from ..settings import BalanceSettings
from .facts import BundleLoad, Split, bundle_range, namespace_of
from .rests import Rests


class Splitting:
    """Counts rounds; `found` is one round's."""

    def __init__(self, settings: BalanceSettings, rests: Rests) -> None:
        self._settings = settings
        self._rests = rests  # of moves: the parts of what was moved or split are not moved at once
        self._split_rests = Rests()  # a bundle that was moved may be split, one that was split may not
        self._hot: dict[str, int] = {}  # bundle -> rounds running in which it was above a limit

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

    def round(
        self,
        hot: Mapping[str, tuple[BundleLoad, str]],
        owner_of: Mapping[str, str],
        requested: Mapping[str, None],
        now: float,
    ) -> Iterator[Split]:
        """`hot`: bundles above a limit, with the limit. `requested`: about which there is a request already."""
        self._split_rests.forget_ended(now)
        self._hot = {bundle: self._hot.get(bundle, 0) + 1 for bundle in hot}
        count = 0
        counts: dict[str, int] | None = None
        for bundle, (load, reason) in hot.items():
            if count >= self._settings.max_splits_per_round:
                return
            if self._hot[bundle] < self._settings.shed_rounds or bundle in requested:
                continue
            if counts is None:
                counts = self._bundle_counts(hot, owner_of, requested)
            if self.may_split(load, counts.get(namespace_of(bundle), 0), now):
                count += 1
                counts[namespace_of(bundle)] += 1
                yield self.split(load, owner_of[bundle], reason, now)

    def split_one(
        self,
        load: BundleLoad,
        reason: str,
        owner_of: Mapping[str, str],
        requested: Mapping[str, None],
        now: float,
    ) -> Split | None:
        """A bundle that is too large for another reason, if it may be split."""
        counts = self._bundle_counts([load.bundle], owner_of, requested)
        if load.bundle in requested or not self.may_split(load, counts[namespace_of(load.bundle)], now):
            return None
        return self.split(load, owner_of[load.bundle], reason, now)

    def may_split(self, load: BundleLoad, bundles_of_namespace: int, now: float) -> bool:
        """Whether a split would help and is allowed."""
        first, last = bundle_range(load.bundle)
        return (
            load.topics > 1
            and first < last
            and bundles_of_namespace < self._settings.max_bundles_per_namespace
            and not self._split_rests.resting(load.bundle, now)
        )

    def split(self, load: BundleLoad, broker: str, reason: str, now: float) -> Split:
        """It and its parts rest until the parts have been seen for as long as anything is before it is judged.

        That is shorter than after a move: no topic notices a split, and what is too hot may need several.
        """
        until = now + self._settings.shed_rounds * self._settings.balance_interval_s
        self._split_rests.rest(load.bundle, until)
        self._rests.rest(load.bundle, until)
        self._hot.pop(load.bundle, None)
        return Split(load.bundle, broker, reason)

    @staticmethod
    def _bundle_counts(
        hot: Iterable[str], owner_of: Mapping[str, str], requested: Mapping[str, None]
    ) -> dict[str, int]:
        """By namespace. A request may be a split that has not been carried out: it counts as one more."""
        counts = dict.fromkeys(map(namespace_of, hot), 0)
        for bundle in chain(owner_of, requested):
            namespace = namespace_of(bundle)
            if namespace in counts:
                counts[namespace] += 1
        return counts

    def check(self) -> None:
        """Asserts the invariants; tests call it after every round."""
        assert all(rounds > 0 for rounds in self._hot.values())

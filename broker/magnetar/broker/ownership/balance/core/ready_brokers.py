"""Brokers as destinations: which ones a namespace may have, in which order of preference, and which have room.

Tiers of a broker for a namespace that is bound to brokers and prefers a zone; lower is better:

    bound   zone    tier
    yes     yes     0
    yes     no      1
    no      yes     2         \
    no      no      3         / NEVER if the binding is strict
    a dedicated group that the namespace is not bound to: NEVER

A namespace without patterns and groups is bound to every broker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..settings import BalanceSettings
from .facts import READY, BrokerFacts, NamespaceBinding

NEVER = 4


@dataclass(slots=True, eq=False)
class ReadyBroker:
    """A ready broker. What comes to it or leaves it may be in its report already, or not yet: so it has bounds.

    least_cpu <= its load when all that was decided is done <= cpu; the same for bundles and topics. A destination is
    judged by the upper bounds, a source by the lower ones: a report of the wrong moment never makes a move look right.
    """

    facts: BrokerFacts
    cpu: float  # as reported, and all that comes
    bundles: int
    topics: int
    least_cpu: float  # as reported, without all that leaves
    least_bundles: int
    least_topics: int
    moves: int = 0  # of this round, from it and to it

    @classmethod
    def of(cls, broker: BrokerFacts) -> ReadyBroker:
        """As reported."""
        cpu, bundles, topics = broker.cpu, broker.bundles, broker.topics
        return cls(broker, cpu, bundles, topics, cpu, bundles, topics)

    def comes(self, share: float, topics: int) -> None:
        """A bundle."""
        self.cpu += share
        self.bundles += 1
        self.topics += topics

    def leaves(self, share: float, topics: int) -> None:
        """A bundle."""
        self.least_cpu = max(self.least_cpu - share, 0.0)
        self.least_bundles = max(self.least_bundles - 1, 0)
        self.least_topics = max(self.least_topics - topics, 0)


def tier_of(broker: BrokerFacts, binding: NamespaceBinding, dedicated_groups: Sequence[str]) -> int:
    """See the module."""
    in_group = bool(broker.group) and broker.group in binding.groups
    if broker.group and broker.group in dedicated_groups and not in_group:
        return NEVER
    anywhere = not binding.brokers and not binding.groups
    bound = anywhere or in_group or any(fnmatchcase(broker.name, pattern) for pattern in binding.brokers)
    if not bound and binding.strict:
        return NEVER
    zone = not binding.zones or broker.zone in binding.zones
    return (0 if bound else 2) + (0 if zone else 1)


class ReadyBrokers:
    """The ready brokers of one moment, by namespace binding. Bindings are few: a hundred namespaces share one."""

    def __init__(self, brokers: Iterable[BrokerFacts], settings: BalanceSettings) -> None:
        self._settings = settings
        self.by_name = {one.name: ReadyBroker.of(one) for one in brokers if one.state == READY}
        self._tiers: dict[NamespaceBinding, tuple[list[ReadyBroker], ...]] = {}
        self._tier_of: dict[NamespaceBinding, dict[str, int]] = {}

    def tiers(self, binding: NamespaceBinding) -> tuple[list[ReadyBroker], ...]:
        """The brokers of tiers 0 to 3, by name."""
        found = self._tiers.get(binding)
        if found is None:
            found = tuple([] for _ in range(NEVER))
            for name in sorted(self.by_name):
                tier = self.tier(name, binding)
                if tier < NEVER:
                    found[tier].append(self.by_name[name])
            self._tiers[binding] = found
        return found

    def tier(self, name: str, binding: NamespaceBinding) -> int:
        """Of a ready broker."""
        known = self._tier_of.setdefault(binding, {})
        tier = known.get(name)
        if tier is None:
            tier = known[name] = tier_of(self.by_name[name].facts, binding, self._settings.dedicated_groups)
        return tier

    def has_room(self, broker: ReadyBroker, topics: int = 0) -> bool:
        """Whether one more bundle with so many topics fits into its limits."""
        limits = self._settings
        return (
            broker.bundles < limits.max_bundles
            and broker.topics + max(topics, 1) <= limits.max_topics
            and broker.facts.connections < limits.max_connections
        )

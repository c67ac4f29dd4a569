"""What a decision looks at: the brokers as destinations, who owns what, and what share of a core each bundle costs.

Tiers of a broker for a namespace that is bound to a group and prefers a zone; lower is better:

    bound   zone    tier
    yes     yes     0
    yes     no      1
    no      yes     2         \
    no      no      3         / NEVER if the binding is strict
    a dedicated group that the namespace is not bound to: NEVER

A namespace without a group is bound to every broker.

A bundle's cost is its part of its broker's processor time, by weight: messages, and kilobytes, a second. Every bundle
counts once, at its owner, however many reports name it: the report of the owner counts, else that of the broker which had
it before. The cost of a unit of weight is bounded by three times the median of all brokers, so that a broker whose
processor is busy with something else does not make its few messages look expensive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..settings import BalanceSettings
from .facts import READY, UNBOUND, BrokerFacts, BundleLoad, ClusterSnapshot, NamespaceBinding, namespace_of

NEVER = 4
# Rows that are looked at in one turn of the loop: 2,000 take 2 to 4 ms (measured).
SLICE_ROWS = 2_000
_BYTES_OF_A_MESSAGE = 1_000.0  # so many bytes cost about what handling one more message does
_MOST_TIMES_THE_USUAL = 3.0


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
    """Of a broker for a namespace; see the module."""
    bound = binding.group in ("", broker.group)
    if broker.group in dedicated_groups and binding.group != broker.group:
        return NEVER
    if not bound and binding.strict:
        return NEVER
    return (0 if bound else 2) + (0 if binding.zone in ("", broker.zone) else 1)


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


def weight_of(load: BundleLoad) -> float:
    """Of a bundle, relative to others."""
    size = load.bytes_in + load.bytes_out
    return load.messages_in + load.messages_out + size / _BYTES_OF_A_MESSAGE


class ClusterSurvey:
    """`read` it to the end, then look. Brokers that are not registered own nothing, whatever their nodes say."""

    def __init__(self, snapshot: ClusterSnapshot, settings: BalanceSettings) -> None:
        self.snapshot = snapshot
        self._cooldown_s = settings.move_cooldown_s
        self.ready = ReadyBrokers(snapshot.brokers, settings)
        self.owner_of: dict[str, str] = {}  # bundle -> a registered broker, ready or not
        self.owned_by: dict[str, list[str]] = {}  # the same by broker
        self.requested: dict[str, None] = {}  # bundles about which there is a request, or that are moving
        self.moved: dict[str, float] = {}  # bundle -> seconds since it was moved, within `move_cooldown_s`
        self.load_of: dict[str, BundleLoad] = {}  # of bundles that somebody reported
        self._former: dict[str, str] = {}  # bundle -> broker that reported it, where that is not the owner
        self._unit_share: dict[str, float] = {}  # broker -> share of a core that a unit of weight costs there
        self._usual_share = 0.0

    def read(self) -> Iterator[None]:
        """Yields after every `SLICE_ROWS` rows."""
        snapshot = self.snapshot
        registered = {one.name: one for one in snapshot.brokers}
        self.owned_by = {name: [] for name in registered}
        for number, owner in enumerate(snapshot.owners, 1):
            bundle, broker = owner.bundle, owner.broker
            if broker in registered:
                self.owner_of[bundle] = broker
                self.owned_by[broker].append(bundle)
            if owner.to:
                self.requested[bundle] = None
            if 0 <= owner.moved_ago_s < self._cooldown_s:
                self.moved[bundle] = owner.moved_ago_s
            if number % SLICE_ROWS == 0:
                yield None
        self.requested.update(dict.fromkeys(snapshot.requested))
        weights: dict[str, float] = {}
        read = 0
        for broker, rows in snapshot.reports.items():
            if broker in registered:
                weights[broker] = self._read_report(broker, rows)
            read += len(rows)
            if read >= SLICE_ROWS:
                read = 0
                yield None
        shares = {name: registered[name].cpu / weight for name, weight in weights.items() if weight >= 1}
        self._usual_share = sorted(shares.values())[len(shares) // 2] if shares else 0.0
        most = _MOST_TIMES_THE_USUAL * self._usual_share
        self._unit_share = {name: min(share, most) for name, share in shares.items()}

    def _read_report(self, broker: str, rows: Iterable[BundleLoad]) -> float:
        """Takes the rows in, and says what they weigh together."""
        owner_of, load_of, former = self.owner_of, self.load_of, self._former
        total = 0.0
        for row in rows:
            bundle = row.bundle
            total += weight_of(row)
            if owner_of.get(bundle) == broker:
                load_of[bundle] = row
                former.pop(bundle, None)
            elif bundle not in load_of and bundle in owner_of:
                load_of[bundle] = row
                former[bundle] = broker
        return total

    def share_of(self, bundle: str) -> float:
        """Of a core that the bundle costs, as estimated; 0 for one that nobody reported."""
        load = self.load_of.get(bundle)
        if load is None:
            return 0.0
        reporter = self._former.get(bundle) or self.owner_of[bundle]
        return weight_of(load) * self._unit_share.get(reporter, self._usual_share)

    def topics_of(self, bundle: str) -> int:
        """As reported; 0 if nobody did."""
        load = self.load_of.get(bundle)
        return 0 if load is None else load.topics

    def binding_of(self, bundle: str) -> NamespaceBinding:
        """Of the bundle's namespace."""
        bindings = self.snapshot.bindings
        return bindings.get(namespace_of(bundle), UNBOUND) if bindings else UNBOUND

    def check(self) -> None:
        """Asserts the invariants of a survey that was read."""
        assert sum(map(len, self.owned_by.values())) == len(self.owner_of), "a bundle has one owner"
        assert self.load_of.keys() <= self.owner_of.keys()
        assert self._former.keys() <= self.load_of.keys()

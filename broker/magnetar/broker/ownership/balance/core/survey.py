"""One round's picture of the cluster: who owns what, and what share of a core each bundle costs.

A bundle's cost is its part of its broker's processor time, by weight: messages, and kilobytes, a second. Every bundle
counts once, at its owner, however many reports name it: the report of the owner counts, else that of the broker which had
it before. The cost of a unit of weight is bounded by three times the median of all brokers, so that a broker whose
processor is busy with something else does not make its few messages look expensive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..settings import BalanceSettings
from .facts import UNBOUND, BundleLoad, ClusterSnapshot, NamespaceBinding, namespace_of
from .ready_brokers import ReadyBrokers

# Rows that are looked at in one turn of the loop: 2,000 take 2 to 4 ms (`python -m bench balance`).
SLICE_ROWS = 2_000
_BYTES_OF_A_MESSAGE = 1_000.0  # so many bytes cost about what handling one more message does
_MOST_TIMES_THE_USUAL = 3.0


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
        self.requested.update((transfer.bundle, None) for transfer in snapshot.transfers)
        weights: dict[str, float] = {}
        rows = 0
        for report in snapshot.reports:
            if report.broker in registered:
                weights[report.broker] = self._read_report(report.broker, report.rows)
            rows += len(report.rows)
            if rows >= SLICE_ROWS:
                rows = 0
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

"""A broker's part in the balance of its cluster: what it reports, what it decides when it is elected, and placement.

`balance` works with rows of plain numbers; here they are read from the cluster's nodes, and written to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from bisect import bisect_right
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from magnetar.metadata import MetadataStore, Session
from magnetar.proto.errors import AlreadyExists, DataDirectoryError, InvalidArgument, MagnetarError
from magnetar.runtime.clock import Clock
from magnetar.runtime.tasks import LongTask

from .balance.core.facts import UNBOUND, BrokerFacts, BundleOwner, NamespaceBinding, Transfer
from .balance.core.placement import BundlePlacement
from .balance.leader import BalanceLeader
from .balance.loads import BundleCounters, LoadReporter, Rates
from .balance.settings import BalanceSettings
from .cluster_view import ClusterView
from .core.bundles import HASHES, Bundle, topic_hash
from .ownership import Host
from .records import DRAINING, BrokerLoad, TransferRecord, transfer_path

_log = logging.getLogger(__name__)

_METADATA_TIMEOUT_S = 10.0
_RETRY_S, _RETRY_MAX_S = 1.0, 4.0
# Of a namespace whose policies cannot be read.
_NOWHERE = NamespaceBinding(zones=(), groups=("",), strict=True)


class Placement:
    """Chooses brokers for bundles that nobody owns."""

    def __init__(self, view: ClusterView, settings: BalanceSettings, rng: random.Random) -> None:
        self._view = view
        self._placement = BundlePlacement(settings, rng)

    async def choose(self, bundle: Bundle, excluded: str = "") -> str | None:
        """The name of a broker, None if no one takes it; `excluded` is one that is not asked for."""
        facts = await broker_facts(self._view)
        now = asyncio.get_running_loop().time()
        self._placement.update(facts, now)
        binding = await self._view.binding(bundle.namespace)
        counted = self._view.has_bounds(bundle.namespace)
        return self._placement.place(str(bundle), binding, now, exclude=excluded, counted=counted)


class Loads:
    """What this broker serves, by bundle."""

    def __init__(
        self, host: Callable[[], Host], owned: Callable[[], list[Bundle]], cpu_s: Callable[[], float]
    ) -> None:
        """`cpu_s`: of this process until now, in seconds."""
        self._host = host
        self._owned = owned
        self._cpu_s = cpu_s
        self._rates = Rates()
        self._cpu_before: tuple[float, float] | None = None

    def counters(self) -> Iterable[BundleCounters]:
        """See balance.loads.LoadSource."""
        bundles = sorted(self._owned())
        sums = [[0, 0, 0, 0, 0] for _ in bundles]
        for topic in self._host().counters():
            # The last bundle that begins at the topic's hash or before: not those of all topics for each bundle.
            at = bisect_right(bundles, (topic.name.full_namespace, topic_hash(topic.name), HASHES)) - 1
            if at >= 0 and bundles[at].holds(topic.name):
                one = sums[at]
                one[0] += 1
                for place, value in enumerate(topic[1:], 1):
                    one[place] += value
        return [BundleCounters(str(bundle), *one) for bundle, one in zip(bundles, sums)]

    def broker_load(self) -> BrokerLoad:
        """Since it was asked for last."""
        now = asyncio.get_running_loop().time()
        counters = list(self.counters())
        rows = self._rates.look(counters, now)
        cpu_s = self._cpu_s()
        before, self._cpu_before = self._cpu_before, (now, cpu_s)
        cpu = 0.0 if before is None or now <= before[0] else (cpu_s - before[1]) / (now - before[0])
        return BrokerLoad(
            cpu=_two_digits(cpu),
            bundles=len(rows),
            topics=sum(row.topics for row in rows),
            connections=int(_two_digits(len(self._host().connections))),
            messages_in=_two_digits(sum(row.messages_in for row in rows)),
            messages_out=_two_digits(sum(row.messages_out for row in rows)),
            bytes_in=_two_digits(sum(row.bytes_in for row in rows)),
            bytes_out=_two_digits(sum(row.bytes_out for row in rows)),
        )


class Balancing:
    """`ClusterFacts` for the leader. `serve` it under the broker's session; cancelled, it stops."""

    def __init__(
        self,
        metadata: MetadataStore,
        view: ClusterView,
        loads: Loads,
        settings: BalanceSettings,
        rng: random.Random,
        broker: str,
        on_load: Callable[[BrokerLoad], None],
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._metadata = metadata
        self._view = view
        self._loads = loads
        self._on_load = on_load
        self._load_interval_s = settings.report_interval_s / 2
        self._leader = BalanceLeader(metadata, self, settings, broker, _METADATA_TIMEOUT_S)
        self._reporter = LoadReporter(metadata, loads, settings, rng, broker, _METADATA_TIMEOUT_S)

    async def serve(self, session: Session) -> None:
        """Until this is cancelled, as whoever holds the session does when it is lost."""
        parts = {
            "the balance of the cluster": self._leader.serve,
            "the report of bundles": self._reporter.serve,
            "the report of the broker's load": self._report_load,
        }
        tasks = [
            LongTask(name, partial(_again, serve, session), retry_max_s=_RETRY_MAX_S)
            for name, serve in parts.items()
        ]
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.gather(*(task.close() for task in tasks))

    async def _report_load(self, session: Session) -> None:
        while not session.lost:
            self._on_load(self._loads.broker_load())
            await asyncio.sleep(self._load_interval_s)

    def figures(self) -> dict[str, float]:
        """For /metrics."""
        return self._leader.figures()

    # --- ClusterFacts ------------------------------------------------------------------------------------------------

    async def brokers(self) -> list[BrokerFacts]:
        return await broker_facts(self._view)

    async def owners(self) -> list[BundleOwner]:
        owners = await self._view.all_owners()
        now_ms = self._clock.now_ms()
        return [
            BundleOwner(
                str(bundle),
                owner.record.broker,
                owner.record.to,
                (now_ms - owner.record.moved_ms) / 1000,
            )
            for bundle, owner in owners.items()
            if not owner.damage
        ]

    async def transfers(self) -> list[Transfer]:
        asked = await self._view.transfers.get()
        return [Transfer(str(bundle), known.record.to) for bundle, known in asked.items()]

    async def bindings(self) -> Mapping[str, NamespaceBinding]:
        found = {}
        for namespace in self._view.namespaces():
            try:
                binding = await self._view.binding(namespace)
            except (DataDirectoryError, InvalidArgument) as error:
                _log.warning("bundles of namespace %s stay where they are: %s", namespace, error)
                binding = _NOWHERE
            if binding != UNBOUND:
                found[namespace] = binding
        return found

    async def request(self, bundle: str, *, to: str, split: bool, reason: str) -> bool:
        record = TransferRecord(to, split, reason)
        with contextlib.suppress(AlreadyExists):
            await self._metadata.create(transfer_path(Bundle.parse(bundle)), record.encode())
            return True
        return False


async def _again(serve: Callable[[Session], Coroutine[Any, Any, None]], session: Session) -> None:
    while not session.lost:
        try:
            await serve(session)
        except MagnetarError:
            if not session.lost:
                raise
        await asyncio.sleep(_RETRY_S)
    await asyncio.Event().wait()


async def broker_facts(view: ClusterView) -> list[BrokerFacts]:
    """Of all brokers of a cluster."""
    draining = await view.draining.get()
    return [
        BrokerFacts(
            row.name,
            row.zone,
            DRAINING if row.name in draining else row.state,
            row.load.cpu,
            row.load.bundles,
            row.load.topics,
            row.load.connections,
            row.group,
            xxh3_64_intdigest(msgspec.msgpack.encode(row.load)),
        )
        for row in (await view.brokers.get()).values()
    ]


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")

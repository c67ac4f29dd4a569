"""The elected balancer: reads the cluster, runs `core.shedding`, and requests what it decides.

    /balancer        ephemeral: the name of the broker that balances

A request is made only while the session holds. One that is under way when the session ends does no harm: the owner of the
bundle verifies requests, and makes them one after another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from magnetar.metadata.election import elected
from magnetar.metadata.store import MetadataStore, Session
from magnetar.metadata.timed import TimedStore, metadata_in_time
from magnetar.proto.errors import DataDirectoryError, MagnetarError

from ..records import BALANCER_PATH
from .core.facts import (
    BrokerFacts,
    BundleLoad,
    BundleOwner,
    BundleReport,
    ClusterSnapshot,
    Decision,
    Move,
    NamespaceBinding,
    Transfer,
)
from .core.shedding import BalancerCore
from .records import BUNDLE_LOADS_PATH, bundle_loads_path, decode_bundle_loads
from .settings import BalanceSettings

_log = logging.getLogger(__name__)
T = TypeVar("T")
# Reports that are read at a time: each may be a few hundred kilobytes.
_READS_AT_A_TIME = 32


class ClusterFacts(Protocol):
    """Nodes that others define. Each call may raise what a MetadataStore raises."""

    async def brokers(self) -> list[BrokerFacts]:
        """Below `/brokers`; one that stands in `/draining-brokers` has the state "draining"."""
        ...

    async def owners(self) -> list[BundleOwner]:
        """Below `/owners`. There may be 100,000, and they are asked for in every round: best followed by watches."""
        ...

    async def transfers(self) -> list[Transfer]:
        """Below `/transfers`."""
        ...

    async def bindings(self) -> Mapping[str, NamespaceBinding]:
        """Of namespaces that are bound to brokers or prefer a zone, by `tenant/namespace`."""
        ...

    async def request(self, bundle: str, *, to: str, split: bool, reason: str) -> bool:
        """Makes the bundle's node below `/transfers`. False if there is one: it is left alone."""
        ...


class BalanceLeader:
    """One contender. `serve` it under the broker's session, which its owner cancels when the session is lost."""

    def __init__(
        self,
        store: MetadataStore,
        facts: ClusterFacts,
        settings: BalanceSettings,
        broker: str,
        metadata_timeout_s: float,
    ) -> None:
        self.elected = False
        self.rounds = 0
        self._store = TimedStore(store, metadata_timeout_s)
        self._facts = facts
        self._settings = settings
        self._broker = broker
        self._timeout_s = metadata_timeout_s
        self._core = BalancerCore(settings)
        # Broker -> its report, as bytes and as rows.
        self._decoded: dict[str, tuple[bytes, list[BundleLoad]]] = {}

    async def serve(self, session: Session) -> None:
        """Contends, then holds a round each interval until the session is lost.

        Raises what the store raises, unless it may pass.
        """
        await elected(self._store, BALANCER_PATH, self._broker.encode(), session)
        self.elected = True
        self._core, self._decoded = BalancerCore(self._settings), {}
        _log.info("this broker balances the cluster (%s)", self._broker)
        try:
            while not session.lost:
                try:
                    await self._round(session)
                except MagnetarError as error:
                    if not error.retryable:
                        raise
                    _log.warning("a round of the balancer is held again later: %s", error)
                await asyncio.sleep(self._settings.balance_interval_s)
        finally:
            self.elected = False

    async def _in_time(self, work: Coroutine[Any, Any, T], what: str) -> T:
        return await metadata_in_time(work, self._timeout_s, what)

    async def _round(self, session: Session) -> None:
        snapshot = await self._read()
        for decision in self._core.round(snapshot, asyncio.get_running_loop().time()):
            if decision is None:
                await asyncio.sleep(0)
            elif session.lost:
                return
            else:
                await self._request(decision)
        self.rounds += 1

    async def _request(self, decision: Decision) -> None:
        moving = isinstance(decision, Move)
        to = decision.to if isinstance(decision, Move) else ""
        request = self._facts.request(decision.bundle, to=to, split=not moving, reason=decision.reason)
        made = await self._in_time(request, f"a request about {decision.bundle}")
        words = f"moves to {to}" if moving else "is split"
        if made:
            _log.info("bundle %s %s: %s", decision.bundle, words, decision.reason)
        else:
            _log.info(
                "bundle %s %s once its owner has done what is requested already: %s",
                decision.bundle,
                words,
                decision.reason,
            )

    async def _read(self) -> ClusterSnapshot:
        facts = self._facts
        brokers = await self._in_time(facts.brokers(), "the list of brokers")
        owners = await self._in_time(facts.owners(), "the owners of bundles")
        transfers = await self._in_time(facts.transfers(), "the requests about bundles")
        bindings = await self._in_time(facts.bindings(), "the bindings of namespaces")
        return ClusterSnapshot(brokers, owners, await self._reports(), transfers, bindings)

    async def _reports(self) -> list[BundleReport]:
        names = await self._store.children(BUNDLE_LOADS_PATH)
        self._decoded = {name: self._decoded[name] for name in names if name in self._decoded}
        reports: list[BundleReport] = []
        for first in range(0, len(names), _READS_AT_A_TIME):
            reports += filter(
                None, await asyncio.gather(*map(self._report, names[first : first + _READS_AT_A_TIME]))
            )
        return reports

    async def _report(self, name: str) -> BundleReport | None:
        path = bundle_loads_path(name)
        node = await self._store.get(path)
        if node is None:
            return None
        known = self._decoded.get(name)
        if known is None or known[0] != node.value:
            try:
                rows = decode_bundle_loads(node.value, path)
            except DataDirectoryError as error:
                _log.warning("the balancer does without the loads of %s: %s", name, error)
                return None
            known = self._decoded[name] = (node.value, rows)
        return BundleReport(name, known[1])

    def figures(self) -> dict[str, float]:
        """For /metrics: always the same names."""
        core = self._core if self.elected else BalancerCore(self._settings)
        return {"balancer_elected": int(self.elected), "balancer_rounds_total": self.rounds, **core.figures()}

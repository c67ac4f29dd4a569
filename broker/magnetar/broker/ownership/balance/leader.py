"""The elected balancer: reads the cluster, runs `core.balancer`, and requests what it decides.

    /balancer        ephemeral: the name of the broker that balances

A request is made only while the session holds. One that is under way when the session ends does no harm: the owner of the
bundle verifies requests, and makes them one after another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from magnetar.metadata.election import elected
from magnetar.metadata.store import MetadataStore, Session
from magnetar.proto.errors import AlreadyExists, DataDirectoryError, InvalidArgument, MagnetarError
from magnetar.runtime.clock import Clock

from ..cluster_view import ClusterView
from ..core.bundles import Bundle
from ..records import BALANCER_PATH, TransferRecord, transfer_path
from .core.balancer import BalancerCore
from .core.facts import UNBOUND, BundleLoad, BundleOwner, ClusterSnapshot, Decision, Move, NamespaceBinding
from .loads import BUNDLE_LOADS_PATH, bundle_loads_path, decode_bundle_loads
from .settings import BalanceSettings

_log = logging.getLogger(__name__)
# Reports that are read at a time: each may be a few hundred kilobytes.
_READS_AT_A_TIME = 32
# Of a namespace whose policies cannot be read; no broker is of this group.
_NOWHERE = NamespaceBinding(group="/", strict=True)


class BalanceLeader:
    """One contender. `serve` it under the broker's session, which its owner cancels when the session is lost."""

    def __init__(
        self, store: MetadataStore, view: ClusterView, settings: BalanceSettings, broker: str, clock: Clock
    ) -> None:
        self.elected = False
        self.rounds = 0
        self._store = store
        self._view = view
        self._settings = settings
        self._broker = broker
        self._clock = clock
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

    async def _round(self, session: Session) -> None:
        snapshot = await self.snapshot()
        for decision in self._core.round(snapshot, asyncio.get_running_loop().time()):
            if decision is None:
                await asyncio.sleep(0)
            elif session.lost:
                return
            else:
                await self._request(decision)
        self.rounds += 1

    async def _request(self, decision: Decision) -> None:
        """A node below `/transfers`. If there is one about the bundle, it is left alone."""
        moving = isinstance(decision, Move)
        to = decision.to if isinstance(decision, Move) else ""
        record = TransferRecord(to, not moving, decision.reason)
        words = f"moves to {to}" if moving else "is split"
        try:
            await self._store.create(transfer_path(Bundle.parse(decision.bundle)), record.encode())
        except AlreadyExists:
            words += " once its owner has done what is requested already"
        _log.info("bundle %s %s: %s", decision.bundle, words, decision.reason)

    async def snapshot(self) -> ClusterSnapshot:
        """The cluster as its nodes show it now."""
        view = self._view
        brokers = await view.broker_facts()
        owners, now_ms = await view.all_owners(), self._clock.now_ms()
        rows = [
            BundleOwner(str(bundle), one.record.broker, one.record.to, (now_ms - one.record.moved_ms) / 1000)
            for bundle, one in owners.items()
            if not one.damage
        ]
        requested = [str(bundle) for bundle in await view.transfers.get()]
        bindings = await self._bindings()
        return ClusterSnapshot(brokers, rows, await self._reports(), requested, bindings)

    async def _bindings(self) -> Mapping[str, NamespaceBinding]:
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

    async def _reports(self) -> Mapping[str, Sequence[BundleLoad]]:
        names = await self._store.children(BUNDLE_LOADS_PATH)
        self._decoded = {name: self._decoded[name] for name in names if name in self._decoded}
        for first in range(0, len(names), _READS_AT_A_TIME):
            await asyncio.gather(*map(self._read_report, names[first : first + _READS_AT_A_TIME]))
        return {name: rows for name, (_, rows) in self._decoded.items()}

    async def _read_report(self, name: str) -> None:
        path = bundle_loads_path(name)
        node = await self._store.get(path)
        known = self._decoded.get(name)
        if node is not None and known is not None and known[0] == node.value:
            return
        self._decoded.pop(name, None)
        if node is None:
            return
        try:
            self._decoded[name] = node.value, decode_bundle_loads(node.value, path)
        except DataDirectoryError as error:
            _log.warning("the balancer does without the loads of %s: %s", name, error)

    def figures(self) -> dict[str, float]:
        """For /metrics: always the same names."""
        core = self._core if self.elected else BalancerCore(self._settings)
        return {"balancer_elected": int(self.elected), "balancer_rounds_total": self.rounds, **core.figures()}

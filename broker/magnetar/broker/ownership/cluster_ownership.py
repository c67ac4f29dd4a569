"""Ownership in a cluster: the bundles that this broker holds, the requests that it carries out, its part in the balance."""

from __future__ import annotations

import random
from collections.abc import Callable

from magnetar.ledger.settings import LedgerSettings
from magnetar.metadata import MetadataStore, Session
from magnetar.metadata.timed import TimedStore
from magnetar.runtime.clock import Clock

from .administration import ClusterAdministration
from .balance import BalanceSettings
from .balance.balancing import Balancing
from .balance.loads import ServedLoads
from .bundle_ownership import BundleOwnership, OwnershipSettings
from .draining import Draining
from .ownership import Host
from .records import (
    STOPPING,
    BrokerLoad,
)
from .transfers import Transfers

_METADATA_TIMEOUT_S = 10.0


class ClusterOwnership(BundleOwnership):
    """`Ownership` of a broker in a cluster."""

    alone = False

    def __init__(
        self,
        metadata: MetadataStore,
        settings: OwnershipSettings,
        clock: Clock,
        rng: random.Random,
        balance: BalanceSettings | None = None,
        cpu_s: Callable[[], float] = lambda: 0.0,
        ledger: LedgerSettings | None = None,
    ) -> None:
        """`balance`, `ledger`: the defaults without them. `cpu_s`: the CPU time of this process until now, in seconds."""
        balance = balance or BalanceSettings()
        metadata = TimedStore(metadata, _METADATA_TIMEOUT_S)
        super().__init__(metadata, settings, balance, clock, rng)
        self._transfers = Transfers(self)
        draining = Draining(metadata, self.view, balance, ledger or LedgerSettings(), rng, clock)
        self.administration = ClusterAdministration(metadata, self.view, draining)
        loads = ServedLoads(lambda: self.host, self.owned, cpu_s)
        self._balancing = Balancing(
            metadata, self.view, loads, balance, rng, settings.name, self._load, clock
        )

    def _load(self, load: BrokerLoad) -> None:
        self.load = load

    async def in_session(self, session: Session) -> None:
        await self._balancing.serve(session)

    async def start(self, host: Host) -> None:
        await self.begin(host)
        self._transfers.start()

    def figures(self) -> dict[str, float]:
        return {"owned_bundles": len(self.owned()), **self._balancing.figures()}

    # --- the end -----------------------------------------------------------------------------------------------------

    async def hand_over(self) -> None:
        self.set_state(STOPPING)  # also without a session: the next one would take bundles
        if self.valid:
            await self._transfers.hand_over()

    async def close(self) -> None:
        await self._transfers.close()
        await self.end()

"""A broker's part in the balance of its cluster: what it reports, and what it decides when it is elected."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from magnetar.metadata import MetadataStore, Session
from magnetar.proto.errors import MagnetarError
from magnetar.runtime.clock import Clock
from magnetar.runtime.tasks import LongTask

from ..cluster_view import ClusterView
from ..records import BrokerLoad
from .leader import BalanceLeader
from .loads import LoadReporter, ServedLoads
from .settings import BalanceSettings

_RETRY_S, _RETRY_MAX_S = 1.0, 4.0


class Balancing:
    """`serve` it under the broker's session; cancelled, it stops."""

    def __init__(
        self,
        metadata: MetadataStore,
        view: ClusterView,
        loads: ServedLoads,
        settings: BalanceSettings,
        rng: random.Random,
        broker: str,
        on_load: Callable[[BrokerLoad], None],
        clock: Clock,
    ) -> None:
        self._loads = loads
        self._on_load = on_load
        self._load_interval_s = settings.report_interval_s / 2
        self._leader = BalanceLeader(metadata, view, settings, broker, clock)
        self._reporter = LoadReporter(metadata, loads.counters, settings, rng, broker)

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


async def _again(serve: Callable[[Session], Coroutine[Any, Any, None]], session: Session) -> None:
    while not session.lost:
        try:
            await serve(session)
        except MagnetarError:
            if not session.lost:
                raise
        await asyncio.sleep(_RETRY_S)
    await asyncio.Event().wait()

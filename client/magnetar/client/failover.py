"""Goes to another cluster when the one in use does not answer, and back: the shell around `connection.core.failover`."""

from __future__ import annotations

import asyncio
import logging

from magnetar.proto.errors import ConnectionLost
from magnetar.runtime.tasks import LongTask

from .connection.core.failover import Failover
from .connection.pool import ConnectionPool
from .service_url import AutoFailover

log = logging.getLogger("magnetar.client")


class ClusterFailover:
    """Probes and switches for one client. `open`, and `close` in the end."""

    def __init__(self, pool: ConnectionPool, settings: AutoFailover) -> None:
        self._pool = pool
        self._settings = settings
        self._services = settings.services
        self._decisions = Failover(
            len(self._services),
            failover_delay_s=settings.failover_delay,
            switch_back_delay_s=settings.switch_back_delay,
        )
        self._task: LongTask | None = None

    async def open(self) -> None:
        """Connects to the first cluster that answers, and probes from then on. Raises ConnectionLost if none does."""
        failures: list[str] = []
        for number, service in enumerate(self._services):
            if service != self._pool.service:
                self._pool.switch(service)
            try:
                await self._pool.to_service()
            except ConnectionLost as error:
                log.warning("%s cannot be reached: %s", service, error)
                failures.append(error.message)
            else:
                self._decisions.use(number)
                self._task = LongTask("the probing of clusters", self._watch)
                return
        raise ConnectionLost(f"no cluster can be reached: {'; '.join(failures)}")

    def close(self) -> None:
        """Probes no more. The pool awaits the end of what is under way."""
        if self._task is not None:
            self._pool.await_end(self._task.stop())
            self._task = None

    async def _watch(self) -> None:
        while True:
            # Not all clients at once.
            await asyncio.sleep(self._settings.check_interval * self._pool.rng.uniform(0.8, 1.2))
            await self._probe()

    async def _probe(self) -> None:
        """Asks the clusters that the next decision needs, and goes where it says."""
        probed = self._decisions.to_probe()
        errors = await asyncio.gather(*[self._pool.probe(self._services[number]) for number in probed])
        in_use = self._services[self._decisions.in_use]
        for number, error in zip(probed, errors):
            if error is not None:
                log.info("%s cannot be reached: %s", self._services[number], error)
        answers = {number: error is None for number, error in zip(probed, errors)}
        if self._decisions.probed(asyncio.get_running_loop().time(), answers):
            service = self._services[self._decisions.in_use]
            log.warning("this client leaves %s for %s", in_use, service)
            self._pool.switch(service)

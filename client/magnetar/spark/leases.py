"""Leases: ledgers of a topic are kept for a query while it reads them.

A batch read has a lease for each topic, which whichever of its tasks run renew: Spark leaves no Python process running
beside a query. It outlives the gap between two tasks, and nobody has to end it. The driver's part of a stream lives as long
as the query, and renews in a thread (`Keeper`), however seldom the query's trigger is due; so do jobs.

A lease trims nothing and expires by itself: a query that is abandoned pins nothing for long, and one that was away for
longer than its lease finds what it missed, or that it is lost. Who wants more has the option `subscription`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Iterable

from magnetar.client import Client
from magnetar.client.administration import ask
from magnetar.proto.commands import KeepLedgers
from magnetar.proto.errors import MagnetarError, MessageLost, PartitionNotFound, TopicNotFound
from magnetar.runtime.tasks import begin

from .options import ReadOptions
from .service import TopicPlan, asking_once, ledgers_of_topic

_log = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 4


async def plan_of_topic(client: Client, topic: str, lease_s: float, lease: str = "") -> TopicPlan:
    """All of a topic. Takes a lease first, so that nothing of what it then finds is deleted. Raises TopicNotFound."""
    lease = await keep(client, topic, lease, lease_s)
    return (await ledgers_of_topic(client, topic))._replace(lease=lease)


async def keep(client: Client, topic: str, lease: str, lease_s: float, first: int = -1) -> str:
    """Takes (lease "") or renews a lease on the ledgers of a topic from the position id `first` on; returns its name."""
    command = KeepLedgers(0, topic, lease, round(lease_s * 1000), first)
    found = await ask(client.admin, command, topic=topic)
    return str(found["lease"])


@contextlib.asynccontextmanager
async def renewing(
    client: Client, topic: str, lease: str, lease_s: float, ledger: int | None
) -> AsyncIterator[None]:
    """Keeps a lease alive as long as the body runs. MessageLost if the ledger (position id) was not kept for the body.

    None: one that is archived.
    """

    async def renew() -> float:
        found = await ask(client.admin, KeepLedgers(0, topic, lease, round(lease_s * 1000)), topic=topic)
        if ledger is not None and (found["first"] is None or found["first"] > ledger):
            raise MessageLost(
                f"ledger {ledger} of {topic} was trimmed before it was read; raise the option lease_s, now {lease_s:g}"
            )
        return float(found["ttl_ms"]) / 1000  # the service may have granted less

    async def again(granted_s: float) -> None:
        while True:
            await asyncio.sleep(granted_s / RENEWALS_PER_LEASE)
            try:
                granted_s = await renew()
            except MessageLost:  # shows in the body, if it needs the ledger still
                return
            except MagnetarError as error:
                _log.warning("the lease on %s is not renewed yet: %s", topic, error)

    task = begin(again(await renew()), f"the lease on {topic}")
    try:
        yield
    except MagnetarError:
        await renew()  # says so if this is the reason
        raise
    finally:
        task.cancel()
        await asyncio.wait([task])  # `await task` would take a cancellation of this one for that of the task


class Keeper:
    """Renews the lease of a name on topics in a thread, until `stop`."""

    def __init__(self, options: ReadOptions, lease: str, topics: Iterable[str]) -> None:
        self._options = options
        self._lease = lease
        self._topics = tuple(topics)
        self._stopped = threading.Event()
        # A daemon: the process of a driver that is killed ends without it.
        self._thread = threading.Thread(target=self._run, name="magnetar-leases", daemon=True)
        self._thread.start()

    def keep(self, topics: Iterable[str]) -> None:
        """From now on it is the lease on these topics."""
        self._topics = tuple(topics)

    def stop(self) -> None:
        """Nothing is renewed any more; the leases end by themselves."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._options.lease_s / RENEWALS_PER_LEASE):
            try:
                asking_once(self._options, self._renew)
            except MagnetarError as error:
                _log.warning("leases are not renewed yet: %s", error)

    async def _renew(self, client: Client) -> None:
        for topic in self._topics:
            with contextlib.suppress(TopicNotFound, PartitionNotFound):
                await keep(client, topic, self._lease, self._options.lease_s)

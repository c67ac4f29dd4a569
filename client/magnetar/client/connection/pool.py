"""What a client has in common: its connections, where its topics are, and the cluster that it uses."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

from magnetar.proto.commands import Command, Partitions
from magnetar.proto.errors import ConnectionLost, LookupAgainError, MagnetarError, MalformedFrame
from magnetar.proto.ids import MAX_PARTITIONS
from magnetar.runtime.clock import Clock
from magnetar.runtime.tasks import TaskSet

from ..options import ClientOptions
from ..pending_budget import PendingBudget
from ..queue_budget import QueueBudget
from ..service_url import ServiceUrl
from .broker_connection import CLOSE_TIMEOUT_S, BrokerConnection
from .brokers import BrokerConnections
from .calls import until_answered
from .lookups import Lookups

# What leaving (closing a producer or consumer) waits for the broker's answer: leaving works without it as well.
LEAVE_TIMEOUT_S = 5.0


class ConnectionPool:
    """`options`, the budgets, `clock` and `rng` are the client's, for everything that uses its connections.

    cluster: counts the switches to another cluster; a message id is of the cluster in which it was received. state: see
    Client.connection_state.
    """

    def __init__(self, service: ServiceUrl, options: ClientOptions, clock: Clock, rng: random.Random) -> None:
        self.options = options
        self.queue_budget = QueueBudget(options.max_queued_bytes)
        self.pending_budget = PendingBudget(options.max_pending_bytes)
        self.clock = clock
        self.rng = rng
        self.cluster = 0
        self.state = "connected"
        self._detached: dict[object, None] = {}
        self._ending = TaskSet("end of a client's work")
        self._use(service)

    def _use(self, service: ServiceUrl) -> None:
        self._brokers = BrokerConnections(service, self.options, self.rng)
        self._lookups = Lookups(self._brokers, self.options.operation_timeout, self.rng)

    @property
    def service(self) -> ServiceUrl:
        """The URL of the cluster that is used."""
        return self._brokers.service

    def note_attached(self, who: object, attached: bool) -> None:
        """What had a broker has none now, or it has one again, or wants none any more."""
        if attached:
            self._detached.pop(who, None)
        else:
            self._detached[who] = None
        self.set_state("reconnecting" if self._detached else "connected")

    def set_state(self, state: str) -> None:
        """From "closed" there is no way back."""
        if self.state not in (state, "closed"):
            self.state = state
            if self.options.on_connection_state is not None:
                # In a turn of its own: what it raises is logged, and what it calls finds nothing half done.
                asyncio.get_running_loop().call_soon(self.options.on_connection_state, state)

    async def to_service(self) -> BrokerConnection:
        """To any broker of the cluster."""
        return await self._brokers.to_service()

    async def to_topic(self, topic: str, *, afresh: bool = False) -> BrokerConnection:
        """To the broker that serves `topic`; `afresh`: as the service says now. Raises what the look-up failed with."""
        return await self._lookups.find(topic, afresh=afresh)

    def moved(self, topic: str, error: BaseException | None) -> bool:
        """Forgets where a topic is if the error says that it moved. True if it says where it goes, which is tried first."""
        return self._lookups.moved(topic, error)

    async def request(self, command: Command, topic: str | None = None, payload: bytes = b"") -> Any:
        """Asks the broker of `topic` (None: any one), again after retryable errors, up to operation_timeout."""

        async def ask() -> Any:
            connection = await (self.to_service() if topic is None else self.to_topic(topic))
            try:
                return await connection.request(command, self.options.operation_timeout, payload)
            except LookupAgainError as error:
                if topic is not None:
                    self.moved(topic, error)
                raise

        return await until_answered(ask, self.options, self.rng, f"{type(command).__name__} did not succeed")

    async def partitions_of(self, topic: str, *, create: bool = False) -> int:
        """How many partitions the topic has; 0: it is not partitioned, or does not exist. `create`: as in the command."""

        async def ask() -> int:
            connection = await self.to_service()
            async with connection.lookups:
                answer = await connection.request(
                    Partitions(0, topic, create), self.options.operation_timeout
                )
            return checked_partitions(answer["partitions"])

        return await until_answered(ask, self.options, self.rng, f"{topic} was not looked up")

    async def request_once(self, command: Command, topic: str) -> Any:
        """Does what `request` does, but asks only once: what is done a second time does something else.

        TopicNotServed does not say whether it was done, so the topic is looked up for each of these.
        """
        what = f"{type(command).__name__} was not sent"
        connection = await until_answered(
            lambda: self.to_topic(topic, afresh=True), self.options, self.rng, what
        )
        return await connection.request(command, self.options.operation_timeout)

    async def tell_leaving(self, connection: BrokerConnection, command: Command) -> None:
        """Tells the broker that a producer or consumer is closed; it finds out itself if that fails."""
        with contextlib.suppress(MagnetarError):
            await connection.request(command, min(LEAVE_TIMEOUT_S, self.options.operation_timeout))

    async def probe(self, service: ServiceUrl) -> MagnetarError | None:
        """Whether a cluster answers: None, or what connecting to it failed with."""
        return await self._brokers.probe(service)

    def switch(self, service: ServiceUrl) -> None:
        """Uses another cluster: all that is attached leaves its broker at once, and looks for its topic there."""
        brokers, lookups = self._brokers, self._lookups
        self.cluster += 1
        self._use(service)
        lookups.stop()
        brokers.retire(ConnectionLost(f"this client leaves {brokers.service} for {service}"))
        self._ending.begin(_leave(brokers, lookups), "leave a cluster")

    def await_end(self, task: asyncio.Task[Any]) -> None:
        """A task that its owner does not wait for: `close` waits until it has ended."""
        self._ending.add(task)

    async def close(self, timeout: float) -> None:
        """Closes the connections, each of which may take `timeout` seconds."""
        await asyncio.gather(
            self._lookups.close(), self._brokers.close(timeout), self._ending.wait(), return_exceptions=True
        )


def checked_partitions(count: int) -> int:
    """As many as a topic can have, or MalformedFrame."""
    if not 0 <= count <= MAX_PARTITIONS:
        raise MalformedFrame(f"a topic has 0 to {MAX_PARTITIONS} partitions, not {count}")
    return count


async def _leave(brokers: BrokerConnections, lookups: Lookups) -> None:
    await lookups.close()
    await brokers.close(CLOSE_TIMEOUT_S)

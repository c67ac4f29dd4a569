"""The connections of a client: one to each broker, opened when the first topic needs it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

from magnetar.proto.commands import Command, Lookup, Partitions
from magnetar.proto.errors import AlreadyClosed, MagnetarError, Unsupported
from magnetar.runtime.clock import Clock
from magnetar.runtime.connection import ConnectionOptions

from ..options import ClientOptions, parse_url
from ..queue_budget import QueueBudget
from .broker_connection import BrokerConnection
from .retries import until_answered

# What leaving (closing a producer or consumer) waits for the broker's answer: leaving works without it as well.
_LEAVE_TIMEOUT_S = 5.0


class ConnectionPool:
    """`options`, `queue_budget`, `clock` and `rng` are the client's, for everything that uses its connections."""

    def __init__(
        self, service: tuple[str, int], options: ClientOptions, clock: Clock, rng: random.Random
    ) -> None:
        self.options = options
        self.queue_budget = QueueBudget(options.max_queued_bytes)
        self.clock = clock
        self.rng = rng
        self._service = service
        self._connection_options = ConnectionOptions(
            name=f"client {options.name}",
            max_message_bytes=options.max_message_bytes,
            ping_interval_s=options.ping_interval,
            handshake_timeout_s=options.connect_timeout,
            tls=options.tls,
        )
        self._opening: dict[
            tuple[str, int], asyncio.Task[BrokerConnection]
        ] = {}  # done ones are open, or failed
        self._ending: dict[asyncio.Task[None], None] = {}
        self._closed = False

    async def to_service(self) -> BrokerConnection:
        """To the address that the user gave."""
        return await self._to(self._service)

    async def to_topic(self, topic: str) -> BrokerConnection:
        """To the broker that serves `topic`. Raises what the look-up failed with."""
        timeout = self.options.operation_timeout
        service = await self.to_service()
        found = await service.request(Lookup(0, topic), timeout)
        address = parse_url(found["url"])
        partitions = (await service.request(Partitions(0, topic), timeout))["partitions"]
        if partitions:
            raise Unsupported(f"{topic} has {partitions} partitions, which this client cannot address yet")
        return service if address == self._service else await self._to(address)

    async def request(self, command: Command, topic: str | None = None, payload: bytes = b"") -> Any:
        """Asks the broker of `topic` (None: the one of the URL), again after retryable errors, up to operation_timeout."""

        async def ask() -> Any:
            connection = await (self.to_service() if topic is None else self.to_topic(topic))
            return await connection.request(command, self.options.operation_timeout, payload)

        return await until_answered(ask, self.options, self.rng, f"{type(command).__name__} did not succeed")

    async def request_once(self, command: Command, topic: str) -> Any:
        """As `request`, but asks only once: what is done a second time does something else."""
        what = f"{type(command).__name__} was not sent"
        connection = await until_answered(lambda: self.to_topic(topic), self.options, self.rng, what)
        return await connection.request(command, self.options.operation_timeout)

    async def tell_leaving(self, connection: BrokerConnection, command: Command) -> None:
        """Tells the broker that a producer or consumer is closed; it finds out itself if that fails."""
        with contextlib.suppress(MagnetarError):
            await connection.request(command, min(_LEAVE_TIMEOUT_S, self.options.operation_timeout))

    def await_end(self, task: asyncio.Task[Any]) -> None:
        """A task that its owner cancelled without waiting: `close` waits until it has ended."""
        self._ending[task] = None
        task.add_done_callback(self._ending.pop)

    async def close(self, timeout: float) -> None:
        """Closes the connections, each of which may take `timeout` seconds."""
        self._closed = True
        opening, self._opening = list(self._opening.values()), {}
        for task in opening:
            task.cancel()  # does nothing to those that are connected
        opened = await asyncio.gather(*opening, return_exceptions=True)
        # A connection is closed when its socket is: the loop may end next.
        await asyncio.gather(
            *[one.close(timeout) for one in opened if isinstance(one, BrokerConnection)],
            *self._ending,
            return_exceptions=True,
        )

    async def _to(self, address: tuple[str, int]) -> BrokerConnection:
        """Opened if there is none; those who ask meanwhile wait for the same one."""
        if self._closed:
            raise AlreadyClosed("the client is closed; connect again")
        task = self._opening.get(address)
        if task is None or (task.done() and (task.cancelled() or task.exception() or task.result().closed)):
            task = asyncio.get_running_loop().create_task(
                BrokerConnection.open(*address, self._connection_options, self.options.connect_timeout),
                name=f"connect {address[0]}:{address[1]}",
            )
            task.add_done_callback(_mark_retrieved)
            self._opening[address] = task
        return await asyncio.shield(task)


def _mark_retrieved(task: asyncio.Task[BrokerConnection]) -> None:
    """Whoever asks next opens another connection."""
    if not task.cancelled():
        task.exception()

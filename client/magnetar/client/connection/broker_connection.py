"""One connection to one broker, and the producers and consumers of this client that use it.

The header of a receipt frame is constant per producer and epoch, so frames of that kind are routed by their bytes; of the
other kinds, the header is decoded.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from magnetar.proto.commands import (
    ActiveConsumer,
    CloseConsumer,
    CloseProducer,
    Command,
    Deliver,
    SendDelayed,
    SendFailed,
    TopicsChanged,
    UnreadableEntry,
    decode_command,
)
from magnetar.proto.errors import ConnectionLost, MagnetarError, error_from_wire
from magnetar.proto.frames import Run
from magnetar.runtime.connection import Connection, ConnectionOptions, open_connection
from magnetar.runtime.connection.addresses import format_address
from magnetar.runtime.timeouts import TimeLimit

from .calls import first_success
from .resolving import addresses_of

log = logging.getLogger("magnetar.client")

# How long a peer may take to accept the end of a connection.
CLOSE_TIMEOUT_S = 1.0
# The same when the user's code failed or was cancelled: enough to send what is buffered to a peer that reads.
ABANDON_TIMEOUT_S = 0.1
# An address of a host that does not answer holds the next one up for so long.
HEAD_START_S = 0.25
# Look-ups at once on one connection; so many more may be held by the broker until an owner that failed has a successor.
MAX_LOOKUPS = 64


class Port(Protocol):
    """A user of a connection."""

    def moved(self, error: MagnetarError) -> None:
        """The connection broke, or the topic moves."""
        ...


class TopicPort(Port, Protocol):
    """A producer or consumer."""

    def refused(self, error: MagnetarError) -> None:
        """The broker ended it for good."""
        ...


class ProducerPort(TopicPort, Protocol):
    """A producer, as its connection sees it."""

    def send_failed(self, command: SendFailed) -> None:
        """The broker did not store a group and those after it in this epoch."""
        ...

    def send_delayed(self, command: SendDelayed) -> None:
        """What was sent waits at the broker, and why."""
        ...

    def writing_resumed(self) -> None:
        """The connection takes more."""
        ...


class ConsumerPort(TopicPort, Protocol):
    """A consumer, as its connection sees it."""

    def delivered(self, command: Deliver, payload: bytes) -> None:
        """A delivery."""
        ...

    def active_changed(self, active: bool) -> None:
        """Failover: it gets everything from now on, or nothing any more."""
        ...

    def unreadable(self, command: UnreadableEntry) -> None:
        """It waits for an entry that the broker cannot read."""
        ...


class WatchPort(Port, Protocol):
    """A watch of topics, as its connection sees it."""

    def topics_changed(self, command: TopicsChanged, payload: bytes) -> None:
        """Topics were made or deleted."""
        ...


class BrokerConnection:
    """ConnectionHandler of the client. `producers`, `consumers` and `watches` by id; `routes` by header bytes."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.producers: dict[int, ProducerPort] = {}
        self.consumers: dict[int, ConsumerPort] = {}
        self.watches: dict[int, WatchPort] = {}
        self.routes: dict[bytes, Callable[[list[bytes]], None]] = {}
        self.lookups = asyncio.Semaphore(MAX_LOOKUPS)
        self.held_lookups = asyncio.Semaphore(MAX_LOOKUPS)
        self._connection: Connection | None = None

    @classmethod
    async def open(
        cls, host: str, port: int, options: ConnectionOptions, connect_timeout: float, rng: random.Random
    ) -> BrokerConnection:
        """Connects to any address of the host. Raises ConnectionLost, which names it, or what the handshake failed with."""
        name = format_address((host, port))

        async def connect(address: str) -> BrokerConnection:
            opened = cls(name)
            opened._connection = await open_connection(address, port, opened, options, server_name=host)
            return opened

        late = f"no connection to {name} within connect_timeout={connect_timeout:g} s; check the address"
        async with TimeLimit(connect_timeout, lambda: ConnectionLost(late)):
            addresses = await addresses_of(host, port)
            rng.shuffle(addresses)
            return await first_success(
                [partial(connect, address) for address in addresses],
                HEAD_START_S,
                discard=lambda late: late.connection.abort(),
            )

    @property
    def connection(self) -> Connection:
        """The connection, open or closed."""
        assert self._connection is not None
        return self._connection

    @property
    def closed(self) -> bool:
        """True once nothing can be sent any more; connection_closed follows."""
        return self._connection is None or self._connection.closed

    @property
    def writable(self) -> bool:
        """False while the write buffer is above its high-water mark; `writing_resumed` follows."""
        return self.connection.writable

    def send(self, header: bytes, payload: bytes = b"") -> None:
        """Sends one frame. Does nothing on a closed connection: its producers and consumers learn of it by `moved`."""
        if not self.closed:
            self.connection.send(header, payload)

    async def send_now(self, header: bytes, payload: bytes) -> None:
        """Sends one frame, which has left the process when this returns: as far as the kernel takes what was sent so far."""
        self.send(header, payload)
        self.connection.transport.flush()
        await asyncio.sleep(0)  # other loops than asyncio's write at the end of the turn

    def send_encoded(self, frames: bytes) -> None:
        """Sends whole frames."""
        if not self.closed:
            self.connection.send_encoded(frames)

    async def request(self, command: Command, timeout: float, payload: bytes = b"") -> Any:
        """The result of a request. Raises its error, ConnectionLost or RequestTimeout.

        Arguments of a wrong type are InvalidArgument here: sent, they would end the connection, and disturb all that use it.
        """
        command.check()
        if self.closed:
            raise ConnectionLost(f"the connection to {self.address} is closed")
        return (await self.connection.request(command, payload, timeout=timeout)).result

    def retire(self, reason: MagnetarError) -> None:
        """Everything that lives here looks for another place, and the connection closes once what was sent is written."""
        self.connection_closed(reason)
        self.connection.close()

    async def close(self, timeout: float) -> None:
        """Flushes and closes; returns when the socket is closed, after `timeout` seconds at most."""
        self.connection.close()
        await self.connection.wait_closed(timeout)

    # --- ConnectionHandler -------------------------------------------------------------------------------------------

    def connection_ready(self, connection: Connection) -> None:
        """The handshake is done."""
        self._connection = connection

    def runs_received(self, runs: list[Run]) -> None:
        """Frames that are not answers."""
        routes = self.routes
        for header, payloads in runs:
            route = routes.get(header)
            if route is not None:
                route(payloads)
                continue
            command = decode_command(header)
            if isinstance(command, Deliver):
                consumer = self.consumers.get(command.consumer_id)
                if consumer is not None:
                    for payload in payloads:
                        consumer.delivered(command, payload)
            elif isinstance(command, TopicsChanged):
                watch = self.watches.get(command.watch_id)
                if watch is not None:
                    for payload in payloads:
                        watch.topics_changed(command, payload)
            else:
                self._notified(command)

    def _notified(self, command: Command) -> None:
        match command:
            case SendFailed() if producer := self.producers.get(command.producer_id):
                producer.send_failed(command)
            case SendDelayed() if producer := self.producers.get(command.producer_id):
                producer.send_delayed(command)
            case CloseProducer():
                self._ended(self.producers.get(command.producer_id), command)
            case ActiveConsumer() if consumer := self.consumers.get(command.consumer_id):
                consumer.active_changed(command.active)
            case UnreadableEntry() if consumer := self.consumers.get(command.consumer_id):
                consumer.unreadable(command)
            case CloseConsumer():
                self._ended(self.consumers.get(command.consumer_id), command)
            case _:
                # Of one that has left, receipts of an old epoch, news of later versions that it can do without.
                log.debug("%s ignored", type(command).__name__)

    def _ended(self, user: TopicPort | None, command: CloseProducer | CloseConsumer) -> None:
        """The broker has closed it: whether it looks for another place depends on why."""
        if user is not None:
            error = error_from_wire(command.code, command.action, command.message)
            error.details["url"] = command.url
            if error.retryable:
                user.moved(error)
            else:
                user.refused(error)

    def connection_closed(self, error: MagnetarError | None) -> None:
        """Everything that lived here looks for another place."""
        reason = error or ConnectionLost(f"the connection to {self.address} was closed")
        users: list[Port] = [*self.producers.values(), *self.consumers.values(), *self.watches.values()]
        self.producers, self.consumers, self.watches, self.routes = {}, {}, {}, {}
        if users:
            log.warning("%s: %s; what used it attaches again", self.address, reason)
        for user in users:
            user.moved(reason)

    def writing_resumed(self) -> None:
        """The write buffer is low again."""
        for producer in list(self.producers.values()):
            producer.writing_resumed()

"""One connection to one broker, and the producers and consumers of this client that use it.

The header of a receipt frame is constant per producer and epoch, so frames of that kind are routed by their bytes; of the
other kinds, the header is decoded.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from magnetar.proto.commands import (
    ActiveConsumer,
    CloseConsumer,
    CloseProducer,
    Command,
    Deliver,
    EndOfTopic,
    HoldProducer,
    PartitionsChanged,
    SendDelayed,
    SendFailed,
    TopicsChanged,
    UnreadableEntry,
    decode_command,
)
from magnetar.proto.errors import ConnectionLost, MagnetarError
from magnetar.proto.frames import Run
from magnetar.runtime.connection import Connection, ConnectionOptions, open_connection
from magnetar.runtime.connection.addresses import format_address
from magnetar.runtime.timeouts import TimeLimit

from .calls import first_success

log = logging.getLogger("magnetar.client")

# How long a peer may take to accept the end of a connection.
CLOSE_TIMEOUT_S = 1.0
# The same when the user's code failed or was cancelled: enough to send what is buffered to a peer that reads.
ABORT_TIMEOUT_S = 0.1
# An address of a host that does not answer holds the next one up for so long.
HEAD_START_S = 0.25
# Look-ups at once on one connection; so many more may be held by the broker until an owner that failed has a successor.
MAX_LOOKUPS = 64


class Port(Protocol):
    """A user of a connection: a producer, a consumer, a watch."""

    def received(self, command: Command, payload: bytes) -> None:
        """A frame that is for it."""

    def lost(self, error: MagnetarError) -> None:
        """The connection broke."""

    def writing_resumed(self) -> None:
        """The connection takes more."""


class BrokerConnection:
    """ConnectionHandler of the client. `ports` by id; `routes` of receipts by header bytes."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.ports: dict[int, Port] = {}
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
        """Sends one frame. Does nothing on a closed connection: its users learn of it by `lost`."""
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
            port = self._port_of(command)
            if port is None:
                # Of one that has left, receipts of an old epoch, news of later versions that it can do without.
                log.debug("%s ignored", type(command).__name__)
                continue
            for payload in payloads:
                port.received(command, payload)

    def _port_of(self, command: Command) -> Port | None:
        match command:
            case Deliver() | EndOfTopic() | ActiveConsumer() | UnreadableEntry() | CloseConsumer():
                return self.ports.get(command.consumer_id)
            case SendFailed() | SendDelayed() | HoldProducer() | CloseProducer():
                return self.ports.get(command.producer_id)
            case TopicsChanged() | PartitionsChanged():
                return self.ports.get(command.watch_id)
        return None

    def connection_closed(self, error: MagnetarError | None) -> None:
        """Everything that lived here looks for another place."""
        reason = error or ConnectionLost(f"the connection to {self.address} was closed")
        ports, self.ports, self.routes = list(self.ports.values()), {}, {}
        if ports:
            log.warning("%s: %s; what used it attaches again", self.address, reason)
        for port in ports:
            port.lost(reason)

    def writing_resumed(self) -> None:
        """The write buffer is low again."""
        for port in list(self.ports.values()):
            port.writing_resumed()


async def addresses_of(host: str, port: int) -> list[str]:
    """IP addresses of a host. Raises ConnectionLost."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return [host]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: no name that DNS could have
        reason = getattr(error, "strerror", None) or error
        raise ConnectionLost(
            f"cannot connect to {host}:{port}: {reason}; is the name right, and can it be resolved here?"
        ) from error
    return list(dict.fromkeys(str(address[0]) for *_, address in found))

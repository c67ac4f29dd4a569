"""The connections of a client to the brokers of one cluster: one to each, opened when it is first needed.

And what a service URL stands for: its hosts, or those that the SRV records of its name have.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

from magnetar.proto.errors import AlreadyClosed, ConnectionLost, InvalidArgument, MagnetarError
from magnetar.runtime.connection import ConnectionOptions
from magnetar.runtime.connection.addresses import format_address
from magnetar.runtime.timeouts import TimeLimit

from ..options import ClientOptions
from ..receipts import copy_of
from ..service_url import Address, ServiceUrl
from .broker_connection import CLOSE_TIMEOUT_S, HEAD_START_S, BrokerConnection
from .calls import SharedCalls, first_success
from .core.reachability import Reachability

SRV_PREFIX = "_magnetar._tcp."


class BrokerConnections:
    """`service` says which hosts answer look-ups; any other broker is connected to because one of them named it."""

    def __init__(self, service: ServiceUrl, options: ClientOptions, rng: random.Random) -> None:
        self.service = service
        self._options = options
        self._rng = rng
        self._connection_options = ConnectionOptions(
            name=f"client {options.name}",
            max_message_bytes=options.max_message_bytes,
            ping_interval_s=options.ping_interval,
            handshake_timeout_s=options.connect_timeout,
            tls=options.tls,
        )
        # Some are closed by now, until the next one is opened.
        self._open: dict[Address, BrokerConnection] = {}
        self._connecting = SharedCalls[Address, BrokerConnection]("connecting")
        self._choosing = SharedCalls[Address | None, BrokerConnection]("connecting to the service")
        self._reachability = Reachability(rng.random)
        self._hosts: list[Address] = []  # of the service, as they were resolved last
        self._service_host: Address | None = None  # the one that answers look-ups
        self._ended: MagnetarError | None = None  # why nothing is connected any more

    async def to(self, address: Address, *, try_now: bool = False) -> BrokerConnection:
        """Opened if there is none; those who ask meanwhile wait for the same one. Raises ConnectionLost.

        After a failure it is tried again in a while, or with `try_now`: somebody knows that it has come back.
        """
        self._check_open()
        connection = self._open.get(address)
        if connection is not None and not connection.closed:
            return connection
        refusal = self._reachability.refusal(address, asyncio.get_running_loop().time())
        if refusal is not None and not try_now:
            raise copy_of(refusal)
        return await self._connecting.get(address, partial(self._connect, address))

    async def to_service(self, avoid: Address | None = None) -> BrokerConnection:
        """To a broker that answers look-ups, to another one than `avoid` if there is any. Raises ConnectionLost."""
        self._check_open()
        if self._service_host is not None and self._service_host != avoid:
            connection = self._open.get(self._service_host)
            if connection is not None and not connection.closed:
                return connection
        return await self._choosing.get(avoid, partial(self._choose, avoid))

    def doubt(self, error: MagnetarError) -> None:
        """The broker that answers look-ups cannot answer one: another host is asked next, if there is one."""
        if self._service_host is not None:
            self._reachability.failed(self._service_host, asyncio.get_running_loop().time(), 0.0, error)
            self._service_host = None

    async def probe(self, service: ServiceUrl) -> MagnetarError | None:
        """Connects to any host of a service and leaves again; what that failed with, None: it is there."""

        async def connect(host: Address) -> None:
            await (await self._open_connection(host)).close(CLOSE_TIMEOUT_S)

        seconds = self._options.connect_timeout
        late = f"{service} did not answer within {seconds:g} s"
        try:
            async with TimeLimit(seconds, lambda: ConnectionLost(late)):
                hosts = await hosts_of(service, self._rng, seconds)
                await first_success([partial(connect, host) for host in hosts], HEAD_START_S)
        except MagnetarError as error:
            return error
        return None

    def retire(self, reason: MagnetarError) -> None:
        """No connection is opened any more; what lives on those that are open looks for another place."""
        self._ended = reason
        self._choosing.stop()
        self._connecting.stop()
        for connection in self._open.values():
            if not connection.closed:
                connection.retire(reason)

    async def close(self, timeout: float) -> None:
        """Closes the connections, each of which may take `timeout` seconds; returns when their sockets are closed."""
        self._ended = self._ended or AlreadyClosed("the client is closed; connect again")
        self._choosing.stop()
        self._connecting.stop()
        await self._choosing.wait_ended()
        await self._connecting.wait_ended()
        opened, self._open = self._open, {}
        await asyncio.gather(*[one.close(timeout) for one in opened.values()], return_exceptions=True)

    def _check_open(self) -> None:
        if self._ended is not None:
            raise copy_of(self._ended)

    async def _open_connection(self, address: Address) -> BrokerConnection:
        return await BrokerConnection.open(
            *address, self._connection_options, self._options.connect_timeout, self._rng
        )

    async def _connect(self, address: Address) -> BrokerConnection:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            connection = await self._open_connection(address)
        except MagnetarError as error:
            if error.retryable and not isinstance(error, ConnectionLost):
                error = ConnectionLost(
                    f"cannot connect to {format_address(address)}: {error.message}"
                )  # it stops, say
            self._reachability.failed(address, loop.time(), loop.time() - began, error)
            raise error from None
        self._reachability.worked(address)
        # Brokers come and go: those that are gone must not stay for the life of the client.
        self._open = {other: one for other, one in self._open.items() if not one.closed}
        self._open[address] = connection
        return connection

    async def _choose(self, avoid: Address | None) -> BrokerConnection:
        """Any host of the service that answers; else a broker that is connected, as each of them knows where topics are."""
        try:
            self._hosts = await hosts_of(self.service, self._rng, self._options.connect_timeout)
        except ConnectionLost:
            if not self._hosts:
                raise
        hosts = [host for host in self._reachability.in_order(self._hosts) if host != avoid] or self._hosts

        async def connect(host: Address) -> tuple[Address, BrokerConnection]:
            return host, await self.to(host)

        try:
            self._service_host, connection = await first_success(
                [partial(connect, host) for host in hosts], HEAD_START_S
            )
        except ConnectionLost:
            others: list[Any] = [
                (address, one) for address, one in self._open.items() if address != avoid and not one.closed
            ]
            if not others:
                raise
            self._service_host, connection = self._rng.choice(others)
        return connection


def check_resolvable(service: ServiceUrl) -> None:
    """Raises InvalidArgument if the URL needs a package that is not installed."""
    if service.srv_name:
        try:
            import dns.asyncresolver  # noqa: F401
        except ImportError:
            raise InvalidArgument(
                f"{service} needs the package dnspython, which is not installed: pip install 'magnetar[srv]', or name the "
                "hosts: magnetar://host:port,host:port"
            ) from None


async def hosts_of(service: ServiceUrl, rng: random.Random, timeout: float) -> list[Address]:
    """The hosts of a service in the order in which to try them, which differs from client to client.

    Those of SRV records by priority, and within one priority by chance, as their weights say (RFC 2782). Raises
    ConnectionLost if there are none.
    """
    if not service.srv_name:
        hosts = list(service.hosts)
        rng.shuffle(hosts)
        return hosts
    import dns.asyncresolver
    import dns.exception

    try:
        answer = await dns.asyncresolver.resolve(SRV_PREFIX + service.srv_name, "SRV", lifetime=timeout)
    except (dns.exception.DNSException, OSError) as error:
        raise ConnectionLost(
            f"no SRV records of {SRV_PREFIX}{service.srv_name}: {error}; is the name in {service} right?"
        ) from error
    # One of weight 2 comes before one of weight 1 twice as often as behind it.
    records = sorted(
        answer, key=lambda record: (record.priority, -(rng.random() ** (1 / max(record.weight, 0.01))))
    )
    return [(str(record.target).removesuffix("."), int(record.port)) for record in records]

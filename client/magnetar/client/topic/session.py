"""What a consumer has at its broker: an id, and the connection on which it is known by that id, as long as there is one."""

from __future__ import annotations

import asyncio
from typing import Any

from magnetar.proto.commands import Command
from magnetar.proto.errors import AlreadyClosed, InvalidArgument, MagnetarError, MessageLost, TopicNotServed

from ..connection.broker_connection import BrokerConnection
from ..connection.pool import ConnectionPool
from ..connection.retries import until_answered
from ..receipts import copy_of

OF_ANOTHER_CLUSTER = "is about messages of the cluster that this client has left"


class ConsumerSession:
    """Shared by a consumer and what keeps its place. `what` names it in messages.

    connection: None while it is not attached. attached: set while there is a connection, and when there never will be again.
    failure: why nothing more will come. cluster: see ConnectionPool; the one that it was attached to last.
    """

    def __init__(self, pool: ConnectionPool, topic: str, consumer_id: int, what: str) -> None:
        self.pool = pool
        self.topic = topic
        self.id = consumer_id
        self.what = what
        self.connection: BrokerConnection | None = None
        self.attached = asyncio.Event()
        self.closed = False
        self.failure: MagnetarError | None = None
        self.cluster = pool.cluster

    def check_open(self) -> None:
        """Raises what it failed with, or AlreadyClosed."""
        if self.failure is not None:
            raise copy_of(self.failure)
        if self.closed:
            raise AlreadyClosed(f"{self.what} is closed; open another one")

    async def call(self, command: Command, payload: bytes = b"") -> Any:
        """A request to whichever broker this is attached to, repeated when it is not attached there any more meanwhile.

        Raises what the broker answered, MessageLost if it is attached to another cluster by then, or RequestTimeout
        after operation_timeout.
        """
        pool, cluster = self.pool, self.cluster

        async def ask() -> Any:
            while self.connection is None:
                self.check_open()
                await self.attached.wait()
            if self.cluster != cluster:
                raise MessageLost(f"{self.what}: {type(command).__name__} {OF_ANOTHER_CLUSTER}")
            connection = self.connection
            try:
                return await connection.request(command, pool.options.operation_timeout, payload)
            except InvalidArgument as error:
                if self.connection is connection or self.closed:
                    raise
                # The broker had ended the consumer (its topic moves, or the broker stops) when the request reached it.
                raise TopicNotServed(f"{self.what}: {error.message}") from error

        what = f"{self.what}: {type(command).__name__} did not succeed"
        return await until_answered(ask, pool.options, pool.rng, what)

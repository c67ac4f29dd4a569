"""What the broker tells of topics that are made and deleted in a namespace, and when to list them instead.

    no watch --the broker agrees--> watching: it tells of every change from then on
    watching --the connection broke--> no watch; asked again, with growing pauses
    no watch --the broker offers none, or no more to this connection--> asked again after the interval

Whoever lists the topics after `begin` misses nothing; each new watch asks for a list, and so does a broker that left changes
out. As a fallback the topics are listed after every interval.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

import msgspec

from magnetar.proto.commands import Command, TopicsChanged, WatchTopics
from magnetar.proto.errors import MagnetarError, MalformedFrame, TooManyRequests

from .connection.broker_connection import BrokerConnection, Port
from .connection.calls import backoff
from .connection.pool import ConnectionPool

_log = logging.getLogger("magnetar.client")

# Changes that were told and not taken yet; above, the topics are listed again.
MAX_CHANGES = 10_000

_decode_changes = msgspec.msgpack.Decoder(dict[str, bool]).decode


class TopicChanges(NamedTuple):
    """Full names."""

    made: list[str]
    deleted: list[str]


class TopicsWatch(Port):
    """See the module docstring. `begin`, then `next` again and again; `close` in the end."""

    def __init__(self, pool: ConnectionPool, namespace: str, watch_id: int) -> None:
        self._pool = pool
        self._namespace = namespace
        self._id = watch_id
        self._connection: BrokerConnection | None = None  # on which the broker tells
        self._changes: dict[str, bool] = {}  # by topic, in the order of the last change: whether it exists
        self._list_again = False
        self._changed = asyncio.Event()  # `next` has something to do

    async def begin(self) -> None:
        """Asks the broker to tell. Raises what it answered, or ConnectionLost."""
        connection = await self._pool.to_service()
        connection.ports[self._id] = self
        command = WatchTopics(0, self._id, self._namespace)
        try:
            await connection.request(command, self._pool.options.operation_timeout)
        except BaseException:
            connection.ports.pop(self._id, None)
            connection.send(WatchTopics(0, self._id).encode())  # it may have begun all the same
            raise
        self._connection = connection

    async def next(self, interval: float) -> TopicChanges | None:
        """What has changed; None: only a list can tell, after `interval` seconds in any case."""
        try:
            async with asyncio.timeout(interval):
                if self._connection is None:
                    await self._begin_again()
                    return None
                await self._changed.wait()
        except TimeoutError:
            return None
        self._changed.clear()
        changes, self._changes = self._changes, {}
        if self._list_again or self._connection is None:
            self._list_again = False
            return None
        made = [topic for topic, exists in changes.items() if exists]
        return TopicChanges(made, [topic for topic, exists in changes.items() if not exists])

    async def _begin_again(self) -> None:
        """Returns when the broker tells, and never if it will not."""
        options = self._pool.options
        for pause in backoff(options.backoff_first, options.backoff_max, self._pool.rng):
            await asyncio.sleep(pause)
            try:
                await self.begin()
            except MagnetarError as error:
                if not error.retryable or isinstance(error, TooManyRequests):
                    _log.info("topics of %s are looked for by listing them: %s", self._namespace, error)
                    await asyncio.get_running_loop().create_future()
            else:
                return

    def close(self) -> None:
        """Nothing is told any more."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.ports.pop(self._id, None)
            connection.send(WatchTopics(0, self._id).encode())

    # --- the connection ----------------------------------------------------------------------------------------------

    def received(self, command: Command, payload: bytes) -> None:
        """A TopicsChanged frame. Raises MalformedFrame."""
        assert isinstance(command, TopicsChanged)
        if command.list_again or len(self._changes) > MAX_CHANGES:
            self._list_again = True
            self._changes.clear()
        elif not self._list_again:
            try:
                changes = _decode_changes(payload)
            except msgspec.MsgspecError as error:
                raise MalformedFrame(f"TopicsChanged carries no map of topics: {error}") from None
            self.note(changes)
        self._changed.set()

    def note(self, changes: dict[str, bool]) -> None:
        """Has `next` return changes, by topic: whether it exists."""
        for topic, exists in changes.items():
            self._changes.pop(topic, None)
            self._changes[topic] = exists
        self._changed.set()

    def writing_resumed(self) -> None:
        """It writes little."""

    def lost(self, _: MagnetarError) -> None:
        """The connection broke."""
        self._connection = None
        self._changed.set()

"""A watch: a broker tells of changes from now on, and on the next connection another one does.

    no watch --a broker agrees--> watching: it tells of every change from then on
    watching --the connection broke--> no watch; asked again, with growing pauses
    no watch --the broker offers none, or no more to this connection--> asked again after the interval

Whoever asks how things are after `begin` misses nothing.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from magnetar.proto.commands import Command
from magnetar.proto.errors import MagnetarError, TooManyRequests

from .broker_connection import BrokerConnection, Port
from .calls import backoff
from .pool import ConnectionPool

_log = logging.getLogger("magnetar.client")


class Watch(Port):
    """`begin`, then `news` again and again; `close` in the end. `what` names in messages what is watched."""

    def __init__(self, pool: ConnectionPool, watch_id: int, what: str) -> None:
        self._pool = pool
        self._id = watch_id
        self._what = what
        self._connection: BrokerConnection | None = None  # on which the broker tells
        self._changed = asyncio.Event()  # `news` has something to say

    def _beginning(self) -> Command:
        """What has the broker tell."""
        raise NotImplementedError

    def _end(self) -> Command:
        """What ends that."""
        raise NotImplementedError

    def _begun(self, answer: Any) -> bool:
        """The broker's answer: True if it tells from now on. Raises MalformedFrame."""
        return True

    async def begin(self) -> None:
        """Asks a broker to tell. Raises what it answered, or ConnectionLost."""
        connection = await self._pool.to_service()
        connection.ports[self._id] = self
        try:
            answer = await connection.request(self._beginning(), self._pool.options.operation_timeout)
            begun = self._begun(answer)
        except BaseException:
            connection.ports.pop(self._id, None)
            connection.send(self._end().encode())  # it may have begun all the same
            raise
        if begun:
            self._connection = connection
        else:
            connection.ports.pop(self._id, None)

    async def news(self, interval: float) -> bool:
        """Waits until there are some; False: only asking can tell, after `interval` seconds in any case."""
        try:
            async with asyncio.timeout(interval):
                if self._connection is None:
                    await self._begin_again()
                    return False
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return self._connection is not None

    async def _begin_again(self) -> None:
        """Returns when a broker tells, and never if none will."""
        options = self._pool.options
        for pause in backoff(options.backoff_first, options.backoff_max, self._pool.rng):
            await asyncio.sleep(pause)
            try:
                await self.begin()
            except MagnetarError as error:
                if not error.retryable or isinstance(error, TooManyRequests):
                    _log.info("%s: asked for again and again, not watched: %s", self._what, error)
                    await asyncio.get_running_loop().create_future()
            else:
                return

    def close(self) -> None:
        """Nothing is told any more."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.ports.pop(self._id, None)
            connection.send(self._end().encode())

    # --- the connection ----------------------------------------------------------------------------------------------

    def writing_resumed(self) -> None:
        """It writes little."""

    def lost(self, _: MagnetarError) -> None:
        """The connection broke."""
        self._connection = None
        self._changed.set()

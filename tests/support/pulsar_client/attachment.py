"""Keeps a producer or a consumer at whichever broker has its topic: look-up, opening, and again after each end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from magnetar.proto.errors import MagnetarError, ProducerFenced, RequestTimeout, TopicTerminated

from .connection import Connection, Handler

if TYPE_CHECKING:
    from .client import PulsarClient

_FIRST_BACKOFF_S, _MOST_BACKOFF_S = 0.1, 1.0


class Attachment:
    """`connection` is where its broker is, None while there is none. Call `begin` once."""

    def __init__(
        self,
        client: PulsarClient,
        topic: str,
        key: tuple[str, int],
        handler: Handler,
        *,
        open: Callable[[Connection], Awaitable[None]],
        opened: Callable[[], None],
        give_up: Callable[[Connection], None],
    ) -> None:
        """`open` asks for it and `opened` goes on; `give_up` closes what was asked for without an answer."""
        self.connection: Connection | None = None
        self.ended: MagnetarError | None = None  # it never comes back
        self._client = client
        self._topic = topic
        self._key = key
        self._handler = handler
        self._open, self._opened, self._give_up = open, opened, give_up
        self._on: Connection | None = None  # where it is asked for, or open
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def begin(self) -> None:
        """Raises what is final, and what may succeed later as well: that is for the program, the first time."""
        try:
            await self._attach()
        except BaseException:
            self.close()
            raise
        if self.connection is None:  # it was closed as soon as it was open
            self._task = asyncio.get_running_loop().create_task(self._return())

    def lost(self, connection: Connection) -> bool:
        """It is not there any more, and comes back by itself. False: that is known."""
        if connection is not self._on:
            return False
        was_open, self._on, self.connection = self.connection is not None, None, None
        if was_open and not self._closed and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._return())
        return True

    def close(self) -> Connection | None:
        """It does not come back; where it was."""
        self._closed = True
        connection, self._on, self.connection = self._on, None, None
        if connection is not None:
            connection.handlers.pop(self._key, None)
        if self._task is not None:
            self._task.cancel()
        return connection

    async def _return(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while self.connection is None and not self._closed:
            await asyncio.sleep(backoff_s * self._client.rng.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, _MOST_BACKOFF_S)
            try:
                await self._attach()
            except (ProducerFenced, TopicTerminated) as error:
                self.ended = error
                break
            except MagnetarError:
                continue  # others may have its place for a while
        self._task = None

    async def _attach(self) -> None:
        connection = await self._client.find(self._topic)
        if connection.closed or self._closed:
            return
        self._on = connection
        connection.handlers[self._key] = self._handler
        try:
            await self._open(connection)
        except MagnetarError as error:
            self._on = None
            connection.handlers.pop(self._key, None)
            if isinstance(error, RequestTimeout):
                self._give_up(connection)
            raise
        if self._on is connection:
            self.connection = connection
            self._opened()

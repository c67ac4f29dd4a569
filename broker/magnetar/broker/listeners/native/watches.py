"""Watches of one connection: topics that are made and deleted become TopicsChanged frames.

changes of one turn of the loop -> one frame
more than MAX_CHANGES of them, or the connection does not take any -> "list again", and nothing is kept until then
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from magnetar.proto import commands as c
from magnetar.proto.errors import AlreadyExists, TooManyRequests

from ...service.broker import BrokerService
from .ports import Link

MAX_CHANGES = 1_000  # in one frame: 300 KB of names at most


class Watch:
    """The way out of one watch."""

    def __init__(self, link: Link, watch_id: int) -> None:
        self._link = link
        self._watch_id = watch_id
        self._loop = asyncio.get_running_loop()
        self._changes: dict[str, bool] = {}  # by topic: whether it exists now
        self._list_again = False
        self._flush: asyncio.Handle | None = None
        self._stop: Callable[[], None] | None = None  # what the service gave, once it has begun
        self._closed = False

    def begun(self, stop: Callable[[], None]) -> None:
        """The service reports changes until `stop` is called: at once if the watch was ended meanwhile."""
        self._stop = stop
        if self._closed:
            stop()

    def topic_changed(self, topic: str, exists: bool) -> None:
        """Sent at the end of the turn."""
        if self._list_again:
            return
        self._changes[topic] = exists
        if len(self._changes) > MAX_CHANGES or not self._link.writable:
            self._changes.clear()
            self._list_again = True
        if self._flush is None:
            self._flush = self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Sends what there is, if the connection takes it."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        if not self._link.writable:
            return
        changes, self._changes = self._changes, {}
        list_again, self._list_again = self._list_again, False
        if list_again:
            self._link.send(c.TopicsChanged(0, self._watch_id, True).encode())
        elif changes:
            header = c.TopicsChanged(0, self._watch_id).encode()
            self._link.send(header, msgspec.msgpack.encode(changes))

    def close(self) -> None:
        """Nothing is sent any more."""
        self._closed = True
        if self._stop is not None:
            self._stop()
        if self._flush is not None:
            self._flush.cancel()


class Watches:
    """All of a connection, by the ids that the peer chose."""

    def __init__(self, service: BrokerService) -> None:
        self._service = service
        self._watches: dict[int, Watch] = {}

    async def request(self, link: Link, command: c.WatchTopics) -> None:
        """Begins or ends a watch. Raises TooManyRequests, AlreadyExists, InvalidArgument."""
        if not command.namespace:
            if (watch := self._watches.pop(command.watch_id, None)) is not None:
                watch.close()
            return
        if command.watch_id in self._watches:
            raise AlreadyExists(f"watch {command.watch_id} is open on this connection; choose another id")
        most = self._service.settings.max_watches_per_connection
        if len(self._watches) >= most:
            raise TooManyRequests(
                f"this connection has {most} watches of topics, which is max_watches_per_connection; "
                "topics are found by listing them"
            )
        watch = self._watches[command.watch_id] = Watch(link, command.watch_id)
        try:
            watch.begun(await self._service.watch_topics(link, command.namespace, watch.topic_changed))
        except BaseException:
            if self._watches.get(command.watch_id) is watch:
                del self._watches[command.watch_id]
            raise

    def writing_resumed(self) -> None:
        """The connection takes more."""
        for watch in self._watches.values():
            watch.flush()

    def close(self) -> None:
        """The connection is gone."""
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()

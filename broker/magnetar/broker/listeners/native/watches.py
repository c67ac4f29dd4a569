"""Watches of one connection: topics that are made and deleted become TopicsChanged frames, growth PartitionsChanged.

changes of one turn of the loop -> one frame
more than MAX_CHANGES of them, or the connection does not take any -> "list again", and nothing is kept until then
the partitions of a topic change -> one frame, with the last number if the connection did not take any for a while
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from magnetar.proto import commands as c
from magnetar.proto.errors import AlreadyExists, TooManyRequests

from ...service.broker import BrokerService
from .ports import Link

MAX_CHANGES = 1_000  # in one frame: 300 KB of names at most
# Each is of a topic that exists, and takes 1 KB: a client has one for each partitioned topic that it uses.
MAX_PARTITION_WATCHES = 10_000


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


class PartitionWatch:
    """The way out of the watch of one partitioned topic."""

    def __init__(self, link: Link, watch_id: int) -> None:
        self._link = link
        self._watch_id = watch_id
        self._known = 0  # by the peer
        self._partitions: int | None = (
            None  # as the service said last; None: it has not said anything since it began
        )
        self._stop: Callable[[], None] | None = None
        self._closed = False

    def begun(self, partitions: int, stop: Callable[[], None]) -> None:
        """As Watch.begun; the peer is answered `partitions`, and anything else that it is to know comes after that."""
        self._known, self._stop = partitions, stop
        asyncio.get_running_loop().call_soon(self.flush)
        if self._closed:
            stop()

    def partitions_changed(self, partitions: int) -> None:
        """Sent at once, if the connection takes it."""
        self._partitions = partitions
        self.flush()

    def flush(self) -> None:
        """Sends what the peer does not know yet."""
        partitions, begun = self._partitions, self._stop is not None and not self._closed
        if begun and partitions is not None and partitions != self._known and self._link.writable:
            self._known = partitions
            self._link.send(c.PartitionsChanged(0, self._watch_id, partitions).encode())

    def close(self) -> None:
        """Nothing is sent any more."""
        self._closed = True
        if self._stop is not None:
            self._stop()


W = TypeVar("W", Watch, PartitionWatch)


class Watches:
    """All of a connection, by the ids that the peer chose."""

    def __init__(self, service: BrokerService) -> None:
        self._service = service
        self._topics: dict[int, Watch] = {}
        self._partitions: dict[int, PartitionWatch] = {}

    async def watch_topics(self, link: Link, command: c.WatchTopics) -> None:
        """Begins or ends a watch. Raises TooManyRequests, AlreadyExists, InvalidArgument."""
        if not command.namespace:
            _end(self._topics, command.watch_id)
            return
        most = self._service.settings.max_watches_per_connection
        cure = "which is max_watches_per_connection; topics are found by listing them"
        with self._begins(self._topics, Watch(link, command.watch_id), command.watch_id, most, cure) as watch:
            watch.begun(await self._service.watch_topics(link, command.namespace, watch.topic_changed))

    async def watch_partitions(self, link: Link, command: c.WatchPartitions) -> dict[str, int]:
        """Begins or ends a watch; how many partitions there are. Raises as watch_topics, and TopicBusy.

        There is none of a topic that is not partitioned.
        """
        watch_id = command.watch_id
        if not command.topic:
            _end(self._partitions, watch_id)
            return {"partitions": 0}
        new, most = PartitionWatch(link, watch_id), MAX_PARTITION_WATCHES
        with self._begins(self._partitions, new, watch_id, most, "the most that there can be") as watch:
            partitions, stop = await self._service.watch_partitions(
                link, command.topic, watch.partitions_changed
            )
            watch.begun(partitions, stop)
        if not partitions:
            _end(self._partitions, watch_id)
        return {"partitions": partitions}

    @contextmanager
    def _begins(self, watches: dict[int, W], watch: W, watch_id: int, most: int, cure: str) -> Iterator[W]:
        """The watch is one of these, unless it cannot begin."""
        if watch_id in self._topics or watch_id in self._partitions:
            raise AlreadyExists(f"watch {watch_id} is open on this connection; choose another id")
        if len(watches) >= most:
            raise TooManyRequests(f"this connection has {most} watches of topics, {cure}")
        watches[watch_id] = watch
        try:
            yield watch
        except BaseException:
            if watches.get(watch_id) is watch:
                del watches[watch_id]
            raise

    def _all(self) -> list[Watch | PartitionWatch]:
        return [*self._topics.values(), *self._partitions.values()]

    def writing_resumed(self) -> None:
        """The connection takes more."""
        for watch in self._all():
            watch.flush()

    def close(self) -> None:
        """The connection is gone."""
        for watch in self._all():
            watch.close()
        self._topics.clear()
        self._partitions.clear()


def _end(watches: dict[int, W], watch_id: int) -> None:
    if (watch := watches.pop(watch_id, None)) is not None:
        watch.close()

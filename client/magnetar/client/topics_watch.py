"""What brokers tell of topics: those that are made and deleted in a namespace, and how many partitions a topic has.

As a fallback topics are listed, and partitions asked for, after every interval (`connection/watch`).
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import msgspec

from magnetar.proto.commands import (
    Command,
    PartitionsChanged,
    TopicsChanged,
    WatchPartitions,
    WatchTopics,
)
from magnetar.proto.errors import MalformedFrame

from .connection.pool import ConnectionPool, checked_partitions
from .connection.watch import Watch

# Changes that were told and not taken yet; above, the topics are listed again.
MAX_CHANGES = 10_000

_decode_changes = msgspec.msgpack.Decoder(dict[str, bool]).decode


class TopicChanges(NamedTuple):
    """Full names."""

    made: list[str]
    deleted: list[str]


class TopicsWatch(Watch):
    """Of the topics of a namespace. Each new watch asks for a list, and so does a broker that left changes out."""

    def __init__(self, pool: ConnectionPool, namespace: str, watch_id: int) -> None:
        super().__init__(pool, watch_id, f"topics of {namespace}")
        self._namespace = namespace
        self._changes: dict[str, bool] = {}  # by topic, in the order of the last change: whether it exists
        self._list_again = False

    def _beginning(self) -> Command:
        return WatchTopics(0, self._id, self._namespace)

    def _end(self) -> Command:
        return WatchTopics(0, self._id)

    async def next(self, interval: float) -> TopicChanges | None:
        """What has changed; None: only a list can tell, after `interval` seconds in any case."""
        told = await self.news(interval)
        changes, self._changes = self._changes, {}
        list_again, self._list_again = self._list_again, False
        if list_again or not told:
            return None
        made = [topic for topic, exists in changes.items() if exists]
        return TopicChanges(made, [topic for topic, exists in changes.items() if not exists])

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


class PartitionsWatch(Watch):
    """Of the number of partitions of a topic. `count`: as far as it is known; 0: it is no partitioned topic (any more)."""

    def __init__(self, pool: ConnectionPool, topic: str, count: int, watch_id: int) -> None:
        super().__init__(pool, watch_id, f"partitions of {topic}")
        self.topic = topic
        self.count = count

    def _beginning(self) -> Command:
        return WatchPartitions(0, self._id, self.topic)

    def _end(self) -> Command:
        return WatchPartitions(0, self._id)

    def _begun(self, answer: Any) -> bool:
        self.count = checked_partitions(answer["partitions"])
        return self.count > 0

    async def next(self, interval: float) -> int:
        """`count` when it has changed, perhaps, and after `interval` seconds. Raises what asking for it failed with."""
        if self._connection is None and not self.count:
            await asyncio.sleep(interval)  # the broker watches no topic that is not partitioned
        if not await self.news(interval) and self._connection is None:
            self.count = await self._pool.partitions_of(self.topic)
        return self.count

    def look_again(self) -> None:
        """Has `next` return: a partition was gone, which may have been made again."""
        self._changed.set()

    def received(self, command: Command, payload: bytes) -> None:
        """A PartitionsChanged frame. Raises MalformedFrame."""
        assert isinstance(command, PartitionsChanged)
        self.count = checked_partitions(command.partitions)
        self._changed.set()

"""The topics of a consumer: those that it names, or those that a pattern matches, which come and go.

The broker tells of topics that are made and deleted, and of the number of partitions (`topics_watch`). As a fallback topics
are listed again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from magnetar.proto.errors import InvalidArgument, MagnetarError
from magnetar.proto.ids import DOMAINS, PARTITION_INFIX, TopicName
from magnetar.runtime.tasks import LongTask

from .administration import Admin
from .connection.pool import ConnectionPool
from .options import LETTER_ENDINGS
from .topics_watch import PartitionsWatch, TopicChanges, TopicsWatch


class TopicPattern:
    """A pattern of topic names, and where it is looked for: the namespace that it begins with, if any.

    One that begins with non-persistent:// matches such topics alone, any other one persistent topics.
    """

    def __init__(self, pattern: re.Pattern[str]) -> None:
        if not isinstance(pattern.pattern, str):
            raise InvalidArgument(f"a pattern of topics is text, not {pattern.pattern!r}")
        domain, separator, text = pattern.pattern.partition("://")
        if not separator or domain not in DOMAINS:
            domain, text = "persistent", pattern.pattern
        parts = text.split("/", 2)
        if len(parts) == 2:
            raise InvalidArgument(f"not a pattern of topics: {text!r} (want NAME or TENANT/NAMESPACE/NAME)")
        self._names = re.compile(parts[-1], pattern.flags)
        # Both are checked as those of a topic.
        name = TopicName.parse(f"{domain}://{parts[0]}/{parts[1]}/x" if len(parts) == 3 else "x")
        self.namespace, self._domain = name.full_namespace, domain

    @property
    def of_letters(self) -> bool:
        """True if it asks for letters of other subscriptions: it has one of their endings in it."""
        return any(ending in self._names.pattern for ending in LETTER_ENDINGS)

    def matches(self, topics: Iterable[str]) -> list[str]:
        """Those full names whose last part matches as a whole, without the number of a partition.

        Retry and dead-letter topics, and partitions by their own names, only if it asks for them.
        """
        return [topic for topic in topics if self._matches(TopicName.parse(topic))]

    def _matches(self, topic: TopicName) -> bool:
        name = topic.whole.name
        if topic.domain != self._domain or (name.endswith(LETTER_ENDINGS) and not self.of_letters):
            return False
        names = self._names
        of_partitions = PARTITION_INFIX in names.pattern
        return bool(names.fullmatch(name) or (of_partitions and names.fullmatch(topic.name)))

    def __str__(self) -> str:
        return f"topics {self.namespace}/{self._names.pattern}"


def checked_topics(topics: str | Sequence[str]) -> list[str]:
    """Full names, each once. Raises InvalidTopicName, InvalidArgument."""
    if not isinstance(topics, Iterable):
        raise InvalidArgument(f"a topic is named by a str, not {topics!r}; several by a sequence of them")
    names = [topics] if isinstance(topics, str) else list(topics)
    if not names:
        raise InvalidArgument("a consumer needs a topic")
    return list(dict.fromkeys(str(TopicName.parse(name)) for name in names))


class PatternTopics:
    """The ChangingTopics of a pattern, without those that `leaves_out` says; listed every `interval` seconds."""

    endless = True

    def __init__(
        self,
        pattern: TopicPattern,
        admin: Admin,
        watch: TopicsWatch,
        interval: float,
        leaves_out: Callable[[str], bool],
    ) -> None:
        self._pattern = pattern
        self._admin = admin
        self._watch = watch
        self._interval = interval
        self._leaves_out = leaves_out

    async def begin(self) -> None:
        with contextlib.suppress(MagnetarError):  # it is tried again
            await self._watch.begin()

    async def all(self) -> list[str]:
        return self._wanted(await self._admin.list_topics(self._pattern.namespace))

    async def next(self) -> TopicChanges | None:
        changes = await self._watch.next(self._interval)
        return changes and TopicChanges(self._wanted(changes.made), changes.deleted)

    def gone(self, topic: str, others: Iterable[str]) -> bool:
        return True

    def made_again(self, topic: str) -> None:
        self._watch.note({topic: True})

    def close(self) -> None:
        self._watch.close()

    def _wanted(self, topics: list[str]) -> list[str]:
        return [topic for topic in self._pattern.matches(topics) if not self._leaves_out(topic)]


class NamedTopics:
    """The ChangingTopics of names of which some are partitioned: the partitions of these, and the others as they are."""

    endless = False

    def __init__(
        self, pool: ConnectionPool, names: list[str], watches: list[PartitionsWatch], interval: float
    ) -> None:
        """`watches`: of those that are partitioned."""
        self._pool = pool
        self._names = names
        self._watches = {watch.topic: watch for watch in watches}
        self._interval = interval
        self._changed = asyncio.Event()
        self._following: list[LongTask] = []

    async def begin(self) -> None:
        # Those that cannot be watched now are watched later.
        await asyncio.gather(*[watch.begin() for watch in self._watches.values()], return_exceptions=True)
        self._following = [
            LongTask(f"the partitions of {topic}", partial(self._follow, watch))
            for topic, watch in self._watches.items()
        ]

    async def _follow(self, watch: PartitionsWatch) -> None:
        while True:
            await watch.next(self._interval)
            self._changed.set()

    async def all(self) -> list[str]:
        return [topic for name in self._names for topic in self._topics_of(name)]

    def _topics_of(self, name: str) -> list[str]:
        watch = self._watches.get(name)
        return [name] if watch is None else partitions_named(name, watch.count)

    async def next(self) -> TopicChanges | None:
        await self._changed.wait()
        self._changed.clear()
        return None

    def gone(self, topic: str, others: Iterable[str]) -> bool:
        """Of a partition, while others of its topic are there. It is looked for at once: it may have been made again."""
        self._changed.set()
        whole = TopicName.parse(topic).whole
        return str(whole) in self._watches and any(TopicName.parse(one).whole == whole for one in others)

    def made_again(self, topic: str) -> None:
        """See `gone`."""

    def close(self) -> None:
        for task in self._following:
            self._pool.await_end(task.stop())
        for watch in self._watches.values():
            watch.close()


def partitions_named(topic: str, count: int) -> list[str]:
    """Full names of the partitions of a topic."""
    name = TopicName.parse(topic)
    return [str(name.partition_of(number)) for number in range(count)]

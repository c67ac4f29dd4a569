"""Topics of a namespace that a pattern names, listed and watched.

A list and what changes in it are known by a hash: who sends the one that it has gets an empty answer while nothing changed.

    WATCH_TOPIC_LIST --the service watches, then lists--> _SUCCESS with the topics --a topic is made, deleted--> _UPDATE
    changes of one turn of the loop, and those while the connection does not take any: one frame
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

import re2
from xxhash import xxh3_64_intdigest

from magnetar.proto.errors import InvalidArgument, TooManyRequests
from magnetar.proto.ids import DOMAINS, PARTITION_INFIX, TopicName
from magnetar.proto.pulsar import wire_pb2 as wire
from magnetar.proto.pulsar.commands import encode

from ...service.broker import BrokerService
from .ports import Link, frame_of

MAX_PATTERN_CHARS = 50  # Pulsar's: longer ones are left to the client
_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
_OPTIONS.max_mem = 1 << 20


class Pattern:
    """A regular expression for names without domain and number of a partition, in time that is linear in the name."""

    def __init__(self, text: str) -> None:
        """Raises InvalidArgument."""
        try:
            self._matches = re2.compile(text.rpartition("://")[2], _OPTIONS).fullmatch
        except re2.error as error:
            reason = error.args[0].decode(errors="replace")
            raise InvalidArgument(f"{text!r} is not a regular expression of RE2: {reason}") from None

    def matches(self, topic: str) -> bool:
        """Whether the topic of this full name is one."""
        name = topic.partition("://")[2]
        if PARTITION_INFIX in name:
            name = str(TopicName.parse(topic).whole).partition("://")[2]
        return self._matches(name) is not None


class TopicsHash:
    """Of a list of topics, whatever their order. Clients send it back as it is, and know nothing else of it."""

    def __init__(self, topics: Iterable[str] = ()) -> None:
        self._value = 0
        for topic in topics:
            self.change(topic)

    def change(self, topic: str) -> None:
        """A topic comes or goes."""
        self._value ^= xxh3_64_intdigest(topic.encode())

    def __str__(self) -> str:
        return f"{self._value:016x}"


async def list_topics(
    service: BrokerService, link: Link, namespace: str, domains: Iterable[str], pattern: Pattern | None = None
) -> list[str]:
    """All of a namespace that the pattern matches, partitions by their own names."""
    prefixes = tuple(f"{domain}://" for domain in domains)
    topics: list[str] = []
    after, more = "", True
    while more:  # a page is looked at in a turn of the loop
        page = await service.list_topics(link, namespace, after=after)
        topics += [
            topic
            for topic in page.topics
            if topic.startswith(prefixes) and (pattern is None or pattern.matches(topic))
        ]
        more, after = page.more, page.topics[-1] if page.topics else ""
    return topics


def _nothing() -> None: ...


class Watch:
    """One watch: which topics the client knows, and what it does not know yet."""

    def __init__(self, link: Link, watcher_id: int, pattern: Pattern) -> None:
        self._link = link
        self._watcher_id = watcher_id
        self._pattern = pattern
        self._known: dict[str, None] = {}
        self._hash = TopicsHash()
        self._changes: dict[str, bool] = {}  # by topic: whether it exists now
        self._flush: asyncio.Handle | None = None
        self._begun = False
        self.stop: Callable[[], None] = _nothing  # what the service gave, and refers to this
        self.closed = False

    def begin(self, topics: Sequence[str]) -> str:
        """The client gets these, whose hash is returned; what changed meanwhile follows."""
        self._known, self._hash = dict.fromkeys(topics), TopicsHash(topics)
        self._begun = True
        self._schedule()
        return str(self._hash)

    def topic_changed(self, topic: str, exists: bool) -> None:
        """Sent at the end of the turn."""
        if topic.startswith("persistent://") and self._pattern.matches(topic):
            self._changes[topic] = exists
            self._schedule()

    def _schedule(self) -> None:
        if self._flush is None and self._begun:
            self._flush = asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Sends what the client does not know, if the connection takes it."""
        self._flush = None
        if self.closed or not self._link.writable:
            return
        changes, self._changes = self._changes, {}
        new = [topic for topic, exists in changes.items() if exists and topic not in self._known]
        deleted = [topic for topic, exists in changes.items() if not exists and topic in self._known]
        for topic in deleted:
            del self._known[topic]
        self._known.update(dict.fromkeys(new))
        for topic in new + deleted:
            self._hash.change(topic)
        if new or deleted:
            update = wire.CommandWatchTopicUpdate(
                watcher_id=self._watcher_id,
                new_topics=new,
                deleted_topics=deleted,
                topics_hash=str(self._hash),
            )
            self._link.send(encode(update))

    def close(self) -> None:
        """Nothing is sent any more."""
        self.closed = True
        self.stop()
        self.stop = _nothing


class Watches:
    """All of a connection, by the ids that the client chose."""

    def __init__(self, service: BrokerService) -> None:
        self._service = service
        self._watches: dict[int, Watch] = {}

    async def watch(
        self, link: Link, command: wire.CommandWatchTopicList
    ) -> wire.CommandWatchTopicListSuccess:
        """Begins a watch, in the place of one with its id. Raises TooManyRequests, InvalidArgument, FrameTooLarge."""
        service, watcher_id = self._service, command.watcher_id
        self.end(watcher_id)
        most = service.settings.max_watches_per_connection
        if len(self._watches) >= most:
            raise TooManyRequests(
                f"this connection has {most} watches of topics, which is max_watches_per_connection"
            )
        pattern = Pattern(command.topics_pattern)
        watch = self._watches[watcher_id] = Watch(link, watcher_id, pattern)
        try:
            stop = await service.watch_topics(link, command.namespace, watch.topic_changed)
            watch.stop = stop
            if watch.closed:
                stop()
            topics = await list_topics(service, link, command.namespace, DOMAINS[:1], pattern)
            found = watch.begin(topics)
            success = wire.CommandWatchTopicListSuccess(
                request_id=command.request_id,
                watcher_id=watcher_id,
                topic=[] if found == command.topics_hash else topics,
                topics_hash=found,
            )
            frame_of(success, link)  # or the client would not learn that it watches
        except BaseException:
            watch.close()
            if self._watches.get(watcher_id) is watch:
                del self._watches[watcher_id]
            raise
        return success

    def end(self, watcher_id: int) -> None:
        """Fine if there is none."""
        if (watch := self._watches.pop(watcher_id, None)) is not None:
            watch.close()

    def writing_resumed(self) -> None:
        """The connection takes more."""
        for watch in list(self._watches.values()):
            watch.flush()

    def close(self) -> None:
        """The connection is gone."""
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()

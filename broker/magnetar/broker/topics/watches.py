"""Watches of a namespace: they are notified at once when topics are made and deleted.

A watch is notified of every change from its beginning on, in order; whoever lists the topics after that misses nothing. A
broker of a cluster learns of what other brokers do from the metadata store: while somebody watches a namespace, its topics
are listed again after each change, at most once in `LIST_INTERVAL_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from magnetar.metadata import MetadataStore
from magnetar.proto.errors import InvalidTopicName
from magnetar.proto.ids import DOMAINS, TopicName
from magnetar.runtime.tasks import LongTask, on_change

from ..log.records import TOPICS_ROOT

# A change of any topic's list of ledgers counts as a change here as well.
LIST_INTERVAL_S = 0.5
_RETRY_MAX_S = 4.0


# Who watches: gets the full name of a topic, and whether it was made or deleted.
TopicWatch = Callable[[str, bool], None]


class TopicWatches:
    """Watches of one broker, by namespace. `close` in the end."""

    def __init__(self, metadata: MetadataStore | None) -> None:
        """`metadata`: where topics of other brokers are found; None: there is no other broker."""
        self._metadata = metadata
        self._watches: dict[str, dict[TopicWatch, None]] = {}
        self._followers: dict[str, _Follower] = {}

    async def watch(self, namespace: str, watch: TopicWatch) -> Callable[[], None]:
        """Notifies `watch` of all that changes once this has returned, until what it returns is called."""

        def stop() -> None:
            watches = self._watches.get(namespace, {})
            watches.pop(watch, None)
            if (
                not watches
                and self._watches.pop(namespace, None) is not None
                and namespace in self._followers
            ):
                self._followers.pop(namespace).stop()

        self._watches.setdefault(namespace, {})[watch] = None
        if self._metadata is not None:
            if namespace not in self._followers:
                self._followers[namespace] = _Follower(self._metadata, namespace, self.changed)
            try:
                await self._followers[namespace].listed.wait()
            except BaseException:
                stop()
                raise
        return stop

    def changed(self, name: TopicName, exists: bool) -> None:
        """A topic was made, or is deleted."""
        namespace = name.full_namespace
        follower = self._followers.get(namespace)
        if follower is not None and not follower.note(name, exists=exists):
            return
        for watch in list(self._watches.get(namespace, ())):
            watch(str(name), exists)

    def close(self) -> None:
        """Nothing is followed any more."""
        for follower in self._followers.values():
            follower.stop()
        self._followers.clear()


class _Follower:
    """The topics of a namespace as the metadata store has them, while somebody watches them."""

    def __init__(
        self, metadata: MetadataStore, namespace: str, changed: Callable[[TopicName, bool], None]
    ) -> None:
        self._metadata = metadata
        self._namespace = namespace
        self._changed = changed
        # Domain and name of each; None: not listed yet, and nobody was answered.
        self._known: set[tuple[str, str]] | None = None
        self.listed = asyncio.Event()  # for the first time
        self._event = asyncio.Event()
        self._event.set()
        self._paths = {domain: f"{TOPICS_ROOT}/{namespace}/{domain}" for domain in DOMAINS}
        self._watches = [metadata.watch(path, lambda _: self._event.set()) for path in self._paths.values()]
        follow = partial(on_change, self._event, self._list)
        self._task = LongTask(
            f"the list of topics of namespace {namespace}", follow, retry_max_s=_RETRY_MAX_S
        )

    def note(self, name: TopicName, *, exists: bool) -> bool:
        """Of a change that this broker made, or found; False if it is no news."""
        known = self._known
        if known is None or ((name.domain, name.name) in known) is exists:
            return False
        known.symmetric_difference_update([(name.domain, name.name)])
        return True

    async def _list(self) -> None:
        listed: set[tuple[str, str]] = set()
        for domain, path in self._paths.items():
            listed.update((domain, name) for name in await self._metadata.children(path))
        self._compare(listed)
        await asyncio.sleep(LIST_INTERVAL_S)

    def _compare(self, listed: set[tuple[str, str]]) -> None:
        if self._known is None:
            self._known = listed
            self.listed.set()
            return
        for domain, name in sorted(self._known ^ listed):
            with contextlib.suppress(InvalidTopicName):  # no topic has that name
                topic = TopicName.parse(f"{domain}://{self._namespace}/{name}")
                self._changed(topic, (domain, name) in listed)

    def stop(self) -> None:
        """Nothing is noted any more."""
        for watch in self._watches:
            watch.close()
        self._task.stop()

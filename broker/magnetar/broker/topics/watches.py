"""Who is told at once that topics of a namespace are made and deleted.

A watch is told of every change from its beginning on, in order; whoever lists the topics after it has begun misses nothing.
"""

from __future__ import annotations

from typing import Protocol

from magnetar.proto.errors import InvalidArgument
from magnetar.proto.ids import TopicName


class TopicWatch(Protocol):
    """Who watches."""

    def topic_changed(self, topic: str, exists: bool) -> None:
        """A topic was made or deleted; its full name."""


class TopicWatches:
    """Watches of one broker, by namespace."""

    def __init__(self) -> None:
        self._watches: dict[str, dict[TopicWatch, None]] = {}

    def add(self, namespace: str, watch: TopicWatch) -> None:
        """`namespace`: tenant/namespace. Raises InvalidArgument."""
        parts = namespace.split("/")
        if len(parts) != 2 or not all(parts):
            raise InvalidArgument(f"not a namespace: {namespace!r} (want tenant/namespace)")
        self._watches.setdefault(namespace, {})[watch] = None

    def remove(self, watch: TopicWatch) -> None:
        """Does nothing if it is not there."""
        for namespace, watches in list(self._watches.items()):
            watches.pop(watch, None)
            if not watches:
                del self._watches[namespace]

    def changed(self, name: TopicName, *, exists: bool) -> None:
        """A topic was made, or is deleted."""
        for watch in list(self._watches.get(f"{name.tenant}/{name.namespace}", ())):
            watch.topic_changed(str(name), exists)

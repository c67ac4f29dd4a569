"""What is read from the store when it is asked for, and kept until it changes.

    not known --read--> known --the store says that it changed--> not known

A watch is made before the first read (MetadataStore.watch), so nothing that changes is missed; what is answered may be as
old as the store's servers are behind each other. Whoever acts on it acts by versions, and finds out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

from magnetar.proto.errors import ServiceNotReady
from magnetar.runtime.tasks import TaskSet

from .store import MetadataStore, Watch

T = TypeVar("T")


class Watched(Generic[T]):
    """What `read` makes of a node or of the nodes below it. Invariant: `known` is what it read since the last change."""

    def __init__(
        self,
        metadata: MetadataStore,
        path: str,
        read: Callable[[], Coroutine[Any, Any, T]],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.known: T | None = None
        self._read = read
        self._on_change = on_change
        self._reading: asyncio.Task[T] | None = None
        # Under way: `_reading`, and those that a change has overtaken.
        self._readings = TaskSet(f"read {path}")
        self.changed = asyncio.Event()  # set at the next change; another one takes its place then
        self._watch: Watch = metadata.watch(path, lambda _: self.drop())

    def drop(self) -> None:
        """It has changed, or may have."""
        self.known = self._reading = None
        event, self.changed = self.changed, asyncio.Event()
        event.set()
        self._on_change()

    async def get(self) -> T:
        """Read if it is not known; those who ask meanwhile share the reading.

        Raises what the store failed with, and ServiceNotReady when this is closed meanwhile.
        """
        if (value := self.known) is not None:
            return value
        reading = self._reading
        if reading is None:
            reading = self._reading = self._readings.begin(self._read(), ended=self._read_done)
        await asyncio.wait([reading])  # a caller who gives up does not stop it for the others
        if reading.cancelled():
            raise ServiceNotReady(f"{reading.get_name()} was stopped; try again")
        return reading.result()

    def _read_done(self, reading: asyncio.Task[T]) -> None:
        failed = reading.cancelled() or reading.exception() is not None
        if self._reading is reading:  # nothing changed since it began
            self._reading = None
            if not failed:
                self.known = reading.result()

    async def close(self) -> None:
        """Nothing is watched or read any more."""
        self._watch.close()
        await self._readings.close()


class WatchedByName(Generic[T]):
    """A Watched for each name that was asked for. Iterated: those names. Kept until `forget`, or `close`.

    Who lets others make up names looks first whether there is such a node.
    """

    def __init__(
        self,
        metadata: MetadataStore,
        path: Callable[[str], str],
        read: Callable[[str], Coroutine[Any, Any, T]],
        on_change: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`path` and `read`: of a name."""
        self._metadata = metadata
        self._path = path
        self._read = read
        self._on_change = on_change
        self._watched: dict[str, Watched[T]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._watched

    def __iter__(self) -> Iterator[str]:
        return iter(self._watched)

    def of(self, name: str) -> Watched[T]:
        """Watched from now on."""
        if (watched := self._watched.get(name)) is None:
            path, read, on_change = (
                self._path(name),
                partial(self._read, name),
                partial(self._on_change, name),
            )
            watched = self._watched[name] = Watched(self._metadata, path, read, on_change)
        return watched

    def forget(self, name: str) -> Watched[T] | None:
        """It is the caller's to close."""
        return self._watched.pop(name, None)

    def drop(self, name: str) -> None:
        """It has changed, or may have."""
        if (watched := self._watched.get(name)) is not None:
            watched.drop()

    async def close(self) -> None:
        """Nothing is watched or read any more."""
        for watched in self._watched.values():
            await watched.close()

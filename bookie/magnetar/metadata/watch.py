"""The watches of a store, whose callbacks come in this process's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator


class LoopWatch:
    """Watch of MetadataStore; see WatchList, which makes it."""

    def __init__(
        self, path: str, callback: Callable[[str], None], forget: Callable[[LoopWatch], None]
    ) -> None:
        self.path = path
        self._callback = callback
        self._forget = forget
        self._scheduled = False
        self._closed = False

    def changed(self) -> None:
        """Calls back in the next turn of the loop, once for all changes until then."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._call)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._forget(self)
            del self._callback, self._forget  # they refer to its owner

    def _call(self) -> None:
        self._scheduled = False
        if not self._closed:
            self._callback(self.path)


class WatchList:
    """All watches of a store, by path. Iterated: the paths that are watched.

    `on_last_closed` is called with a path that nobody watches any more.
    """

    def __init__(self, on_last_closed: Callable[[str], None] = lambda path: None) -> None:
        self._by_path: dict[str, list[LoopWatch]] = {}
        self._on_last_closed = on_last_closed

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_path)

    def __contains__(self, path: str) -> bool:
        return path in self._by_path

    def __len__(self) -> int:
        return len(self._by_path)

    def add(self, path: str, callback: Callable[[str], None]) -> LoopWatch:
        """One more; it is in the list until it is closed."""
        watch = LoopWatch(path, callback, self._forget)
        self._by_path.setdefault(path, []).append(watch)
        return watch

    def notify(self, path: str) -> None:
        """What is at the path has changed, or may have."""
        for watch in self._by_path.get(path, ()):
            watch.changed()

    def close(self) -> None:
        """Closes all of them."""
        for watch in [watch for watches in self._by_path.values() for watch in watches]:
            watch.close()

    def _forget(self, watch: LoopWatch) -> None:
        watches = self._by_path[watch.path]
        watches.remove(watch)
        if not watches:
            del self._by_path[watch.path]
            self._on_last_closed(watch.path)

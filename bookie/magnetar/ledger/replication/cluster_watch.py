"""Which bookies are registered, known and drained now; and a directory that leaves the drained ones out of placement.

/draining/<bookie id>    an operator wants its ledgers on other bookies; it serves them until then (`metadata.drains`)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from magnetar.ledger.directory import BOOKIES_PATH, BookieDirectory
from magnetar.metadata.paths import COOKIES_PATH, DRAINING_BOOKIES_PATH
from magnetar.metadata.store import MetadataStore, Watch
from magnetar.proto.bookie_identity import BookieIdentity
from magnetar.runtime.tasks import LongTask, on_change

from .core.repair import ClusterView

_RETRY_MAX_S = 4.0
# Without a change that the store reports: a watch that was lost with a connection is made up for.
_POLL_S = 30.0
_PATHS = (BOOKIES_PATH, COOKIES_PATH, DRAINING_BOOKIES_PATH)


class ClusterWatch:
    """Follows the lists. `start` it, `close` it before the store; `on_change` is called from the loop."""

    def __init__(self, store: MetadataStore) -> None:
        self.view = ClusterView({}, {})
        self.known: tuple[str, ...] = ()  # bookies that ever were registered, as their cookies say
        self.on_change: list[Callable[[], None]] = []
        self._store = store
        self._changed = asyncio.Event()
        self._watches: list[Watch] = []
        self._task: LongTask | None = None

    async def start(self) -> None:
        """Reads the lists, and follows them from then on. Raises what the store raises; nothing is left then."""
        self._watches = [self._store.watch(path, lambda _: self._changed.set()) for path in _PATHS]
        try:
            await self.read()
        except BaseException:
            await self.close()
            raise
        read = partial(on_change, self._changed, self.read, poll_s=_POLL_S)
        self._task = LongTask("the list of bookies under repair", read, retry_max_s=_RETRY_MAX_S)

    async def read(self) -> None:
        """Reads the lists now."""
        lists = [await self._store.children(path) for path in _PATHS]
        registered, known, draining = (dict.fromkeys(names) for names in lists)
        view = ClusterView(registered, draining)
        if view != self.view or tuple(known) != self.known:
            self.view, self.known = view, tuple(known)
            for callback in list(self.on_change):
                callback()

    async def close(self) -> None:
        """Stops following."""
        for watch in self._watches:
            watch.close()
        if self._task is not None:
            await self._task.close()
            self._task = None


class PlacedBookies:
    """A BookieDirectory without the bookies that are drained: nothing new is placed there."""

    def __init__(self, bookies: BookieDirectory, watch: ClusterWatch) -> None:
        self._bookies = bookies
        self._watch = watch
        self._found: tuple[Sequence[str], object, tuple[str, ...]] | None = None
        self.address, self.labels, self.free_bytes = bookies.address, bookies.labels, bookies.free_bytes
        self.return_count, self.suspected = bookies.return_count, bookies.suspected

    def writable(self) -> Sequence[str]:
        """See BookieDirectory. The same object as long as they are the same."""
        writable, draining = self._bookies.writable(), self._watch.view.draining
        if not draining:
            return writable
        if self._found is None or self._found[0] is not writable or self._found[1] is not draining:
            self._found = (writable, draining, tuple(b for b in writable if b not in draining))
        return self._found[2]

    def refusals(self) -> Mapping[str, str]:
        draining = dict.fromkeys(self._watch.view.draining, "it is drained")
        return {**draining, **self._bookies.refusals()}

    def draining(self, bookie: str) -> bool:
        return bookie in self._watch.view.draining

    def identity(self, bookie: str) -> BookieIdentity:
        return self._bookies.identity(bookie)

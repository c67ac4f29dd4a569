"""What topics follow in the metadata store: read when somebody listens to it, and again after each change.

unknown --read--> known, and those who listen are called --the node changed--> unknown, and it is read again
   `--it cannot be read--> unknown: it is read again after a pause, or when somebody asks
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Generic, TypeVar

from magnetar.metadata import MetadataStore
from magnetar.metadata.watched import WatchedByName
from magnetar.proto.errors import MagnetarError
from magnetar.runtime.tasks import Jobs

_log = logging.getLogger(__name__)

_PAUSE_S = 5.0
_LISTENERS_PER_TURN = 20  # each of which may take 0.2 ms
T = TypeVar("T")


class Followed(Generic[T]):
    """Values by name, as `read` finds them. `close` in the end."""

    def __init__(
        self,
        metadata: MetadataStore,
        path: Callable[[str], str],
        read: Callable[[str], Coroutine[Any, Any, T]],
        *,
        what: str,
        meanwhile: str,
    ) -> None:
        """`what`, followed by a name, cannot be read, and `meanwhile`: for the log."""
        self._what = what
        self._meanwhile = meanwhile
        self.read = read  # what is stored now
        self._watched = WatchedByName(metadata, path, read, self._changed)
        self._jobs = Jobs(what)
        self._listeners: dict[str, dict[Callable[[], None], None]] = {}  # by name
        self._closed = False

    def listen(self, name: str, changed: Callable[[], None]) -> None:
        """From now on `changed` is called after each change, once the new value is known, until `ignore`."""
        self._listeners.setdefault(name, {})[changed] = None

    def ignore(self, name: str, changed: Callable[[], None]) -> None:
        """Ends `listen`; may come without it. What nobody listens to is not followed any more."""
        listeners = self._listeners.get(name, {})
        listeners.pop(changed, None)
        if not listeners and self._listeners.pop(name, None) is not None and not self._closed:
            if (watched := self._watched.forget(name)) is not None:
                self._jobs.begin(f"the end of {name}", watched.close)

    def known(self, name: str) -> T | None:
        """From memory; None: not known now, and being read."""
        found = self._watched.of(name).known
        if found is None:
            self._jobs.begin(name, partial(self._learn, name))
        return found

    async def learn(self, name: str) -> None:
        """Returns when it was read, if that is possible."""
        if self.known(name) is None:
            await self._jobs.wait(name)

    async def get(self, name: str) -> T:
        """From memory if somebody listens to it, else read now. Raises what the store failed with."""
        return await (self._watched.of(name).get() if name in self._listeners else self.read(name))

    def drop(self, name: str) -> None:
        """It has changed, or may have."""
        self._watched.drop(name)

    def _changed(self, name: str) -> None:
        if not self._closed and name in self._listeners:
            self.known(name)

    async def _learn(self, name: str) -> None:
        watched, told = self._watched.of(name), None
        while told is None or watched.known is not told:  # it may change again while they are told
            try:
                while (told := watched.known) is None:
                    await watched.get()
            except MagnetarError as error:
                _log.warning("%s %s cannot be read, %s: %s", self._what, name, self._meanwhile, error)
                asyncio.get_running_loop().call_later(_PAUSE_S, self._changed, name)
                return
            await self._tell(name)

    async def _tell(self, name: str) -> None:
        for number, changed in enumerate(list(self._listeners.get(name, ())), 1):
            if number % _LISTENERS_PER_TURN == 0:
                await asyncio.sleep(0)
            if changed not in self._listeners.get(name, ()):
                continue  # it has ended meanwhile
            try:
                changed()
            except Exception:  # costs its own topic only (rule 48)
                _log.exception("%s %s: somebody does not follow a change", self._what, name)

    async def close(self) -> None:
        """Nothing is watched or read any more."""
        self._closed = True
        await self._watched.close()
        await self._jobs.cancel()

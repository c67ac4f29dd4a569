"""What requests use one after another and somebody has to close: producers and consumers, by key.

(nothing)  --use--> OPENING  --it is open--> IN USE  --the last request is over--> IDLE  --use--> IN USE
OPENING    --it failed: each request that waits is told--> (nothing)
IN USE     --the last request is over, and it has ended: its topic is deleted, or it is refused--> closed
IDLE       --`idle_s` passed, or there are more than `most`--> closed; what has ended meanwhile is not used again
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Final, Generic, Protocol, TypeVar

from magnetar.proto.errors import MagnetarError
from magnetar.runtime.tasks import Jobs, awaited

_CLOSE_S: Final = 2.0  # what takes longer is given up


class Closable(Protocol):
    """A producer or a consumer."""

    @property
    def ended(self) -> bool:
        """Nothing can be done with it any more."""

    async def close(self) -> None:
        """Ends it."""

    def abort(self) -> None:
        """The same at once."""


C = TypeVar("C", bound=Closable)


class _Held(Generic[C]):
    def __init__(self, opening: asyncio.Task[C]) -> None:
        self.opening = opening
        self.users = 0
        self.timer: asyncio.TimerHandle | None = None

    @property
    def ended(self) -> bool:
        """The next use has to open another one."""
        if not self.opening.done():
            return False
        return self.opening.cancelled() or self.opening.exception() is not None or self.opening.result().ended


class Kept(Generic[C]):
    """See the module docstring. `close` in the end."""

    def __init__(self, what: str, idle_s: float, most: int) -> None:
        self._idle_s = idle_s
        self._most = most
        self._held: dict[Hashable, _Held[C]] = {}  # who was used last comes last
        self._jobs = Jobs(what)

    @asynccontextmanager
    async def use(self, key: Hashable, open: Callable[[], Awaitable[C]]) -> AsyncIterator[C]:
        """The one of this key, opened if there is none. Raises what opening raises."""
        held = self._held.get(key)
        if held is None or held.ended:
            self._drop(key)
            held = _Held(awaited(_opened(open), "an opening of HTTP"))
        self._held.pop(key, None)
        self._held[key] = held
        if held.timer is not None:
            held.timer.cancel()
        held.users += 1
        try:
            yield await asyncio.shield(held.opening)
        finally:
            held.users -= 1
            if not held.users and self._held.get(key) is held:
                self._idle(key, held)

    def _idle(self, key: Hashable, held: _Held[C]) -> None:
        if held.ended:
            self._drop(key)
            return
        held.timer = asyncio.get_running_loop().call_later(self._idle_s, self._drop, key)
        for other, one in list(self._held.items()):
            if len(self._held) <= self._most:
                return
            if not one.users:
                self._drop(other)

    def _drop(self, key: Hashable) -> None:
        if (held := self._held.pop(key, None)) is not None:
            if held.timer is not None:
                held.timer.cancel()
            self._jobs.begin(f"the end of {id(held)}", lambda: _closed(held))

    async def close(self) -> None:
        """Closes all."""
        for key in list(self._held):
            self._drop(key)
        await self._jobs.wait()


async def _opened(open: Callable[[], Awaitable[C]]) -> C:
    return await open()


async def _closed(held: _Held[C]) -> None:
    """Whoever waits for an opening that fails is told; one that takes too long is given up."""
    with contextlib.suppress(MagnetarError, TimeoutError):
        try:
            async with asyncio.timeout(_CLOSE_S):
                await (await held.opening).close()
        except TimeoutError:
            if held.opening.done() and not held.opening.cancelled():
                held.opening.result().abort()
            raise

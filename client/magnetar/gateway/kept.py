"""What requests use one after another and somebody has to close: producers and consumers, by key.

(nothing)  --use--> OPENING  --it is open--> IN USE  --the last request is over--> IDLE  --use--> IN USE
OPENING    --it failed: each request that waits is told--> (nothing)
IDLE       --`idle_s` passed, or there are more than `most`--> closed
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

from magnetar.runtime.tasks import Jobs, awaited


class Closable(Protocol):
    """A producer or a consumer."""

    async def close(self) -> None:
        """Ends it."""


C = TypeVar("C", bound=Closable)


class _Held(Generic[C]):
    def __init__(self, opening: asyncio.Task[C]) -> None:
        self.opening = opening
        self.users = 0
        self.timer: asyncio.TimerHandle | None = None


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
        held = self._held.pop(key, None)
        if held is None:
            held = _Held(awaited(_awaited(open), "an opening of HTTP"))
        self._held[key] = held
        if held.timer is not None:
            held.timer.cancel()
        held.users += 1
        try:
            yield await asyncio.shield(held.opening)
        finally:
            held.users -= 1
            if not held.users:
                self._idle(key, held)

    def drop(self, key: Hashable) -> None:
        """It is closed, or broken: the next use opens another one."""
        if (held := self._held.pop(key, None)) is not None:
            self._let_go(held)

    def _idle(self, key: Hashable, held: _Held[C]) -> None:
        if self._held.get(key) is not held:
            return
        failed = held.opening.done() and (held.opening.cancelled() or held.opening.exception() is not None)
        if failed:
            del self._held[key]
            return
        held.timer = asyncio.get_running_loop().call_later(self._idle_s, self.drop, key)
        for other, one in list(self._held.items()):
            if len(self._held) <= self._most:
                return
            if not one.users:
                self.drop(other)

    def _let_go(self, held: _Held[C]) -> None:
        if held.timer is not None:
            held.timer.cancel()
        self._jobs.begin(f"the end of {id(held)}", lambda: _closed(held))

    async def close(self) -> None:
        """Closes all."""
        for key in list(self._held):
            self.drop(key)
        await self._jobs.wait()


async def _awaited(open: Callable[[], Awaitable[C]]) -> C:
    return await open()


async def _closed(held: _Held[C]) -> None:
    await (await held.opening).close()

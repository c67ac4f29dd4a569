"""Handles, futures and tasks of the simulated loop."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from support.sim.loop import SimLoop
    from support.sim.process import SimProcess


def _nothing() -> None:
    """The callback of a cancelled handle."""


class SimHandle(asyncio.Handle):
    """A callback that waits for its turn: what asyncio's handles hold, without what only its debug mode needs.

    `owner` is the process of its context; it is looked up once. Handles are a tenth of a run, so nothing is called here
    that can be written out.
    """

    __slots__ = ("owner",)

    def __init__(
        self,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context,
        owner: SimProcess | None,
    ) -> None:
        self._callback = callback
        self._args = args
        self._context = context
        self._cancelled = False
        self.owner = owner

    def cancel(self) -> None:
        """See asyncio. The loop skips it when its time comes."""
        self._cancelled = True
        self._callback, self._args = _nothing, ()  # what they hold is free now, not when the time comes

    def __repr__(self) -> str:
        return f"<SimHandle {self._callback!r}{' cancelled' if self._cancelled else ''}>"


class SimTimerHandle(asyncio.TimerHandle):
    """The same of a timer."""

    __slots__ = ("owner",)

    def __init__(
        self,
        when: float,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context,
        owner: SimProcess | None,
    ) -> None:
        self._when = when
        self._callback = callback
        self._args = args
        self._context = context
        self._cancelled = False
        self.owner = owner

    def cancel(self) -> None:
        """See asyncio. The loop skips it when its time comes."""
        self._cancelled = True
        self._callback, self._args = _nothing, ()

    def __repr__(self) -> str:
        return f"<SimTimerHandle {self._callback!r}{' cancelled' if self._cancelled else ''}>"


Handle = SimHandle | SimTimerHandle


class SimFuture(asyncio.Future[Any]):
    """A future whose place in a set does not depend on its address; few are ever asked for their hash."""

    number = 0

    def __hash__(self) -> int:
        if not self.number:
            self.number = next(cast(Any, self.get_loop()).numbers)
        return self.number


class SimTask(asyncio.Task[Any]):
    """A task whose place in a set does not depend on its address: asyncio puts each into one when it is made."""

    number = 0
    loop: SimLoop | None = None
    owner: SimProcess | None = None

    def __hash__(self) -> int:
        if not self.number:
            self.number = next(cast(Any, self.get_loop()).numbers)
        return self.number

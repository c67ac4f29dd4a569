"""The openings of one connection, of producers or of consumers: carries out what `core.opening` decides for each id."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from magnetar.proto.errors import AlreadyClosed, MagnetarError, ServiceNotReady

from .core.opening import Accept, Begin, Cancel, Instruction, Opening, Refuse, Release, State

_log = logging.getLogger(__name__)

Request = TypeVar("Request")
Handle = TypeVar("Handle")


class OpeningActions(NamedTuple, Generic[Request, Handle]):
    """What a protocol does for its ids. `begin` may be cancelled, and must then leave nothing behind."""

    begin: Callable[[Request], Coroutine[Any, Any, Handle]]
    accept: Callable[[Request, Handle], None]
    refuse: Callable[[Request, MagnetarError], None]
    release: Callable[[Handle], None]
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]  # the connection owns its tasks


class Openings(Generic[Request, Handle]):
    """See the module docstring. `kind` is for errors: "producer"."""

    def __init__(self, kind: str, actions: OpeningActions[Request, Handle]) -> None:
        self._kind = kind
        self._actions = actions
        self._by_id: dict[int, Opening] = {}  # none that is CLOSED
        # By id: of the openings that are OPENING or CANCELLING.
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def get(self, id: int) -> Handle | None:
        """What the id holds; None unless it is open."""
        opening = self._by_id.get(id)
        return None if opening is None else opening.handle

    def __iter__(self) -> Iterator[Handle]:
        return iter([opening.handle for opening in self._by_id.values() if opening.handle is not None])

    def open(self, id: int, request: Request) -> None:
        """The peer opens the id."""
        opening = self._by_id.setdefault(id, Opening(f"{self._kind} {id}"))
        self._carry_out(id, opening, opening.open(request))

    def close(self, id: int) -> None:
        """The peer closes the id, whatever its state."""
        if (opening := self._by_id.get(id)) is not None:
            self._carry_out(id, opening, opening.close())

    def ended(self, id: int, handle: Handle) -> None:
        """What the id held ended by itself; ignored if the id does not hold it any more."""
        if (opening := self._by_id.get(id)) is not None:
            self._carry_out(id, opening, opening.ended(handle))

    def lose_all(self) -> None:
        """The connection is gone."""
        for id, opening in list(self._by_id.items()):
            self._carry_out(id, opening, opening.lose())

    def _carry_out(self, id: int, opening: Opening, instructions: list[Instruction]) -> None:
        actions = self._actions
        for instruction in instructions:
            match instruction:
                case Begin(request):
                    task = self._tasks[id] = actions.spawn(self._work(id, opening, request))
                    task.add_done_callback(partial(self._cancelled, id, opening))
                case Cancel():
                    self._tasks[id].cancel()
                case Accept(request, handle):
                    actions.accept(request, handle)
                case Refuse(request, error):
                    actions.refuse(request, error)
                case Release(handle):
                    actions.release(handle)
        if opening.state is State.CLOSED and self._by_id.get(id) is opening:
            del self._by_id[id]

    async def _work(self, id: int, opening: Opening, request: Request) -> None:
        error: MagnetarError
        try:
            handle = await self._actions.begin(request)
        except MagnetarError as failure:
            error = failure
        except Exception as failure:
            _log.exception("opening %s %d failed", self._kind, id)
            error = ServiceNotReady(f"opening the {self._kind} failed here: {failure!r}")
        else:
            # In the turn in which it was opened: whatever comes next finds it in its place.
            del self._tasks[id]
            self._carry_out(id, opening, opening.opened(handle))
            return
        del self._tasks[id]
        self._carry_out(id, opening, opening.failed(error))

    def _cancelled(self, id: int, opening: Opening, task: asyncio.Task[None]) -> None:
        """The task may have been cancelled before it took its first step, so it cannot tell that itself."""
        if self._tasks.get(id) is task:
            del self._tasks[id]
            self._carry_out(
                id, opening, opening.failed(AlreadyClosed(f"opening {self._kind} {id} was cancelled"))
            )

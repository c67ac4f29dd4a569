"""The producers, or the consumers, of one connection: each of its ids, from its opening to its end.

Opening takes a while: a topic is loaded, a cursor is written. Meanwhile the peer may give up and close the id, open it
again, or be gone. Whatever comes when, at most one opening of an id is worked on at a time, every request is answered once
while somebody is there to be answered, and what was opened is either held by the id or let go of:

    of the id         open                              close, lose_all         it is opened    it fails
    nothing           begins                            -                       -               -
    an opening        refused, cancelled; the new one   refused, cancelled      accepted        refused
                      begins when that has ended
    what was opened   let go of; the new one begins     let go of               -               -
    a cancelled one   the new one begins after it       -                       let go of       -

Worked case: Subscribe, CloseConsumer and Subscribe of one id in one read. The first begins; the close refuses and cancels
it; the second waits until the first has ended, which may even have succeeded and is let go of then; it begins after that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Generic, TypeVar

from magnetar.proto.errors import AlreadyClosed, MagnetarError, ServiceNotReady, TooManyRequests

from .requests import Requests, for_client

_log = logging.getLogger(__name__)

Request = TypeVar("Request")
Handle = TypeVar("Handle")


class _Opening(Generic[Request, Handle]):
    """The last request of an id that was neither refused nor let go of."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.handle: Handle | None = None  # once it is open
        self.task: asyncio.Task[None] | None = None


class Openings(Generic[Request, Handle]):
    """See the module docstring."""

    def __init__(
        self,
        kind: str,
        requests: Requests,
        *,
        begin: Callable[[Request], Coroutine[Any, Any, Handle]],
        accept: Callable[[Request, Handle], None],
        refuse: Callable[[Request, MagnetarError], None],
        release: Callable[[Handle], None],
    ) -> None:
        """`kind` is for errors: "producer". `requests` of the connection: each opening is one of them.

        `begin` may be cancelled, and must then leave nothing behind. `release` lets go of what was opened.
        """
        self._kind = kind
        self._requests = requests
        self._begin = begin
        self._accept = accept
        self._answer_error = refuse
        self._release = release
        self._by_id: dict[int, _Opening[Request, Handle]] = {}
        self._working: dict[int, list[asyncio.Task[None]]] = {}  # the cancelled ones of an id among them

    def get(self, id: int) -> Handle | None:
        """What the id holds; None unless it is open."""
        opening = self._by_id.get(id)
        return None if opening is None else opening.handle

    def __iter__(self) -> Iterator[Handle]:
        return iter([opening.handle for opening in self._by_id.values() if opening.handle is not None])

    def open(self, id: int, request: Request) -> None:
        """The peer opens the id, which supersedes whatever it did with it before."""
        try:
            self._requests.check_busy()
        except TooManyRequests as error:
            self._refuse(request, error)
            return
        self._let_go(id, "was opened again before it was open")
        opening = self._by_id[id] = _Opening(request)
        working = self._working.setdefault(id, [])
        task = opening.task = self._requests.begin(self._work(id, opening, list(working)))
        working.append(task)
        task.add_done_callback(lambda task: self._ended(id, task))

    def close(self, id: int) -> None:
        """The peer closes the id, whatever its state."""
        self._let_go(id, "was closed before it was open")

    def ended(self, id: int, handle: Handle) -> None:
        """What the id held ended by itself; ignored if the id does not hold it any more."""
        if self.get(id) is handle:
            del self._by_id[id]

    def lose_all(self) -> None:
        """The connection is gone: nobody is there to be answered."""
        for id in list(self._by_id):
            self._let_go(id)
        # Nothing begins any more; these refer to the connection.
        del self._begin, self._accept, self._answer_error, self._release

    def _refuse(self, request: Request, error: MagnetarError) -> None:
        self._answer_error(request, for_client(error))

    def _let_go(self, id: int, reason: str = "") -> None:
        opening = self._by_id.pop(id, None)
        if opening is None:
            return
        if opening.handle is not None:
            self._release(opening.handle)
            return
        assert opening.task is not None
        opening.task.cancel()
        if reason:
            self._refuse(opening.request, AlreadyClosed(f"{self._kind} {id} {reason}"))

    async def _work(
        self, id: int, opening: _Opening[Request, Handle], before: list[asyncio.Task[None]]
    ) -> None:
        error: MagnetarError
        release = self._release
        try:
            if before:
                await asyncio.wait(before)
            handle = await self._begin(opening.request)
        except MagnetarError as failure:
            error = failure
        except asyncio.CancelledError:  # here, when nobody is told, or something that it waited for
            error = ServiceNotReady(f"opening {self._kind} {id} was interrupted here; try again")
        except Exception as failure:
            _log.exception("opening %s %d failed", self._kind, id)
            error = ServiceNotReady(f"opening the {self._kind} failed here: {failure!r}")
        else:
            # In the turn in which it was opened: whatever comes next finds it in its place.
            if self._by_id.get(id) is opening:
                opening.handle = handle
                self._accept(opening.request, handle)
            else:
                release(handle)
            return
        if self._by_id.get(id) is opening:
            del self._by_id[id]
            self._refuse(opening.request, error)

    def _ended(self, id: int, task: asyncio.Task[None]) -> None:
        self._working[id].remove(task)
        if not self._working[id]:
            del self._working[id]

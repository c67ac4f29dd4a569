"""One id of a connection (of a producer or a consumer), from its opening to its end; without I/O.

Opening takes a while: a topic is loaded, a cursor is written. Meanwhile the peer may give up and close the id, open it
again, or be gone. Whatever comes when, at most one opening of an id is worked on at a time, and what was opened is either
held by the id or let go of:

    state       open(r)                  close, lose              opened(h)           failed          ended(h)
    CLOSED      Begin(r) > OPENING       -                        not possible        not possible    -
    OPENING     Cancel > CANCELLING,     Cancel > CANCELLING      Accept(h) > OPEN    > CLOSED        -
                r waits
    CANCELLING  r waits                  nothing waits            Release(h), then    what waits      -
                                                                  as failed           begins > OPENING,
                                                                                      else > CLOSED
    OPEN        Release, Begin(r)        Release > CLOSED         not possible        not possible    > CLOSED
                > OPENING

A request that is superseded, closed or has failed is refused (`Refuse`); after `lose` nobody is there to be answered.

Worked case: Subscribe, CloseConsumer and Subscribe of one id in one read. The first begins; the close refuses and cancels
it; the second waits until the first has ended, which may even have succeeded and is released then; it begins after that.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from magnetar.proto.errors import AlreadyClosed, MagnetarError


class Begin(NamedTuple):
    """Work on the request; `opened` or `failed` tells how that ended."""

    request: Any


class Cancel(NamedTuple):
    """End the work that `Begin` began; `opened` or `failed` comes all the same."""


class Accept(NamedTuple):
    """The request is done: the id holds the handle."""

    request: Any
    handle: Any


class Refuse(NamedTuple):
    """The request has failed."""

    request: Any
    error: MagnetarError


class Release(NamedTuple):
    """The id does not hold the handle: let go of its place."""

    handle: Any


Instruction = Begin | Cancel | Accept | Refuse | Release


class State(enum.Enum):
    """See the module docstring."""

    CLOSED = "closed"
    OPENING = "opening"
    CANCELLING = "cancelling"
    OPEN = "open"


class Opening:
    """See the module docstring. `name` is for errors: "consumer 3". Each method returns what follows, in order."""

    __slots__ = ("_name", "_request", "_waiting", "handle", "state")

    def __init__(self, name: str) -> None:
        self._name = name
        self.state = State.CLOSED
        self.handle: Any = None  # set exactly while OPEN
        self._request: Any = None  # the one that is worked on; set exactly while OPENING
        self._waiting: Any = (
            None  # the one that begins when the cancelled work has ended; only while CANCELLING
        )

    def open(self, request: Any) -> list[Instruction]:
        """The peer opens the id, which supersedes whatever it did with it before."""
        instructions = self._let_go(f"{self._name} was opened again before it was open")
        if self.state is State.CANCELLING:
            self._waiting = request
        else:
            instructions += self._begin(request)
        return instructions

    def close(self) -> list[Instruction]:
        """The peer closes the id, or gives up opening it."""
        return self._let_go(f"{self._name} was closed before it was open")

    def lose(self) -> list[Instruction]:
        """The connection is gone."""
        return [one for one in self.close() if not isinstance(one, Refuse)]

    def opened(self, handle: Any) -> list[Instruction]:
        """The work has succeeded."""
        if self.state is State.CANCELLING:
            return [Release(handle), *self._work_ended()]
        request, self._request = self._request, None
        self.handle, self.state = handle, State.OPEN
        return [Accept(request, handle)]

    def failed(self, error: MagnetarError) -> list[Instruction]:
        """The work has failed, or was cancelled."""
        if self.state is State.CANCELLING:
            return self._work_ended()
        request, self._request = self._request, None
        self.state = State.CLOSED
        return [Refuse(request, error)]

    def ended(self, handle: Any) -> list[Instruction]:
        """What was opened ended by itself: the topic moved, the subscription was deleted."""
        if self.state is State.OPEN and self.handle is handle:
            self.handle, self.state = None, State.CLOSED
        return []

    def _let_go(self, reason: str) -> list[Instruction]:
        """The id is not wanted as it is: CLOSED or CANCELLING, and nothing waits."""
        match self.state:
            case State.OPENING:
                request, self._request = self._request, None
                self.state = State.CANCELLING
                return [Refuse(request, AlreadyClosed(reason)), Cancel()]
            case State.CANCELLING if self._waiting is not None:
                request, self._waiting = self._waiting, None
                return [Refuse(request, AlreadyClosed(reason))]
            case State.OPEN:
                handle, self.handle = self.handle, None
                self.state = State.CLOSED
                return [Release(handle)]
        return []

    def _work_ended(self) -> list[Instruction]:
        request, self._waiting = self._waiting, None
        self.state = State.CLOSED
        return [] if request is None else self._begin(request)

    def _begin(self, request: Any) -> list[Instruction]:
        self._request, self.state = request, State.OPENING
        return [Begin(request)]

    def check(self) -> None:
        """Asserts the invariants of the fields; tests call it after every event."""
        assert (self.handle is not None) == (self.state is State.OPEN)
        assert (self._request is not None) == (self.state is State.OPENING)
        assert self._waiting is None or self.state is State.CANCELLING

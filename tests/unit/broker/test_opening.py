"""The openings of one id: every order of open, close, success, failure, end and loss, on the state machine alone."""

from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.listeners.core.opening import (
    Accept,
    Begin,
    Cancel,
    Instruction,
    Opening,
    Refuse,
    Release,
    State,
)
from magnetar.proto.errors import AlreadyClosed, ServiceNotReady


class Peer:
    """Carries out what the machine says, as a listener does, and knows what must be true of it."""

    def __init__(self) -> None:
        self.opening = Opening("consumer 3")
        self.sent = 0  # requests, which are numbered from 1
        self.answered: dict[int, str] = {}
        self.working: int | None = None  # the request of the one task
        self.cancelled = False
        self.places: set[int] = set()  # handles not released; the handle of request n is n
        self.wanted: int | None = None  # the request that the peer wants to be open

    def follow(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Begin(request):
                    assert self.working is None, "two openings of one id at a time"
                    assert not self.places, "the old one lets go first"
                    self.working, self.cancelled = request, False
                case Cancel():
                    assert self.working is not None
                    self.cancelled = True
                case Accept(request, handle):
                    assert handle in self.places
                    self.answer(request, "ok")
                case Refuse(request, _):
                    self.answer(request, "refused")
                case Release(handle):
                    self.places.remove(handle)
        self.opening.check()

    def answer(self, request: int, how: str) -> None:
        assert request not in self.answered, "answered twice"
        self.answered[request] = how

    def open(self) -> None:
        self.sent += 1
        self.wanted = self.sent
        self.follow(self.opening.open(self.sent))

    def close(self) -> None:
        self.wanted = None
        self.follow(self.opening.close())

    def succeed(self) -> None:
        """Also after it was cancelled: the cancellation may come too late."""
        if self.working is not None:
            handle, self.working = self.working, None
            self.places.add(handle)
            self.follow(self.opening.opened(handle))

    def fail(self) -> None:
        if self.working is not None:
            if self.working == self.wanted:
                self.wanted = None
            self.working = None
            self.follow(self.opening.failed(ServiceNotReady("as it happens")))

    def end(self) -> None:
        """The topic ends what was opened."""
        if self.opening.state is State.OPEN:
            handle = self.opening.handle
            self.places.remove(handle)
            self.wanted = None
            self.follow(self.opening.ended(handle))


STEPS = st.lists(st.sampled_from(["open", "close", "succeed", "fail", "end"]), max_size=30)


@given(STEPS)
def test_a_place_is_held_exactly_while_the_peer_wants_it(steps: list[str]) -> None:
    peer = Peer()
    for step in steps:
        getattr(peer, step)()
        assert peer.cancelled or peer.working in (None, peer.wanted), (
            "work that nobody wants is not cancelled"
        )
        assert peer.places <= {peer.wanted}
    while peer.working is not None:
        peer.succeed()
    assert peer.places == (set() if peer.wanted is None else {peer.wanted})
    assert peer.opening.handle == peer.wanted
    assert set(peer.answered) == set(range(1, peer.sent + 1)), "each request is answered"


@given(STEPS, st.booleans())
def test_a_lost_connection_leaves_nothing_behind(steps: list[str], too_late: bool) -> None:
    peer = Peer()
    for step in steps:
        getattr(peer, step)()
    answered = dict(peer.answered)
    peer.follow(peer.opening.lose())
    assert peer.working is None or peer.cancelled
    peer.succeed() if too_late else peer.fail()
    assert peer.opening.state is State.CLOSED
    assert not peer.places
    assert peer.answered == answered, "nobody is there to be answered"


def test_opened_closed_and_opened_in_one_read() -> None:
    opening = Opening("consumer 3")
    assert opening.open("a") == [Begin("a")]
    refused, cancelled = opening.close()
    assert isinstance(refused, Refuse)
    assert (refused.request, type(refused.error), cancelled) == ("a", AlreadyClosed, Cancel())
    assert opening.open("b") == []
    assert opening.opened("handle of a") == [Release("handle of a"), Begin("b")]
    assert opening.opened("handle of b") == [Accept("b", "handle of b")]

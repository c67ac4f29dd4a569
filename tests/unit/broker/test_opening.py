"""The openings of one id: every order of open, close, success, failure, end and loss."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker import BrokerSettings
from magnetar.broker.listeners.openings import Openings
from magnetar.broker.listeners.requests import Requests
from magnetar.proto.errors import ServiceNotReady
from support.virtual_time import in_virtual_time

SERVICE: Any = SimpleNamespace(settings=BrokerSettings())


class Peer:
    """Carries out openings, as a listener does, and knows what must be true of them."""

    def __init__(self) -> None:
        self.openings = Openings[int, int](
            "consumer",
            Requests(SERVICE),
            begin=self.begin,
            accept=lambda request, handle: self.answer(request, "ok"),
            refuse=self.refuse,
            release=lambda handle: self.places.remove(handle),
        )
        self.sent = 0  # requests, which are numbered from 1
        self.answered: dict[int, str] = {}
        self.working: int | None = None  # the request of the one task
        self.outcome: asyncio.Future[bool] = asyncio.Future()  # of that
        self.cancelled = False
        self.places: set[int] = set()  # handles not released; the handle of request n is n
        self.wanted: int | None = None  # the request that the peer wants to be open

    async def begin(self, request: int) -> int:
        assert self.working is None, "two openings of one id at a time"
        assert not self.places, "the old one lets go first"
        self.working, self.cancelled, self.outcome = request, False, asyncio.Future()
        try:
            while True:
                try:
                    if not await asyncio.shield(self.outcome):
                        raise ServiceNotReady("as it happens")
                    self.places.add(request)
                    return request
                except asyncio.CancelledError:
                    self.cancelled = True  # it comes too late, or the work ends when the test says so
        finally:
            self.working = None

    def refuse(self, request: int, error: Any) -> None:
        if request == self.wanted:
            self.wanted = None
        self.answer(request, "refused")

    def answer(self, request: int, how: str) -> None:
        assert request not in self.answered, "answered twice"
        self.answered[request] = how

    def open(self) -> None:
        self.sent += 1
        self.wanted = self.sent
        self.openings.open(3, self.sent)

    def close(self) -> None:
        self.wanted = None
        self.openings.close(3)

    def succeed(self) -> None:
        """Also after it was cancelled: the cancellation may come too late."""
        if not self.outcome.done():
            self.outcome.set_result(True)

    def fail(self) -> None:
        if not self.outcome.done():
            self.outcome.set_result(False)

    def end(self) -> None:
        """The topic ends what was opened."""
        handle = self.openings.get(3)
        if handle is not None:
            self.places.remove(handle)
            self.wanted = None
            self.openings.ended(3, handle)

    async def step(self, name: str, turns: int) -> None:
        getattr(self, name)()
        for _ in range(turns):
            await asyncio.sleep(0)
        if turns == _SETTLED:
            assert self.cancelled or self.working in (None, self.wanted), (
                "work that nobody wants is not cancelled"
            )
            assert self.places <= {self.wanted}


_SETTLED = 10
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["open", "close", "succeed", "fail", "end"]), st.sampled_from([0, 1, 2, _SETTLED])
    ),
    max_size=30,
)


@given(STEPS)
def test_a_place_is_held_exactly_while_the_peer_wants_it(steps: list[tuple[str, int]]) -> None:
    @in_virtual_time
    async def run() -> None:
        peer = Peer()
        for name, turns in steps:
            await peer.step(name, turns)
        await asyncio.sleep(0.1)
        while peer.working is not None:
            await peer.step("succeed", _SETTLED)
        assert peer.places == (set() if peer.wanted is None else {peer.wanted})
        assert peer.openings.get(3) == peer.wanted
        assert set(peer.answered) == set(range(1, peer.sent + 1)), "each request is answered"

    run()


@given(STEPS, st.booleans())
def test_a_lost_connection_leaves_nothing_behind(steps: list[tuple[str, int]], too_late: bool) -> None:
    @in_virtual_time
    async def run() -> None:
        peer = Peer()
        for name, turns in steps:
            await peer.step(name, turns)
        answered = dict(peer.answered)
        peer.wanted = None
        peer.openings.lose_all()
        await asyncio.sleep(0.1)
        assert peer.working is None or peer.cancelled
        await peer.step("succeed" if too_late else "fail", _SETTLED)
        assert len(asyncio.all_tasks()) == 1
        assert list(peer.openings) == []
        assert not peer.places
        assert peer.answered == answered, "nobody is there to be answered"

    run()


async def test_what_is_cancelled_from_within_may_be_tried_again() -> None:
    """Seed 153 of `once`: a client whose broker stopped was told AlreadyClosed, which is final, and had closed nothing."""
    done: list[Any] = []

    async def begin(request: str) -> str:
        raise asyncio.CancelledError

    openings = Openings[str, str](
        "producer",
        Requests(SERVICE),
        begin=begin,
        accept=lambda *_: pytest.fail("it is not open"),
        refuse=lambda request, error: done.append(type(error)),
        release=lambda _: pytest.fail("there is nothing"),
    )
    openings.open(1, "a")
    for _ in range(_SETTLED):
        await asyncio.sleep(0)
    assert done == [ServiceNotReady]

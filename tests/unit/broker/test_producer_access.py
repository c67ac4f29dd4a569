"""Who may publish: text scenarios, and a machine that tries everything against what must hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from magnetar.broker.topics.core.producers import (
    ACCESS_MODES,
    NOT_ALONE,
    Ask,
    Claim,
    Producers,
    ProducerSession,
    Queued,
    SessionState,
    StoreEpoch,
    Wait,
)
from magnetar.proto.errors import MagnetarError, ProducerFenced
from support.access_scenario import Port, run_scenario
from support.text_scenarios import check, scenario_files


@pytest.mark.parametrize("path", scenario_files("access"), ids=lambda path: path.stem)
def test_scenarios(path: Path) -> None:
    check(path, run_scenario)


class AccessMachine(RuleBasedStateMachine):
    """Any number of claims, each in the middle of what it was told to do first."""

    def __init__(self) -> None:
        super().__init__()
        self.producers = Producers("orders", 10_000)
        self.now = 0.0
        self.told: dict[Claim, Any] = {}  # claims without a session, and what they were told last
        self.woken: set[Claim] = set()
        self.order: list[Claim] = []  # of those that wait
        self.sessions: list[ProducerSession] = []
        self.fenced: set[int] = set()  # topic epochs below one under which somebody was let in
        self.storing: list[Claim] = []  # epochs
        self.durable = NOT_ALONE

    def _open(self, claim: Claim) -> None:
        self.woken.discard(claim)
        try:
            told = self.producers.open(claim, lambda epoch: Port(lambda _: None, epoch), self.now)
        except MagnetarError:
            self._give_up(claim)
            return
        if isinstance(told, Queued) and claim not in self.order:
            self.order.append(claim)
            claim.wake = lambda: self.woken.add(claim)
        if claim in self.order and not isinstance(told, Queued | Ask):
            waiting = [one for one in self.order if one.refused is None]
            assert claim is waiting[0], "who waits is let in, in order of arrival"
            self.order.remove(claim)
        if isinstance(told, StoreEpoch):
            self.storing.append(claim)
        if not isinstance(told, ProducerSession):
            self.told[claim] = told
            return
        self.told.pop(claim, None)
        if told.topic_epoch != NOT_ALONE:
            assert told.topic_epoch <= self.durable, "let in before its epoch is durable"
            assert told.topic_epoch not in self.fenced
            assert not any(one.outstanding for one in self.sessions), "something queued can still land"
            self.fenced.update(range(told.topic_epoch))
        self.sessions.append(told)

    def _give_up(self, claim: Claim) -> None:
        self.told.pop(claim, None)
        if claim in self.order:
            self.order.remove(claim)
        self.producers.withdraw(claim)

    def _active(self, session: ProducerSession) -> bool:
        return session.state is not SessionState.CLOSED

    @rule(
        name=st.sampled_from("abc"),
        epoch=st.integers(0, 3),
        mode=st.sampled_from(list(ACCESS_MODES)),
        topic_epoch=st.integers(-1, 3),
    )
    def comes(self, name: str, epoch: int, mode: str, topic_epoch: int) -> None:
        self._open(Claim(name, epoch, mode, topic_epoch))

    @rule(data=st.data())
    def goes_on(self, data: st.DataObject) -> None:
        """One claim has done what it was told."""
        ready = [
            claim
            for claim, told in self.told.items()
            if isinstance(told, Ask)
            or (isinstance(told, Wait) and not told.session.outstanding)
            or (isinstance(told, Queued) and (claim in self.woken or (told.until or 1e9) <= self.now))
        ]
        if ready:
            self._open(data.draw(st.sampled_from(ready)))

    @rule(success=st.booleans())
    def stored(self, success: bool) -> None:
        """One at a time: the list is changed by who came first."""
        claim = next((one for one in self.storing if isinstance(self.told.get(one), StoreEpoch)), None)
        if claim is not None:
            self.storing.remove(claim)
            self.durable += 1  # also if the outcome was not known
            if success:
                self.producers.epoch_stored(claim, self.durable)
                self._open(claim)
            else:
                self._give_up(claim)

    @rule(data=st.data())
    def gives_up(self, data: st.DataObject) -> None:
        if self.told:
            self._give_up(data.draw(st.sampled_from(list(self.told))))

    @rule(data=st.data(), what=st.sampled_from(["send", "confirm", "close", "lost"]))
    def session_does(self, data: st.DataObject, what: str) -> None:
        live = [one for one in self.sessions if self._active(one) or one.outstanding]
        if not live:
            return
        session = data.draw(st.sampled_from(live))
        if what == "send" and session.state is SessionState.OPEN:
            session.outstanding += 1
        elif what == "confirm":
            self.producers.finished(session, session.outstanding)
        elif what in ("close", "lost") and self._active(session):
            self.producers.forget(session, self.now + 2 if what == "lost" else 0.0)

    @rule()
    def time_passes(self) -> None:
        self.now += 1

    @invariant()
    def holds(self) -> None:
        self.producers.check()
        assert self.producers.waiting == len([one for one in self.order if one.refused is None])

    def teardown(self) -> None:
        """Everybody leaves, and whoever waits is let in, one after another."""
        self.now += 10
        for _ in range(1000):
            for session in self.sessions:
                if session.outstanding:
                    self.producers.finished(session, session.outstanding)
                if self._active(session):
                    self.producers.forget(session)
            self.sessions = [one for one in self.sessions if self._active(one)]
            if not self.told:
                return
            for claim, told in list(self.told.items()):
                if isinstance(told, StoreEpoch):
                    self.durable += 1
                    self.producers.epoch_stored(claim, self.durable)
                if not isinstance(told, Queued) or claim in self.woken or told.until is not None:
                    self._open(claim)
        raise AssertionError(f"these wait for ever: {self.told}")


AccessMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestAccess = AccessMachine.TestCase


def test_who_comes_back_with_an_epoch_that_the_topic_does_not_know() -> None:
    """The topic was deleted and made again: it is another one."""
    with pytest.raises(ProducerFenced, match="under epoch 3, and the topic has epoch -1 now"):
        Producers("orders", 0).open(Claim("p", 1, "exclusive", 3), lambda epoch: Port(None, epoch))

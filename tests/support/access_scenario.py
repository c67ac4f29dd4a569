"""Runs the text scenarios of who may publish (tests/scenarios/access_*.txt): a command, `----`, and what becomes of it.

    open NAME MODE [epoch=N] [topic_epoch=N] [as=ID]     a claim, known by ID (else NAME) from here on
    again ID                     it opens again, after what it was told to do first
    stored ID | not-stored ID    its topic epoch is durable, or cannot be
    send ID                      its session has one more group queued
    confirm ID                   all of its groups are stored
    close ID | lost ID           its session is closed, or its connection is lost at the time of the scenario
    withdraw ID                  its claim is given up
    time N                       the loop's time
    stop                         the topic moves

Each answer ends with who was woken or closed by it. `check()` runs after every command.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from magnetar.broker.topics.core.producers import (
    Ask,
    Claim,
    Producers,
    ProducerSession,
    Queued,
    StoreEpoch,
    Wait,
)
from magnetar.proto.errors import MagnetarError, TopicNotServed
from support.text_scenarios import play

GRACE = 10.0


class Port:
    """Notes its end."""

    peer: Any = None

    def __init__(self, note: Any, epoch: int) -> None:
        self._note = note
        self.epoch = epoch

    def receipts(self, rows: Any) -> None: ...

    def send_failed(self, sequence_id: int, error: Any) -> None: ...

    def send_delayed(self, error: Any) -> None: ...

    def hold(self, reason: str) -> None: ...

    def producer_closed(self, error: MagnetarError) -> None:
        """The broker ends the session."""
        self._note(error)


class AccessScenario:
    """The producers of one topic, and claims by id."""

    def __init__(self) -> None:
        self.producers = Producers("orders", 10_000)
        self.claims: dict[str, Claim] = {}
        self.sessions: dict[str, ProducerSession] = {}
        self.now = 0.0
        self._notes: list[str] = []

    def run(self, command: str) -> list[str]:
        """The answer to a command."""
        self._notes = []
        word, *rest = command.split()
        name = word.replace("-", "_")
        lines = getattr(self, f"_{name}")(*rest) or []
        self.producers.check()
        return [*lines, *self._notes]

    def _open(self, name: str, mode: str, *options: str) -> list[str]:
        given = dict(option.split("=") for option in options)
        id = given.get("as", name)
        claim = Claim(name, int(given.get("epoch", 0)), mode, int(given.get("topic_epoch", -1)))
        claim.wake = partial(self._note, f"{id} is woken")
        self.claims[id] = claim
        return self._again(id)

    def _note(self, text: str) -> None:
        self._notes.append(text)

    def _id_of(self, session: ProducerSession) -> str:
        return next((id for id, one in self.sessions.items() if one is session), session.name)

    def _again(self, id: str) -> list[str]:
        def new_port(epoch: int) -> Port:
            return Port(lambda error: self._note(f"{id} is closed: {error.message}"), epoch)

        try:
            told = self.producers.open(self.claims[id], new_port, self.now)
        except MagnetarError as error:
            self.producers.withdraw(self.claims[id])
            return [f"{id} {type(error).__name__}: {error.message}"]
        match told:
            case Ask(sessions):
                return [f"{id} asks {', '.join(map(self._id_of, sessions))}"]
            case Wait(session):
                return [f"{id} waits for what {self._id_of(session)} has queued"]
            case Queued(reason, until):
                return [f"{id} is queued: {reason}" + ("" if until is None else f", until {until:g}")]
            case StoreEpoch():
                return [f"{id} stores an epoch"]
        self.sessions[id] = told
        return [f"{id} is in: epoch {told.epoch}, topic epoch {told.topic_epoch}"]

    def _stored(self, id: str) -> list[str]:
        self.producers.epoch_stored(self.claims[id], self.producers.topic_epoch + 1)
        return self._again(id)

    def _not_stored(self, id: str) -> None:
        self.producers.withdraw(self.claims[id])

    def _send(self, id: str) -> None:
        self.sessions[id].outstanding += 1

    def _confirm(self, id: str) -> None:
        self.producers.finished(self.sessions[id], self.sessions[id].outstanding)

    def _close(self, id: str) -> None:
        self.producers.forget(self.sessions[id])

    def _lost(self, id: str) -> None:
        self.producers.forget(self.sessions[id], self.now + GRACE)

    def _withdraw(self, id: str) -> None:
        self.producers.withdraw(self.claims[id])

    def _time(self, now: str) -> None:
        self.now = float(now)

    def _stop(self) -> None:
        self.producers.stop(TopicNotServed("the topic moves"))


def run_scenario(text: str) -> str:
    """The text with what the core does."""
    scenario = AccessScenario()
    return play(text, scenario.run)

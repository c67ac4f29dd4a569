"""The short form of `make model`: small shapes exhausted, planted defects found, reductions that miss nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from magnetar.ledger.core import recovery
from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.core.recovery import RecoveryCore
from magnetar.ledger.core.writer import WriterCore

from . import looks, runner
from .defects import PLANTED, Planted
from .explorer import Explored, Violation, explore
from .invariants import INVARIANTS
from .ledger_world import LEDGER, LedgerWorld
from .looks import State
from .reduced_world import ReducedWorld
from .search import search, walk
from .shape import Shape
from .worlds import WORLDS

# Planted defects must show within so many states; the slowest needs a half of it.
STATES = 100_000


@pytest.fixture(autouse=True)
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recovery looks for one entry at a time: reads ahead of the end multiply states and show nothing new.

    It asks every replica at once, which has every order of messages that asking one first has.
    """
    monkeypatch.setattr(recovery, "WINDOW_ENTRIES", 1)
    monkeypatch.setattr(recovery, "ONE_REPLICA_FIRST", False)


ONE = Shape(entries=1)
TWO = Shape(entries=2, crashes=0, losses=0)
STRIPED = Shape(ensemble_size=3)
ALL_THREE = Shape(ensemble_size=3, write_quorum=3)


@pytest.mark.parametrize(
    "shape",
    [
        replace(ONE, losses=1),
        replace(ONE, crashes=0, losses=1, overtaking=True),
        replace(ONE, crashes=0, losses=1, late_answers=True),
        replace(ONE, crashes=0, losses=0, recoverers=2),
        replace(ONE, ack_quorum=1, losses=0),
        replace(ONE, crashes=0, losses=1, ack_quorum=1, repairs=1),
        TWO,
        replace(STRIPED, losses=0, crashes=0),
        replace(STRIPED, entries=1, losses=1),
        replace(ALL_THREE, entries=1, losses=1, crashes=0),
    ],
    ids=str,
)
def test_no_reachable_state_breaks_an_invariant(shape: Shape) -> None:
    """Exhausted, not sampled."""
    explored = search(ReducedWorld(shape))
    assert explored.exhausted
    assert explored.states > 100


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_planted_defects_are_found(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each breaks one rule; what the protocol promises shows it, and the search says how."""
    planted.plant(monkeypatch)
    with pytest.raises(Violation) as caught:
        search(ReducedWorld(planted.shape, core_checks=False), max_states=STATES)
    assert caught.value.path, caught.value
    assert caught.value.reason.startswith(f"[{planted.shows}]"), caught.value
    assert replayed(ReducedWorld(planted.shape, core_checks=False), caught.value.turns) == caught.value.reason


def replayed(model: ReducedWorld, turns: list[int]) -> str:
    """What is violated at the end of a way."""
    state = model.start()
    try:
        for _, state in walk(model, turns):
            model.check(state)
        model.following(state)
    except AssertionError as error:
        return str(error)
    return "nothing"


def test_every_invariant_has_a_defect_that_breaks_it() -> None:
    """So none of them is empty words."""
    assert {planted.shows for planted in PLANTED} == set(INVARIANTS)


@pytest.mark.parametrize("planted", [p for p in PLANTED if p.plain], ids=lambda planted: planted.name)
def test_reductions_hide_no_planted_defect(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain world and the one without partial order find what the reduced one finds."""
    planted.plant(monkeypatch)
    reasons = []
    for partial_order in (True, False):
        with pytest.raises(Violation) as caught:
            search(ReducedWorld(planted.shape, core_checks=False, partial_order=partial_order))
        reasons.append(caught.value.reason)
    assert reasons[0] == reasons[1]
    with pytest.raises(Violation):
        explore(LedgerWorld(planted.shape))


def test_the_way_to_a_violation_is_a_shortest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """And can be read."""
    planted = next(p for p in PLANTED if p.name == "one_ack_is_enough")
    planted.plant(monkeypatch)
    with pytest.raises(Violation) as caught:
        search(ReducedWorld(planted.shape, core_checks=False))
    assert caught.value.path == [
        "the writer appends",
        "writer's add of entry 0 at a arrives",
        "answer 0 of a to the writer's add of entry 0 arrives",
    ]


@pytest.mark.parametrize(
    "shape",
    [
        replace(ONE, crashes=0, losses=0),
        replace(ONE, crashes=1, losses=0, writer_closes=False, bookies=2),
        replace(ONE, crashes=0, losses=1, writer_closes=False, bookies=2),
        replace(ONE, crashes=0, losses=0, ack_quorum=1),
        replace(ONE, crashes=0, losses=0, ensemble_size=3, writer_closes=False),
    ],
    ids=str,
)
def test_reductions_lose_no_outcome(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be when nothing can happen any more is the same in all three worlds; the reduced ones have fewer states."""
    ends: dict[tuple[object, ...], None] = {}

    def ended(writer: WriterCore, metadata: LedgerMetadata, confirmed: int) -> None:
        firsts = tuple(ensemble.first_entry for ensemble in metadata.ensembles)
        ends[metadata.state, metadata.last_entry, metadata.length, firsts, confirmed, writer.state] = None

    class Reduced(ReducedWorld):
        def following(self, state: State) -> list[tuple[Any, ...]]:
            steps = super().following(state)
            if not steps:
                ended(self.cores.things[state[0]], self.metas.things[state[3]][0], state[7])
            return steps

    right = LedgerWorld.actions

    def actions(self: LedgerWorld) -> list[tuple[str, tuple[object, ...]]]:
        steps = list(right(self))
        if not steps:
            ended(self.writer, self.metadata, self.confirmed)
        return steps

    monkeypatch.setattr(LedgerWorld, "actions", actions)
    found, states = [], []
    ways: list[Callable[[], Explored]] = [
        lambda: search(Reduced(shape)),
        lambda: search(Reduced(shape, partial_order=False)),
        lambda: explore(LedgerWorld(shape)),
    ]
    for look in ways:
        ends.clear()
        explored = look()
        assert explored.exhausted
        states.append(explored.states)
        found.append(dict(ends))
    assert len(ends) > 1
    assert found[0].keys() == found[1].keys() == found[2].keys()
    assert states[0] <= states[1] < states[2]


@pytest.mark.parametrize(
    "shape",
    [
        replace(ONE, crashes=0, losses=0, recoverers=2),
        replace(ONE, crashes=0, losses=0, recoverers=2, late_answers=True),
        replace(ONE, losses=0, recoverers=2, writer_closes=False),
        replace(STRIPED, entries=1, crashes=0, losses=0, recoverers=2),
    ],
    ids=str,
)
def test_reductions_for_several_recoverers_lose_no_end(shape: Shape) -> None:
    """With a writer in full and every order explored there is no other end, and none past which more was confirmed."""

    def ends(model: ReducedWorld) -> tuple[dict[tuple[Any, ...], int], int]:
        found: dict[tuple[Any, ...], int] = {}
        checked = model.check

        def check(state: State) -> None:
            checked(state)
            metadata = model.metas.things[state[3]][0]
            if metadata.closed:
                firsts = tuple(ensemble.first_entry for ensemble in metadata.ensembles)
                end = (metadata.last_entry, metadata.length, firsts, *state[5:7])
                found[end] = max(found.get(end, -1), state[7])

        model.check = check  # type: ignore[method-assign]
        explored = search(model)
        assert explored.exhausted
        return found, explored.states

    reduced, states = ends(ReducedWorld(shape))
    whole, more_states = ends(ReducedWorld(shape, partial_order=False, whole_writer=True))
    assert reduced == whole
    assert len(whole) > 1
    assert states < more_states


def test_a_way_is_printed_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """What `make model` says about a violation, and its command walks again."""
    assert runner.main(["--walk", "one_ack_is_enough"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "  1. the writer appends"
    assert lines[2].strip().startswith("a{} b{} c{} | OPEN 0:a,b | writer writing, confirmed to -1")
    assert lines[-1] == "VIOLATION [not lost] entry 0 is stored by 1 bookies of its write set"


def test_worlds_have_names_of_their_own() -> None:
    """And the first is the scorecard's: three bookies, two entries, a crash, two losses; a writer and two recoverers."""
    names = [world.name for world in WORLDS] + [planted.name for planted in PLANTED]
    assert len(names) == len(dict.fromkeys(names))
    assert WORLDS[0].text == "3 bookies 2/2/2, 2e 3c 1+2"
    assert not WORLDS[0].long


# Fields of the cores that need not tell states apart, and why; all others are in the keys of `looks`.
NOT_IN_KEYS = {
    WriterCore: {
        "_bits": "the ensemble; in the key",
        "_masks": "of the striping",
        "_size": "of the striping",
        "_targets": "of the ensemble",
        "explicit_lac": "only of IdleTick, which never comes here",
        "busy": "only of TooManyRequests, which no bookie answers here",
        "ledger_id": "there is one",
        "last_add_pushed": "of the pending adds",
        "outstanding_bytes": "of the pending adds",
        "sending": "of the state",
    },
    RecoveryCore: {
        "_base_replicas": "in the key",
        "_busy": "only of TooManyRequests, which no bookie answers here",
        "accepted_end": "an operator's, who is not here",
        "_suspects": "whom to ask first; here all are asked at once",
        "_window": "here always one entry",
        "held_bytes": "of the entries",
        "ledger_id": "there is one",
        "starts": "only at its limit, which is asserted never to be reached",
        "striping": "of the metadata",
    },
}


@pytest.mark.parametrize("kind", [WriterCore, RecoveryCore], ids=lambda kind: kind.__name__)
def test_a_new_field_of_a_core_is_thought_of(kind: type[Any]) -> None:
    """A field that decides something and is missing in the key makes different states look alike: nothing would tell."""
    metadata = LedgerMetadata.create(Striping(2, 2, 2), ("a", "b"), 0, {})
    core = kind(LEDGER, metadata, 0)
    fields = set(getattr(kind, "__slots__", None) or vars(core))
    source = inspect.getsource(looks)
    unknown = {name for name in fields if f"core.{name}" not in source} - NOT_IN_KEYS[kind].keys()
    assert not unknown, f"take {sorted(unknown)} into the key of model.looks, or say in NOT_IN_KEYS why not"

"""The short form of `make model`, and defects planted into the cores that it must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from magnetar.ledger.core import recovery
from magnetar.ledger.core.events import Instruction, MetadataWritten
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.core.recovery import RecoveryCore
from magnetar.ledger.core.writer import WriterCore

from .explorer import Violation, explore
from .ledger_world import LedgerWorld, Shape

# Planted defects must show within so many states; the slowest needs a third of it.
STATES = 60_000


@pytest.fixture(autouse=True)
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recovery reads one entry at a time: reads ahead of the end multiply states and show nothing new."""
    monkeypatch.setattr(recovery, "WINDOW_ENTRIES", 1)
    # Every replica is asked at once: each order of events with one asked first is one of these, and bookies stay symmetric.
    monkeypatch.setattr(recovery, "ONE_REPLICA_FIRST", False)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(entries=1, losses=0),
        Shape(entries=1, crashes=0, losses=1, writer_closes=False),
    ],
    ids=str,
)
def test_no_reachable_state_breaks_an_invariant(shape: Shape) -> None:
    """Exhausted, not sampled."""
    explored = explore(LedgerWorld(shape))
    assert explored.exhausted
    assert explored.states > 100


def _search(shape: Shape) -> Violation:
    with pytest.raises(Violation) as caught:
        explore(LedgerWorld(shape), max_states=STATES)
    return caught.value


Plant = Callable[[pytest.MonkeyPatch], None]


def absence_needs_one_negative_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 14."""
    right = Striping.negatives_for_absence.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Striping, "negatives_for_absence", property(lambda self: right(self) - 1))


def an_unreadable_entry_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 14: anything else aborts."""
    monkeypatch.setattr(recovery, "_NEGATIVE", frozenset((*recovery._NEGATIVE, 22, *range(1, 60))))


def confirmed_before_the_change_is_in_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 17; apache/bookkeeper #4097."""
    right = WriterCore._change_ensemble

    def change(self: WriterCore, bookies: dict[int, str]) -> list[Instruction]:
        instructions = right(self, bookies)
        self._writing_metadata = False
        version = self.version
        following = self.handle(MetadataWritten(version))
        self.version = version
        self._writing_metadata = True
        return [*instructions, *following]

    monkeypatch.setattr(WriterCore, "_change_ensemble", change)


def acks_of_the_replaced_bookie_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 17; apache/bookkeeper #1591."""
    right = WriterCore._ensemble_changed

    def changed(self: WriterCore) -> list[Instruction]:
        kept = [add.acked for add in self.pending]
        instructions = right(self)
        for add, acked in zip(self.pending, kept):
            add.acked |= acked
        return instructions

    monkeypatch.setattr(WriterCore, "_ensemble_changed", changed)


def one_ack_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ack quorum."""
    right = WriterCore.__init__

    def init(self: WriterCore, *arguments: Any) -> None:
        right(self, *arguments)
        self.ack_quorum = 1

    monkeypatch.setattr(WriterCore, "__init__", init)


def re_adds_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 15."""
    right = RecoveryCore._send

    def send(self: RecoveryCore, entry_id: int, entry: bytes) -> list[Instruction]:
        self._entries[entry_id].acked = self.striping.mask(entry_id)
        return right(self, entry_id, entry)

    monkeypatch.setattr(RecoveryCore, "_send", send)


def nothing_is_added_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 15."""

    def send(self: RecoveryCore, entry_id: int, entry: bytes) -> list[Instruction]:
        self._entries[entry_id].acked = self.striping.mask(entry_id)
        return []

    monkeypatch.setattr(RecoveryCore, "_send", send)


@pytest.mark.parametrize(
    ("plant", "shape"),
    [
        (absence_needs_one_negative_less, Shape(ensemble_size=3, write_quorum=3, crashes=0, losses=0)),
        (an_unreadable_entry_is_the_end, Shape(entries=1, crashes=0, losses=2)),
        (confirmed_before_the_change_is_in_the_metadata, Shape(entries=1, crashes=0, losses=1)),
        (acks_of_the_replaced_bookie_are_kept, Shape(crashes=0, losses=1, recoverers=0, writer_closes=False)),
        (one_ack_is_enough, Shape(entries=1, crashes=0, losses=0)),
        (re_adds_are_not_waited_for, Shape(entries=1, crashes=0, losses=0)),
        (nothing_is_added_again, Shape(entries=1, crashes=0, losses=0)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_planted_defects_are_found(plant: Plant, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each breaks one rule, and the search says how."""
    plant(monkeypatch)
    violation = _search(shape)
    assert violation.path, violation

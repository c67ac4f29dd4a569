"""What is damaged: told once, in bounded memory, until it is repaired."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.bookie.scrub import damage as damage_module
from magnetar.bookie.scrub.damage import Damage, DamagedRange


class Queue:
    def __init__(self) -> None:
        self.told: list[tuple[int, int, int]] = []
        self.gone_ledgers: list[int] = []

    def damaged(self, ledger_id: int, first: int, last: int, reason: str) -> None:
        self.told.append((ledger_id, first, last))

    def resolved(self, ledger_id: int) -> None:
        self.gone_ledgers.append(ledger_id)


def test_told_once_and_until_repaired() -> None:
    queue = Queue()
    damage = Damage(queue)
    for _ in range(2):
        for entry_id in (7, 5, 6, 9):
            damage.report(1, entry_id, where="log", reason="bits")
    damage.report_file("/data/index/1.sst", "bits")
    damage.report_file("/data/index/1.sst", "bits")
    assert queue.told == [(1, 7, 7), (1, 5, 5), (1, 6, 6), (1, 9, 9)]
    assert damage.ledgers() == {1: [DamagedRange(5, 7, "log", "bits"), DamagedRange(9, 9, "log", "bits")]}
    assert damage.covers(1, 6)
    assert not damage.covers(1, 8)
    assert not damage.covers(2, 6)
    figures = damage.figures()
    assert (figures["damaged_ledgers"], figures["damaged_entries"], figures["damage_found"]) == (1, 4, 5)
    assert figures["damaged_files"] == 1
    damage.repaired(1, 6, 6)
    assert [(known.first, known.last) for known in damage.ledgers()[1]] == [(5, 5), (7, 7), (9, 9)]
    assert queue.gone_ledgers == []
    damage.repaired(1, 0, 100)
    assert queue.gone_ledgers == [1]
    damage.forget_file("/data/index/1.sst")
    figures = damage.figures()
    assert not any(figures[name] for name in ("damaged_ledgers", "damaged_entries", "damaged_files"))
    assert figures["damage_healed"] == 4
    damage.report(1, 5, where="log", reason="bits")  # found again
    damage.deleted(1)
    assert queue.gone_ledgers == [1, 1]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damage_module, "_MAX_RANGES", 10)
    monkeypatch.setattr(damage_module, "_MAX_LEDGERS", 3)
    monkeypatch.setattr(damage_module, "_MAX_FILES", 2)
    queue = Queue()
    damage = Damage(queue)
    for entry_id in range(0, 100, 2):
        damage.report(1, entry_id, where="log", reason="bits")
    assert len(damage.ledgers()[1]) <= 10
    assert all(damage.covers(1, entry_id) for entry_id in range(0, 100, 2))
    for ledger_id in range(2, 10):
        damage.report(ledger_id, 0, where="log", reason="bits")
        damage.report_file(f"file {ledger_id}", "bits")
    assert len(damage.ledgers()) == 3
    assert damage.figures()["damage_unrecorded"] == 6 + 6
    assert queue.told[-1] == (9, 0, 0)  # the queue hears of it nevertheless


ranges = st.tuples(st.integers(0, 30), st.integers(0, 5), st.sampled_from("ab"), st.booleans())


@given(st.lists(ranges, max_size=30))
def test_ranges_cover_what_was_reported_and_not_repaired(steps: list[tuple[int, int, str, bool]]) -> None:
    damage = Damage()
    expected: dict[int, None] = {}
    for first, more, reason, repair in steps:
        if repair:
            damage.repaired(1, first, first + more)
            for entry_id in range(first, first + more + 1):
                expected.pop(entry_id, None)
        else:
            damage.report_range(1, first, first + more, where="log", reason=reason)
            expected |= dict.fromkeys(range(first, first + more + 1))
        known = damage.ledgers().get(1, [])
        assert all(left.last < right.first for left, right in pairwise(known))
        assert [n for n in range(40) if damage.covers(1, n)] == sorted(expected)

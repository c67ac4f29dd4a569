"""Ledger descriptors: clean ones are forgotten a few at a time, and never those that are needed."""

from __future__ import annotations

import pytest

from magnetar.bookie import ledgers as module
from magnetar.bookie.index import LedgerRecord
from magnetar.bookie.ledgers import LedgerDescriptors, Waiters
from support.index_model import ModelLocationIndex, ModelStorage


@pytest.fixture
def ledgers(monkeypatch: pytest.MonkeyPatch) -> LedgerDescriptors:
    monkeypatch.setattr(module, "_MAX_STATES", 100)
    monkeypatch.setattr(module, "_FORGOTTEN_AT_ONCE", 20)
    index = ModelLocationIndex(ModelStorage())
    index.put_ledgers([(number, LedgerRecord(last_entry=number)) for number in range(1000)])
    found = LedgerDescriptors(index, Waiters(10))
    found._full_at = 100
    return found


def test_clean_states_are_bounded(ledgers: LedgerDescriptors) -> None:
    for number in range(1000):
        assert ledgers.load(number).last_entry == number
        assert len(ledgers.by_id) <= 120
    assert 999 in ledgers.by_id


def test_old_states_that_always_change_keep_no_others_in_memory(ledgers: LedgerDescriptors) -> None:
    for number in range(50):
        ledgers.note_entry(ledgers.load(number), number, number + 1, number)
    for number in range(50, 1000):
        ledgers.load(number)
    assert all(number in ledgers.by_id for number in range(50)), "the index does not have these yet"
    assert len(ledgers.by_id) <= 200
    ledgers.take_dirty()
    ledgers.note_saved()
    for number in range(500, 900):
        ledgers.load(number)
    assert not all(number in ledgers.by_id for number in range(50))

"""What a stopped bookie says of its ledgers, wherever their entries stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from magnetar.bookie.entry_ids import EntryIds
from magnetar.bookie.offline import Journaled, LedgerSummary, StoppedBookie, list_ledgers, read_entries
from magnetar.proto.errors import LedgerNotFound
from support.offline_kit import LEDGERS, entries_of, entry_logs, flip, with_stopped


def summaries(bookie: StoppedBookie, ledger_id: int | None = None) -> dict[int, LedgerSummary]:
    return {found.ledger_id: found for found in list_ledgers(bookie, Journaled.read(bookie), ledger_id)}


@pytest.mark.real
@pytest.mark.parametrize("image", ["stopped", "killed"])
def test_every_ledger_is_listed_with_all_that_is_known(image: str, request: pytest.FixtureRequest) -> None:
    found = with_stopped(request.getfixturevalue(image), summaries)
    assert list(found) == [1, 2, 3, 4, 5, 6]
    for ledger_id in (1, 2, 3, 6):
        known = entries_of(ledger_id)
        assert found[ledger_id].entries + found[ledger_id].journaled_entries == len(known)
        assert found[ledger_id].bytes + found[ledger_id].journaled_bytes == sum(map(len, known.values()))
        assert found[ledger_id].ranges == [(0, max(known))]
        assert found[ledger_id].last_entry == max(known)
        assert found[ledger_id].last_add_confirmed == max(known) - 1
    assert [found[one].state for one in found] == ["open", "open", "fenced", "open", "fenced", "open"]
    assert (found[4].explicit_lac, found[4].ranges) == (17, [])
    assert found[2].logs == sorted(found[2].logs)


@pytest.mark.real
def test_what_only_the_journals_have_is_told_apart(killed: Path) -> None:
    found = with_stopped(killed, summaries)
    assert (found[1].entries, found[1].journaled_entries) == (LEDGERS[1][0], 15)
    assert (found[6].entries, found[6].journaled_entries, found[6].logs) == (0, 5, [])


@pytest.mark.real
def test_one_ledger_alone_says_the_same(killed: Path) -> None:
    everything = with_stopped(killed, summaries)
    for ledger_id, summary in everything.items():
        assert with_stopped(killed, lambda bookie, one=ledger_id: summaries(bookie, one)) == {  # type: ignore[misc]
            ledger_id: summary
        }


@pytest.mark.real
def test_an_unknown_ledger_is_named(stopped: Path) -> None:
    with pytest.raises(LedgerNotFound, match="nothing is known of ledger 99"):
        with_stopped(stopped, lambda bookie: summaries(bookie, 99))


@pytest.mark.real
@pytest.mark.parametrize("image", ["stopped", "killed"])
def test_entries_are_read_from_where_they_stand(image: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(image)
    for ledger_id in (1, 2, 3, 6):

        def read(bookie: StoppedBookie, ledger_id: int = ledger_id) -> dict[int, bytes]:
            places = Journaled.read(bookie, places_of=ledger_id).places
            found = list(read_entries(bookie, places, ledger_id))
            assert not any(one.damage for one in found)
            assert [one.entry_id for one in found] == sorted(one.entry_id for one in found)
            return {one.entry_id: one.data for one in found}

        assert with_stopped(directory, read) == entries_of(ledger_id)


@pytest.mark.real
def test_a_range_is_read_from_log_and_journal(killed: Path) -> None:
    def read(bookie: StoppedBookie) -> list[tuple[int, str]]:
        places = Journaled.read(bookie, places_of=1).places
        return [(one.entry_id, one.source) for one in read_entries(bookie, places, 1, 58, 61)]

    assert with_stopped(killed, read) == [
        (58, "entry log"),
        (59, "entry log"),
        (60, "journal"),
        (61, "journal"),
    ]


@pytest.mark.real
def test_rule_08_a_damaged_entry_is_shown_as_damaged(stopped: Path) -> None:
    first = with_stopped(stopped, lambda bookie: next(read_entries(bookie, {}, 2)))
    flip(Path(first.path), first.position + 500)
    found = with_stopped(stopped, lambda bookie: list(read_entries(bookie, {}, 2)))
    assert [one.entry_id for one in found if one.damage] == [0]
    assert len(found) == LEDGERS[2][0]


@pytest.mark.real
def test_entries_of_a_lost_log_are_damaged_not_absent(stopped: Path) -> None:
    for log in entry_logs(stopped):
        log.unlink()
    found = with_stopped(stopped, lambda bookie: list(read_entries(bookie, {}, 1)))
    assert len(found) == 75
    assert all("missing" in one.damage for one in found)


def test_entry_ids_against_a_set() -> None:
    ids, model = EntryIds(), set[int]()
    for number in range(400):
        entry_id = number * 7919 % 97
        assert ids.add(entry_id) == (entry_id not in model)
        model.add(entry_id)
        assert (entry_id in ids, len(ids)) == (True, len(model))
        flat = [one for first, last in ids.ranges() for one in range(first, last + 1)]
        assert flat == sorted(model)
        assert all(
            last + 1 < first for (_, last), (first, _) in zip(ids.ranges(), ids.ranges()[1:], strict=False)
        )

"""An audit finds each kind of damage at the copy that has it, over every ensemble and stripe, and nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest

from magnetar.ledger import EntryPage, LedgerMetadata, ReadResult
from magnetar.ledger.core.metadata import Ensemble, LedgerState
from magnetar.proto.errors import BookieUnavailable, EntryDamaged, EntryNotFound, LedgerNotFound
from magnetar.proto.ledger_entry import encode_ledger_entry
from magnetar.proto.stripe import EVERY_ENTRY, Stripe
from magnetar.spark.jobs import copies
from magnetar.spark.jobs.copies import compare_copies, ranges_of, shares

LEDGER = 7


def entry(entry_id: int, payload: bytes = b"", last_confirmed: int | None = None, length: int = 0) -> bytes:
    confirmed = entry_id - 1 if last_confirmed is None else last_confirmed
    return encode_ledger_entry(
        LEDGER, entry_id, confirmed, length or 10 * entry_id, payload or b"%d" % entry_id
    )


class Bookies:
    """Entries by bookie. `down` ones do not answer; `rotten` (bookie, entry) cannot be read there."""

    def __init__(self, rng: random.Random) -> None:
        self.stored: dict[str, dict[int, bytes]] = {}
        self.down: set[str] = set()
        self.rotten: set[tuple[str, int]] = set()
        self.reads = 0
        self._rng = rng

    async def read(
        self,
        bookie: str,
        ledger_id: int,
        first: int,
        last: int,
        *,
        max_bytes: int = 0,
        stripe: Stripe = EVERY_ENTRY,
        **_: Any,
    ) -> ReadResult:
        """As a bookie answers: a run without gaps of any length, or why there is none."""
        self.reads += 1
        stripe.check(first, last)
        if bookie in self.down:
            raise BookieUnavailable(f"bookie {bookie} is down")
        if bookie not in self.stored:
            raise LedgerNotFound(f"ledger {ledger_id} is not known")
        found: list[bytes] = []
        for entry_id in stripe.ids(first, last):
            if (bookie, entry_id) in self.rotten or entry_id not in self.stored[bookie]:
                break
            found.append(self.stored[bookie][entry_id])
        if not found:
            raise (EntryDamaged if (bookie, first) in self.rotten else EntryNotFound)(f"entry {first}")
        return ReadResult(found[: self._rng.randrange(1, len(found) + 1)], -1)

    async def list_entries(
        self, bookie: str, ledger_id: int, *, first: int = 0, count: int = 1000
    ) -> EntryPage:
        """The next one of them, now and then with an empty page before it."""
        following = next((one for one in sorted(self.stored[bookie]) if one >= first), None)
        if following is None:
            return EntryPage([], -1)
        if self._rng.random() < 0.3 and following > first:
            return EntryPage([], first + 1)
        return EntryPage([(following, following)], following + 1)


def metadata_of(ensembles: list[tuple[int, list[str]]], write_quorum: int, last: int) -> LedgerMetadata:
    return LedgerMetadata(
        LedgerState.CLOSED,
        len(ensembles[0][1]),
        write_quorum,
        1,
        tuple(Ensemble(first, tuple(bookies)) for first, bookies in ensembles),
        0,
        last,
        1,
    )


def held_by(metadata: LedgerMetadata, entry_id: int) -> list[str]:
    bookies = metadata.ensemble_of(entry_id).bookies
    return [bookies[position] for position in metadata.striping.write_set(entry_id)]


SHAPES = [
    ([(0, ["a"])], 1),
    ([(0, ["a", "b", "c"])], 3),
    ([(0, ["a", "b", "c"])], 2),
    ([(0, ["a", "b", "c", "d", "e"]), (13, ["a", "x", "c", "d", "e"]), (14, ["y", "x", "c", "d", "e"])], 3),
    ([(0, ["a", "b"]), (40, ["a", "c"])], 2),  # the last ensemble may be empty
]


@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize("seed", range(8))
async def test_every_kind_of_damage_is_found_where_it_is(shape: int, seed: int) -> None:
    rng = random.Random(100 * shape + seed)
    metadata = metadata_of(*SHAPES[shape], last=39)
    bookies = Bookies(rng)
    expected: dict[tuple[int, str], str] = {}
    for entry_id in range(40):
        holders = held_by(metadata, entry_id)
        for bookie in holders:
            # Recoveries write under a LAC of their own: that is no difference.
            bookies.stored.setdefault(bookie, {})[entry_id] = entry(
                entry_id, last_confirmed=rng.choice((None, 39))
            )
            expected[entry_id, bookie] = "ok"
        if rng.random() < 0.4:
            victim, how = rng.choice(holders), rng.choice(("missing", "damaged", "rotten", "differs"))
            if how == "missing":
                del bookies.stored[victim][entry_id]
            elif how == "damaged":
                bookies.stored[victim][entry_id] = bookies.stored[victim][entry_id][:-1] + b"!"
            elif how == "rotten":
                bookies.rotten.add((victim, entry_id))
            elif len(holders) > 1:
                bookies.stored[victim][entry_id] = rng.choice(
                    (entry(entry_id, b"another"), entry(entry_id, length=1))
                )
                if len(holders) == 2:  # no majority
                    expected |= {(entry_id, bookie): "disputed" for bookie in holders}
                    continue
            if how != "differs" or len(holders) > 1:
                expected[entry_id, victim] = how.replace("rotten", "damaged")
    first = rng.randrange(10)
    found = await compare_copies(bookies, LEDGER, metadata, first, 39)  # type: ignore[arg-type]
    assert {(row.entry, row.bookie): row.state for row in found} == {
        place: state for place, state in expected.items() if place[0] >= first
    }
    assert len(found) == metadata.write_quorum * (40 - first)
    # The same as ranges: each copy once, and never over the border of an ensemble.
    ranges = ranges_of(found, metadata)
    unfolded = {
        (entry_id, one.bookie): one.state
        for one in ranges
        for entry_id in range(one.first, one.last + 1)
        if one.bookie in held_by(metadata, entry_id)
    }
    assert unfolded == {(row.entry, row.bookie): row.state for row in found}
    assert sum(one.copies for one in ranges) == len(found)
    assert all(
        one.bookie in metadata.ensemble_of(n).bookies
        for one in ranges
        for n in range(one.first, one.last + 1)
    )


async def test_bookies_that_do_not_answer_and_ledgers_that_they_do_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copies, "RETRY_S", 0.001)
    metadata = metadata_of([(0, ["a", "b", "c"])], 3, last=9)
    bookies = Bookies(random.Random(1))
    bookies.stored = {bookie: {one: entry(one) for one in range(10)} for bookie in ("a", "c")}
    bookies.down = {"c"}
    found = await compare_copies(bookies, LEDGER, metadata, 0, 9)  # type: ignore[arg-type]
    states = {row.bookie: row.state for row in found}
    assert states == {"a": "ok", "b": "missing", "c": "unreachable"}
    assert {row.detail for row in found if row.bookie == "c"} == {"bookie c is down"}


async def test_what_is_sound_is_one_range_for_each_bookie_and_ensemble() -> None:
    for ensembles, write_quorum in SHAPES:
        metadata = metadata_of(ensembles, write_quorum, last=39)
        bookies = Bookies(random.Random(1))
        for entry_id in range(40):
            for bookie in held_by(metadata, entry_id):
                bookies.stored.setdefault(bookie, {})[entry_id] = entry(entry_id)
        found = await compare_copies(bookies, LEDGER, metadata, 0, 39)  # type: ignore[arg-type]
        # An ensemble of one entry has shares for fewer bookies.
        assert len(ranges_of(found, metadata)) == len(shares(metadata, 0, 39))


async def test_an_entry_without_an_intact_copy_is_reported_as_lost() -> None:
    metadata = metadata_of([(0, ["a", "b"])], 2, last=3)
    bookies = Bookies(random.Random(1))
    bookies.stored = {bookie: {one: entry(one) for one in range(4)} for bookie in ("a", "b")}
    del bookies.stored["a"][1], bookies.stored["b"][2], bookies.stored["b"][3]
    bookies.rotten = {("b", 1), ("a", 3)}
    found = ranges_of(await compare_copies(bookies, LEDGER, metadata, 0, 3), metadata)  # type: ignore[arg-type]
    lost = [(one.bookie, one.first, one.last) for one in found if one.detail == copies.NO_COPY_LEFT]
    assert lost == [("a", 1, 1), ("a", 3, 3), ("b", 1, 1), ("b", 3, 3)]
    assert [(one.first, one.state) for one in found if one.bookie == "b"] == [
        (0, "ok"),
        (1, "damaged"),
        (2, "missing"),
        (3, "missing"),
    ]


async def test_a_long_gap_costs_a_few_questions() -> None:
    metadata = metadata_of([(0, ["a"])], 1, last=9999)
    bookies = Bookies(random.Random(1))
    bookies.stored = {"a": {0: entry(0), 9999: entry(9999)}}
    found = await compare_copies(bookies, LEDGER, metadata, 0, 9999)  # type: ignore[arg-type]
    assert [row.entry for row in found if row.state == "ok"] == [0, 9999]
    assert bookies.reads <= 4


def test_shares_name_every_holder_of_every_entry_once() -> None:
    for ensembles, write_quorum in SHAPES:
        metadata = metadata_of(ensembles, write_quorum, last=39)
        found = [(entry_id, share.bookie) for share in shares(metadata, 5, 39) for entry_id in share.ids]
        assert sorted(found) == sorted(
            (entry_id, bookie) for entry_id in range(5, 40) for bookie in held_by(metadata, entry_id)
        )
        assert all(share.stripe.holds(share.ids[0]) for share in shares(metadata, 5, 39))

"""Quorum arithmetic and ledger metadata: properties, and a ledger of very many ensembles."""

import itertools

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.ledger import LedgerSettings
from magnetar.ledger.core.events import LastConfirmedRead
from magnetar.ledger.core.metadata import LedgerMetadata, LedgerState
from magnetar.ledger.core.quorum import Striping, check_quorums
from magnetar.ledger.core.recovery import RecoveryCore
from magnetar.proto.errors import FinalError, InvalidSetting

BOOKIES = tuple(f"b{n}" for n in range(8))
LEDGER = 7


@st.composite
def stripings(draw: st.DrawFn) -> Striping:
    ensemble_size = draw(st.integers(1, 6))
    write_quorum = draw(st.integers(1, ensemble_size))
    return Striping(ensemble_size, write_quorum, draw(st.integers(1, write_quorum)))


@given(stripings(), st.integers(0, 1 << 43))
def test_write_sets_are_round_robin(striping: Striping, entry_id: int) -> None:
    write_set = striping.write_set(entry_id)
    assert len(set(write_set)) == striping.write_quorum
    assert write_set[0] == entry_id % striping.ensemble_size
    assert striping.mask(entry_id) == sum(1 << position for position in write_set)


@given(stripings(), st.data())
def test_rule_13_covered_means_that_no_ack_quorum_is_unknown(striping: Striping, data: st.DataObject) -> None:
    known = data.draw(st.integers(0, (1 << striping.ensemble_size) - 1))
    unknown = [p for p in range(striping.ensemble_size) if not known & 1 << p]
    hidden = any(
        set(quorum) <= set(unknown)
        for write_set in striping.write_sets
        for quorum in itertools.combinations(write_set, striping.ack_quorum)
    )
    assert striping.covered(known) == (not hidden)


@given(stripings(), st.data())
def test_rule_14_negatives_for_absence_meet_every_ack_quorum(striping: Striping, data: st.DataObject) -> None:
    write_set = striping.write_set(data.draw(st.integers(0, 10)))
    for negatives in itertools.combinations(write_set, striping.negatives_for_absence):
        for acks in itertools.combinations(write_set, striping.ack_quorum):
            assert set(negatives) & set(acks), "a confirmed entry would be taken for absent"


@pytest.mark.parametrize("quorums", [(0, 0, 0), (1, 1, 0), (1, 2, 1), (2, 1, 2), (3, 2, 3), (65, 1, 1)])
def test_quorums_that_do_not_fit(quorums: tuple[int, int, int]) -> None:
    for refuse in (check_quorums, Striping, LedgerSettings):
        with pytest.raises(InvalidSetting, match=r"1 <= ack_quorum <= write_quorum <= ensemble_size <= 64"):
            refuse(*quorums)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("add_timeout_s", 0),
        ("read_timeout_s", -1),
        ("reconnect_backoff_max_s", 0.01),
        ("explicit_lac_interval_s", -0.1),
        ("max_outstanding_bytes", 10),
    ],
)
def test_settings_that_do_not_fit(name: str, value: float) -> None:
    with pytest.raises(InvalidSetting, match=name):
        LedgerSettings(**{name: value})  # type: ignore[arg-type]


def sample() -> LedgerMetadata:
    return LedgerMetadata.create(Striping(3, 2, 2), BOOKIES[:3], 123, {"topic": "t"})


def test_metadata_round_trip_keeps_what_later_releases_wrote() -> None:
    metadata = sample().with_ensemble(5, BOOKIES[1:4]).in_recovery().close(9, 1000)
    fields = msgpack.unpackb(metadata.encode()) | {"custom": [1, 2]}
    decoded = LedgerMetadata.decode(msgpack.packb(fields), 1)
    assert decoded.unknown == {"custom": [1, 2]}
    assert msgpack.unpackb(decoded.encode()) == fields
    assert (decoded.ensembles, decoded.last_entry, decoded.length) == (metadata.ensembles, 9, 1000)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc0",
        b"\x80",
        msgpack.packb([1, 2]),
        msgpack.packb(msgpack.unpackb(sample().encode()) | {"state": 9}),
        msgpack.packb(msgpack.unpackb(sample().encode()) | {"ack_quorum": 3}),
        msgpack.packb(msgpack.unpackb(sample().encode()) | {"ensembles": [[0, ["b0", "b0", "b1"]]]}),
        msgpack.packb(msgpack.unpackb(sample().encode()) | {"ensembles": []}),
    ],
)
def test_damaged_metadata_is_told(data: bytes) -> None:
    with pytest.raises(FinalError, match="metadata of ledger 7 is damaged"):
        LedgerMetadata.decode(data, 7)


def test_ensembles_by_entry() -> None:
    metadata = sample().with_ensemble(5, BOOKIES[1:4])
    assert metadata.ensemble_of(4).bookies == BOOKIES[:3]
    assert metadata.ensemble_of(5).bookies == BOOKIES[1:4]
    assert (metadata.end_of_ensemble(0), metadata.end_of_ensemble(5)) == (4, None)
    again = metadata.with_ensemble(5, BOOKIES[2:5])
    assert [e.first_entry for e in again.ensembles] == [0, 5], (
        "the one recorded for this entry is replaced (rule 17)"
    )
    with pytest.raises(AssertionError):
        metadata.in_recovery().close(1, 1).close(2, 2)
    assert metadata.in_recovery().state is LedgerState.IN_RECOVERY


def test_a_ledger_of_65000_ensembles_is_read_written_and_found_in() -> None:
    ensembles = tuple(
        LedgerMetadata.create(Striping(3, 2, 2), ("b1", "b2", "b3"), 0, {})
        .ensembles[0]
        .__class__(n * 10, (f"b{n}", f"b{n + 1}", f"b{n + 2}"))
        for n in range(65_000)
    )
    metadata = LedgerMetadata(LedgerState.OPEN, 3, 2, 2, ensembles, 0)
    metadata.check()
    again = LedgerMetadata.decode(metadata.encode(), LEDGER)
    assert again == metadata
    assert again.ensemble_of(0).first_entry == 0
    assert again.ensemble_of(19).first_entry == 10
    assert again.end_of_ensemble(19) == 19
    assert again.end_of_ensemble(650_000) is None
    changed = again.with_ensemble(650_000, ("x", "y", "z"))
    assert len(changed.ensembles) == 65_001
    core = RecoveryCore(LEDGER, changed.in_recovery(), 1)
    core.begin()
    for bookie in ("x", "y", "z"):
        core.handle(LastConfirmedRead(bookie, 3, 0))
    assert core.first_unfinished == 649_999, "an LAC below the last ensemble is not where it begins"

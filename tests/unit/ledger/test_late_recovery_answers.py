"""Answers that count for nothing in a recovery: of an earlier attempt, of another write set, given twice."""

from magnetar.ledger import LedgerSettings
from magnetar.ledger.core.events import (
    LastConfirmedRead,
    MetadataFound,
)
from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.ledger.core.quorum import LastConfirmedQuorum, Striping
from magnetar.ledger.core.recovery import RecoveryCore, RecoveryState
from magnetar.proto.errors import (
    ConnectionLost,
    EntryNotFound,
    LedgerNotFound,
)
from magnetar.proto.ledger_entry import encode_ledger_entry
from support.ledger_scenario import entry_read

NO_LAC = LedgerSettings(explicit_lac_interval_s=0)


def test_rule_13_an_answer_of_a_bookie_that_is_not_in_the_ensemble_counts_for_nothing() -> None:
    """A recovery that starts over with another ensemble hears late answers of the old one: it ended with a ValueError."""
    quorum = LastConfirmedQuorum(Striping(3, 3, 2), ("a", "b", "c"))
    quorum.answered("x", 99, 0)
    quorum.answered("y", -1, ConnectionLost.code)
    quorum.answered("z", -1, EntryNotFound.code)
    assert (quorum.covered, quorum.complete, quorum.last_add_confirmed) == (False, False, -1)
    assert quorum.silent == ("a", "b", "c")


def test_rule_13_a_bookie_that_answers_twice_is_one_bookie() -> None:
    quorum = LastConfirmedQuorum(Striping(3, 3, 2), ("a", "b", "c"))
    quorum.answered("a", -1, ConnectionLost.code)
    quorum.answered("a", 4, 0)
    quorum.answered("b", -1, ConnectionLost.code)
    assert not quorum.complete, "c has not answered"
    quorum.answered("c", 3, 0)
    assert quorum.covered
    assert quorum.last_add_confirmed == 4


def state(core: RecoveryCore) -> RecoveryState:
    return core.state


def started_over(last: tuple[str, ...]) -> RecoveryCore:
    """A recovery that lost its closing compare-and-set to a change of the ensemble, and reads entries again."""
    striping = Striping(3, 3, 2)
    before = LedgerMetadata.create(striping, ("a", "b", "c"), 0, {}).in_recovery()
    core = RecoveryCore(7, before, 1)
    core.begin()
    for bookie in ("a", "b"):
        core.handle(LastConfirmedRead(bookie, -1, LedgerNotFound.code))
    for bookie in ("a", "b"):
        core.handle(entry_read(bookie, 0, b"", 0, EntryNotFound.code))
    assert state(core) is RecoveryState.CLOSING
    after = LedgerMetadata.create(striping, last, 0, {}).in_recovery()
    core.handle(MetadataFound(after, 2))
    assert state(core) is RecoveryState.FENCING
    return core


def test_rule_13_late_fences_of_an_earlier_attempt() -> None:
    core = started_over(("a", "d", "e"))
    assert core.handle(LastConfirmedRead("c", -1, ConnectionLost.code)) == []
    assert core.handle(LastConfirmedRead("c", 5, 0)) == []
    core.check()
    for bookie in ("a", "d"):
        core.handle(LastConfirmedRead(bookie, -1, 0))
    assert state(core) is RecoveryState.ENTRIES


def test_rule_14_negatives_of_an_earlier_attempt_count_only_within_the_write_set() -> None:
    """Two bookies that left the ensemble said no: that says nothing about the bookies of now."""
    core = started_over(("a", "d", "e"))
    for bookie in ("a", "d"):
        core.handle(LastConfirmedRead(bookie, -1, 0))
    assert core.handle(entry_read("b", 0, b"", 0, EntryNotFound.code)) == []
    assert core.handle(entry_read("c", 0, b"", 0, EntryNotFound.code)) == []
    core.check()
    assert state(core) is RecoveryState.ENTRIES
    core.handle(entry_read("a", 0, b"", 0, EntryNotFound.code))
    entry = encode_ledger_entry(7, 0, -1, 1, b"x")
    core.handle(entry_read("d", 0, entry, 1, 0))
    core.check()
    assert state(core) is RecoveryState.ENTRIES, "it exists"


def test_rule_14_a_late_negative_for_another_write_set_of_a_striped_ledger() -> None:
    """E = 3, Qw = 2: entry 0 is on a and b. What c says about it is no answer to anything."""
    metadata = LedgerMetadata.create(Striping(3, 2, 2), ("a", "b", "c"), 0, {}).in_recovery()
    core = RecoveryCore(7, metadata, 1)
    core.begin()
    for bookie in ("a", "b", "c"):
        core.handle(LastConfirmedRead(bookie, -1, 0))
    assert core.handle(entry_read("c", 0, b"", 0, EntryNotFound.code)) == []
    assert state(core) is RecoveryState.ENTRIES

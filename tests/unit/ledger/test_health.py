"""Quarantine: who is left out of placement, and that somebody is left."""

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from magnetar.ledger import BookieHealth, LedgerSettings, StaticBookies
from magnetar.ledger.core.quarantine import Quarantine
from magnetar.proto.errors import (
    BookieReadOnly,
    BookieUnavailable,
    EntryNotFound,
    LedgerFenced,
    RequestTimeout,
    TooManyRequests,
)
from support.bookies import Bookies, Confirmations


def fail(quarantine: Quarantine, bookie: str, *times: float) -> list[bool]:
    return [quarantine.failed(bookie, now) for now in times]


def test_five_failures_of_a_minute_are_half_an_hour() -> None:
    quarantine = Quarantine(5, 60, 1800)
    assert fail(quarantine, "a", 0, 10, 20, 30, 61) == [False] * 5, "the first one is older than a minute"
    assert fail(quarantine, "a", 62) == [True]
    assert quarantine.quarantined(1000) == {"a": 1862}
    assert list(quarantine.offers(["a", "b"], 1861)) == [("b",), ("a", "b")]
    assert list(quarantine.offers(["a", "b"], 1862)) == [("a", "b")]
    assert fail(quarantine, "a", 1863, 1865, 1867, 1869) == [False] * 4, "it starts anew"
    assert fail(quarantine, "a", 1871) == [True]


def test_what_one_broken_connection_fails_is_one_failure() -> None:
    quarantine = Quarantine(5, 60, 1800)
    assert not any(fail(quarantine, "a", *[number / 1000 for number in range(900)]))
    assert fail(quarantine, "a", 2, 4, 6, 8) == [False, False, False, True]


def test_the_first_to_be_well_again_is_readmitted_first() -> None:
    quarantine = Quarantine(1, 60, 100)
    for now, bookie in enumerate("cab"):
        quarantine.failed(bookie, now)
    assert list(quarantine.offers(["a", "b", "c", "d"], 10)) == [
        ("d",),
        ("c", "d"),
        ("a", "c", "d"),
        ("a", "b", "c", "d"),
    ]
    assert quarantine.count(101) == 1


def test_zero_errors_is_never() -> None:
    quarantine = Quarantine(0, 60, 100)
    assert not any(fail(quarantine, "a", *range(0, 100, 2)))


class QuarantineMachine(RuleBasedStateMachine):
    """Against a plain list of what happened."""

    def __init__(self) -> None:
        super().__init__()
        self.quarantine = Quarantine(3, 10, 50)
        self.now = 0.0
        self.counted: dict[str, list[float]] = {}
        self.until: dict[str, float] = {}

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0, 11.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(bookie=st.sampled_from("abc"))
    def fail(self, bookie: str) -> None:
        before = self.until.get(bookie, 0) > self.now
        expected = False
        if not before:
            times = self.counted.setdefault(bookie, [])
            if not times or self.now - times[-1] >= 1:
                times.append(self.now)
                if len([t for t in times if self.now - t <= 10]) >= 3:
                    expected = True
                    self.until[bookie] = self.now + 50
                    del self.counted[bookie]
        assert self.quarantine.failed(bookie, self.now) == expected

    @precondition(lambda self: self.until)
    @rule()
    def somebody_is_always_left(self) -> None:
        offers = list(self.quarantine.offers(["a", "b", "c"], self.now))
        assert offers[-1] == ("a", "b", "c")
        assert [len(offer) for offer in offers] == list(range(len(offers[0]), 4))

    @invariant()
    def as_expected(self) -> None:
        well = [bookie for bookie in "abc" if self.until.get(bookie, 0) <= self.now]
        assert next(self.quarantine.offers(["a", "b", "c"], self.now)) == tuple(well)
        self.quarantine.check()


TestQuarantineMachine = QuarantineMachine.TestCase
TestQuarantineMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


async def test_only_what_is_the_bookies_fault_counts() -> None:
    directory = StaticBookies(["a:1", "b:1"])
    asked: list[str] = []
    directory.on_suspected = asked.append
    health = BookieHealth(LedgerSettings(quarantine_errors=1), directory)
    for error in (TooManyRequests, LedgerFenced, EntryNotFound):
        health.failed("a:1", error.code)
    assert not health.quarantined()
    assert not asked
    health.failed("a:1", BookieReadOnly.code)
    assert (asked, health.quarantined()) == (["a:1"], {}), "asked what it is, not punished for it"
    health.failed("b:1", RequestTimeout.code)
    assert list(health.quarantined()) == ["b:1"]
    assert asked == ["a:1", "b:1"]
    assert list(health.offers(["a:1", "b:1"])) == [("a:1",), ("a:1", "b:1")]
    assert health.figures() == {
        "bookies_quarantined": 1,
        "bookie_failures_total": 1,
        "bookie_quarantines_total": 1,
        "quarantines_overridden_total": 1,
    }


async def test_figures_before_anything_happened() -> None:
    health = BookieHealth(LedgerSettings(), StaticBookies(["a:1"]))
    figures = await asyncio.to_thread(health.figures)  # no loop there: whoever scrapes may be another thread
    assert set(figures.values()) == {0}


async def test_a_writer_tells_and_new_ledgers_go_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    bookies = Bookies("a", "b", "c")
    settings_ = LedgerSettings(ensemble_size=2, write_quorum=2, ack_quorum=2, quarantine_errors=1)
    directory = bookies.directory()
    client = bookies.client(settings_, seed=1, directory=directory)
    writer = await client.create()
    lost = writer.metadata.last_ensemble.bookies[0]
    bookies[lost].fail(BookieUnavailable("down"))
    confirmed = Confirmations()
    writer.append(b"x", confirmed)
    await confirmed.count(1)
    assert confirmed.ids == [0]
    assert list(client.health.quarantined()) == [lost]
    assert f"bookie {lost} failed 1 times" in caplog.text
    for _ in range(10):
        assert lost not in (await client.create()).metadata.last_ensemble.bookies
    full = await client.create(ensemble_size=3)
    assert sorted(full.metadata.last_ensemble.bookies) == ["a", "b", "c"], "never so many that none is left"
    assert client.figures()["bookies_quarantined"] == 1
    await client.close()


async def test_readers_and_recoveries_tell_as_well() -> None:
    bookies = Bookies("a", "b", "c")
    client = bookies.client(
        LedgerSettings(ensemble_size=3, write_quorum=3, ack_quorum=2, quarantine_errors=1)
    )
    writer = await client.create()
    confirmed = Confirmations()
    for _ in range(3):
        writer.append(b"x", confirmed)
    await confirmed.count(3)
    bookies["b"].fail(RequestTimeout("silent"))
    other = bookies.client(LedgerSettings(quarantine_errors=1, read_timeout_s=1))
    await other.open(writer.ledger_id, recover=True)
    assert list(other.health.quarantined()) == ["b"]
    third = bookies.client(LedgerSettings(quarantine_errors=1))
    for bookie in ("a", "c"):
        bookies[bookie].fail(BookieUnavailable("down"))
    reader = await third.open(writer.ledger_id, recover=False)
    with pytest.raises((BookieUnavailable, RequestTimeout)):
        await reader.read(0, 2)
    assert sorted(third.health.quarantined()) == ["a", "b", "c"]
    for each in (client, other, third):
        await each.close()

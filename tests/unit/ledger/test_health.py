"""Quarantine: who is left out of placement, and that somebody is left."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.ledger import BookieHealth, LedgerSettings, StaticBookies
from magnetar.proto.errors import (
    BookieReadOnly,
    BookieUnavailable,
    EntryNotFound,
    LedgerFenced,
    RequestTimeout,
    TooManyRequests,
)
from support.bookies import Bookies, Confirmations
from support.sim import SimLoop
from support.virtual_time import in_virtual_time

UNAVAILABLE = BookieUnavailable.code
NAMES = ("a", "b", "c", "d")


def health_with(errors: int, window_s: float, quarantine_s: float) -> BookieHealth:
    """Without suspicion, so that only quarantine shows."""
    settings_ = LedgerSettings(
        quarantine_errors=errors,
        quarantine_window_s=window_s,
        quarantine_s=quarantine_s,
        suspect_bookie_s=0,
    )
    return BookieHealth(settings_, StaticBookies(dict.fromkeys(NAMES, ("127.0.0.1", 1))))


async def at(seconds: float) -> None:
    """Waits until so long after the beginning, which is 10 s on the clock of the simulated loop."""
    await asyncio.sleep(10 + seconds - asyncio.get_running_loop().time())


async def fail(health: BookieHealth, bookie: str, *times: float) -> list[bool]:
    """Whether it is in quarantine after each failure."""
    found = []
    for seconds in times:
        await at(seconds)
        health.failed(bookie, UNAVAILABLE)
        health.check()
        found.append(bookie in health.quarantined())
    return found


@in_virtual_time
async def test_five_failures_of_a_minute_are_half_an_hour() -> None:
    health = health_with(5, 60, 1800)
    assert await fail(health, "a", 0, 10, 20, 30, 61) == [False] * 5, "the first one is older than a minute"
    assert await fail(health, "a", 62) == [True]
    assert health.quarantined() == {"a": pytest.approx(1800)}
    await at(1861)
    assert list(health.offers(["a", "b"])) == [("b",), ("a", "b")]
    await at(1862.01)
    assert list(health.offers(["a", "b"])) == [("a", "b")]
    assert await fail(health, "a", 1863, 1865, 1867, 1869) == [False] * 4, "it starts anew"
    assert await fail(health, "a", 1871) == [True]


@in_virtual_time
async def test_what_one_broken_connection_fails_is_one_failure() -> None:
    health = health_with(5, 60, 1800)
    assert not any(await fail(health, "a", *[number / 1000 for number in range(900)]))
    assert await fail(health, "a", 2, 4, 6, 8) == [False, False, False, True]


@in_virtual_time
async def test_the_first_to_be_well_again_is_readmitted_first() -> None:
    health = health_with(1, 60, 100)
    for now, bookie in enumerate("cab"):
        await fail(health, bookie, now)
    await at(10.01)
    assert list(health.offers(["a", "b", "c", "d"])) == [
        ("d",),
        ("c", "d"),
        ("a", "c", "d"),
        ("a", "b", "c", "d"),
    ]
    await at(101.01)
    assert health.figures()["bookies_quarantined"] == 1


@in_virtual_time
async def test_zero_errors_is_never() -> None:
    health = health_with(0, 60, 100)
    assert not any(await fail(health, "a", *range(0, 100, 2)))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(st.sampled_from([0.5, 1.0, 4.0, 11.0, 30.0]), st.sampled_from("abc")),
        min_size=1,
        max_size=40,
    )
)
def test_quarantine_against_a_plain_list_of_what_happened(steps: list[float | str]) -> None:
    """A number is a pause, a name a failure."""

    async def run() -> None:
        health, loop = health_with(3, 10, 50), asyncio.get_running_loop()
        counted: dict[str, list[float]] = {}
        until: dict[str, float] = {}
        for step in steps:
            if isinstance(step, float):
                await asyncio.sleep(step)
            elif until.get(step, 0) <= (now := loop.time()):
                times = counted.setdefault(step, [])
                if not times or now - times[-1] >= 1:
                    times.append(now)
                    if len([t for t in times if now - t <= 10]) >= 3:
                        until[step] = now + 50
                        del counted[step]
                health.failed(step, UNAVAILABLE)
            well = tuple(name for name in "abc" if until.get(name, 0) <= loop.time())
            offers = list(health.offers(["a", "b", "c"]))
            assert offers[0] == well
            assert offers[-1] == ("a", "b", "c"), "somebody is always left"
            assert [len(offer) for offer in offers] == list(range(len(well), 4))
            health.suspects()  # which forgets what is over
            health.check()

    loop = SimLoop(seed=1)
    try:
        loop.run(run())
    finally:
        loop.close()


@in_virtual_time
async def test_a_slow_bookie_is_asked_last_for_a_while_and_is_no_suspect() -> None:
    health = BookieHealth(LedgerSettings(suspect_bookie_s=10), StaticBookies(["a:1", "b:1"]))
    await at(0)
    health.slow("a:1")
    assert (health.asked_last("a:1"), health.asked_last("b:1")) == (True, False)
    assert health.suspects() == ()
    assert list(health.offers(["a:1", "b:1"])) == [("a:1", "b:1")]
    await at(10.01)
    assert not health.asked_last("a:1")
    health.failed("a:1", UNAVAILABLE)
    assert health.asked_last("a:1")


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

"""Bookies of a list, asked how they are."""

import asyncio
import logging
import random
from dataclasses import replace
from typing import Any

import pytest

from magnetar.ledger import (
    BookieInfoReader,
    Labels,
    LedgerClient,
    LedgerSettings,
    LocalTransport,
    StaticBookies,
    TcpTransport,
)
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import BookieUnavailable, NotEnoughBookies
from magnetar.runtime.connection import ConnectionOptions
from support.bookies import Confirmations, StillClock
from support.sim import SimLoop
from unit.ledger.test_tcp_transport import FAST, Cluster


class Asked:
    """A bookie that tells what it was given, fails with it, or hangs."""

    def __init__(self, **told: Any) -> None:
        self.told: dict[str, Any] = told
        self.error: BookieUnavailable | None = None
        self.calls = 0
        self.go = asyncio.Event()
        self.go.set()
        self.asked = asyncio.Event()

    async def info(self) -> dict[str, Any]:
        self.calls += 1
        self.asked.set()
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return self.told


class Transport(LocalTransport):
    def __init__(self, bookies: dict[str, Asked]) -> None:
        super().__init__({})
        self.asked = bookies

    async def info(self, bookie: str) -> dict[str, Any]:
        return await self.asked[bookie].info()


class Room:
    """Bookies, a directory, a survey of them."""

    def __init__(self, interval_s: float = 30.0, **bookies: Asked) -> None:
        self.bookies = bookies
        self.directory = StaticBookies(dict.fromkeys(bookies, ("127.0.0.1", 1)))
        self.info_reader = BookieInfoReader(
            self.directory,
            Transport(bookies),
            LedgerSettings(bookie_info_interval_s=interval_s, connect_timeout_s=0.05),
            random.Random(1),
        )

    async def __aenter__(self) -> "Room":
        await self.info_reader.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.info_reader.close()
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("the info of")]

    async def until(self, writable: tuple[str, ...]) -> None:
        async with asyncio.timeout(10):
            while tuple(self.directory.writable()) != writable:
                await asyncio.sleep(0.005)


async def test_what_they_tell_is_known_when_it_has_started() -> None:
    async with Room(
        a=Asked(rack="r1", zone="z1", free_bytes=7, read_only=False),
        b=Asked(read_only=True, rack=5, zone=None, free_bytes="much"),
        c=Asked(),
    ) as room:
        directory = room.directory
        assert directory.writable() == ("a", "c")
        assert directory.labels("a") == Labels("r1", "z1")
        assert directory.labels("b") == directory.labels("c") == directory.labels("nobody") == Labels()
        assert (directory.free_bytes("a"), directory.free_bytes("b")) == (7, 0)
        assert directory.writable() is directory.writable()


async def test_one_that_does_not_answer_holds_nobody_up_and_is_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    down = Asked(zone="z")
    down.error = BookieUnavailable("no")
    hung = Asked()
    hung.go.clear()
    with caplog.at_level(logging.INFO, "magnetar.ledger.bookie_info_reader"):
        async with Room(0.02, a=Asked(), b=down, c=hung) as room:
            assert room.directory.writable() == ("a", "c"), "nothing is known against c yet"
            async with asyncio.timeout(10):
                while down.calls < 3:
                    await asyncio.sleep(0.005)
            assert [r.levelname for r in caplog.records] == ["WARNING"], "said once"
            down.error = None
            await room.until(("a", "b", "c"))
            assert "b answers again" in caplog.text
            assert room.directory.labels("b").zone == "z"


async def test_a_suspected_bookie_is_out_until_it_answers_and_is_asked_at_once() -> None:
    a = Asked(zone="z")
    async with Room(3600, a=a, b=Asked()) as room:
        a.asked.clear()
        room.directory.suspected("a")
        room.directory.suspected("nobody")
        assert room.directory.writable() == ("b",)
        assert room.directory.labels("a").zone == "z", "what it told stays known"
        await room.until(("a", "b"))
        assert a.calls == 2
    room.directory.suspected("a")
    assert room.directory.writable() == ("a", "b"), "nobody asks any more"


def test_how_often_they_are_asked() -> None:
    """A hundred seconds of virtual time: every 10 s while they answer, every second while not, five times one at most."""

    async def scenario() -> tuple[int, int, int]:
        well, down, suspected = Asked(), Asked(), Asked()
        down.error = BookieUnavailable("no")
        async with Room(10.0, a=well, b=down, c=suspected) as room:
            loop = asyncio.get_running_loop()
            room.directory.suspected("a")
            end = loop.time() + 100
            while loop.time() < end:
                room.directory.suspected("c")
                await asyncio.sleep(0.01)
        return well.calls, down.calls, suspected.calls

    loop = SimLoop(1)
    try:
        well, down, suspected = loop.run(scenario())
    finally:
        loop.close()
    assert 9 <= well <= 12
    assert 75 <= down <= 100
    assert 300 <= suspected <= 501


async def test_a_suspicion_while_it_is_being_asked_is_not_lost() -> None:
    a = Asked()
    async with Room(3600, a=a) as room:
        a.asked.clear()
        a.go.clear()
        room.directory.suspected("a")
        async with asyncio.timeout(10):
            await a.asked.wait()
        room.directory.suspected("a")
        a.go.set()
        async with asyncio.timeout(10):
            while a.calls < 3:
                await asyncio.sleep(0.005)
        await room.until(("a",))


async def test_over_tcp_a_hung_bookie_is_passed_by_until_it_answers_again() -> None:
    """A writer finds out after the add timeout, the survey hears from it again: full ledgers, smaller ones, full ones."""
    cluster = Cluster()
    await cluster.start("a", "b")
    settings = replace(FAST, ensemble_size=2, write_quorum=2, ack_quorum=2, minimum_write_quorum=1)
    directory = cluster.directory()
    transport = TcpTransport(directory, settings, ConnectionOptions("test"))
    info_reader = BookieInfoReader(directory, transport, settings, random.Random(1))
    await info_reader.start()
    client = LedgerClient(
        StoredLedgers(cluster.metadata), transport, directory, settings, random.Random(1), StillClock()
    )
    assert directory.free_bytes("b") == 1 << 30
    writer = await client.create()
    assert not writer.degraded
    cluster.servers["b"].deaf.set()
    confirmed = Confirmations()
    writer.append(b"x", confirmed)
    await confirmed.count(1)
    assert confirmed.errors == [NotEnoughBookies]
    smaller = await client.create()
    assert smaller.metadata.last_ensemble.bookies == ("a",)
    smaller.append(b"x", confirmed)
    await confirmed.count(2)
    assert confirmed.ids == [0]
    cluster.servers["b"].deaf.clear()
    async with asyncio.timeout(10):
        while not smaller.replaceable:
            await asyncio.sleep(0.01)
    assert not (await client.create()).degraded
    await client.close()
    await info_reader.close()
    await transport.close()
    await cluster.close()


async def test_a_bookie_whose_journal_hangs_is_passed_by_until_it_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its process answers and takes adds: only the journal does nothing."""
    a, b = Asked(), Asked(zone="z", journal_stalled_s=0)
    async with Room(0.02, a=a, b=b) as room:
        assert room.directory.writable() == ("a", "b")
        b.told["journal_stalled_s"] = 2.4
        for _ in range(3):  # a slow disk is no hung one: half an add timeout of 5 s
            b.asked.clear()
            await b.asked.wait()
        assert room.directory.writable() == ("a", "b")
        b.told["journal_stalled_s"] = 2.6
        with caplog.at_level(logging.INFO, "magnetar.ledger.bookie_info_reader"):
            await room.until(("a",))
            assert (
                "bookie b answers, but its journal hangs: nothing became durable there for 2.6 s"
                in caplog.text
            )
            assert room.directory.labels("b").zone == "z", "what it told is known all the same"
            assert room.info_reader.problems() == {
                "bookie b": "answers, but its journal hangs: nothing became durable there for 2.6 s while adds wait; new "
                "ledgers pass it by"
            }
            room.directory.suspected("b")
            b.asked.clear()
            await b.asked.wait()
            b.asked.clear()
            await b.asked.wait()
            assert room.directory.writable() == ("a",), "an answer alone does not make it writable"
            before = room.directory.return_count("b")
            b.told["journal_stalled_s"] = 0.0
            await room.until(("a", "b"))
        assert room.directory.return_count("b") == before + 1
        assert room.info_reader.problems() == {}
        assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"], "said once each"


@pytest.mark.parametrize("told", [None, "7", -1, True, [3]])
async def test_nonsense_of_an_earlier_or_later_release_is_no_stall(told: object) -> None:
    async with Room(a=Asked(journal_stalled_s=told)) as room:
        assert room.directory.writable() == ("a",)


async def test_a_start_that_is_cancelled_leaves_no_task() -> None:
    hung = Asked()
    hung.go.clear()
    room = Room(a=hung)
    room.info_reader._first_s = 60
    starting = asyncio.create_task(room.info_reader.start())
    await hung.asked.wait()
    starting.cancel()
    assert isinstance((await asyncio.gather(starting, return_exceptions=True))[0], asyncio.CancelledError)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("the info of")]
    assert room.directory.on_suspected is None


async def test_a_bug_in_an_answer_does_not_end_the_survey_of_a_bookie(
    caplog: pytest.LogCaptureFixture,
) -> None:
    a = Asked(zone="z")
    good, bad = dict(a.told), [1]
    async with Room(0.02, a=a, b=Asked()) as room:
        a.told = bad  # type: ignore[assignment]
        await room.until(("b",))
        assert "the info of bookie a has ended" in caplog.text
        a.told = good
        await room.until(("a", "b"))

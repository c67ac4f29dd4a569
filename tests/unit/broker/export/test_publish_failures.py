"""Small batches: whatever dies between recording a place and confirming its entry, the batch is there once, or not yet."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from magnetar.broker.log.appending import State
from magnetar.broker.log.reading import LedgerReading
from magnetar.ledger import LedgerClient
from magnetar.proto import commands as c
from magnetar.proto.errors import (
    BookieUnavailable,
    EntryDamaged,
    MagnetarError,
    RequestTimeout,
    ServiceNotReady,
)
from support.bookies import Bookies
from support.broker_kit import TOPIC, settle
from support.export_kit import (
    Job,
    crash,
    loaded,
    open_ledger,
    published,
    read_all,
    record_of,
    small_broker,
    staged_nodes,
)


async def shape(bookies: Bookies) -> list[list[int]]:
    """Entries and messages of each ledger of the stored list."""
    return [[info.entries, info.messages] for info in (await record_of(bookies)).ledgers]


@pytest.mark.parametrize("lands", [False, True], ids=["lost", "landed"])
@pytest.mark.parametrize("others", [0, 2])
async def test_a_crash_between_append_and_confirmation(
    bookies: Bookies, ledgers: LedgerClient, lands: bool, others: int
) -> None:
    other_client = bookies.client()
    async with small_broker(bookies, ledgers) as broker:
        client = await published(broker, b"a")
        job = Job(bookies, broker)
        rows = [await job.stage([b"x"]), await job.stage([b"y"])]
        kept = {name: dict(bookie.entries) for name, bookie in bookies.items()}
        for bookie in bookies.values():
            bookie.hold_adds()
        for number in range(others):
            client.publish(b"%d" % number, first=number + 1)
            await settle(3)
        attaching = job.attach(0, *rows)
        await settle(50)
        place = loaded(broker).ledger.list.record.publishing["q"]
        assert (place.entry_id, place.confirmed, attaching.done()) == (1 + others, False, False)
        if not lands:
            for name, bookie in bookies.items():
                bookie.entries = kept[name]
        await crash(broker)
        with pytest.raises(MagnetarError) as caught:
            await attaching
        assert caught.value.retryable
    for bookie in bookies.values():
        bookie.release()
    async with small_broker(bookies, other_client) as broker:
        job = Job(bookies, broker)
        await broker.topic(TOPIC, create=False)
        state = await job.client.ask(c.QueryState, "orders", "q")
        assert state == {"batch": 0 if lands else -1}
        assert (await job.attach(0, *rows))["attached"] is not lands
        assert await staged_nodes(bookies) == []
        numbers = [b"%d" % number for number in range(others)] if lands else []
        assert await read_all(broker, 3 + len(numbers)) == [b"a", *numbers, b"x", b"y"]
        assert not (await job.attach(0, await job.stage([b"x"])))["attached"]
    await other_client.close()


class Closing:
    """A writer that is closed in another way."""

    def __init__(self, writer: Any, close: Any) -> None:
        self.writer = writer
        self.close = close

    def __getattr__(self, name: str) -> Any:
        return getattr(self.writer, name)


@pytest.mark.parametrize("lands", [False, True], ids=["lost", "landed"])
async def test_a_ledger_that_fails_in_the_middle(
    bookies: Bookies, ledgers: LedgerClient, lands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry is found in the ledger that failed, or moves to the next one with those beside it."""
    async with small_broker(bookies, ledgers) as broker:
        client = await published(broker, b"a")
        job = Job(bookies, broker)
        rows = [await job.stage([b"x"]), await job.stage([b"y"])]
        first = await open_ledger(client)
        for bookie in bookies.values():
            bookie.hold_adds()
        client.publish(b"b", first=1)
        await settle(5)
        attaching = job.attach(0, *rows)
        await settle(50)
        client.publish(b"c", first=2)
        await settle(5)
        assert loaded(broker).ledger.list.record.publishing["q"].ledger_id == first
        if not lands:
            for bookie in bookies.values():
                bookie.entries = {key: value for key, value in bookie.entries.items() if key != (first, 2)}
                bookie.entries = {key: value for key, value in bookie.entries.items() if key != (first, 3)}
        for bookie in bookies.values():
            bookie.forget_held()
        # The writer gives up, as when no bookie is left for an ensemble change, and cannot close the ledger either.
        segment = loaded(broker).ledger.appending.open_ledger

        async def close() -> None:
            raise BookieUnavailable("gone")

        monkeypatch.setattr(segment, "writer", Closing(segment.writer, close))
        segment.confirmed(1, b"", BookieUnavailable("gone"))
        assert (await attaching)["attached"]
        await client.confirmed(3)
        state = loaded(broker).ledger.list.record.publishing["q"]
        assert (state.ledger_id == first) is lands
        found = await read_all(broker, 5)
        assert sorted(found) == [b"a", b"b", b"c", b"x", b"y"]
        assert found[found.index(b"x") + 1] == b"y"
        assert [value for value in found if value in b"abc"] == [b"a", b"b", b"c"]
        await crash(broker)
    again = bookies.client()
    async with small_broker(bookies, again) as broker:
        job = Job(bookies, broker)
        await broker.topic(TOPIC, create=False)
        assert not (await job.attach(0, await job.stage([b"x"])))["attached"]
        assert sorted(await read_all(broker, 5)) == [b"a", b"b", b"c", b"x", b"y"]
    await again.close()


class Moody:
    """A metadata store: `puts` of the ledger list whose outcome is an error, stored or not; or a rival in between."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.armed = ""
        self.on_put: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    async def put(self, path: str, value: bytes, *, version: int) -> int:
        if not path.startswith("/topics") or not self.armed:
            return int(await self.store.put(path, value, version=version))
        if self.on_put is not None:
            await self.on_put()
        if self.armed == "refused":
            self.armed = ""
            raise ServiceNotReady("not now")
        found: int = await self.store.put(path, value, version=version)
        if self.armed == "lost":
            raise RequestTimeout("no answer")
        return found

    async def get(self, path: str) -> Any:
        if self.armed == "lost" and path.startswith("/topics"):
            self.armed = ""
            raise RequestTimeout("no answer")
        return await self.store.get(path)


@pytest.mark.parametrize("mood", ["refused", "lost"])
async def test_a_place_whose_record_has_no_known_outcome(
    bookies: Bookies, ledgers: LedgerClient, mood: str
) -> None:
    """Publishers' entries come at that place then: whoever loads the topic must not take one for the batch."""
    store = Moody(bookies.metadata)
    async with small_broker(bookies, ledgers, store) as broker:
        client = await published(broker, b"a")
        job = Job(bookies, broker)
        rows = [await job.stage([b"x"]), await job.stage([b"y"])]
        store.armed = mood
        with pytest.raises(MagnetarError) as caught:
            await job.attach(0, *rows)
        assert caught.value.retryable
        client.publish(b"b", first=1)
        await client.confirmed(2)
        stored = await record_of(bookies)
        assert ("q" in stored.publishing) is (mood == "lost")
        with pytest.raises(MagnetarError) if mood == "lost" else contextlib.nullcontext():
            await job.attach(0, *rows)  # meets the conflict, if there is one: the topic is loaded anew
        assert (await job.attach(0, *rows))["attached"] is (mood == "lost")
        found = await read_all(broker, 4)
        assert found == [b"a", b"b", b"x", b"y"]
        await crash(broker)
    again = bookies.client()
    async with small_broker(bookies, again) as broker:
        assert await read_all(broker, 4) == [b"a", b"b", b"x", b"y"]
        assert await Job(bookies, broker).client.ask(c.QueryState, "orders", "q") == {"batch": 0}
    await again.close()


async def test_a_roll_over_while_the_batch_is_recorded(bookies: Bookies, ledgers: LedgerClient) -> None:
    store = Moody(bookies.metadata)
    async with small_broker(bookies, ledgers, store, max_ledger_age_ms=3_600_000) as broker:
        client = await published(broker, b"a")
        job = Job(bookies, broker)
        row = await job.stage([b"x"])
        first = await open_ledger(client)
        ledger = loaded(broker).ledger

        rolled = asyncio.Event()

        async def roll() -> None:
            store.on_put = None
            rolled.set()
            assert ledger.appending.open_ledger is not None
            ledger.appending.open_ledger.opened_at -= 3600
            assert ledger.appending.roll_if_due()
            await settle(5)

        store.armed, store.on_put = "roll", roll
        attaching = job.attach(0, row)
        await rolled.wait()
        client.publish(b"b", first=1)
        assert (await attaching)["attached"]
        await client.confirmed(2)
        assert loaded(broker).ledger.list.record.publishing["q"].ledger_id > first
        assert sorted(await read_all(broker, 3)) == [b"a", b"b", b"x"]
        assert (await shape(bookies))[0] == [1, 1]


async def test_publishers_go_on_while_a_batch_is_recorded_and_their_entries_are_not_taken_for_it(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    store = Moody(bookies.metadata)
    async with small_broker(bookies, ledgers, store) as broker:
        client = await published(broker, b"a")
        job = Job(bookies, broker)
        row = await job.stage([b"x"], [b"y"])
        receipts = []

        async def publish() -> None:
            store.on_put = None
            client.publish(b"b", first=1)
            await settle(50)
            receipts.extend(client.receipts)

        store.armed, store.on_put = "publish", publish
        assert (await job.attach(0, row))["attached"]
        assert sum(row[1] for row in receipts) == 2
        assert await read_all(broker, 4) == [b"a", b"b", b"x", b"y"]
        await crash(broker)
    again = bookies.client()
    async with small_broker(bookies, again) as broker:
        await broker.topic(TOPIC, create=False)
        place = loaded(broker).ledger.list.record.publishing["q"]
        assert (place.entry_id, place.confirmed) == (2, True)
        assert await Job(bookies, broker).client.ask(c.QueryState, "orders", "q") == {"batch": 0}
    await again.close()


async def test_an_entry_that_is_lost_where_a_batch_is_looked_for_may_be_the_batch(
    bookies: Bookies, ledgers: LedgerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with small_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        client = await published(broker, b"a")
        opened = await open_ledger(client)
        await job.attach(0, await job.stage([b"x"]))
        client.publish(b"b", first=1)
        await client.confirmed(2)
        await crash(broker)
    read = LedgerReading.read

    async def read_damaged(reading: Any, ledger_id: int, first: int, *, max_bytes: int) -> list[bytes]:
        if (ledger_id, first) == (opened, 1):
            raise EntryDamaged("no copy is whole")
        return await read(reading, ledger_id, first, max_bytes=max_bytes)

    monkeypatch.setattr(LedgerReading, "read", read_damaged)
    again = bookies.client()
    async with small_broker(bookies, again) as broker:
        row = await Job(bookies, broker).stage([b"x"])
        assert not (await Job(bookies, broker).attach(0, row))["attached"]
    await again.close()


async def test_a_place_that_was_never_filled_does_not_hide_the_batch_before_it(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    async with small_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        await job.attach(7, await job.stage([b"x"]))
        before, after = await job.stage([b"x"]), await job.stage([b"y"])
        kept = {name: dict(bookie.entries) for name, bookie in bookies.items()}
        for bookie in bookies.values():
            bookie.hold_adds()
        attaching = job.attach(8, after)
        await settle(50)
        for name, bookie in bookies.items():
            bookie.entries = kept[name]
        await crash(broker)
        with pytest.raises(MagnetarError):
            await attaching
    for bookie in bookies.values():
        bookie.release()
    again = bookies.client()
    async with small_broker(bookies, again) as broker:
        job = Job(bookies, broker)
        await broker.topic(TOPIC, create=False)
        assert await job.client.ask(c.QueryState, "orders", "q") == {"batch": 7}
        assert not (await job.attach(7, before))["attached"]
        assert (await job.attach(8, after))["attached"]
        assert await read_all(broker, 2) == [b"x", b"y"]
    await again.close()


async def test_rule_23_another_owner_comes_while_the_place_is_recorded(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    store = Moody(bookies.metadata)
    other_client = bookies.client()
    async with (
        small_broker(bookies, ledgers, store) as old,
        small_broker(bookies, other_client) as new,
    ):
        await published(old, b"a")
        job = Job(bookies, old)
        row = await job.stage([b"x"])
        old_topic = loaded(old)

        async def take_over() -> None:
            store.on_put = None
            await new.topic(TOPIC, create=False)

        store.armed, store.on_put = "rival", take_over
        with pytest.raises(MagnetarError) as caught:
            await job.attach(0, row)
        assert caught.value.retryable
        assert old_topic.ledger.appending.state in (State.FENCED, State.CLOSED)
        driver = Job(bookies, new)
        assert (await driver.attach(0, row))["attached"]
        assert await read_all(new, 2) == [b"a", b"x"]
    await other_client.close()

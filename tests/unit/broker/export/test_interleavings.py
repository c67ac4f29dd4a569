"""What happens in between: requests that meet a roll-over, a trimming, a creation or a deletion that is under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from magnetar.broker.log.appending import State
from magnetar.ledger import LedgerClient
from magnetar.metadata.store import Delete, Operation
from magnetar.proto import commands as c
from magnetar.proto.errors import BookieUnavailable, MagnetarError, TopicNotServed
from support.bookies import Bookies
from support.broker_kit import TOPIC, FakeClient, settle
from support.export_kit import (
    Job,
    export_broker,
    published,
    read_all,
    record_of,
    staged_nodes,
    stored_ledgers,
)
from support.memory_metadata import MemoryMetadataStore
from support.virtual_time import in_virtual_time


class Gate(MemoryMetadataStore):
    """A metadata store in which writes of one kind wait at a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.closed: Callable[[str, str], bool] = lambda _kind, _path: False
        self.waiting = 0
        self._open = asyncio.Event()
        self.fail_deletes = False

    def shut(self, kind: str, prefix: str) -> None:
        """From now on `kind` of what begins with `prefix` waits."""
        self._open.clear()
        self.closed = lambda asked, path: asked == kind and path.startswith(prefix)

    def open(self) -> None:
        """Everybody goes on."""
        self.closed = lambda _kind, _path: False
        self._open.set()

    async def reached(self) -> None:
        """Somebody waits at the gate."""
        async with asyncio.timeout(5):
            while not self.waiting:
                await asyncio.sleep(0)

    async def _pass(self, kind: str, path: str) -> None:
        if self.closed(kind, path):
            self.waiting += 1
            await self._open.wait()
            self.waiting -= 1

    async def put(self, path: str, value: bytes, *, version: int) -> int:
        await self._pass("put", path)
        return await super().put(path, value, version=version)

    async def create(self, path: str, value: bytes, *, session: Any = None) -> int:
        await self._pass("create", path)
        return await super().create(path, value, session=session)

    async def commit(self, operations: Sequence[Operation]) -> None:
        if self.fail_deletes and any(
            isinstance(one, Delete) and one.path.startswith("/ledgers") for one in operations
        ):
            raise MagnetarError("not now")
        await super().commit(operations)


@pytest.fixture
async def gate() -> Gate:
    return Gate()


@pytest.fixture
async def bookies(gate: Gate) -> Bookies:
    return Bookies("b1", "b2", metadata=gate)


def loaded(broker: Any) -> Any:
    return broker.topics[str(TOPIC)]


def after_drawing(ledgers: LedgerClient, monkeypatch: pytest.MonkeyPatch, then: Callable[[int], Any]) -> None:
    """`then` happens once, when the next position id was drawn: an attachment draws its own while it has the list."""

    async def drawn(count: int = 1) -> int:
        monkeypatch.undo()
        first = await ledgers.next_id(count)
        await then(first)
        return first

    monkeypatch.setattr(ledgers, "next_id", drawn)


async def test_a_subscription_at_the_end_of_a_list_without_ledgers(
    gate: Gate, bookies: Bookies, ledgers: LedgerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end lies below ids that were drawn, whatever was discarded before and is not deleted yet."""
    async with export_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        row = await job.stage([b"x"])
        consumer = FakeClient(broker)

        (await job.open("late")).detach()
        gate.fail_deletes = True
        await job.client.ask(c.DiscardStaged, "orders", "late")
        assert loaded(broker).ledger.list.record.trimmed

        async def subscribe(_first: int) -> None:
            await consumer.consumer(start=("latest", None))

        after_drawing(ledgers, monkeypatch, subscribe)
        await job.attach(0, row)
        assert await consumer.received(1) == [b"x"]


async def test_rule_24_an_append_that_fails_while_an_attachment_waits_for_it(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    async with export_broker(bookies, ledgers) as broker:
        client = await published(broker, b"0")
        job = Job(bookies, broker)
        row = await job.stage([b"x"])
        adds = {name: bookie.add for name, bookie in bookies.items()}
        held: list[tuple[Any, int, int]] = []

        def hold(entry: bytes, *, recovery: bool, done: Any, deferred: bool = False) -> None:
            held.append((done, int.from_bytes(entry[:8], "big"), int.from_bytes(entry[8:16], "big")))

        for bookie in bookies.values():
            bookie.add = hold  # type: ignore[method-assign]
        client.publish(b"1", first=1)
        attaching = job.attach(0, row)
        await settle(100)
        assert held, "the attachment waits until the message is confirmed"
        while held:  # each bookie in turn
            done, ledger_id, entry_id = held.pop()
            done(ledger_id, entry_id, BookieUnavailable.code)
            await settle(20)
        for name, bookie in bookies.items():
            bookie.add = adds[name]  # type: ignore[method-assign]
        assert (await attaching)["attached"]
        await client.confirmed(2)


async def test_rule_24_what_failed_before_an_attachment_is_appended_behind_it(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    async with export_broker(bookies, ledgers) as broker:
        client = await published(broker, b"0")
        job = Job(bookies, broker)
        row = await job.stage([b"x"])
        adds = {name: bookie.add for name, bookie in bookies.items()}

        def refuse(entry: bytes, *, recovery: bool, done: Any, deferred: bool = False) -> None:
            ledger_id, entry_id = int.from_bytes(entry[:8], "big"), int.from_bytes(entry[8:16], "big")
            asyncio.get_running_loop().call_soon(done, ledger_id, entry_id, BookieUnavailable.code)

        for bookie in bookies.values():
            bookie.add = refuse  # type: ignore[method-assign]
        client.publish(b"1", first=1)
        attaching = job.attach(0, row)
        await settle(100)
        for name, bookie in bookies.items():
            bookie.add = adds[name]  # type: ignore[method-assign]
        assert (await attaching)["attached"]
        await client.confirmed(2)  # without anything that would wake the topic
        client.publish(b"2", first=2)
        await client.confirmed(3)
        values = await read_all(broker, 4)
        assert [value for value in values if value != b"x"] == [b"0", b"1", b"2"]
        assert loaded(broker).ledger.appending.outstanding_bytes == 0


async def test_an_attachment_that_comes_while_the_next_ledger_is_made(
    gate: Gate, bookies: Bookies, ledgers: LedgerClient
) -> None:
    async with export_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        row, second = await job.stage([b"x"]), await job.stage([b"y"])
        client = FakeClient(broker)
        await client.producer()
        gate.shut("put", "/topics")
        client.publish(b"0")
        await gate.reached()
        attaching = [job.attach(0, row), job.attach(0, second, query="other")]
        await settle()
        client.publish(b"1", first=1)
        gate.open()
        for answer in attaching:
            assert (await asyncio.wait_for(answer, 5))["attached"]
        await client.confirmed(2)
        values = await read_all(broker, 4)
        assert values[0] == b"0", "who was first is first"
        assert sorted(values) == [b"0", b"1", b"x", b"y"]


async def test_a_fence_answers_who_waits_for_the_ledger_to_be_closed(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    async with export_broker(bookies, ledgers) as broker:
        client = await published(broker, b"0")
        job = Job(bookies, broker)
        row = await job.stage([b"x"])
        for bookie in bookies.values():
            bookie.hold_adds()
        client.publish(b"1", first=1)
        attaching = job.attach(0, row)
        await settle(100)
        ledger = loaded(broker).ledger
        assert not attaching.done(), "in line, behind what is pending"
        assert ledger.appending.state is State.WRITING
        ledger.fence(TopicNotServed("lost"))
        with pytest.raises(TopicNotServed, match="lost"):
            await asyncio.wait_for(attaching, 5)
        for bookie in bookies.values():
            bookie.release()


async def test_a_close_waits_for_an_attachment_that_is_being_stored(
    gate: Gate, bookies: Bookies, ledgers: LedgerClient
) -> None:
    async with export_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        row = await job.stage([b"x"])
        gate.shut("put", "/topics")
        attaching = job.attach(0, row)
        await gate.reached()
        closing = asyncio.ensure_future(broker.close())
        await settle()
        assert not attaching.done()
        gate.open()
        await closing
        assert (await attaching)["attached"]
    assert [info.stored_id for info in (await record_of(bookies)).ledgers] == [row[0]]


async def test_a_caller_who_leaves_the_line_attaches_nothing(bookies: Bookies, ledgers: LedgerClient) -> None:
    async with export_broker(bookies, ledgers) as broker:
        client = await published(broker, b"0")
        job = Job(bookies, broker)
        row = await job.stage([b"x"])
        for bookie in bookies.values():
            bookie.hold_adds()
        client.publish(b"1", first=1)
        job.attach(0, row)
        await settle(100)
        job.client.handler.connection_closed(None)
        await settle()
        for bookie in bookies.values():
            bookie.release()
        await client.confirmed(2)
        assert await read_all(broker, 2) == [b"0", b"1"]
        again = Job(bookies, broker)
        assert (await again.attach(0, row))["attached"]


async def test_publishers_have_their_turn_between_attachments(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    async with export_broker(bookies, ledgers) as broker:
        client = FakeClient(broker)
        await client.producer()
        jobs = [Job(bookies, broker) for _ in range(5)]
        rows = [[await job.stage([b"x"]) for _ in range(10)] for job in jobs]
        attached = 0

        async def drive(number: int) -> None:
            nonlocal attached
            for batch, row in enumerate(rows[number]):
                await jobs[number].attach(batch, row, query=f"q{number}")
                attached += 1

        driving = asyncio.gather(*[drive(number) for number in range(5)])
        while attached < 2:
            await asyncio.sleep(0)
        for number in range(3):
            before = attached
            client.publish(b"%d" % number, first=number)
            await client.confirmed(number + 1)
            assert attached - before <= 20, "each driver twice, those in line and those that joined, and some"
        assert attached < 50, "they go on all the while"
        await driving
        assert len(await read_all(broker, 53)) == 53


async def consumed(broker: Any, count: int) -> FakeClient:
    client = FakeClient(broker)
    await client.producer()
    await client.consumer()
    for number in range(count):
        client.publish(b"%d" % number, first=number)
        await client.confirmed(number + 1)
    await client.received(count)
    await client.ack(*[message.row() for message in client.messages])
    await settle()
    return client


async def test_a_lease_that_comes_while_a_trimming_waits_is_heeded(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    async with export_broker(bookies, ledgers, max_ledger_entries=1) as broker:
        client = await consumed(broker, 4)
        topic = loaded(broker)
        ids = [info.ledger_id for info in topic.ledger.list.ledgers]
        async with topic.ledger.changes.lock:
            topic.maintain()
            await settle()
            asked = client.ask(c.KeepLedgers, "orders", "", 60_000)
            await settle()
        assert (await asked)["first"] == ids[0]
        assert [info.ledger_id for info in (await record_of(bookies)).ledgers] == ids


async def test_a_lease_that_comes_while_a_trimming_is_stored_is_told_what_is_left(
    gate: Gate, bookies: Bookies, ledgers: LedgerClient
) -> None:
    async with export_broker(bookies, ledgers, max_ledger_entries=1) as broker:
        client = await consumed(broker, 4)
        topic = loaded(broker)
        ids = [info.ledger_id for info in topic.ledger.list.ledgers]
        held = (await client.ask(c.KeepLedgers, "orders", "", 60_000, ids[2]))["lease"]
        gate.shut("put", "/topics")
        topic.maintain()
        await gate.reached()
        asked = client.ask(c.KeepLedgers, "orders", "", 60_000)
        await settle()
        assert not asked.done()
        renewed = await client.ask(c.KeepLedgers, "orders", held, 60_000)
        assert renewed["first"] == ids[2], "what is held already waits for nobody"
        gate.open()
        first = (await asked)["first"]
        kept = [info.ledger_id for info in (await record_of(bookies)).ledgers]
        assert kept == ids[2:]
        assert first == kept[0]


@pytest.mark.parametrize("step", ["/topics", "/ledgers"], ids=["node", "ledger"])
@pytest.mark.parametrize("command", [c.DiscardStaged, c.DeleteTopic])
async def test_what_is_being_made_is_not_left_behind(
    gate: Gate, bookies: Bookies, ledgers: LedgerClient, step: str, command: Any
) -> None:
    async with export_broker(bookies, ledgers) as broker:
        client = FakeClient(broker)
        await client.ask(c.CreateTopic, "orders")
        gate.shut("create", step)
        making = client.ask(c.CreateStagedLedger, "orders", "t")
        await gate.reached()
        fields = ("orders", "t") if command is c.DiscardStaged else ("orders", True)
        ending = client.ask(command, *fields)
        await settle()
        assert not ending.done()
        gate.open()
        await ending
        await asyncio.wait([making])
        await settle()
        assert await stored_ledgers(bookies) == []
        assert await staged_nodes(bookies) == []


@in_virtual_time
async def test_what_is_being_made_is_not_swept() -> None:
    gate = Gate()
    bookies = Bookies("b1", "b2", metadata=gate)
    ledgers = bookies.client()
    async with export_broker(bookies, ledgers, staged_ttl_ms=5_000) as broker:
        client = FakeClient(broker)
        await client.ask(c.CreateTopic, "orders")
        gate.shut("create", "/ledgers")
        making = client.ask(c.CreateStagedLedger, "orders", "t")
        await gate.reached()
        staging = loaded(broker).export.staging
        await asyncio.sleep(6)
        assert await staging.sweep() == 0
        gate.open()
        made = await making
        assert await stored_ledgers(bookies) == [made["ledger"]]
        await asyncio.sleep(6)
        assert await staging.sweep() == 1
        assert await stored_ledgers(bookies) == []
    await ledgers.close()

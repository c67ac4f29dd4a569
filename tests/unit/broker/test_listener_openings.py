"""Opening and closing through the listener: whatever order, no place is held that nobody knows of."""

import asyncio
import random
from typing import Any

import pytest

from magnetar.broker import Broker
from magnetar.proto import commands as c
from magnetar.proto.errors import (
    AlreadyClosed,
    ConsumerBusy,
    InvalidArgument,
    ProducerFenced,
    StorageFailed,
    TopicNotFound,
)
from magnetar.proto.frames import encode_frame
from support.broker_kit import TOPIC, FakeClient, running_broker, settle
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore


class SlowMetadata(MemoryMetadataStore):
    """Writes wait for `go`; reads fail while `broken`."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.go.set()
        self.broken = False
        self.reads = 0

    async def create(self, path: str, value: bytes, *, session: Any = None) -> int:
        await self.go.wait()
        return await super().create(path, value, session=session)

    async def get(self, path: str) -> Any:
        if path.endswith("/orders"):
            self.reads += 1
            await asyncio.sleep(0)
            if self.broken:
                raise StorageFailed("the store is ill")
        return await super().get(path)


def consumers(broker: Broker) -> int:
    """Connected consumers of all subscriptions of the topic."""
    return sum(len(one.consumers) for one in broker.topics[str(TOPIC)].subscriptions.values())


def one_read(client: FakeClient, *commands: c.Command) -> list[asyncio.Future[Any]]:
    """The frames arrive together; the futures of their answers."""
    loop = asyncio.get_running_loop()
    for command in commands:
        client.answers[command.request_id] = loop.create_future()
    client.bytes_received(b"".join(encode_frame(command.encode(), b"") for command in commands))
    return [client.answers[command.request_id] for command in commands]


async def test_a_close_in_the_same_read_as_the_open_wins() -> None:
    async with running_broker() as broker:
        client, other = FakeClient(broker), FakeClient(broker)
        opened, closed = one_read(client, c.Subscribe(101, 1, "orders", "billing"), c.CloseConsumer(102, 1))
        assert await closed is None
        with pytest.raises(AlreadyClosed, match="consumer 1 was closed before it was open"):
            await opened
        await other.consumer()
        assert consumers(broker) == 1


async def test_opened_closed_and_opened_in_one_read_is_open() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        first, closed, second = one_read(
            client,
            c.Subscribe(101, 1, "orders", "billing", start=("earliest", None)),
            c.CloseConsumer(102, 1),
            c.Subscribe(103, 1, "orders", "billing", start=("earliest", None)),
        )
        assert (await closed, (await second)["epoch"]) == (None, 0)
        with pytest.raises(AlreadyClosed):
            await first
        client.frame(c.Flow(0, 1, 10))
        await client.producer()
        client.publish(b"a")
        assert await client.received(1) == [b"a"]
        assert consumers(broker) == 1


async def test_a_close_cancels_an_opening_that_waits_for_the_store() -> None:
    metadata = SlowMetadata()
    async with running_broker(None, metadata) as broker:
        client, other = FakeClient(broker), FakeClient(broker)
        await client.producer()
        metadata.go.clear()
        opening = client.ask(c.Subscribe, 1, "orders", "billing")
        await settle()
        assert not opening.done()
        await client.ask(c.CloseConsumer, 1)
        with pytest.raises(AlreadyClosed):
            await opening
        metadata.go.set()
        await other.consumer()
        assert consumers(broker) == 1


async def test_a_repeated_open_supersedes_the_one_before() -> None:
    metadata = SlowMetadata()
    async with running_broker(None, metadata) as broker:
        client = FakeClient(broker)
        await client.producer()
        metadata.go.clear()
        asked = [client.ask(c.Subscribe, 1, "orders", "billing") for _ in range(3)]
        await settle()
        metadata.go.set()
        assert (await asked[2])["epoch"] == 0
        for superseded in asked[:2]:
            with pytest.raises(AlreadyClosed, match="opened again"):
                await superseded
        assert (await client.consumer())["epoch"] == 0  # also of one that is open: the old one lets go first
        assert consumers(broker) == 1


async def test_a_repeated_open_of_a_producer_supersedes() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        first = await client.producer(name="p")
        second = await client.producer(name="p", epoch=first["epoch"])
        client.publish(b"a", epoch=second["epoch"])
        await client.confirmed(1)
        assert [session.name for session in broker.topics[str(TOPIC)].producers] == ["p"]
        opened, _ = one_read(client, c.CreateProducer(101, 2, "orders", "q"), c.CloseProducer(102, 2))
        with pytest.raises(AlreadyClosed):
            await opened
        assert [session.name for session in broker.topics[str(TOPIC)].producers] == ["p"]


async def test_a_producer_cancelled_while_it_waits_for_its_old_session_is_gone() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers) as broker:
        client = FakeClient(broker)
        await client.producer(name="p")
        client.publish(b"0")
        await client.confirmed(1)
        ledgers.hold = True
        client.publish(b"1", first=1)
        for _ in range(3):
            opening = client.ask(c.CreateProducer, 1, "orders", "p", 1)
            await settle()
            await client.ask(c.CloseProducer, 1)
            with pytest.raises(AlreadyClosed):
                await opening
        ledgers.hold = False
        ledgers.confirm()
        await settle()
        assert not list(broker.topics[str(TOPIC)].producers)


@pytest.mark.parametrize("seed", range(3))
async def test_a_storm_of_openings_leaves_no_place_behind(seed: int) -> None:
    rng = random.Random(seed)
    async with running_broker() as broker:
        clients = [FakeClient(broker) for _ in range(4)]
        await broker.topic(TOPIC, create=True)
        tasks, asked = len(asyncio.all_tasks()), []
        for _ in range(400):
            client = rng.choice(clients)
            match rng.randrange(4):
                case 0:
                    asked.append(client.ask(c.Subscribe, rng.randrange(3), "orders", "s", "shared"))
                case 1:
                    asked.append(
                        client.ask(c.CreateProducer, rng.randrange(3), "orders", "p", rng.randrange(9))
                    )
                case 2:
                    asked.append(client.ask(c.CloseConsumer, rng.randrange(3)))
                case 3:
                    asked.append(client.ask(c.CloseProducer, rng.randrange(3)))
            await settle(rng.randrange(4))
        await asyncio.gather(*asked, return_exceptions=True)
        for client in clients[:2]:
            client.handler.connection_closed(None)
        for client in clients[2:]:
            for number in range(3):
                await client.ask(c.CloseConsumer, number)
                await client.ask(c.CloseProducer, number)
        await settle()
        topic = broker.topics[str(TOPIC)]
        assert consumers(broker) == 0
        assert len(topic.producers) == 0
        assert len(asyncio.all_tasks()) == tasks, "no request is worked on any more"
        for client in clients[2:]:
            for number in range(3):
                for epoch in range(9):
                    client.publish(b"late", producer_id=number, epoch=epoch)
                with pytest.raises(InvalidArgument):
                    await client.ask(c.Unsubscribe, number)
            assert [failed.code for failed in client.failures[-27:]] == [ProducerFenced.code] * 27
        assert not topic.publish_budget.used


# --- loads -----------------------------------------------------------------------------------------------------------


async def test_all_who_wait_for_a_load_share_its_failure() -> None:
    metadata = SlowMetadata()
    async with running_broker(None, metadata) as broker:
        metadata.broken = True
        asked = [asyncio.create_task(broker.topic(TOPIC, create=True)) for _ in range(100)]
        errors = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(error) for error in errors} == {StorageFailed}
        assert len({id(error) for error in errors}) == 100, "each raises one of its own"
        with pytest.raises(StorageFailed):  # the storm goes on
            await broker.topic(TOPIC, create=True)
        assert metadata.reads == 1
        metadata.broken = False
        async with asyncio.timeout(5):
            while True:
                try:
                    await broker.topic(TOPIC, create=True)
                    break
                except StorageFailed:
                    await asyncio.sleep(0.01)


async def test_who_wants_to_make_a_topic_does_not_share_that_it_is_not_there() -> None:
    async with running_broker(None, SlowMetadata()) as broker:
        asked = [asyncio.create_task(broker.topic(TOPIC, create=create)) for create in (False, True, False)]
        missing, made, also_missing = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(missing, TopicNotFound)
        assert isinstance(also_missing, TopicNotFound)
        assert made is broker.topics[str(TOPIC)]


async def test_an_exclusive_place_is_refused_while_it_is_held() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.consumer(1)
        with pytest.raises(ConsumerBusy):
            await client.consumer(2)
        await client.consumer(1)

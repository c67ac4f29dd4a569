"""Access modes of producers, through the public client against the real broker."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from magnetar.client import (
    AlreadyClosed,
    Client,
    InvalidArgument,
    Producer,
    ProducerBusy,
    ProducerFenced,
    blocking,
    connect,
)
from magnetar.client.partitioned_producer import PartitionedProducer
from magnetar.runtime.connection import FramedServer
from support.client_kit import until
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore, ModelKeyValue
from support.served_broker import connect_to, serving, take


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FramedServer]:
    async with serving(exclusive_grace_ms=100) as server:
        yield server


@pytest_asyncio.fixture
async def client(server: FramedServer) -> AsyncIterator[Client]:
    async with connect_to(server) as client:
        yield client


async def test_one_exclusive_producer(client: Client) -> None:
    with pytest.raises(InvalidArgument, match="unknown access_mode 'alone'; want one of shared, exclusive"):
        await client.create_producer("t", access_mode="alone")  # type: ignore[arg-type]
    async with client.create_producer("t", access_mode="exclusive", name="leader") as leader:
        assert leader.topic_epoch == 0
        for mode, error in (("shared", ProducerBusy), ("exclusive", ProducerFenced)):
            with pytest.raises(error, match="in use by producer 'leader'"):
                await client.create_producer("t", access_mode=mode)  # type: ignore[arg-type]
        await leader.send(b"1")
    async with client.create_producer("t") as shared:
        assert shared.topic_epoch == -1
        await shared.send(b"2")
        with pytest.raises(ProducerFenced, match=r"\(shared\)"):
            await client.create_producer("t", access_mode="exclusive")


async def test_a_fenced_producer_raises_from_every_call(client: Client) -> None:
    old = await client.create_producer("t", name="old")
    await old.send(b"1")
    async with client.create_producer("t", access_mode="exclusive_with_fencing", name="new") as new:
        await new.send(b"2")
        fenced = "'new' has taken topic"
        with pytest.raises(ProducerFenced, match=fenced):
            await old.send(b"late")
        with pytest.raises(ProducerFenced, match=fenced):
            old.send_nowait(b"late")
        with pytest.raises(ProducerFenced, match=fenced):
            await old.send_many([b"late"])
        assert old.ended
        async with client.create_reader("t", start="earliest") as reader:
            assert [message.value for message in await take(reader, 2)] == [b"1", b"2"]


async def test_who_waits_takes_over_and_says_for_whom_it_waits(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "magnetar.client")
    leader = await client.create_producer("t", access_mode="exclusive", name="leader")
    waiting = asyncio.ensure_future(_open(client, "t", access_mode="wait_for_exclusive", name="standby"))
    while "waits: " not in caplog.text:
        await asyncio.sleep(0.01)
    assert "in use by producer 'leader' (exclusive)" in caplog.text
    assert not waiting.done()
    await leader.close()
    standby = await waiting
    assert standby.topic_epoch == 1
    await standby.send(b"x")


def url_of(server: FramedServer) -> str:
    return f"magnetar://127.0.0.1:{server.addresses[0][1]}"


async def _open(client: Client, topic: str, **options: Any) -> Producer:
    return await client.create_producer(topic, **options)


async def test_rule_45_who_waits_for_long_is_warned_of(
    server: FramedServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect_to(server, operation_timeout=0.2) as client:
        async with client.create_producer("t", name="a"):
            waiting = asyncio.ensure_future(_open(client, "t", access_mode="wait_for_exclusive"))
            while "has waited 0.2 s for its place" not in caplog.text:
                await asyncio.sleep(0.02)
            assert "in use by producer 'a' (shared)" in caplog.text
        assert (await waiting).topic_epoch == 0


async def test_waiting_can_be_cancelled_and_leaves_nothing(client: Client) -> None:
    leader = await client.create_producer("t", access_mode="exclusive")
    waiting = asyncio.ensure_future(_open(client, "t", access_mode="wait_for_exclusive"))
    while not (await client.admin.topic_stats("t"))["waiting_producers"]:
        await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    while (await client.admin.topic_stats("t"))["waiting_producers"]:
        await asyncio.sleep(0.01)
    await leader.close()
    async with client.create_producer("t") as producer:
        await producer.send(b"x")


async def test_a_client_that_closes_ends_who_waits(server: FramedServer, client: Client) -> None:
    leader = await client.create_producer("t", access_mode="exclusive")
    other = await connect(url_of(server))
    waiting = asyncio.ensure_future(_open(other, "t", access_mode="wait_for_exclusive"))
    while not (await client.admin.topic_stats("t"))["waiting_producers"]:
        await asyncio.sleep(0.01)
    await other.close()
    with pytest.raises(AlreadyClosed):
        await waiting
    while (await client.admin.topic_stats("t"))["waiting_producers"]:
        await asyncio.sleep(0.01)
    await leader.send(b"x")


async def test_over_a_restart_of_the_broker_the_holder_stays_and_who_waits_goes_on_waiting() -> None:
    disk, ledgers = ModelKeyValue(), FakeLedgers()
    async with serving(MemoryMetadataStore(disk), ledgers) as server:
        port = server.addresses[0][1]
        client, other = await connect(url_of(server)), await connect(url_of(server))
        leader = await client.create_producer("t", access_mode="wait_for_exclusive", name="leader")
        await leader.send(b"1")
        waiting = asyncio.ensure_future(_open(other, "t", access_mode="wait_for_exclusive", name="w"))
        while not (await client.admin.topic_stats("t"))["waiting_producers"]:
            await asyncio.sleep(0.01)
    async with serving(MemoryMetadataStore(disk), ledgers, port, exclusive_grace_ms=3_000):
        await leader.send(b"2")
        assert leader.topic_epoch == 0
        assert not waiting.done()
        await leader.close()
        standby = await waiting
        assert standby.topic_epoch == 1
        await other.close()
        await client.close()


async def test_all_partitions_or_none(client: Client) -> None:
    await client.admin.create_topic("p", partitions=3)
    held = await client.create_producer("p-partition-2", access_mode="exclusive", name="held")
    with pytest.raises(ProducerFenced, match="'held'"):
        await client.create_producer("p", access_mode="exclusive")
    stats = await client.admin.topic_stats("p")
    assert [len(one["producers"]) for one in stats["partitions"]] == [0, 0, 1]
    async with client.create_producer("p", access_mode="exclusive_with_fencing") as producer:
        await producer.send_many([b"%d" % n for n in range(9)], keys=[str(n) for n in range(9)])
        with pytest.raises(ProducerFenced):
            await held.send(b"x")
        # Two that wait get in each other's way nowhere: the first one gets all partitions.
        waiting = [
            asyncio.ensure_future(_open(client, "p", access_mode="wait_for_exclusive")) for _ in range(2)
        ]
        while (await client.admin.topic_stats("p-partition-0"))["waiting_producers"] < 2:
            await asyncio.sleep(0.01)
    done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert (len(done), len(left)) == (1, 1)
    await done.pop().result().close()
    await (await left.pop()).close()


async def test_who_is_fenced_in_one_partition_is_alone_in_none(client: Client) -> None:
    """Half a topic is no exclusive access: it would go on to store there, beside whoever has the other half."""
    await client.admin.create_topic("p", partitions=3)
    old = await client.create_producer("p", access_mode="exclusive", name="old")
    receipts = [old.send_nowait(b"%d" % number) for number in range(9)]
    async with client.create_producer("p-partition-1", access_mode="exclusive_with_fencing", name="new"):
        await until(lambda: old.ended)
        for value in (b"x", b"y"):
            with pytest.raises(ProducerFenced, match="'new' has taken topic"):
                old.send_nowait(value)
        await asyncio.gather(*receipts, return_exceptions=True)
        assert await producers_of(client, "p") == [[], ["new"], []]
    await old.close()
    await client.admin.update_partitions("p", 4)
    assert await producers_of(client, "p") == [[], [], [], []]


async def test_of_two_that_fence_each_other_none_has_a_part(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One comes to the other partitions when the other has taken partition 0 from it, and all the rest."""
    await client.admin.create_topic("p", partitions=3)
    open_rest, slow, go_on = PartitionedProducer._open, [True], asyncio.Event()

    async def late(self: PartitionedProducer, producers: Any) -> None:
        if slow and slow.pop():
            await go_on.wait()
        await open_rest(self, producers)

    monkeypatch.setattr(PartitionedProducer, "_open", late)
    mode: Any = "exclusive_with_fencing"
    first = asyncio.ensure_future(_open(client, "p", access_mode=mode, name="first"))
    await until(lambda: not slow)
    second = await client.create_producer("p", access_mode=mode, name="second")
    go_on.set()
    with pytest.raises(ProducerFenced, match="'second' has taken topic"):
        await first
    await until(lambda: second.ended)
    await second.close()
    assert await producers_of(client, "p") == [[], [], []]


async def producers_of(client: Client, topic: str) -> list[list[str]]:
    """Their names, in each partition."""
    stats = await client.admin.topic_stats(topic)
    return [[producer["name"] for producer in one["producers"]] for one in stats["partitions"]]


def test_the_blocking_client() -> None:
    async def run() -> None:
        async with serving() as server:
            await asyncio.to_thread(work, url_of(server))

    def work(url: str) -> None:
        with blocking.connect(url) as client:
            with client.create_producer("t", access_mode="exclusive") as producer:
                assert producer.topic_epoch == 0
                producer.send(b"x")
            client.admin.terminate_topic("t")
            with client.subscribe("t", "s", start="earliest") as consumer:
                assert [message.value for message in consumer] == [b"x"]
                assert consumer.reached_end

    asyncio.run(run())

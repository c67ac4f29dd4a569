"""Look-ups in a cluster of brokers: followed, shared, remembered, held while an owner is away, and left without a trace."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from magnetar.client import Client, ConnectionLost, LookupAgainError, MagnetarError, RequestTimeout, connect
from magnetar.client.connection import lookups
from magnetar.proto.commands import (
    CloseConsumer,
    CreateProducer,
    ListTopics,
    Lookup,
    Partitions,
    SkipMessages,
    Subscribe,
    TopicStats,
)
from magnetar.proto.errors import ServiceNotReady, TopicNotServed
from support.client_kit import take, until
from support.fake_broker import HELD
from support.fake_cluster import FakeCluster

T = "persistent://public/default/t"


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster.of(3) as cluster:
        yield cluster


@pytest_asyncio.fixture
async def client(cluster: FakeCluster) -> AsyncIterator[Client]:
    async with connect(cluster.url, backoff_first=0.01, operation_timeout=5.0) as client:
        yield client


def received(cluster: FakeCluster, kind: type[Any]) -> list[Any]:
    return [command for broker in cluster.brokers for command in broker.received(kind)]


async def test_answers_that_are_not_final_are_followed(cluster: FakeCluster, client: Client) -> None:
    cluster.redirects = [1, 2, 0, 1, 2, 0, 1, 2, 0, 2]
    cluster.default = 2
    await client.create_producer("t")
    asked = received(cluster, Lookup)
    assert len(asked) == 11
    assert sum(command.authoritative for command in asked) == 10
    assert len(cluster.brokers[2].received(CreateProducer)) == 1


async def test_brokers_that_send_on_for_ever_are_an_error(cluster: FakeCluster) -> None:
    async with connect(cluster.url, operation_timeout=0.3) as client:
        cluster.redirects = [1, 2] * 1000
        with pytest.raises(RequestTimeout, match="10 brokers") as failed:
            await client.create_producer("t")
        assert isinstance(failed.value.__cause__, LookupAgainError)


async def test_look_ups_of_a_topic_are_shared_and_remembered(cluster: FakeCluster, client: Client) -> None:
    await asyncio.gather(*[client.create_producer("t") for _ in range(20)], client.subscribe("t", "s"))
    assert len(received(cluster, Lookup)) == 1
    assert len(received(cluster, Partitions)) == 21, "each asks what it is about to open"
    for broker in cluster.brokers:
        broker.cut()
    await until(lambda: len(received(cluster, CreateProducer)) == 40)
    await until(lambda: len(received(cluster, Subscribe)) == 2)
    assert len(received(cluster, Lookup)) <= 3, "the connection broke, and those attempts share one again"
    assert len(received(cluster, Partitions)) == 21, "and never again"


async def test_what_is_not_served_any_more_is_looked_up_again(cluster: FakeCluster, client: Client) -> None:
    producer = await client.create_producer("t")
    cluster.owners[T] = 1
    cluster.brokers[0].fail_next_send = TopicNotServed("it moved")
    await producer.send(b"0")
    assert len(cluster.brokers[1].received(CreateProducer)) == 1
    # A command on the topic goes where the topic is known to be, and follows the error from there.
    for broker in cluster.brokers:
        broker.failures[TopicStats] = TopicNotServed("not here")
    before = len(received(cluster, Lookup))
    assert await client.admin.topic_stats("t") == {"subscriptions": {}}
    assert len(received(cluster, Lookup)) == before + 1


async def test_what_must_not_be_repeated_is_looked_up_each_time(cluster: FakeCluster, client: Client) -> None:
    await client.create_producer("t")
    cluster.owners[T] = 1
    cluster.brokers[1].failures[SkipMessages] = TopicNotServed("whether it was done is not known")
    with pytest.raises(TopicNotServed):
        await client.admin.skip_messages("t", "s", 1)
    assert len(received(cluster, SkipMessages)) == 1
    assert cluster.brokers[1].received(SkipMessages)


@pytest.mark.parametrize("kind", ["producer", "consumer"])
async def test_a_topic_that_moves_is_followed_at_once(cluster: FakeCluster, kind: str) -> None:
    async with connect(
        cluster.url, backoff_first=30.0, backoff_max=60.0
    ) as client:  # pauses that would be seen
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s")
        before = len(received(cluster, Lookup))
        loop = asyncio.get_running_loop()
        began = loop.time()
        cluster.move(T, 2)
        if kind == "producer":
            await producer.send(b"0")
        else:
            await until(lambda: cluster.brokers[2].received(Subscribe))
        assert loop.time() - began < 25, "less than one pause"
        asked = received(cluster, Lookup)[before:]
        assert [command.authoritative for command in asked] == [True]
        assert len(cluster.brokers[2].look_ups) >= 1
        await producer.send(b"1")
        assert (await take(consumer, 1))[0].value in (b"0", b"1")


async def test_a_topic_that_comes_and_goes_makes_no_loop(cluster: FakeCluster) -> None:
    """Each broker sends it to the other one as soon as it is there."""
    async with connect(cluster.url, backoff_first=0.05) as client:
        await client.create_producer("t")
        ends = asyncio.get_running_loop().time() + 0.5
        while asyncio.get_running_loop().time() < ends:
            owner = cluster.brokers[cluster.owner_of(T)]
            if any(handler.producers for handler in owner.handlers):
                cluster.move(T, 1 - owner.number)
            await asyncio.sleep(0.001)
        # 0 + 0.05 + 0.1 + 0.2 ...: without pauses it would be hundreds.
        assert len(received(cluster, CreateProducer)) <= 12


async def test_a_failed_owner_is_followed_the_moment_it_has_a_successor(cluster: FakeCluster) -> None:
    async with connect(cluster.url, backoff_first=0.01, operation_timeout=5.0) as client:
        producer = await client.create_producer("t", send_timeout=20.0)
        consumer = await client.subscribe("t", "s", start="earliest")
        await producer.send(b"0")
        [message] = await take(consumer, 1)
        await consumer.ack(message, receipt=True)
        cluster.fail(0)
        receipts = [producer.send_nowait(b"%d" % number) for number in range(1, 50)]
        await until(lambda: cluster.held)
        await asyncio.sleep(0.3)
        assert len(cluster.held) == 1, "producer and consumer share it, and nobody polls"
        [(_, _, command)] = cluster.held
        assert command.unreachable == cluster.brokers[0].url
        loop = asyncio.get_running_loop()
        began = loop.time()
        cluster.give(0, 1)
        await asyncio.gather(*receipts)
        assert loop.time() - began < 1
        values = [message.value for message in await take(consumer, 49)]
        assert values == [b"%d" % number for number in range(1, 50)]


async def test_a_held_answer_that_takes_too_long_is_asked_for_again(cluster: FakeCluster) -> None:
    async with connect(cluster.url, backoff_first=0.01, operation_timeout=0.3) as client:
        producer = await client.create_producer("t", send_timeout=20.0)
        cluster.fail(0)
        receipt = producer.send_nowait(b"0")
        await until(lambda: len(cluster.held) >= 3)
        cluster.give(0, 2)
        await receipt
        with pytest.raises(MagnetarError):
            await connect(cluster.brokers[0].url)


async def test_the_owner_comes_back_while_the_answer_is_held(cluster: FakeCluster, client: Client) -> None:
    producer = await client.create_producer("t", send_timeout=20.0)
    port = cluster.brokers[0].port
    cluster.fail(0)
    receipt = producer.send_nowait(b"0")
    await until(lambda: cluster.held)
    await cluster.brokers[0].listen(port)
    for asked, handler, command in cluster.held:
        handler.connection.answer(command.request_id, {"url": cluster.brokers[0].url, "final": True})
        assert asked is not cluster.brokers[0]
    await receipt


@pytest.mark.parametrize("leave", ["close", "abort", "producer", "cancel"])
async def test_leaving_while_an_answer_is_held(cluster: FakeCluster, leave: str) -> None:
    async with connect(cluster.url, backoff_first=0.01, operation_timeout=60.0) as client:
        await client.admin.list_topics()
        producer = await client.create_producer("t", send_timeout=60.0)
        consumer = await client.subscribe("t", "s")
        cluster.fail(0)
        await until(lambda: cluster.held)
        [connection] = [one for one in client._pool._brokers._open.values() if not one.closed]
        requests = connection.connection._requests
        opening = asyncio.ensure_future(client.create_producer("t"))
        await asyncio.sleep(0.01)
        await until(lambda: len(requests._pending) == 1)  # it has joined the others
        async with asyncio.timeout(5):
            if leave == "cancel":
                opening.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await opening
            if leave in ("close", "abort"):
                await getattr(client, leave)()
            else:
                await producer.close()
                await consumer.close()
                await until(lambda: not requests._pending or leave == "producer")
                assert (len(requests._pending), opening.done()) == (
                    (1, False) if leave == "producer" else (0, True)
                )
    await asyncio.wait([opening], timeout=1)
    assert opening.done()
    opening.cancelled() or opening.exception()
    # What is left: the test itself, and what the fake brokers do with connections.
    assert [
        task.get_name()
        for task in asyncio.all_tasks()
        if "look" in task.get_name() or "attach" in task.get_name()
    ] == []


@pytest.mark.asyncio(loop_factories=["uvloop"])  # not in virtual time
async def test_look_ups_at_once_are_bounded_and_held_ones_hold_nobody_up(
    cluster: FakeCluster, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[Lookup] = []
    for broker in cluster.brokers:
        answer = broker.answer

        def hold(handler: Any, command: Any, payload: bytes, answer: Any = answer) -> Any:
            if isinstance(command, Lookup) and not release.is_set():
                waiting.append(command)
                return HELD
            return answer(handler, command, payload)

        monkeypatch.setattr(broker, "answer", hold)
    release = asyncio.Event()
    openings = [asyncio.ensure_future(client.create_producer(f"t{number}")) for number in range(200)]
    await until(lambda: len(waiting) == 64)
    await asyncio.sleep(0.05)
    assert len(waiting) == 64
    for opening in openings:
        opening.cancel()
    await asyncio.wait(openings)
    release.set()
    cluster.owners[T] = 1
    monkeypatch.undo()
    cluster.fail(0)
    openings = [asyncio.ensure_future(client.create_producer(f"u{number}")) for number in range(100)]
    await until(lambda: len(cluster.held) == 64)
    await client.create_producer(T)  # another broker's, and not known yet
    cluster.give(0, 2)
    await asyncio.gather(*openings)


async def test_what_is_remembered_is_bounded(
    cluster: FakeCluster, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "MAX_OWNERS", 3)
    for number in (0, 1, 2, 3, 3, 1, 0):
        await client._pool.to_topic(f"t{number}")
    assert [command.topic for command in received(cluster, Lookup)] == ["t0", "t1", "t2", "t3", "t0"]


async def test_a_host_that_is_not_ready_is_not_asked_again(cluster: FakeCluster, client: Client) -> None:
    [asked] = [broker for broker in cluster.brokers if broker.handlers]
    asked.failures[Lookup] = ServiceNotReady("it stops")
    await client.create_producer("t")
    assert len(asked.look_ups) == 1
    assert len(received(cluster, Lookup)) == 2


async def test_a_cluster_whose_owner_hangs_in_a_handshake(cluster: FakeCluster) -> None:
    """It accepts connections and says nothing, as a stopped process does."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    silent = f"magnetar://127.0.0.1:{listening.getsockname()[1]}"
    async with connect(cluster.url, backoff_first=0.01, connect_timeout=0.2) as client:
        own, cluster.brokers[0].address_url = cluster.brokers[0].address_url, silent
        opening = asyncio.ensure_future(client.create_producer("t"))
        await until(lambda: cluster.held)
        cluster.brokers[0].address_url = own
        cluster.give(0, 1)
        await opening
    listening.close()


@pytest.mark.asyncio(loop_factories=["uvloop"])  # not in virtual time
async def test_closing_while_an_owner_hangs(cluster: FakeCluster) -> None:
    """Nothing refuses the connection: its end would be noticed after connect_timeout."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        async with connect(cluster.url, backoff_first=0.01, connect_timeout=3600.0) as client:
            producer = await client.create_producer("t")
            consumer = await client.subscribe("t", "s")
            cluster.brokers[0].address_url = f"magnetar://127.0.0.1:{listening.getsockname()[1]}"
            cluster.fail(0)
            opening = asyncio.ensure_future(client.create_reader("u"))
            await until(lambda: any("connecting" in task.get_name() for task in asyncio.all_tasks()))
            await producer.close()
            await consumer.close()
            await client.close()
        with pytest.raises(MagnetarError):
            await opening
    names = [task.get_name() for task in asyncio.all_tasks()]
    assert not [name for name in names if any(part in name for part in ("connect", "look", "attach"))], names


async def test_listing_goes_to_any_broker_and_survives_its_end(cluster: FakeCluster) -> None:
    async with connect(cluster.url, operation_timeout=1.0) as client:
        [asked] = [broker for broker in cluster.brokers if broker.handlers]
        cluster.fail(asked.number)
        assert await client.admin.list_topics() == []
        assert not asked.received(ListTopics)
        for broker in cluster.brokers:
            if broker is not asked:
                cluster.fail(broker.number)
        with pytest.raises(RequestTimeout) as failed:
            await client.create_producer("t")
        assert isinstance(failed.value.__cause__, ConnectionLost)


async def test_openings_that_were_given_up_close_behind_themselves(
    cluster: FakeCluster, client: Client
) -> None:
    cluster.default = 1
    cluster.brokers[1].unanswered.append(Subscribe)
    opening = asyncio.ensure_future(client.subscribe("t", "s"))
    await until(lambda: cluster.brokers[1].received(Subscribe))
    opening.cancel()
    await asyncio.wait([opening])
    await until(lambda: cluster.brokers[1].received(CloseConsumer))

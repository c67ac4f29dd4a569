"""Connecting, look-ups, one connection per broker, closing; the public names and what importing pulls in."""

import asyncio
import random
import subprocess
import sys
from typing import Any

import pytest

import magnetar.client
from magnetar.client import (
    AlreadyClosed,
    Client,
    ConnectionLost,
    InvalidArgument,
    MagnetarError,
    RequestTimeout,
    connect,
)
from magnetar.client.connection.calls import backoff
from magnetar.proto.commands import (
    CloseConsumer,
    CloseProducer,
    CreateProducer,
    ListTopics,
    Lookup,
    Partitions,
    Subscribe,
)
from magnetar.proto.errors import InvalidTopicName, ServiceNotReady, Unsupported
from support.fake_broker import FakeBroker
from support.sockets import counts_sockets, open_sockets


def test_public_names() -> None:
    assert sorted(magnetar.client.__all__) == magnetar.client.__all__
    assert set(magnetar.client.__all__) == set(
        "Action Admin AlreadyClosed AlreadyExists AuthenticationFailed AutoFailover BacklogQuotaExceeded "
        "ChecksumMismatch Client ConnectionLost Consumer ConsumerBusy DeadLetterPolicy DiskFull "
        "EntryDamaged EntryUnreadable FinalError FoundPolicies FrameTooLarge InvalidArgument "
        "InvalidCallError InvalidTopicName LookupAgainError MagnetarError MalformedFrame Message "
        "MessageBatch MessageId MessageLost MessageTooLarge NotAllowed NotAuthorized NotEmpty NotEnoughBookies "
        "NotFound OutgoingMessage "
        "PartitionNotFound Policies PolicyInForce Producer ProducerBusy ProducerFenced ProducerQueueFull Reader Receipt "
        "ReceiveTimeout RedeliveryBackoff RequestTimeout RetryableError SendTimeout SequenceIdError ServiceNotReady "
        "StorageFailed StreamedMessage SubscriptionNotFound TableView TooManyRequests TopicBusy TopicInUse "
        "TopicNotFound TopicTerminated Unsupported UnsupportedVersion VersionConflict "
        "CompressionName Duration Start SubscriptionType "
        "connect".split()
    )
    for name in magnetar.client.__all__:
        public = getattr(magnetar.client, name)
        assert public.__doc__ or not isinstance(public, type), name


@pytest.mark.real
def test_importing_the_client_imports_nothing_of_the_server() -> None:
    code = "import magnetar.client, magnetar.client.blocking, sys; print(*sorted(sys.modules))"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    rooms = {name.split(".")[1] for name in modules if name.startswith("magnetar.")}
    assert rooms == {"client", "proto", "runtime"}
    servers = {"structlog", "aiohttp", "prometheus_client", "rocksdict", "typer", "rich", "aiozk", "uvloop"}
    assert not servers & set(modules)


@pytest.mark.parametrize(
    "url",
    ["http://h:1", "pulsar://h:6650", "magnetar://", "h:7650", "magnetar://h:1/x", "magnetar://h:99999", 5],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match="want magnetar://host:port"):
        connect(url)


async def test_nobody_there() -> None:
    with pytest.raises(ConnectionLost, match=r"127\.0\.0\.1:1: .*is the service running") as caught:
        await connect("magnetar://127.0.0.1:1")
    assert caught.value.retryable


async def test_bad_names_and_options(client: Client) -> None:
    with pytest.raises(InvalidTopicName, match="not a topic name"):
        client.create_producer("a b")
    with pytest.raises(InvalidArgument, match="subscription name"):
        client.subscribe("t", "a/b")
    with pytest.raises(
        InvalidArgument, match=r"subscription type 'public' \(want 'exclusive' or 'failover' or"
    ):
        client.subscribe("t", "s", type="public")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="compression"):
        client.create_producer("t", compression="brotli")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="send_timeout"):
        client.create_producer("t", send_timeout=0)
    with pytest.raises(InvalidArgument, match="start position"):
        await client.subscribe("t", "s", start="yesterday")  # type: ignore[arg-type]
    with pytest.raises(MagnetarError, match="operation_timeout"):
        connect("magnetar://h", operation_timeout=-1)


async def test_a_forgotten_await_is_told(client: Client) -> None:
    forgotten: Any = client.create_producer("t")
    with pytest.raises(AttributeError, match="has no 'send'; await it first"):
        forgotten.send(b"0")
    assert not hasattr(forgotten, "closed")


async def test_one_connection_and_a_look_up_for_each_topic(broker: FakeBroker, client: Client) -> None:
    await asyncio.gather(*[client.create_producer(f"t{i}") for i in range(5)])
    await client.subscribe("t0", "s")
    assert len(broker.handlers) == 1
    assert len(broker.received(Lookup)) == 5
    assert len(broker.received(Partitions)) == 6


async def test_retryable_refusals_are_tried_again_and_others_are_told(
    broker: FakeBroker, client: Client
) -> None:
    broker.failures[Lookup] = ServiceNotReady("starting")
    await client.create_producer("t")
    broker.failures[CreateProducer] = Unsupported("not here")
    with pytest.raises(Unsupported, match="not here"):
        await client.create_producer("t")


async def test_operations_time_out_with_a_reason(broker: FakeBroker) -> None:
    async with connect(broker.url, operation_timeout=0.05) as client:
        broker.unanswered.append(Lookup)
        with pytest.raises(
            RequestTimeout, match=r"producer of .* was not ready within operation_timeout=0\.05 s"
        ):
            await client.create_producer("t")
        broker.unanswered.append(ListTopics)
        with pytest.raises(RequestTimeout, match="ListTopics"):
            await client.admin.list_topics()


async def test_closing_the_client_closes_everything(broker: FakeBroker) -> None:
    async with connect(broker.url) as client:
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s")
        receipt = producer.send_nowait(b"0")
    assert await receipt == magnetar.client.MessageId(1, 0, 0)
    assert broker.received(CloseProducer)
    with pytest.raises(AlreadyClosed, match="open another one"):
        await consumer.receive()
    with pytest.raises(AlreadyClosed):
        await client.create_producer("t")
    await client.close()
    assert len(asyncio.all_tasks()) == 1


async def test_closing_while_the_broker_is_gone_does_not_hang(broker: FakeBroker) -> None:
    client = await connect(broker.url, backoff_first=0.01)
    producer = await client.create_producer("t", send_timeout=0.1)
    await client.subscribe("t", "s")
    await broker.server.close(0.0)
    producer.send_nowait(b"0")
    async with asyncio.timeout(5):
        with pytest.raises(RequestTimeout, match="send_timeout"):
            await client.close()
    assert len(asyncio.all_tasks()) == 1
    await broker.listen(0)


def test_backoff_doubles_with_jitter_from_the_generator() -> None:
    pauses = backoff(0.1, 1.0, random.Random(1))
    got = [next(pauses) for _ in range(8)]
    assert got == [next(p) for p in [backoff(0.1, 1.0, random.Random(1))] for _ in range(8)]
    assert got[0] <= 0.2
    for pause, expected in zip(got[1:], [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]):
        assert 0.5 * expected <= pause <= 1.5 * expected


async def test_an_opening_given_up_does_not_keep_its_place_at_the_broker(
    broker: FakeBroker, client: Client
) -> None:
    broker.unanswered.append(Subscribe)
    opening = asyncio.ensure_future(client.subscribe("t", "s"))
    while not broker.received(Subscribe):
        await asyncio.sleep(0.001)
    opening.cancel()
    await asyncio.wait([opening])
    while not broker.received(CloseConsumer):
        await asyncio.sleep(0.001)
    broker.unanswered.clear()
    await client.subscribe("t", "s")


@counts_sockets
@pytest.mark.asyncio(loop_factories=["uvloop", "asyncio"])
async def test_after_close_no_socket_is_open(broker: FakeBroker) -> None:
    before = open_sockets()
    for reads in (True, False):
        client = await connect(broker.url)
        await client.admin.list_topics()
        assert len(open_sockets() - before) == 2, "one of the client, and one of the broker"
        [handler] = broker.handlers
        if not reads:
            handler.connection.pause_reading("test")
        async with asyncio.timeout(5):
            await client.close()
        assert len(open_sockets() - before) <= 1, "the broker's may still be open"
        handler.connection.abort()
        while broker.handlers:
            await asyncio.sleep(0)

"""Several clusters: a client goes from one to another by hand or by itself, and mixes up nothing of the two."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from magnetar.client import (
    AlreadyClosed,
    AutoFailover,
    Client,
    ConnectionLost,
    InvalidArgument,
    MessageLost,
    blocking,
    connect,
)
from magnetar.client.connection.pool import ConnectionPool
from magnetar.client.service_url import ServiceUrl
from magnetar.proto.commands import Ack, CreateProducer, Redeliver, Subscribe
from magnetar.proto.errors import MagnetarError
from support.client_kit import fill, take, until
from support.fake_broker import FakeBroker


@pytest_asyncio.fixture
async def rome() -> AsyncIterator[FakeBroker]:
    broker = await FakeBroker.start()
    yield broker
    await broker.close()


@pytest_asyncio.fixture
async def oslo() -> AsyncIterator[FakeBroker]:
    broker = await FakeBroker.start()
    yield broker
    await broker.close()


@pytest_asyncio.fixture
async def client(rome: FakeBroker) -> AsyncIterator[Client]:
    async with connect(rome.url, backoff_first=0.01, operation_timeout=5.0) as client:
        yield client


# --- by hand --------------------------------------------------------------------------------------------------------------


async def test_producers_go_on_in_the_other_cluster(
    rome: FakeBroker, oslo: FakeBroker, client: Client
) -> None:
    named, unnamed = await client.create_producer("t", name="n"), await client.create_producer("t")
    await named.send(b"0")
    given = unnamed.name
    rome.hold_receipts = True
    receipts = [named.send_nowait(b"%d" % number) for number in range(1, 20)]
    await until(lambda: rome.held)
    await client.switch_to(oslo.url)
    await asyncio.gather(*receipts)
    assert (client.service_url, client.cluster_switches) == (oslo.url, 1)
    assert oslo.topic("t").message_count == 19, "what rome had not confirmed, in order"
    await until(lambda: len(oslo.received(CreateProducer)) == 2)
    assert {command.name for command in oslo.received(CreateProducer)} == {"n", None}
    assert given
    await until(lambda: unnamed.name)  # which comes with the answer
    await until(lambda: not rome.handlers)


async def test_a_subscription_goes_on_where_it_stands_there(
    rome: FakeBroker, oslo: FakeBroker, client: Client
) -> None:
    fill(rome, 10)
    fill(oslo, 30)
    consumer = await client.subscribe("t", "s", start="earliest")
    await take(consumer, 5)
    await client.switch_to(oslo.url)
    await until(lambda: oslo.received(Subscribe))
    assert [message.value for message in await take(consumer, 30)] == [b"%d" % number for number in range(30)]


@pytest.mark.parametrize("how", ["message", "batch", "cumulative", "nack"])
@pytest.mark.parametrize("attached", [True, False])
async def test_what_was_received_before_is_not_acknowledged_there(
    rome: FakeBroker, oslo: FakeBroker, client: Client, how: str, attached: bool
) -> None:
    """Its id means another message there, which nobody has seen."""
    fill(rome, 10, entry=5)
    fill(oslo, 10, entry=5)
    consumer = await client.subscribe(
        "t",
        "s",
        start="earliest",
        type="exclusive" if how == "cumulative" else "shared",
        ack_group_delay=0.01,
        nack_delay=0.0,
    )
    old = await take(consumer, 5)
    if attached:
        await client.switch_to(oslo.url)
        await until(lambda: oslo.received(Subscribe))
        await take(consumer, 1)
    acts: dict[str, Callable[[], Any]] = {
        "message": lambda: consumer.ack(old[0]),
        "batch": lambda: consumer.ack(old),
        "cumulative": lambda: consumer.ack_cumulative(old[-1]),
    }
    if how == "nack":
        consumer.nack(old[0])
    else:
        await acts[how]()
    if not attached:
        rome.unanswered.append(Ack)
        await client.switch_to(oslo.url)
        await until(lambda: oslo.received(Subscribe))
    await asyncio.sleep(0.03)
    new = await take(consumer, 4 if attached else 5)
    assert not oslo.received(Ack)
    assert not oslo.received(Redeliver)
    await consumer.ack(new[0], receipt=True)
    assert sum(map(len, oslo.topic("t").acked.values())) == 1


async def test_a_receipt_of_an_old_message_is_an_error(
    rome: FakeBroker, oslo: FakeBroker, client: Client
) -> None:
    fill(rome, 10)
    fill(oslo, 10)
    consumer = await client.subscribe("t", "s", start="earliest", type="shared")
    single = await client.subscribe("u", "s", start="earliest")
    fill(rome, 1, name="u")
    old = await take(consumer, 3)
    rome.unanswered.append(Ack)
    pending = asyncio.ensure_future(consumer.ack(old[0], receipt=True))
    await until(lambda: rome.received(Ack))
    await client.switch_to(oslo.url)
    with pytest.raises(MessageLost, match="of the cluster that this client has left"):
        await pending
    for call in (consumer.ack(old[1], receipt=True), consumer.ack(old[1:], receipt=True)):
        with pytest.raises(MessageLost, match="may be delivered again"):
            await call
    assert not oslo.received(Ack)
    [message] = await take(consumer, 1)
    await consumer.ack(message, receipt=True)
    assert single.topic


async def test_readers_go_on_at_the_time_of_their_last_message(
    rome: FakeBroker, oslo: FakeBroker, client: Client
) -> None:
    for broker in (rome, oslo):
        for _ in range(3):
            fill(broker, 2)
            broker.now_ms += 1000
    fresh = await client.create_reader("t", start="earliest")
    by_id = await client.create_reader("t", start=(await take(fresh, 1))[0].id)
    reader = await client.create_reader("t", start="earliest")
    await take(reader, 4)
    await client.switch_to(oslo.url)
    await until(lambda: len(oslo.received(Subscribe)) == 3)
    starts = {command.consumer_id: tuple(command.start) for command in oslo.received(Subscribe)}
    assert sorted(starts.values()) == [
        ("earliest", None),
        ("time", 1_700_000_000_000),
        ("time", 1_700_000_001_000),
    ]
    assert [message.value for message in await take(reader, 4)] == [b"0", b"1", b"0", b"1"]
    assert by_id.topic


async def test_switching_to_what_does_not_answer_changes_nothing(
    rome: FakeBroker, oslo: FakeBroker, client: Client
) -> None:
    producer = await client.create_producer("t")
    url = oslo.url
    await oslo.close()
    with pytest.raises(ConnectionLost):
        await client.switch_to(url)
    with pytest.raises(InvalidArgument, match="not a service URL"):
        await client.switch_to("oslo")
    await client.switch_to(rome.url)  # it is there
    assert (client.service_url, client.cluster_switches) == (rome.url, 0)
    await producer.send(b"0")
    assert len(rome.received(CreateProducer)) == 1
    await client.close()
    with pytest.raises(AlreadyClosed):
        await client.switch_to(url)


async def test_back_and_forth_while_sending(rome: FakeBroker, oslo: FakeBroker, client: Client) -> None:
    producer = await client.create_producer("t")
    receipts = []
    for number in range(300):
        receipts.append(producer.send_nowait(b"%d" % number))
        if number % 30 == 29:
            await client.switch_to(oslo.url if client.service_url == rome.url else rome.url)
        await asyncio.sleep(0)
    await asyncio.gather(*receipts)
    assert client.cluster_switches == 10
    values = []
    for _ in (rome, oslo):
        other = await client.create_reader("t", start="earliest")
        values.append([message.value async for message in _available(other)])
        await client.switch_to(oslo.url if client.service_url == rome.url else rome.url)
        await other.close()
    assert {int(value) for cluster in values for value in cluster} == set(range(300))
    await client.close()
    names = [task.get_name() for task in asyncio.all_tasks()]
    assert not [name for name in names if "attach" in name or "leave" in name or "connect" in name]


async def _available(reader: Any) -> AsyncIterator[Any]:
    while await reader.has_message_available():
        yield await reader.read_next()


@pytest.mark.asyncio(loop_factories=["uvloop"])  # not in virtual time
async def test_without_asyncio(rome: FakeBroker, oslo: FakeBroker) -> None:
    def work() -> tuple[str, int]:
        with blocking.connect(rome.url) as client:
            producer = client.create_producer("t")
            client.switch_to(oslo.url)
            producer.send(b"0")
            return client.service_url, client.cluster_switches

    assert await asyncio.to_thread(work) == (oslo.url, 1)
    assert oslo.topic("t").message_count == 1


# --- by itself ------------------------------------------------------------------------------------------------------------


def failover(rome: FakeBroker, oslo: FakeBroker, **settings: float) -> AutoFailover:
    times = {"failover_delay": 0.2, "switch_back_delay": 0.3, "check_interval": 0.05}
    return AutoFailover(primary=rome.url, secondary=[oslo.url], **{**times, **settings})


@pytest.mark.asyncio(loop_factories=["uvloop"])  # not in virtual time
async def test_there_and_back(rome: FakeBroker, oslo: FakeBroker, caplog: pytest.LogCaptureFixture) -> None:
    async with connect(failover(rome, oslo), backoff_first=0.01) as client:
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s", start="earliest")
        await producer.send(b"rome")
        assert (await take(consumer, 1))[0].value == b"rome"
        port = rome.port
        down_at = time.monotonic()
        rome.server.stop_accepting()
        rome.cut()
        await producer.send(b"oslo")
        assert time.monotonic() - down_at >= 0.2
        assert client.service_url == oslo.url
        assert (await take(consumer, 1))[0].value == b"oslo"
        await rome.listen(port)
        up_at = time.monotonic()
        with caplog.at_level(logging.WARNING):
            await until(lambda: client.service_url == rome.url)
        assert time.monotonic() - up_at >= 0.25
        assert f"this client leaves {oslo.url} for {rome.url}" in caplog.text
        await producer.send(b"rome again")
        assert rome.topic("t").message_count == 2
        assert client.cluster_switches == 2
        with pytest.raises(InvalidArgument, match="AutoFailover"):
            await client.switch_to(oslo.url)


async def test_a_short_failure_is_waited_out(rome: FakeBroker, oslo: FakeBroker) -> None:
    async with connect(failover(rome, oslo, failover_delay=5.0), backoff_first=0.01) as client:
        producer = await client.create_producer("t")
        port = rome.port
        rome.server.stop_accepting()
        rome.cut()
        receipt = producer.send_nowait(b"0")
        await asyncio.sleep(0.2)
        await rome.listen(port)
        await receipt
        assert (client.service_url, client.cluster_switches) == (rome.url, 0)
        assert not oslo.commands


async def test_a_primary_that_is_down_from_the_beginning(rome: FakeBroker, oslo: FakeBroker) -> None:
    url = rome.url
    rome.server.stop_accepting()
    async with connect(
        AutoFailover(primary=url, secondary=[oslo.url], check_interval=0.05, switch_back_delay=60.0)
    ) as client:
        assert client.service_url == oslo.url
        await client.admin.list_topics()
    await oslo.close()
    with pytest.raises(ConnectionLost, match=r"no cluster can be reached: .*; "):
        await connect(failover(rome, oslo))


async def test_a_defect_in_a_probe_does_not_end_the_failover(
    rome: FakeBroker, oslo: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe, probed = ConnectionPool.probe, list[str]()

    async def broken_once(self: ConnectionPool, service: ServiceUrl) -> MagnetarError | None:
        probed.append(str(service))
        if len(probed) == 1:
            raise RuntimeError("a defect")
        return await probe(self, service)

    monkeypatch.setattr(ConnectionPool, "probe", broken_once)
    async with connect(failover(rome, oslo)) as client:
        await until(lambda: probed)
        rome.server.stop_accepting()
        rome.cut()
        await until(lambda: client.service_url == oslo.url)


async def test_closing_while_clusters_are_probed(rome: FakeBroker, oslo: FakeBroker) -> None:
    client = await connect(failover(rome, oslo, check_interval=0.001))
    await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        await client.close()
    assert [task.get_name() for task in asyncio.all_tasks() if "probe" in task.get_name()] == []

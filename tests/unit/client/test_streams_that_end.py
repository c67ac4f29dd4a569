"""Sources of `send_stream` that hang or are wrong, and what ends while a message is being sent in chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from magnetar.client import (
    AlreadyClosed,
    Client,
    InvalidArgument,
    MessageLost,
    Producer,
    SendTimeout,
    connect,
)
from magnetar.proto.commands import CloseProducer
from support.client_kit import until, until_sent
from support.fake_broker import FakeBroker

SIZE = 1000


@pytest.fixture
async def small(broker: FakeBroker) -> AsyncIterator[Client]:
    async with connect(broker.url, backoff_first=0.01, max_message_bytes=SIZE) as client:
        yield client


async def hanging() -> AsyncIterator[bytes]:
    yield b"x" * 2 * SIZE
    await asyncio.Event().wait()


async def begun(producer: Producer) -> asyncio.Task[Any]:
    """A message of which the rest does not come."""
    streaming = asyncio.create_task(producer.send_stream(hanging()))
    await until_sent(producer, 0)
    await producer.flush()
    return streaming


async def test_a_producer_that_is_closed_ends_a_stream_and_those_who_wait_behind_it(small: Client) -> None:
    producer = await small.create_producer("t", chunking=True)
    streaming = await begun(producer)
    behind = [asyncio.create_task(one) for one in (producer.send(b"1"), producer.send_many([b"2"]))]
    await asyncio.sleep(0)
    await producer.close()
    for one in (streaming, *behind):
        with pytest.raises(AlreadyClosed):
            await asyncio.wait_for(one, 5.0)


async def test_rule_45_who_waits_behind_a_stream_for_long_is_told_so(
    small: Client, caplog: pytest.LogCaptureFixture
) -> None:
    producer = await small.create_producer("t", chunking=True, send_timeout=0.1)
    streaming = await begun(producer)
    behind = [asyncio.create_task(producer.send(b"%d" % number)) for number in range(2)]
    await until(lambda: "2 calls wait until the source of a message in chunks ends" in caplog.text)
    streaming.cancel()
    await asyncio.gather(*behind)


@pytest.mark.parametrize("rest", [b"", b"x" * 3 * SIZE])
async def test_what_one_cluster_has_the_beginning_of_is_not_finished_in_another(
    broker: FakeBroker, small: Client, rest: bytes
) -> None:
    other = await FakeBroker.start()
    producer = await small.create_producer("t", chunking=True)
    go_on = asyncio.Event()

    async def source() -> AsyncIterator[bytes]:
        yield b"x" * 2 * SIZE
        await go_on.wait()
        yield rest

    streaming = asyncio.create_task(producer.send_stream(source()))
    await until_sent(producer, 0)
    await producer.flush()
    await small.switch_to(other.url)
    go_on.set()
    with pytest.raises(MessageLost, match="cluster"):
        await asyncio.wait_for(streaming, 5.0)
    await producer.send(b"next")
    assert other.topic("t").message_count == 1
    await producer.close()
    await other.close()


@pytest.mark.parametrize("chunks", [2, 3, 7])
async def test_a_message_that_is_not_confirmed_in_time_fails_with_all_of_its_chunks(
    broker: FakeBroker, small: Client, chunks: int
) -> None:
    producer = await small.create_producer("t", chunking=True, send_timeout=0.2)
    broker.hold_receipts = True
    receipt = producer.send_nowait(b"x" * chunks * SIZE)
    behind = producer.send_nowait(b"y")
    for one in (receipt, behind):
        with pytest.raises(SendTimeout):
            await asyncio.wait_for(one, 5.0)
    assert producer.pending_bytes == 0


class _Nothing:
    def read(self, size: int) -> None:
        return None


@pytest.mark.parametrize(
    ("source", "says"), [([1, 2], "not int"), (iter([None]), "not NoneType"), (_Nothing(), "not NoneType")]
)
async def test_a_source_of_something_else_is_refused(small: Client, source: Any, says: str) -> None:
    producer = await small.create_producer("t", chunking=True)
    with pytest.raises(InvalidArgument, match=says):
        await producer.send_stream(source)
    await producer.send(b"next")


async def test_the_broker_learns_of_a_producer_that_ended_while_it_was_not_attached(
    broker: FakeBroker, client: Client
) -> None:
    """Rule 40: the connection lives on, and holds the place."""
    producer = await client.create_producer("t", send_timeout=0.2)
    inner: Any = producer._producer
    inner._numbered = True
    from magnetar.proto.errors import ServiceNotReady

    attachment = inner._attachment
    receipt = producer.send_nowait(b"1")
    attachment.lost(ServiceNotReady("later"))
    attachment._task.cancel()
    with pytest.raises(Exception):  # noqa: B017
        await receipt
    await until(lambda: broker.received(CloseProducer))

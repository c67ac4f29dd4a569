"""What a listener does with frames that make no sense: one clear answer, or the end of that connection only."""

import asyncio
import random
import tracemalloc

import msgpack
import pytest

from magnetar.proto import commands as c
from magnetar.proto.batch import encode_batch
from magnetar.proto.errors import (
    InvalidArgument,
    InvalidTopicName,
    MagnetarError,
    NotAuthorized,
    ProducerFenced,
    TooManyRequests,
    TopicNotFound,
    UnknownCommand,
)
from magnetar.proto.frames import encode_frame
from support.broker_kit import FakeClient, running_broker, settle
from support.memory_metadata import MemoryMetadataStore


async def test_foreign_commands_are_answered() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        with pytest.raises(UnknownCommand):
            await client.ask(c.BookieInfo)


async def test_unknown_ids_and_names() -> None:
    async with running_broker(auto_create_topics=False) as broker:
        client = FakeClient(broker)
        for command in (c.Unsubscribe, c.LastMessageId):
            with pytest.raises(InvalidArgument, match="not open"):
                await client.ask(command, 5)
        with pytest.raises(InvalidArgument):
            await client.ack((0, 0, 0, 0))
        with pytest.raises(TopicNotFound):
            await client.producer()
        with pytest.raises(TopicNotFound):
            await client.ask(c.TopicStats, "orders")
        with pytest.raises(InvalidTopicName):
            await client.ask(c.Lookup, "a/b")
        with pytest.raises(InvalidArgument):
            await client.ask(c.ListTopics, "public")
        await client.ask(c.CloseProducer, 5)
        await client.ask(c.CloseConsumer, 5)
        await client.ask(c.CreateTopic, "orders")
        await client.producer()
        assert await client.ask(c.ListTopics, "public/default") == {
            "topics": ["persistent://public/default/orders"],
            "more": False,
        }
        assert await client.ask(c.Lookup, "orders") == {
            "url": broker.settings.service_url,
            "final": True,
        }
        assert await client.ask(c.Partitions, "orders") == {"partitions": 0}


async def test_every_command_is_authorized() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        nothing = msgpack.packb([])
        operations = (
            "produce consume lookup list_topics topic_stats create_topic delete_topic delete_subscription "
            "topic_ledgers keep_ledgers stage_ledgers attach_ledgers archive_ledgers"
        )
        client.forbidden = set(operations.split())
        for command, fields in (
            (c.CreateProducer, (1, "orders")),
            (c.Subscribe, (1, "orders", "s")),
            (c.Lookup, ("orders",)),
            (c.Partitions, ("orders",)),
            (c.ListTopics, ()),
            (c.TopicStats, ("orders",)),
            (c.CreateTopic, ("orders",)),
            (c.DeleteTopic, ("orders",)),
            (c.DeleteSubscription, ("orders", "s")),
            (c.TopicLedgers, ("orders",)),
            (c.AttachLedgers, ("orders", "q", 0)),
            (c.KeepLedgers, ("orders",)),
            (c.CreateStagedLedger, ("orders", "t")),
            (c.GetLedgerMetadata, ("orders", 1)),
            (c.PutLedgerMetadata, ("orders", 1, 0)),
            (c.KeepStaged, ("orders", "t")),
            (c.DiscardStaged, ("orders", "t")),
            (c.QueryState, ("orders", "q")),
            (c.ArchiveLedgers, ("orders", "file:///a")),
        ):
            with pytest.raises(NotAuthorized):
                await client.ask(command, *fields, payload=nothing)
        assert not broker.topics


async def test_requests_are_bounded_and_end_with_the_connection() -> None:
    class Hung(MemoryMetadataStore):
        async def children(self, path: str, *, after: str = "", limit: int = 0) -> list[str]:
            await asyncio.Event().wait()
            return []

    metadata = MemoryMetadataStore()
    async with running_broker(None, metadata, max_requests_per_connection=3) as broker:
        client = FakeClient(broker)
        before = asyncio.all_tasks()
        metadata.children = Hung().children  # type: ignore[method-assign]
        asked = [client.ask(c.ListTopics, "public/default") for _ in range(4)]
        with pytest.raises(TooManyRequests):
            await asked[3]
        await settle()
        assert len(asyncio.all_tasks() - before) == 3, "they wait for the store"
        client.handler.connection_closed(None)
        await settle()
        assert asyncio.all_tasks() == before
        del metadata.children


@pytest.mark.parametrize("seed", range(5))
async def test_mutated_frames_neither_crash_nor_stay(seed: int) -> None:
    rng = random.Random(seed)
    async with running_broker() as broker:
        for _ in range(30):
            client = FakeClient(broker)
            await client.producer()
            await client.consumer(subscription=f"s{rng.random()}", durable=False)
            client.answers = _Anybody()  # type: ignore[assignment]
            for _ in range(30):
                if client.closed is not None:
                    break
                command = rng.choice(
                    [
                        c.Ack(0, 1, rng.random() < 0.5),
                        c.Redeliver(0, 1),
                        c.Flow(0, 1, rng.randrange(1 << 62), rng.randrange(1 << 62)),
                        c.Send(0, 1, 0),
                        c.Seek(rng.randrange(3), 1, ("id", rng.randbytes(24))),
                        c.Subscribe(
                            1, rng.randrange(9), "orders", "x", "shared", ("time", rng.randrange(1 << 40))
                        ),
                        c.TopicLedgers(1, "orders", rng.randrange(-2, 9), rng.randrange(-1, 9)),
                        c.KeepLedgers(1, "orders", "", rng.randrange(99), rng.randrange(-2, 9)),
                        c.AttachLedgers(1, "orders", "q", rng.randrange(-1, 9)),
                        c.CreateStagedLedger(1, "orders", "t"),
                        c.GetLedgerMetadata(1, "orders", rng.randrange(9)),
                        c.PutLedgerMetadata(1, "orders", rng.randrange(9), 0),
                        c.KeepStaged(1, "orders", "t", rng.randrange(99)),
                        c.DiscardStaged(1, "orders", "t"),
                        c.QueryState(1, "orders", "q"),
                        c.ArchiveLedgers(1, "orders", "file:///a", dry=rng.random() < 0.5),
                    ]
                )
                header = bytearray(command.encode())
                if rng.random() < 0.4:
                    header[rng.randrange(len(header))] = rng.randrange(256)
                try:
                    client.handler.runs_received(
                        [(bytes(header), [rng.randbytes(rng.choice((0, 24, 48, 60)))])]
                    )
                except MagnetarError as error:
                    client.close(error)
                await settle(3)
            if client.closed is None:
                client.handler.connection_closed(None)
        await settle()
        survivor = FakeClient(broker)
        answer = await survivor.producer()
        await survivor.consumer(subscription="after", start=("latest", None))
        survivor.publish(b"alive", epoch=answer["epoch"])
        assert await survivor.received(1) == [b"alive"]


class _Anybody(dict[int, object]):
    """Answers to requests that nobody waits for."""

    def __missing__(self, _key: int) -> "_Anybody":
        return self

    def set_result(self, _: object) -> None:
        """Ignored."""

    def set_exception(self, _: object) -> None:
        """Ignored."""

    def exception(self) -> None:
        """None to look at."""


async def test_headers_of_a_producer_that_vary_do_not_pile_up() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.producer()
        # A later version may append fields to SEND, which are ignored here.
        headers = [msgpack.packb([c.Send.NUMBER, 0, 1, 0, b"%05d" % number * 2000]) for number in range(300)]
        frames = [
            encode_frame(header, encode_batch([b"x"], sequence_id=n, publish_time_ms=0))
            for n, header in enumerate(headers)
        ]
        tracemalloc.start()
        try:
            for number, frame in enumerate(frames):
                client.bytes_received(frame)
                await client.confirmed(number + 1)
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert kept < len(headers[0]) * len(headers) / 3, "of 3 MB of headers"
        await client.ask(c.CloseProducer, 1)
        client.bytes_received(frames[-1])
        await client.until(lambda: client.failures)
        assert client.failures[0].code == ProducerFenced.code

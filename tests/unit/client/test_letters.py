"""Retry topics and dead-letter topics, through the public client and a real broker."""

import asyncio
import contextlib
import logging
import re
from typing import Any

import pytest

from magnetar.broker.service.broker import BrokerService
from magnetar.client import (
    Client,
    Consumer,
    DeadLetterPolicy,
    InvalidArgument,
    Message,
    ReceiveTimeout,
    RedeliveryBackoff,
    dead_letters,
)
from magnetar.client.options import SubscriptionType
from magnetar.proto.errors import InvalidTopicName, MessageTooLarge, NotAuthorized, ServiceNotReady
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore
from support.served_broker import connect_to, serving, take
from support.virtual_time import in_virtual_time

QUICK = RedeliveryBackoff(min_delay=0.0, max_delay=0.0)
DLQ, RETRY = "t-s-DLQ", "t-s-RETRY"


async def dead(client: Client, topic: str = DLQ, *, count: int, timeout: float = 5.0) -> list[Message]:
    """So many messages of a dead-letter topic; and there are no more."""
    async with client.create_reader(topic, start="earliest") as reader:
        found = [await reader.receive(timeout) for _ in range(count)]
        with pytest.raises(ReceiveTimeout):
            await reader.receive(0.05)
        return found


async def drained(client: Client, subscription: str = "s", topic: str = "t") -> None:
    """Everything of the subscription is acknowledged."""
    async with asyncio.timeout(60.0):
        while await backlog(client, subscription, topic):
            await asyncio.sleep(0.01)


async def backlog(client: Client, subscription: str = "s", topic: str = "t") -> int:
    """Messages from the first one that is not acknowledged on."""
    found: int = (await client.admin.topic_stats(topic))["subscriptions"][subscription]["backlog_messages"]
    return found


# --- dead letters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", ["shared", "key_shared"])
@pytest.mark.parametrize("limit", [0, 1, 3])
async def test_a_message_is_handed_out_so_often_and_then_buried(type: SubscriptionType, limit: int) -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        consumer = await client.subscribe(
            "t", "s", type=type, start="earliest", nack_delay=0.01,
            dead_letter=DeadLetterPolicy(max_redeliver_count=limit),
        )  # fmt: skip
        first = await producer.send_many(
            [b"good", b"bad", None, b"fine"],
            keys=["k", "k", b"\xff", None],
            properties=[{}, {"a": "1", "REAL_SUBSCRIPTION": "mine"}, {}, {}],
            event_times=[None, 77, None, None],
        )
        counts: dict[Any, list[int]] = {}
        while sum(map(len, counts.values())) < 2 + 2 * (limit + 1):
            message = await consumer.receive(5.0)
            counts.setdefault(message.value, []).append(message.redelivery_count)
            if message.value in (b"good", b"fine"):
                await consumer.ack(message)
            else:
                consumer.nack(message)
        assert counts == {b"good": [0], b"fine": [0], b"bad": [*range(limit + 1)], None: [*range(limit + 1)]}
        buried = {message.value: message for message in await dead(client, count=2)}
        bad, tombstone = buried[b"bad"], buried[None]
        assert (bad.key, bad.event_time) == ("k", 77)
        assert dict(bad.properties) == {
            "a": "1",
            "REAL_TOPIC": "persistent://public/default/t",
            "REAL_SUBSCRIPTION": "s",  # what others wrote is not believed
            "ORIGIN_MESSAGE_ID": str(first[1]),
            "LETTER_TOPIC": f"persistent://public/default/{DLQ}",
            "LETTER_GENERATION": "1",
        }
        assert tombstone.key == b"\xff"
        assert tombstone.properties["REAL_SUBSCRIPTION"] == "s"
        await drained(client)
        with pytest.raises(ReceiveTimeout):
            await consumer.receive(0)


@in_virtual_time
async def test_an_ack_timeout_counts_as_well_and_nothing_waits_for_who_is_slow() -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        consumer = await client.subscribe(
            "t", "s", type="shared", start="earliest", ack_timeout=5.0,
            dead_letter=DeadLetterPolicy(max_redeliver_count=1, topic="graveyard", initial_subscription="inspection"),
        )  # fmt: skip
        await producer.send(b"bad")
        assert [m.redelivery_count for m in await take(consumer, 2)] == [0, 1]
        with pytest.raises(ReceiveTimeout):
            await consumer.receive(60.0)
        assert [m.value for m in await dead(client, "graveyard", count=1)] == [b"bad"]
        inspector = await client.subscribe("graveyard", "inspection", type="exclusive")
        assert (
            await inspector.receive(1.0)
        ).value == b"bad"  # though it was written before anybody subscribed


async def test_an_initial_subscription_that_somebody_uses_in_another_way_is_fine() -> None:
    async with serving() as server, connect_to(server) as client:
        inspector = await client.subscribe(DLQ, "inspection", type="exclusive")
        producer = await client.create_producer("t")
        policy = DeadLetterPolicy(max_redeliver_count=0, initial_subscription="inspection")
        consumer = await client.subscribe("t", "s", type="shared", start="earliest", dead_letter=policy)
        await producer.send(b"bad")
        consumer.nack(await consumer.receive(5.0))
        assert (await inspector.receive(5.0)).value == b"bad"


async def test_the_limit_holds_over_a_restart_of_the_broker() -> None:
    metadata, ledgers = MemoryMetadataStore(), FakeLedgers()
    policy = DeadLetterPolicy(max_redeliver_count=3)
    for start in range(3):
        async with serving(metadata, ledgers) as server, connect_to(server) as client:
            if not start:
                producer = await client.create_producer("t")
                await producer.send(b"poison")
            consumer = await client.subscribe(
                "t", "s", start="earliest", type="shared", nack_delay=0, dead_letter=policy
            )
            if start < 2:  # two deliveries in each life: 0 and 1, 2 and 3
                for count in (2 * start, 2 * start + 1):
                    message = await consumer.receive(5.0)
                    assert message.redelivery_count == count
                    if count % 2 == 0:
                        consumer.nack(message)
            else:
                assert [m.value for m in await dead(client, count=1)] == [b"poison"]
                await drained(client)


class Refusing:
    """A broker that does not let anybody produce to the dead-letter topic, for a reason that the test sets."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.error: Exception | None = None
        self.asked = 0
        create: Any = BrokerService.create_producer

        async def create_producer(service: Any, caller: Any, topic: str, **named: Any) -> Any:
            if topic.endswith(DLQ):
                self.asked += 1
                if self.error is not None:
                    raise self.error
            return await create(service, caller, topic, **named)

        patch.setattr(BrokerService, "create_producer", create_producer)


@pytest.mark.parametrize("error", [NotAuthorized("produce"), ServiceNotReady("the backlog is full")])
def test_what_cannot_be_buried_is_tried_again_and_stays_unacknowledged(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusing = Refusing(monkeypatch)

    @in_virtual_time
    async def run() -> None:
        refusing.error = error
        async with serving() as server, connect_to(server) as client:
            producer = await client.create_producer("t")
            consumer = await client.subscribe(
                "t", "s", type="shared", start="earliest", nack_backoff=QUICK,
                dead_letter=DeadLetterPolicy(max_redeliver_count=1),
            )  # fmt: skip
            await producer.send_many([b"bad", b"worse", b"good"])
            for message in await take(consumer, 3):
                consumer.nack(message)
            bad, worse, good = await take(consumer, 3)
            consumer.nack([bad, worse])
            await consumer.ack(good)
            with caplog.at_level(logging.WARNING, "magnetar.client"), pytest.raises(ReceiveTimeout):
                await consumer.receive(600.0)
            assert await backlog(client) == 2  # the third one is acknowledged
            warnings = [record for record in caplog.records if "dead-letter topic" in record.message]
            # Not one for each attempt, and attempts not one after another.
            assert 2 <= len(warnings) <= 11
            assert "2 messages" in warnings[0].message
            assert str(error) in warnings[0].message
            attempts = refusing.asked
            if isinstance(error, NotAuthorized):  # else each attempt asks again until it gives up
                assert 10 <= attempts <= 20
            refusing.error = None
            assert {m.value for m in await dead(client, count=2, timeout=200.0)} == {b"bad", b"worse"}
            await drained(client)

    run()


async def test_a_letter_that_can_never_be_written_costs_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        consumer = await client.subscribe(
            "t", "s", type="shared", start="earliest", dead_letter=DeadLetterPolicy(max_redeliver_count=0)
        )
        send: Any = type(producer).send

        async def picky(self: Any, value: Any, *given: Any, **named: Any) -> Any:
            if value == b"large":
                raise MessageTooLarge("it is")
            return await send(self, value, *given, **named)

        await producer.send_many([b"small", b"large", b"tiny"])
        monkeypatch.setattr(type(producer), "send", picky)
        consumer.nack(await take(consumer, 3))
        assert {m.value for m in await dead(client, count=2)} == {b"small", b"tiny"}
        async with asyncio.timeout(5.0):
            while await backlog(client) != 1:  # the large one alone is not acknowledged
                await asyncio.sleep(0.01)


async def test_more_dead_letters_than_may_be_in_flight_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "MAX_LETTERS_IN_FLIGHT", 10)
    monkeypatch.setattr(dead_letters, "_BACKOFF", RedeliveryBackoff(min_delay=0.01, max_delay=0.01))
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        consumer = await client.subscribe(
            "t", "s", type="shared", start="earliest", dead_letter=DeadLetterPolicy(max_redeliver_count=0)
        )
        values = [b"%d" % number for number in range(105)]
        await producer.send_many(values)
        consumer.nack(await take(consumer, 105))
        waiting = asyncio.create_task(consumer.receive())
        assert {m.value for m in await dead(client, count=105)} == set(values)
        await drained(client)
        waiting.cancel()


async def test_a_letter_is_not_acknowledged_before_it_is_written_whatever_ends_the_consumer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        written = asyncio.Event()
        send: Any = type(producer).send

        async def slow(self: Any, *given: Any, **named: Any) -> Any:
            if self.topic.endswith(DLQ):
                await written.wait()
            return await send(self, *given, **named)

        monkeypatch.setattr(type(producer), "send", slow)
        await producer.send(b"bad")

        async def subscribe() -> Consumer:
            policy = DeadLetterPolicy(max_redeliver_count=0)
            return await client.subscribe("t", "s", type="shared", start="earliest", dead_letter=policy)

        for end in ("abort", "close"):
            consumer = await subscribe()
            monkeypatch.setattr(dead_letters, "_SETTLE_TIMEOUT_S", 0.05)
            if end == "abort":
                consumer.nack(await consumer.receive(5.0))
            with pytest.raises(ReceiveTimeout):
                await consumer.receive(0.1)
            if end == "abort":
                consumer.abort()
            else:
                await consumer.close()
            assert await backlog(client) == 1
        consumer = await subscribe()
        waiting = asyncio.create_task(consumer.receive())
        written.set()
        assert len(await dead(client, count=1)) == 1
        await drained(client)
        waiting.cancel()


async def test_letters_need_individual_acknowledgements_and_possible_names() -> None:
    async with serving() as server, connect_to(server) as client:
        policy = DeadLetterPolicy(max_redeliver_count=1)
        for type in ("exclusive", "failover"):
            with pytest.raises(InvalidArgument, match="subscribe with type='shared' or 'key_shared'"):
                client.subscribe("t", "s", type=type, dead_letter=policy)
        with pytest.raises(InvalidTopicName):
            client.subscribe("t" * 200, "s" * 100, type="shared", dead_letter=policy)
        for wrong in (-1, 1.5, True, None):
            count: Any = wrong
            with pytest.raises(InvalidArgument, match="max_redeliver_count must be a whole number"):
                DeadLetterPolicy(max_redeliver_count=count)
        with pytest.raises(InvalidTopicName):
            DeadLetterPolicy(topic="a b")
        with pytest.raises(InvalidArgument, match="subscription name"):
            DeadLetterPolicy(initial_subscription="a/b")


# --- retry topics ----------------------------------------------------------------------------------------------------


class LoopClock:
    """Wall clock of a virtual loop."""

    def now_ms(self) -> int:
        """Since the loop began."""
        return round(asyncio.get_running_loop().time() * 1000)


@in_virtual_time
async def test_a_message_comes_again_by_way_of_the_retry_topic_and_is_buried_in_the_end() -> None:
    async with serving() as server, connect_to(server, clock=LoopClock()) as client:
        producer = await client.create_producer("t")
        policy = DeadLetterPolicy(max_redeliver_count=2)
        consumer = await client.subscribe(
            "t", "s", type="shared", start="earliest", retry=True, dead_letter=policy
        )
        assert consumer.topics == [f"persistent://public/default/{name}" for name in ("t", RETRY)]
        origin = await producer.send(b"later", key="k", properties={"a": "1"})
        loop = asyncio.get_running_loop()
        message = await consumer.receive(5.0)
        for times, delay in ((1, 20.0), (2, 5.0)):
            began = loop.time()
            await consumer.reconsume_later(message, delay, properties={"why": "busy"})
            message = await consumer.receive(100.0)
            assert delay <= loop.time() - began <= delay + 0.5
            assert (message.value, message.key, message.redelivery_count) == (b"later", "k", 0)
            assert dict(message.properties) == {
                "a": "1",
                "why": "busy",
                "REAL_TOPIC": "persistent://public/default/t",
                "REAL_SUBSCRIPTION": "s",
                "ORIGIN_MESSAGE_ID": str(origin),
                "RECONSUMETIMES": str(times),
                "DELAY_TIME": str(round(delay * 1000)),
                "LETTER_TOPIC": f"persistent://public/default/{RETRY}",
            }
        await consumer.reconsume_later(message, 1.0)
        (buried,) = await dead(client, count=1)
        assert (buried.properties["RECONSUMETIMES"], buried.properties["ORIGIN_MESSAGE_ID"]) == (
            "3",
            str(origin),
        )
        for topic in ("t", RETRY):
            await drained(client, topic=topic)


@in_virtual_time
async def test_what_is_not_due_in_a_retry_topic_survives_its_consumer_and_is_not_counted() -> None:
    async with serving() as server, connect_to(server, clock=LoopClock()) as client:
        producer = await client.create_producer("t")
        policy = DeadLetterPolicy(max_redeliver_count=1)
        options: dict[str, Any] = {
            "type": "shared",
            "start": "earliest",
            "retry": True,
            "dead_letter": policy,
        }
        first = await client.subscribe("t", "s", **options)
        await producer.send_many([b"a", b"b", b"c"])
        loop = asyncio.get_running_loop()
        began = loop.time()
        for message, delay in zip(await take(first, 3), (50.0, 40.0, 0.0), strict=True):
            await first.reconsume_later(message, delay)
        assert (await first.receive(1.0)).value == b"c"
        for _ in range(4):  # more often than the limit
            await asyncio.sleep(1.0)
            await first.close()
            first = await client.subscribe("t", "s", **options)
            await first.ack(await first.receive(1.0)) if _ == 0 else None
        found = [(await first.receive(100.0), round(loop.time() - began)) for _ in range(2)]
        assert [(m.value, m.redelivery_count, at) for m, at in found] == [(b"b", 0, 40), (b"a", 0, 50)]


async def test_reconsume_later_without_a_retry_topic_or_a_message_is_refused() -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        await producer.send(b"m")
        plain = await client.subscribe("t", "plain", type="shared", start="earliest")
        dead_letter = DeadLetterPolicy(max_redeliver_count=1)
        buried = await client.subscribe("t", "b", type="shared", start="earliest", dead_letter=dead_letter)
        for consumer in (plain, buried):
            with pytest.raises(InvalidArgument, match="subscribe with retry=True"):
                await consumer.reconsume_later(await consumer.receive(5.0))
        retry = await client.subscribe("t", "s", type="shared", start="earliest", retry=True)
        message = await retry.receive(5.0)
        wrong: Any = message.id
        with pytest.raises(InvalidArgument, match="takes a message, not MessageId"):
            await retry.reconsume_later(wrong)
        with pytest.raises(InvalidArgument, match="delay"):
            await retry.reconsume_later(message, -1.0)


async def test_a_cancelled_reconsume_later_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s", type="shared", start="earliest", retry=True, nack_delay=0)
        await producer.send(b"m")
        message = await consumer.receive(5.0)
        send: Any = type(producer).send

        async def never(self: Any, *given: Any, **named: Any) -> Any:
            await asyncio.Event().wait()

        monkeypatch.setattr(type(producer), "send", never)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await consumer.reconsume_later(message, 0.0)
        monkeypatch.setattr(type(producer), "send", send)
        consumer.nack(message)
        assert (await consumer.receive(5.0)).redelivery_count == 1


async def test_properties_that_are_no_numbers_are_zero() -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer(RETRY)
        consumer = await client.subscribe("t", "s", type="shared", start="earliest", retry=True)
        for strange in ("", "soon", "-5", "9" * 5000, "٣"):
            own = {"REAL_SUBSCRIPTION": "s", "LETTER_TOPIC": f"persistent://public/default/{RETRY}"}
            await producer.send(b"m", properties={**own, "DELAY_TIME": strange, "RECONSUMETIMES": strange})
            message = await consumer.receive(5.0)
            await consumer.reconsume_later(message, 0.0)
            assert (await consumer.receive(5.0)).properties["RECONSUMETIMES"] == "1"


# --- letters of letters ----------------------------------------------------------------------------------------------


async def refuse_all(consumer: Consumer, seconds: float) -> None:
    """What a service does whose every message is poison."""
    end = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < end:
        with contextlib.suppress(ReceiveTimeout):
            consumer.nack(await consumer.receive(0.2))


@pytest.mark.parametrize("pattern", [".*", ".*|x-DLQ|x-RETRY"])
@pytest.mark.parametrize("named", [False, True])
async def test_services_of_all_topics_make_no_letters_of_letters(pattern: str, named: bool) -> None:
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        await producer.send(b"poison")
        consumers = [
            await client.subscribe(
                re.compile(pattern), name, type="shared", start="earliest", nack_backoff=QUICK,
                dead_letter=DeadLetterPolicy(max_redeliver_count=1, topic=f"dead-{name}" if named else None),
            )
            for name in ("a", "b", "c")
        ]  # fmt: skip
        await asyncio.gather(*[refuse_all(consumer, 0.6) for consumer in consumers])
        topics = await client.admin.list_topics("public/default")
        stored = [(await client.admin.topic_stats(topic))["stored_messages"] for topic in topics]
        # Of three services with a pattern that asks for letters each may bury what the two others did, three times over.
        most = 3 + 6 + 12 if "DLQ" in pattern else 3
        assert sum(stored) - 1 <= most
        if "DLQ" not in pattern:
            assert len(topics) == 1 + 3


async def test_rule_49_bookkeeping_of_another_life_is_not_believed() -> None:
    """A letter that was sent again to its topic, with all of its properties, is a new message."""
    policy = DeadLetterPolicy(max_redeliver_count=2)
    async with serving() as server, connect_to(server) as client:
        producer = await client.create_producer("t")
        other = {
            "LETTER_TOPIC": "x",
            "LETTER_GENERATION": "9",
            "REAL_TOPIC": "y",
            "ORIGIN_MESSAGE_ID": "1:2:3",
        }
        properties = {
            **other,
            "RECONSUMETIMES": "77",
            "REAL_SUBSCRIPTION": "s",
            "DELAY_TIME": "99999999",
            "own": "1",
        }
        first = await producer.send(b"v", properties=properties)
        async with client.subscribe(
            "t", "s", type="shared", start="earliest", retry=True, dead_letter=policy
        ) as consumer:
            for topic in ("t", RETRY, RETRY):
                [message] = await take(consumer, 1)
                assert message.topic.endswith(f"/{topic}")
                await consumer.reconsume_later(message, delay=0.0)
            [letter] = await dead(client, count=1)
            assert letter.properties == {
                "REAL_TOPIC": "persistent://public/default/t", "REAL_SUBSCRIPTION": "s", "ORIGIN_MESSAGE_ID": str(first),
                "RECONSUMETIMES": "3", "DELAY_TIME": "0", "own": "1", "LETTER_GENERATION": "1",
                "LETTER_TOPIC": f"persistent://public/default/{DLQ}",
            }  # fmt: skip
        # What a stranger writes into the retry topic is handed out at once, and has its whole life before it.
        stranger = await client.create_producer(RETRY)
        await stranger.send(b"v", properties={**properties, "REAL_SUBSCRIPTION": "another"})
        async with client.subscribe(
            "t", "s", type="shared", start="earliest", retry=True, dead_letter=policy
        ) as consumer:
            [message] = await take(consumer, 1)
            await consumer.reconsume_later(message, delay=0.0)
            [message] = await take(consumer, 1)
            assert message.properties["RECONSUMETIMES"] == "1"

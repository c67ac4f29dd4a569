"""Places that are held, while it is asked whether their holders are still there: whatever happens meanwhile."""

import asyncio
from typing import Any

import pytest

from magnetar.proto import commands as c
from magnetar.proto.errors import ConsumerBusy, MagnetarError, ProducerBusy, TopicInUse, TopicNotServed
from support.broker_kit import TOPIC, FakeClient, running_broker, settle


async def holding(broker: Any) -> tuple[FakeClient, FakeClient]:
    """One that holds all places and does not answer, and a newcomer."""
    old, new = FakeClient(broker), FakeClient(broker)
    await old.consumer()
    await old.consumer(2, "keys", type="key_shared", hash_ranges=[(0, 9)])
    await old.consumer(3, "", durable=False)
    await old.producer(name="p")
    old.answer_probes = False
    return old, new


def ask(new: FakeClient, kind: str) -> Any:
    match kind:
        case "exclusive":
            return new.ask(c.Subscribe, 1, "orders", "billing")
        case "another type":
            return new.ask(c.Subscribe, 1, "orders", "billing", "shared")
        case "durable":
            return new.ask(c.Subscribe, 1, "orders", "reader-1")
        case "hash ranges":
            return new.ask(c.Subscribe, 1, "orders", "keys", "key_shared", hash_ranges=[(5, 20)])
        case "delete subscription":
            return new.ask(c.DeleteSubscription, "orders", "billing")
        case "delete topic":
            return new.ask(c.DeleteTopic, "orders")
    return new.ask(c.CreateProducer, 1, "orders", "p")


PLACES = ["exclusive", "another type", "durable", "hash ranges", "producer"]
ALL = [*PLACES, "delete subscription", "delete topic"]


@pytest.mark.parametrize("kind", ALL)
async def test_rule_53_who_does_not_answer_loses_its_place(kind: str) -> None:
    async with running_broker() as broker:
        old, new = await holding(broker)
        asked = ask(new, kind)
        await settle()
        assert old.probes
        assert not asked.done()
        old.handler.connection_closed(None)
        for probe in old.probes:
            probe.set_result(None)
        await asked


@pytest.mark.parametrize("kind", ALL)
async def test_who_answers_keeps_its_place(kind: str) -> None:
    async with running_broker() as broker:
        old, new = await holding(broker)
        old.answer_probes = True
        with pytest.raises((ConsumerBusy, ProducerBusy, TopicInUse)):
            await ask(new, kind)


@pytest.mark.parametrize("kind", ["exclusive", "hash ranges", "producer"])
async def test_the_connection_that_asks_is_not_asked(kind: str) -> None:
    async with running_broker() as broker:
        old, _ = await holding(broker)
        if kind == "exclusive":
            asked = old.ask(c.Subscribe, 9, "orders", "billing")
        elif kind == "producer":
            asked = old.ask(c.CreateProducer, 9, "orders", "p")
        else:
            asked = old.ask(c.Subscribe, 9, "orders", "keys", "key_shared", hash_ranges=[(5, 20)])
        with pytest.raises((ConsumerBusy, ProducerBusy)):
            await asked
        assert not old.probes


@pytest.mark.parametrize("kind", ALL)
async def test_a_holder_that_leaves_by_itself_makes_room(kind: str) -> None:
    async with running_broker() as broker:
        old, new = await holding(broker)
        asked = ask(new, kind)
        await settle()
        for consumer_id in (1, 2, 3):
            await old.ask(c.CloseConsumer, consumer_id)
        await old.ask(c.CloseProducer, 1)
        for probe in old.probes:
            probe.set_result(None)
        await asked


@pytest.mark.parametrize("kind", ALL)
async def test_a_topic_that_ends_meanwhile_is_looked_up_again(kind: str) -> None:
    async with running_broker() as broker:
        old, new = await holding(broker)
        asked = ask(new, kind)
        await settle()
        gone = asyncio.create_task(broker.unload(TOPIC, TopicNotServed("it moves")))
        await settle()
        for probe in old.probes:
            probe.set_result(None)
        with pytest.raises(MagnetarError) as refused:
            await asked
        assert refused.value.retryable
        await gone


@pytest.mark.parametrize("kind", PLACES)
async def test_a_newcomer_that_is_gone_meanwhile_gets_nothing(kind: str) -> None:
    async with running_broker() as broker:
        old, new = await holding(broker)
        asked = ask(new, kind)
        await settle()
        new.handler.connection_closed(None)
        await settle()
        assert not any(probe.cancelled() for probe in old.probes), "others may wait for it"
        old.handler.connection_closed(None)
        for probe in old.probes:
            probe.set_result(None)
        await settle()
        topic = broker.topics[str(TOPIC)]
        assert not any(subscription.consumers for subscription in topic.subscriptions.values())
        assert len(topic.producers) == 0
        assert not asked.done()


async def test_of_two_newcomers_one_gets_the_place_and_the_other_is_refused() -> None:
    async with running_broker() as broker:
        old, new = await holding(broker)
        other = FakeClient(broker)
        asked = [ask(one, kind) for kind in ("exclusive", "producer") for one in (new, other)]
        await settle()
        old.handler.connection_closed(None)
        for probe in old.probes:
            probe.set_result(None)
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert [isinstance(result, ConsumerBusy | ProducerBusy) for result in results].count(True) == 2


async def test_the_active_consumer_of_a_failover_subscription_is_asked_when_another_one_joins() -> None:
    async with running_broker() as broker:
        old, new = FakeClient(broker), FakeClient(broker)
        await old.consumer(type="failover")
        await new.consumer(type="failover")
        assert len(old.probes) == 1
        assert not new.probes

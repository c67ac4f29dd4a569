"""Exclusive producers of a whole broker: durable epochs, fencing, those who wait, hand-over."""

import asyncio
from typing import Any, get_args

import pytest

from magnetar.broker import Broker
from magnetar.broker.log.records import TopicRecord, topic_path
from magnetar.broker.topics.core.producers import ACCESS_MODES, Producers
from magnetar.broker.topics.producer_access import let_in
from magnetar.broker.topics.topic import Topic
from magnetar.client.options import AccessMode
from magnetar.proto import commands as c
from magnetar.proto.errors import (
    AlreadyClosed,
    InvalidArgument,
    MagnetarError,
    ProducerBusy,
    ProducerFenced,
    QuorumLost,
    TopicBusy,
    TopicInUse,
    TopicNotServed,
)
from support.broker_kit import TOPIC, FakeClient, running_broker, settle
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore
from support.virtual_time import in_virtual_time


def opening(client: FakeClient, mode: str, producer_id: int = 1, **named: Any) -> "asyncio.Future[Any]":
    """Asks for access; the future of the answer."""
    future: asyncio.Future[Any] = client.ask(
        c.CreateProducer, producer_id, "orders", access_mode=mode, **named
    )
    return future


def delays(client: FakeClient) -> list[str]:
    """What it was told to wait for."""
    return [frame.message for frame, _ in client.frames if isinstance(frame, c.SendDelayed)]


async def stored_epoch(metadata: MemoryMetadataStore) -> int:
    """As whoever takes the topic over finds it."""
    found = await metadata.get(topic_path(TOPIC))
    assert found is not None
    return TopicRecord.decode(found.value, "").topic_epoch


async def values(broker: Broker, count: int) -> list[bytes]:
    """What a reader finds."""
    reader = FakeClient(broker)
    await reader.consumer(9, "", durable=False)
    return await reader.received(count)


async def test_an_exclusive_producer_is_alone_and_its_epoch_rises() -> None:
    async with running_broker() as broker:
        first, second = FakeClient(broker), FakeClient(broker)
        answer = await opening(first, "exclusive", name="leader")
        assert (answer["name"], answer["topic_epoch"]) == ("leader", 0)
        with pytest.raises(ProducerBusy, match="in use by producer 'leader'"):
            await second.producer()
        with pytest.raises(ProducerFenced, match="in use by producer 'leader'"):
            await opening(second, "exclusive")
        stats = await first.ask(c.TopicStats, "orders")
        (producer,) = stats["producers"]
        shown = {"name": "leader", "epoch": 0, "access_mode": "exclusive", "topic_epoch": 0}
        assert producer.items() >= shown.items()
        await first.ask(c.CloseProducer, 1)
        assert (await second.producer())["topic_epoch"] == -1
        await second.ask(c.CloseProducer, 1)
        assert (await opening(second, "exclusive"))["topic_epoch"] == 1
        for wrong in ({"topic_epoch": -2}, {"topic_epoch": 1 << 62}):
            with pytest.raises(InvalidArgument, match="topic epoch"):
                await opening(first, "exclusive", **wrong)


async def test_a_holder_that_does_not_answer_is_asked_first() -> None:
    async with running_broker() as broker:
        holder, newcomer = FakeClient(broker), FakeClient(broker)
        await opening(holder, "exclusive")
        holder.answer_probes = False
        coming = opening(newcomer, "exclusive")
        await settle()
        assert not coming.done()
        holder.close()  # nothing came from it in time
        holder.probes[0].set_result(None)
        assert (await coming)["topic_epoch"] == 1


async def check_durable_before_it_is_let_in() -> None:
    """The head in metadata has the epoch when the producer learns it; an epoch that cannot be stored lets nobody in."""
    metadata = MemoryMetadataStore()
    async with running_broker(None, metadata) as broker:
        client, other, gate = FakeClient(broker), FakeClient(broker), asyncio.Event()
        ledgers = (await broker.topic(TOPIC, create=True)).ledger.list
        commit = ledgers.commit

        async def slow(**changed: Any) -> None:
            await gate.wait()
            await commit(**changed)

        ledgers.commit = slow  # type: ignore[method-assign]
        coming = opening(client, "exclusive", name="p")
        await settle()
        assert not coming.done()
        with pytest.raises(TopicBusy, match="producer 'p'"):
            await other.producer()  # the place is taken all the same
        gate.set()
        assert (await coming)["topic_epoch"] == 0
        assert await stored_epoch(metadata) == 0

        async def fails(**changed: Any) -> None:
            raise QuorumLost("the store is away")

        await client.ask(c.CloseProducer, 1)
        ledgers.commit = fails  # type: ignore[method-assign]
        with pytest.raises(QuorumLost):
            await opening(client, "exclusive", name="p")
        await other.producer()  # nothing is left of it


async def test_the_epoch_is_durable_before_its_producer_is_let_in() -> None:
    await check_durable_before_it_is_let_in()


@pytest.mark.parametrize("succeeds", [True, False])
async def test_whose_connection_breaks_while_its_epoch_is_stored_is_not_refused_for_good(
    succeeds: bool,
) -> None:
    """Neither is who had the place before, if it keeps it: the epoch is not stored."""
    metadata = MemoryMetadataStore()
    async with running_broker(None, metadata) as broker:
        before, first, again = FakeClient(broker), FakeClient(broker), FakeClient(broker)
        assert (await opening(before, "exclusive", name="before"))["topic_epoch"] == 0
        before.close()
        ledgers, gate = broker.topics[str(TOPIC)].ledger.list, asyncio.Event()
        commit = ledgers.commit

        async def slow(**changed: Any) -> None:
            await gate.wait()
            if not succeeds:
                raise QuorumLost("the store is away")
            await commit(**changed)

        ledgers.commit = slow  # type: ignore[method-assign]
        opening(first, "exclusive", name="p")
        await settle()
        first.close()
        claims: list[dict[str, Any]] = [
            {"name": "p", "epoch": 1},
            {"name": "before", "epoch": 1, "topic_epoch": 0},
        ]
        for claim in claims:
            with pytest.raises(TopicBusy, match="try again"):
                await opening(again, "exclusive", **claim)
        gate.set()
        await settle()
        ledgers.commit = commit  # type: ignore[method-assign]
        came_back = opening(again, "exclusive", 2, name="before", epoch=1, topic_epoch=0)
        if succeeds:
            with pytest.raises(ProducerFenced, match="the topic has epoch 1 now"):
                await came_back
            assert (await opening(again, "exclusive", name="p", epoch=1))["topic_epoch"] == 2
        else:
            assert (await came_back)["topic_epoch"] == 0


async def check_two_exclusive_producers_after_a_hand_over() -> None:
    """The first owner was cut off and does not know that the topic has moved: only one of the two stores anything."""
    metadata, ledgers = MemoryMetadataStore(), FakeLedgers()
    async with running_broker(ledgers, metadata) as old, running_broker(ledgers, metadata) as new:
        first, second = FakeClient(old), FakeClient(new)
        assert (await opening(first, "exclusive", name="first"))["topic_epoch"] == 0
        first.publish(b"1")
        await first.confirmed(1)
        # The new owner: the first producer has not found it yet.
        assert (await opening(second, "exclusive", name="second"))["topic_epoch"] == 1
        first.publish(b"lost", first=1)
        second.publish(b"2")
        await second.confirmed(1)
        await settle()
        assert [row[0] for row in first.receipts] == [0]
        again = FakeClient(new)
        with pytest.raises(ProducerFenced, match="under epoch 0, and the topic has epoch 1 now"):
            await opening(again, "exclusive", name="first", epoch=1, topic_epoch=0)
        await second.ask(c.CloseProducer, 1)
        with pytest.raises(ProducerFenced):  # it stays so, whoever is there
            await opening(again, "exclusive_with_fencing", name="first", epoch=1, topic_epoch=0)
        assert await values(new, 2) == [b"1", b"2"]


async def test_two_exclusive_producers_after_a_hand_over_never_both_store() -> None:
    await check_two_exclusive_producers_after_a_hand_over()


async def test_an_exclusive_producer_keeps_its_place_over_a_hand_over() -> None:
    metadata, ledgers = MemoryMetadataStore(), FakeLedgers()
    async with running_broker(ledgers, metadata) as broker:
        first, waiting = FakeClient(broker), FakeClient(broker)
        await opening(first, "exclusive", name="first")
        coming = opening(waiting, "wait_for_exclusive", name="standby")
        await settle()
        await broker.unload(TOPIC, TopicNotServed("the topic moves"))
        with pytest.raises(TopicNotServed):
            await coming
        # Who waits may be the first to find the new owner.
        coming = opening(waiting, "wait_for_exclusive", name="standby")
        await settle()
        assert not coming.done()
        answer = await opening(first, "exclusive", name="first", epoch=1, topic_epoch=0)
        assert answer["topic_epoch"] == 0
        await first.ask(c.CloseProducer, 1)
        assert (await coming)["topic_epoch"] == 1


async def check_what_a_fenced_producer_has_queued() -> None:
    """It lands before the new one is let in, or never."""
    ledgers = FakeLedgers()
    async with running_broker(ledgers) as broker:
        old, new = FakeClient(broker), FakeClient(broker)
        await old.producer(name="old")
        old.publish(b"0")
        await old.confirmed(1)
        ledgers.hold = True
        old.publish(b"1", first=1)
        await settle()
        old.publish(b"2", first=2)
        coming = opening(new, "exclusive_with_fencing", name="new")
        await settle()
        old.publish(b"late", first=3)
        assert not coming.done(), "what was queued can still land"
        ledgers.hold = False
        ledgers.confirm()
        await coming
        topic = broker.topics[str(TOPIC)]
        assert topic.publish_budget.used == 0, "something queued has not landed yet"
        new.publish(b"first")
        await new.confirmed(1)
        assert await values(broker, 4) == [b"0", b"1", b"2", b"first"]
        closed = [frame for frame, _ in old.frames if isinstance(frame, c.CloseProducer)]
        assert [frame.code for frame in closed] == [ProducerFenced.code]
        assert "'new' has taken topic" in closed[0].message


async def test_rule_33_what_a_fenced_producer_has_queued_lands_before_the_new_one_is_let_in() -> None:
    await check_what_a_fenced_producer_has_queued()


async def test_who_waits_is_told_for_whom_and_leaves_when_it_gives_up() -> None:
    async with running_broker() as broker:
        holder, first, second, third = (FakeClient(broker) for _ in range(4))
        await holder.producer(name="a")
        opened = [
            opening(client, "wait_for_exclusive", name=f"w{n}")
            for n, client in enumerate((first, second, third))
        ]
        await settle()
        assert delays(first) == [f"topic {TOPIC} is in use by producer 'a' (shared)"]
        assert "producer 'a' (shared), producer 'w0' (waits: wait_for_exclusive)" in delays(second)[0]
        topic = broker.topics[str(TOPIC)]
        stats = await holder.ask(c.TopicStats, "orders")
        assert stats["waiting_producers"] == 3
        first.frame(c.CloseProducer(0, 1))  # cancelled
        with pytest.raises(AlreadyClosed):
            await opened[0]
        second.close()  # its connection breaks
        await settle()
        assert topic.producers.waiting == 1
        await holder.ask(c.CloseProducer, 1)
        assert (await opened[2])["topic_epoch"] == 0
        assert topic.producers.waiting == 0


async def test_a_topic_for_which_somebody_waits_is_in_use() -> None:
    async with running_broker() as broker:
        holder, waiting = FakeClient(broker), FakeClient(broker)
        await holder.producer()
        opened = opening(waiting, "wait_for_exclusive")
        await settle()
        topic = broker.topics[str(TOPIC)]
        holder.publish(b"x")
        await holder.confirmed(1)
        waits_alone = topic.producers.waiting
        assert (waits_alone, topic.in_use) == (1, True)
        with pytest.raises(TopicInUse, match="2 producer"):
            await waiting.ask(c.DeleteTopic, "orders")
        await holder.ask(c.DeleteTopic, "orders", True)
        with pytest.raises(MagnetarError):
            await opened


async def test_opening_its_id_again_keeps_the_place_of_an_exclusive_producer() -> None:
    """After a message that was refused, say: those who wait do not get in between."""
    async with running_broker() as broker:
        holder, waiting = FakeClient(broker), FakeClient(broker)
        await opening(holder, "exclusive", name="p")
        coming = opening(waiting, "wait_for_exclusive")
        await settle()
        answer = await opening(holder, "exclusive", name="p", epoch=1, topic_epoch=0)
        assert (answer["epoch"], answer["topic_epoch"]) == (1, 0)
        assert not coming.done()
        await holder.ask(c.CloseProducer, 1)
        assert (await coming)["topic_epoch"] == 1


@in_virtual_time
async def test_whose_connection_is_lost_has_the_grace_to_come_back() -> None:
    async with running_broker(exclusive_grace_ms=3_000) as broker:
        loop = asyncio.get_running_loop()
        holder, waiting = FakeClient(broker), FakeClient(broker)
        await opening(holder, "exclusive", name="p")
        coming = opening(waiting, "wait_for_exclusive")
        await settle()
        holder.close()
        lost_at = loop.time()
        assert (await coming)["topic_epoch"] == 1
        assert 3.0 <= loop.time() - lost_at < 3.1
        assert "may come back" in delays(waiting)[-1]


# --- planted defects -------------------------------------------------------------------------------------------------


async def test_planted_an_epoch_that_is_not_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def only_in_memory(self: Topic) -> int:
        return self.producers.topic_epoch + 1

    monkeypatch.setattr(Topic, "_store_epoch", only_in_memory)
    with pytest.raises(AssertionError):
        await check_durable_before_it_is_let_in()


async def test_planted_an_epoch_that_nobody_looks_at_after_a_hand_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    access = Producers._access

    def trusting(self: Producers, claim: Any, now: float) -> Any:
        if claim.topic_epoch >= 0:
            self.topic_epoch = max(self.topic_epoch, claim.topic_epoch)
            claim.topic_epoch = self.topic_epoch
        return access(self, claim, now)

    monkeypatch.setattr(Producers, "_access", trusting)
    with pytest.raises(AssertionError):
        await check_two_exclusive_producers_after_a_hand_over()


async def test_planted_an_epoch_that_is_forgotten_at_a_hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Topic.load

    async def forgetful(self: Topic, *, create: bool) -> bool:
        made = await load(self, create=create)
        self.producers.topic_epoch = -1
        return made

    async def only_in_memory(self: Topic) -> int:
        return self.producers.topic_epoch + 1

    monkeypatch.setattr(Topic, "load", forgetful)
    monkeypatch.setattr(Topic, "_store_epoch", only_in_memory)
    with pytest.raises(AssertionError):
        await check_two_exclusive_producers_after_a_hand_over()


async def test_planted_a_fenced_producer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def impatient(producers: Any, *given: Any) -> Any:
        for session in producers:
            session.outstanding, queued = 0, session.outstanding
            opened = await let_in(producers, *given)
            session.outstanding = queued
            return opened
        return await let_in(producers, *given)

    monkeypatch.setattr("magnetar.broker.topics.topic.let_in", impatient)
    with pytest.raises(AssertionError):
        await check_what_a_fenced_producer_has_queued()


def test_access_modes_are_those_that_clients_name() -> None:
    assert tuple(ACCESS_MODES) == get_args(AccessMode)

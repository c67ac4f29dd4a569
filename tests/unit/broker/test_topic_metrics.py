"""Metrics by topic and subscription: what they say, that they read nothing, and that they are bounded in number."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from magnetar.broker import Broker
from magnetar.broker.log.reading import LedgerReading
from magnetar.broker.service.stats import TopicOffsets
from magnetar.broker.service.topic_metrics import PULSAR_METRICS, TOPIC_METRICS, topic_metrics
from magnetar.broker.topics.topic import Topic
from magnetar.cli.wiring.metrics import service_metrics
from magnetar.ledger import StaticBookies
from magnetar.proto import commands as c
from magnetar.proto.ids import TopicName
from support.broker_kit import FakeClient, FakeClock, running_broker, settle
from unit.broker.test_cursor import publish

NAME = "persistent://public/default/orders"


async def figure(broker: Broker, name: str, *labels: str) -> float:
    return dict((await topic_metrics(broker))[name])[labels]


async def test_rule_54_the_lag_of_a_subscription_is_in_the_metrics_and_no_entry_is_read_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def read(*_: Any, **__: Any) -> Any:
        raise AssertionError("a scrape reads an entry")

    clock = FakeClock()
    async with running_broker(clock=clock) as broker:
        client = FakeClient(broker)
        await client.consumer(type="shared")
        await publish(client, 4, batch=3)
        await client.received(12)
        monkeypatch.setattr(LedgerReading, "read_entry", read)
        both = (NAME, "billing")
        assert await figure(broker, "subscription_backlog_messages", *both) == 12
        assert await figure(broker, "subscription_backlog_bytes", *both) > 0
        assert await figure(broker, "subscription_unacked_messages", *both) == 12
        clock.now += 90_000
        assert await figure(broker, "subscription_oldest_unacknowledged_seconds", *both) == 90
        assert await figure(broker, "topic_messages_in", NAME) == 12
        assert await figure(broker, "topic_messages_out", NAME) == 12
        assert await figure(broker, "topic_published_entries", NAME) >= 1
        assert await figure(broker, "topic_publish_seconds", NAME) >= 0
        assert await figure(broker, "subscription_redelivered_messages", *both) == 0
        client.frame(c.Redeliver(0, 1, True), c.encode_rows(c.ACK_ROW, [client.messages[0].row()]))
        await settle()
        assert await figure(broker, "subscription_redelivered_messages", *both) == 1
        await client.ack(*[message.row() for message in client.messages])
        await settle()
        assert await figure(broker, "subscription_backlog_messages", *both) == 0
        assert await figure(broker, "subscription_backlog_bytes", *both) == 0
        assert await figure(broker, "subscription_oldest_unacknowledged_seconds", *both) == 0
        text = (await service_metrics(broker, None).render()).decode()
        assert f'magnetar_topic_messages_in_total{{topic="{NAME}"}} 12.0' in text
        labels = f'subscription="billing",topic="{NAME}"'
        assert f"magnetar_subscription_backlog_messages{{{labels}}} 0.0" in text
        assert "# HELP magnetar_subscription_oldest_unacknowledged_seconds Seconds since" in text
        assert "messages_in_total Messages that producers sent, over all topics of this broker, since" in text
        assert "publish_queue_bytes Publish queue bytes, over all topics of this broker, now\n" in text


async def test_topics_beyond_the_bound_are_summed_in_one_row() -> None:
    async with running_broker(max_topic_metrics=2) as broker:
        for number in range(5):
            topic = await broker.find(TopicName.parse(f"t{number}"))
            await topic.subscriptions.create("s", ("earliest", None))
            topic.messages_in = 10 * (number + 1)
        rows = await topic_metrics(broker)
        assert set(rows) == {*TOPIC_METRICS, *PULSAR_METRICS}
        assert [name for name, found in rows.items() if not found] == []
        assert [number for _, number in rows["topic_messages_in"]] == [10, 20, 120]
        assert rows["topic_messages_in"][-1][0] == ("",)
        assert [labels for labels, _ in rows["subscription_backlog_messages"]][-1] == ("", "")
        assert len(rows["subscription_backlog_messages"]) == 3


async def test_a_scrape_of_many_topics_takes_turns_with_the_rest_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_broker() as broker:
        for number in range(250):
            topic = await broker.find(TopicName.parse(f"t{number}"))
            await topic.subscriptions.create("s", ("earliest", None))
        looked = [0]  # in each turn
        make: Any = TopicOffsets.__init__

        def counted(self: Any, topic: Topic) -> None:
            looked[-1] += 1
            make(self, topic)

        monkeypatch.setattr(TopicOffsets, "__init__", counted)
        scrape = asyncio.create_task(service_metrics(broker, None).render())
        while not scrape.done():
            await asyncio.sleep(0)
            looked.append(0)
        assert sum(looked) == 250
        assert max(looked) <= 50
        assert (
            b'magnetar_topic_messages_in_total{topic="persistent://public/default/t249"} 0.0' in await scrape
        )


async def test_rule_54_too_few_bookies_for_a_new_ledger_are_named_in_the_whole_cluster() -> None:
    bookies = StaticBookies(["b1:3181"])
    three: dict[str, Any] = {"ensemble_size": 3, "write_quorum": 2, "ack_quorum": 2}
    async with running_broker(bookies=bookies, **three) as broker:
        await broker.look_for_problems()
        assert "ensemble_size" in broker.problems()["bookies"]
    async with running_broker(bookies=bookies, minimum_write_quorum=1, **three) as broker:
        await broker.look_for_problems()
        assert broker.problems() == {}


async def test_pulsars_names_stand_beside_ours_with_its_labels() -> None:
    async with running_broker(max_topic_metrics=1) as broker:
        client = FakeClient(broker)
        await client.consumer(type="shared")
        await publish(client, 4, batch=3)
        await client.received(12)
        topic = broker.topics[NAME]
        topic.rates.look(0.0, (0, 0, 0, 0))
        topic.rates.look(20.0, (100, 2_000, 40, 800))
        rows = await topic_metrics(broker)
        labels = ("standalone", "public/default", NAME)
        assert dict(rows["pulsar_in_messages"])[labels] == 12
        assert dict(rows["pulsar_rate_in"])[labels] == 5
        assert dict(rows["pulsar_throughput_out"])[labels] == 40
        assert dict(rows["pulsar_subscription_back_log"])[(*labels, "billing")] == 12
        assert dict(rows["pulsar_out_messages"])[(*labels, "billing")] == 12
        assert dict(rows["pulsar_subscription_consumers_count"])[(*labels, "billing")] == 1
        await broker.topic(TopicName.parse("orders-2"), create=True)
        rows = await topic_metrics(broker)
        assert [labels for labels, _ in rows["pulsar_in_messages"]] == [labels, ("standalone", "", "")]
        text = (await service_metrics(broker, None).render()).decode()
        place = f'cluster="standalone",namespace="public/default",topic="{NAME}"'
        assert f"pulsar_in_messages_total{{{place}}} 12.0" in text

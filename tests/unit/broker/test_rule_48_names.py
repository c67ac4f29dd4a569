"""A node among the topics whose name no topic can have costs itself: it is named, and the others are listed."""

from __future__ import annotations

import pytest

from magnetar.broker.export.orphans import find_staged
from magnetar.broker.export.topic_export import TopicExport
from magnetar.broker.log.records import TOPICS_ROOT, staged_ledger_path
from magnetar.broker.log.topic_names import list_topics
from magnetar.proto.ids import TopicName
from support.broker_kit import FakeClient, running_broker
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore

BAD = [
    f"{TOPICS_ROOT}/public/default/persistent/m m",
    f"{TOPICS_ROOT}/public/default/persistent/n n",
    f"{TOPICS_ROOT}/public/default/notes/x",
    f"{TOPICS_ROOT}/a tenant/default/persistent/x",
]


async def test_rule_48_a_name_that_no_topic_has_is_left_out_of_the_list_in_pages(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metadata = MemoryMetadataStore()
    async with running_broker(FakeLedgers(), metadata) as broker:
        names = [f"persistent://public/default/{name}" for name in ("a", "l", "z", "zz")]
        for name in names:
            await broker.topic(TopicName.parse(name), create=True)
        for path in BAD:
            await metadata.create(path, b"")
        for count in (1, 2, 3, 4, 100):
            listed: list[str] = []
            while page := await list_topics(
                broker.metadata, "", after=listed[-1] if listed else "", count=count
            ):
                assert len(page) <= count
                listed += page
            assert listed == names
        assert await list_topics(broker.metadata, "public/default", count=3) == names[:3]
        for path in BAD:
            assert path in caplog.text


async def test_rule_48_names_that_nobody_knows_do_not_keep_staged_ledgers_from_being_found() -> None:
    metadata = MemoryMetadataStore()
    async with running_broker(FakeLedgers(), metadata) as broker:
        client = FakeClient(broker)
        await client.producer()
        (topic,) = broker.topics.values()
        for path in (*BAD, staged_ledger_path(topic.name, 7), staged_ledger_path(topic.name, 7)[:-1] + "x"):
            await metadata.create(path, b"\xc1")

        async def export_of(_: TopicName) -> TopicExport:
            return topic.export

        async def look(_: TopicName) -> None:
            """Nothing else is to do."""

        await find_staged(metadata, lambda _: True, export_of, look)
        assert 7 in topic.export.staging

"""Policies: set by compare-and-set, resolved from topic to namespace to broker, and never acted on while not known."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from magnetar.broker import BrokerSettings
from magnetar.broker.log.records import NamespaceRecord, namespace_path
from magnetar.broker.topics.policies import NamespacePolicies
from magnetar.ledger import BookieFacts
from magnetar.metadata.store import Versioned
from magnetar.proto import commands as c
from magnetar.proto.errors import (
    ConnectionLost,
    InvalidArgument,
    InvalidSetting,
    NotAuthorized,
    TopicNotFound,
    VersionConflict,
)
from magnetar.proto.policies import Policies
from magnetar.proto.policy_table import BY_POLICY
from support.bookies import Bookies
from support.broker_kit import TOPIC, FakeClient, running_broker, settle
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore

SPACE = "public/default"
DEFAULTS = [
    [policy, "", getattr(BrokerSettings(), policy, row.default), "broker"]
    for policy, row in BY_POLICY.items()
    if not row.named
]
OFF, STORED = DEFAULTS[:3], DEFAULTS[3:]  # those of retention and TTL, and the others


async def set_policies(
    client: FakeClient, version: int, *, topic: str = "", namespace: str = "", **fields: Any
) -> Any:
    payload = msgspec.msgpack.encode(fields)
    return await client.ask(c.SetPolicies, topic, namespace, version, payload=payload)


class FailingStore(MemoryMetadataStore):
    """`failing`: paths that cannot be read now. `gate`: reads of namespaces wait for it before they return."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: set[str] = set()
        self.gate: asyncio.Event | None = None

    async def get(self, path: str) -> Versioned | None:
        """See MetadataStore."""
        if path in self.failing:
            raise ConnectionLost("the store is away")
        found = await super().get(path)
        if self.gate is not None and path.startswith("/namespaces"):
            await self.gate.wait()
        return found


async def test_the_nearest_level_counts_and_says_so() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.ask(c.CreateTopic, "orders")
        assert await client.ask(c.GetPolicies, "orders") == {
            "policies": {},
            "version": 0,
            "in_force": OFF + STORED,
        }
        assert await client.ask(c.GetPolicies, "", SPACE) == {
            "policies": {},
            "version": -1,
            "in_force": OFF + STORED,
        }
        common: dict[str, Any] = {
            "retention_ms": 9,
            "retention_bytes": 99,
            "message_ttl_ms": 7,
            "subscription_ttl_ms": {"a": 1},
        }
        assert await set_policies(client, -1, namespace=SPACE, **common) == {"version": 0}
        assert await set_policies(
            client, 0, topic="orders", retention_bytes=5, subscription_ttl_ms={"b": 2}
        ) == {"version": 1}
        found = await client.ask(c.GetPolicies, "orders")
        assert found["policies"] == {"retention_bytes": 5, "subscription_ttl_ms": {"b": 2}}
        assert found["version"] == 1
        assert found["in_force"] == [
            ["retention_ms", "", -1, "topic"],  # one of the two was set there
            ["retention_bytes", "", 5, "topic"],
            ["message_ttl_ms", "", 7, "namespace"],
            ["subscription_ttl_ms", "a", 1, "namespace"],
            ["subscription_ttl_ms", "b", 2, "topic"],
            *STORED,
        ]
        # A TTL of the topic comes before what the namespace says of a subscription.
        await set_policies(client, 1, topic="orders", message_ttl_ms=0)
        rows = {(row[0], row[1]): row[2:] for row in (await client.ask(c.GetPolicies, "orders"))["in_force"]}
        assert rows["subscription_ttl_ms", "a"] == [0, "topic"]
        assert rows["retention_ms", ""] == [9, "namespace"]


async def test_they_outlive_the_broker_and_go_with_their_topic() -> None:
    ledgers, metadata = FakeLedgers(), MemoryMetadataStore()
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await client.ask(c.CreateTopic, "orders")
        await client.producer()
        await set_policies(client, 0, topic="orders", retention_ms=5)
        await set_policies(client, -1, namespace=SPACE, message_ttl_ms=6)
        client.publish(b"a")
        await client.confirmed(1)
    async with running_broker(ledgers, metadata, retention_ms=-1, retention_bytes=-1) as broker:
        client = FakeClient(broker)
        in_force = (await client.ask(c.GetPolicies, "orders"))["in_force"]
        assert [row[2:] for row in in_force[:3]] == [[5, "topic"], [-1, "topic"], [6, "namespace"]]
        await client.ask(c.DeleteTopic, "orders")
        await client.ask(c.CreateTopic, "orders")
        in_force = (await client.ask(c.GetPolicies, "orders"))["in_force"]
        assert [row[2:] for row in in_force[:3]] == [[-1, "broker"], [-1, "broker"], [6, "namespace"]]


@pytest.mark.parametrize("level", [{"topic": "orders"}, {"namespace": SPACE}])
async def test_of_two_who_change_them_one_meets_a_conflict(level: dict[str, str]) -> None:
    async with running_broker() as broker:
        one, other = FakeClient(broker), FakeClient(broker)
        await one.ask(c.CreateTopic, "orders")
        version = (await one.ask(c.GetPolicies, level.get("topic", ""), level.get("namespace", "")))[
            "version"
        ]
        changed = await set_policies(one, version, **level, message_ttl_ms=5)
        with pytest.raises(
            VersionConflict, match=r"the policies of .* have changed since they were read; read them again"
        ):
            await set_policies(other, version, **level, message_ttl_ms=6)
        assert await set_policies(one, version, **level, message_ttl_ms=5) == changed, "the reply was lost"
        assert broker.topics[str(TOPIC)].not_served is None, "no fence"
        await set_policies(other, changed["version"], **level, message_ttl_ms=6)


async def test_bad_requests_are_refused() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        for fields in (("", ""), ("orders", SPACE)):
            with pytest.raises(InvalidArgument, match="of a topic or of a namespace: name one of the two"):
                await client.ask(c.GetPolicies, *fields)
            with pytest.raises(InvalidArgument, match="of a topic or of a namespace: name one of the two"):
                await client.ask(c.SetPolicies, *fields, 0)
        for namespace in ("public", "a/b/c", "a/", "a/b d"):
            with pytest.raises(InvalidArgument, match=r"not a namespace: .* \(want tenant/namespace\)"):
                await client.ask(c.GetPolicies, "", namespace)
        with pytest.raises(TopicNotFound):
            await set_policies(client, 0, topic="nowhere")
        with pytest.raises(InvalidArgument, match="'ttl' is no policy"):
            await set_policies(client, 0, topic="nowhere", ttl=5)
        client.forbidden = {"set_policies"}
        with pytest.raises(NotAuthorized):
            await set_policies(client, -1, namespace=SPACE)
    wrong: list[dict[str, Any]] = [
        {"retention_ms": 5},
        {"retention_ms": -2, "retention_bytes": -1},
        {"message_ttl_ms": -1},
    ]
    for settings in wrong:
        with pytest.raises(InvalidSetting):
            BrokerSettings(**settings)


async def test_what_another_process_sets_for_a_namespace_is_heeded() -> None:
    metadata = MemoryMetadataStore()
    async with running_broker(metadata=metadata) as broker, running_broker(metadata=metadata) as another:
        client = FakeClient(broker)
        await client.ask(c.CreateTopic, "orders")
        topic = broker.topics[str(TOPIC)]
        for version, ttl_ms in enumerate([5, 6, 7], -1):
            await set_policies(FakeClient(another), version, namespace=SPACE, message_ttl_ms=ttl_ms)
            await settle()
            in_force = topic.policies.in_force()
            assert in_force is not None
            assert in_force.ttl_ms("any") == (ttl_ms, "namespace")


async def test_a_change_while_they_are_read_is_not_missed() -> None:
    metadata = FailingStore()
    async with running_broker(metadata=metadata) as broker:
        client = FakeClient(broker)
        metadata.gate = asyncio.Event()
        creating = client.ask(c.CreateTopic, "orders")
        await settle()
        setting = asyncio.ensure_future(set_policies(client, -1, namespace=SPACE, message_ttl_ms=5))
        await settle()
        metadata.gate.set()
        await setting
        await creating
        await settle()
        in_force = broker.topics[str(TOPIC)].policies.in_force()
        assert in_force is not None
        assert in_force.ttl_ms("any") == (5, "namespace")


async def test_while_policies_cannot_be_read_nothing_is_trimmed_and_nothing_expires() -> None:
    """Neither the broker's settings nor anybody else's policies stand in."""
    metadata, ledgers = FailingStore(), FakeLedgers()
    settings: dict[str, Any] = {"max_ledger_entries": 1, "message_ttl_ms": 1}
    async with running_broker(ledgers, metadata, **settings) as broker:
        client = FakeClient(broker)
        await client.producer()
        await client.consumer(subscription="s", permits=0)
        for number in range(3):
            client.publish(b"%d" % number, first=number)
            await client.confirmed(number + 1)
        await settle()
        metadata.failing.add(namespace_path(SPACE))
        await metadata.create(namespace_path(SPACE), NamespaceRecord(Policies()).encode())
        await settle()
        topic = broker.topics[str(TOPIC)]
        assert topic.subscriptions["s"].cursor.skip_to(topic.ledger.list.end)
        await topic.subscriptions["s"].cursor.flush()

        len_before = len(topic.ledger.list.ledgers)

        async def ledgers_after_a_round() -> int:
            topic.maintain()
            await topic.maintenance.trimmed()
            topic.maintenance.expire()
            await topic.maintenance.expired()
            await settle()
            return len(topic.ledger.list.ledgers)

        assert await ledgers_after_a_round() == len_before
        figures = await client.ask(c.TopicStats, "orders")
        assert figures["retained_by"] == "the policies of its namespace are not known now"
        with pytest.raises(ConnectionLost):
            await client.ask(c.GetPolicies, "orders")
        metadata.failing.clear()
        await ledgers_after_a_round()  # the first one has them read
        await broker.namespaces.followed.learn(SPACE)
        assert await ledgers_after_a_round() < len_before


async def test_a_node_that_is_damaged_is_named_and_keeps_everything() -> None:
    metadata = MemoryMetadataStore()
    await metadata.create(namespace_path(SPACE), b"damaged")
    async with running_broker(metadata=metadata) as broker:
        client = FakeClient(broker)
        await client.ask(c.CreateTopic, "orders")
        assert broker.topics[str(TOPIC)].policies.in_force() is None
        with pytest.raises(Exception, match="metadata of /namespaces/public/default is damaged"):
            await client.ask(c.GetPolicies, "", SPACE)


LEVELS = [{"topic": "orders"}, {"namespace": SPACE}]
THREE: dict[str, Any] = {"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2}


@pytest.mark.parametrize("level", LEVELS)
async def test_what_the_bookies_cannot_carry_out_is_refused_when_it_is_set(level: dict[str, str]) -> None:
    bookies = Bookies("a", "b")
    directory = bookies.directory()
    ledgers = bookies.client(directory=directory)
    async with running_broker(ledgers, bookies.metadata) as broker:
        client = FakeClient(broker)
        await client.ask(c.CreateTopic, "orders")
        version = 0 if "topic" in level else -1
        wrong: list[tuple[dict[str, Any], str]] = [
            (THREE, r"ensemble_size=3 .*2 are known \(a, b\); start more .*--minimum-write-quorum"),
            (THREE | {"minimum_write_quorum": 3}, "ensemble_size=3"),
            ({"bookie_group": "fast"}, r"bookie_group=fast allows only bookies with the setting"),
        ]
        for policies, text in wrong:
            with pytest.raises(InvalidArgument, match=text):
                await set_policies(client, version, **level, **policies)
        directory.answered("b", BookieFacts(read_only=True))
        for policies in (
            {"ensemble_size": 2, "write_quorum": 2, "ack_quorum": 2},  # one of the two is away for a moment
            THREE | {"minimum_write_quorum": 1},  # bookies are still to come
            {"bookie_group": "preferred:fast"},
            {"broker_zone": "west"} if "namespace" in level else {"message_ttl_ms": 5},
        ):
            version = (await set_policies(client, version, **level, **policies))["version"]
    await ledgers.close()


async def test_what_the_settings_ask_for_in_vain_hinders_no_other_policy() -> None:
    bookies = Bookies("a")
    ledgers = bookies.client()
    async with running_broker(ledgers, bookies.metadata, **THREE) as broker:
        client = FakeClient(broker)
        await set_policies(client, -1, namespace=SPACE, message_ttl_ms=5)
        with pytest.raises(InvalidArgument, match="ensemble_size=3"):
            await set_policies(client, 0, namespace=SPACE, minimum_write_quorum=2)
        await set_policies(client, 0, namespace=SPACE, minimum_write_quorum=1)
    await ledgers.close()


async def test_a_group_without_brokers_is_refused() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        with pytest.raises(InvalidArgument, match=r"broker_group=west: no broker has .*preferred:west"):
            await set_policies(client, -1, namespace=SPACE, broker_group="west")
        await set_policies(client, -1, namespace=SPACE, broker_group="preferred:west")


async def test_rule_48_a_topic_that_cannot_follow_its_policies_costs_itself_only() -> None:
    namespaces = NamespacePolicies(MemoryMetadataStore()).followed
    followed: list[str] = []

    def fails() -> None:
        raise AssertionError("a defect of one topic")

    namespaces.listen("a/b", fails)
    namespaces.listen("a/b", lambda: followed.append("another topic"))
    await namespaces.learn("a/b")
    assert followed == ["another topic"]
    await namespaces.close()

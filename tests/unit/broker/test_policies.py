"""Policies: set by compare-and-set, resolved from topic to namespace to broker, and never acted on while not known."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker import BrokerSettings
from magnetar.broker.log.records import NamespaceRecord, namespace_path
from magnetar.broker.topics.policies import NamespacePolicies, Resolved, of_broker
from magnetar.ledger import BookieFacts
from magnetar.metadata.store import Versioned
from magnetar.proto import commands as c
from magnetar.proto.errors import (
    ConnectionLost,
    InvalidArgument,
    InvalidSetting,
    NotAuthorized,
    TopicNotFound,
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
    if not row.by_subscription
]
OFF, STORED = DEFAULTS[:3], DEFAULTS[3:]  # those of retention and TTL, and the others


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
        assert await client.change_policies(namespace=SPACE, **common) == {"version": 0}
        assert await client.change_policies(
            topic="orders", retention_bytes=5, subscription_ttl_ms={"b": 2}
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
        await client.change_policies(topic="orders", message_ttl_ms=0, retention_bytes=None)
        rows = {(row[0], row[1]): row[2:] for row in (await client.ask(c.GetPolicies, "orders"))["in_force"]}
        assert rows["subscription_ttl_ms", "a"] == [0, "topic"]
        assert rows["retention_ms", ""] == [9, "namespace"]


async def test_they_outlive_the_broker_and_go_with_their_topic() -> None:
    ledgers, metadata = FakeLedgers(), MemoryMetadataStore()
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await client.ask(c.CreateTopic, "orders")
        await client.producer()
        await client.change_policies(topic="orders", retention_ms=5)
        await client.change_policies(namespace=SPACE, message_ttl_ms=6)
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


@pytest.mark.parametrize("level", ["topic", "partitioned topic", "namespace", "broker"])
async def test_of_changes_that_meet_none_is_lost(level: str) -> None:
    """From two brokers; of a topic its owner alone changes them."""
    metadata = MemoryMetadataStore()
    async with running_broker(metadata=metadata) as one, running_broker(metadata=metadata) as another:
        clients = [FakeClient(one), FakeClient(one if level == "topic" else another)]
        await clients[0].ask(c.CreateTopic, "orders", 2 if level == "partitioned topic" else 0)
        of: dict[str, Any] = (
            {"namespace": SPACE} if level == "namespace" else {} if level == "broker" else {"topic": "orders"}
        )
        policies = [
            policy for policy, row in BY_POLICY.items() if row.unit == "count" and "topic" in row.levels
        ][:6]
        changed: dict[str, Any] = {}
        asked = []
        for number, policy in enumerate(policies):
            changed[policy] = number + 1
            asked.append(clients[number % 2].change_policies(**of, **dict[str, Any]({policy: number + 1})))
        versions = [answer["version"] for answer in await asyncio.gather(*asked)]
        assert len(set(versions)) == len(policies)
        found = await clients[0].ask(c.GetPolicies, of.get("topic", ""), of.get("namespace", ""))
        assert found["policies"] == changed
        assert found["version"] == max(versions)
        again = await clients[1].change_policies(**of, **changed)
        assert again == {"version": max(versions)}, "its answer was lost"
        nothing: Any = dict.fromkeys(policies)
        await clients[0].change_policies(**of, **nothing)
        found = await clients[1].ask(c.GetPolicies, of.get("topic", ""), of.get("namespace", ""))
        assert found["policies"] == {}


async def test_what_is_set_for_all_brokers_reaches_the_topics_of_each() -> None:
    metadata = MemoryMetadataStore()
    async with running_broker(metadata=metadata) as one, running_broker(metadata=metadata) as another:
        client, other = FakeClient(one), FakeClient(another)
        await client.ask(c.CreateTopic, "orders")
        await other.ask(c.CreateTopic, "others")
        topics = [*one.topics.values(), *another.topics.values()]
        for ttl_ms, source in ((5, "broker"), (None, "broker"), (7, "broker")):
            await client.change_policies(message_ttl_ms=ttl_ms)
            await settle()
            for topic in topics:
                in_force = topic.policies.in_force()
                assert in_force is not None
                assert in_force.value("message_ttl_ms") == (ttl_ms or 0, source)
        await other.change_policies(namespace=SPACE, message_ttl_ms=0)
        await settle()
        in_force = topics[0].policies.in_force()
        assert in_force is not None
        assert in_force.value("message_ttl_ms") == (0, "namespace"), "0 is a value"
        assert (await other.ask(c.GetPolicies, "", ""))["policies"] == {"message_ttl_ms": 7}
        with pytest.raises(
            InvalidArgument, match="broker_zone is no policy of a broker; set it for the namespace"
        ):
            await client.change_policies(broker_zone="x")


_LEVELS = st.dictionaries(
    st.sampled_from(["message_ttl_ms", "max_producers", "publish_rate_messages", "max_consumers"]),
    st.integers(0, 3),
)


@given(st.lists(st.tuples(_LEVELS, _LEVELS), min_size=1, max_size=4))
def test_a_policy_is_that_of_the_first_level_that_has_it(
    steps: list[tuple[dict[str, int], dict[str, int]]],
) -> None:
    """Also when changes of two levels, and taking policies back, went before."""
    model: list[dict[str, int]] = [{}, {}]
    levels = [Policies(), Policies()]
    for step, changes in enumerate(steps):
        for at, values in enumerate(changes):
            fields = {name: None if step % 2 and value == 3 else value for name, value in values.items()}
            model[at] = {name: value for name, value in (model[at] | fields).items() if value is not None}
            levels[at] = levels[at].changed(fields)
    default = of_broker(BrokerSettings())
    resolved = Resolved((("topic", levels[0]), ("namespace", levels[1]), default))
    for policy, row in BY_POLICY.items():
        if row.by_subscription or policy in ("retention_ms", "retention_bytes"):
            continue
        sources = [
            (own[policy], name)
            for name, own in zip(("topic", "namespace"), model, strict=True)
            if policy in own
        ]
        assert resolved.value(policy) == (sources or [(default[1].value(policy), "broker")])[0]


async def test_bad_requests_are_refused() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        with pytest.raises(InvalidArgument, match="of a topic or of a namespace: name one of the two"):
            await client.ask(c.GetPolicies, "orders", SPACE)
        with pytest.raises(InvalidArgument, match="of a topic or of a namespace: name one of the two"):
            await client.change_policies("orders", SPACE)
        for namespace in ("public", "a/b/c", "a/", "a/b d"):
            with pytest.raises(InvalidArgument, match=r"not a namespace: .* \(want tenant/namespace\)"):
                await client.ask(c.GetPolicies, "", namespace)
        with pytest.raises(TopicNotFound):
            await client.change_policies(topic="nowhere")
        with pytest.raises(InvalidArgument, match="'ttl' is no policy"):
            await client.change_policies(namespace=SPACE, ttl=5)
        client.forbidden = {"set_policies"}
        with pytest.raises(NotAuthorized):
            await client.change_policies(namespace=SPACE)
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
        for ttl_ms in (5, 6, 7):
            await FakeClient(another).change_policies(namespace=SPACE, message_ttl_ms=ttl_ms)
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
        setting = asyncio.ensure_future(client.change_policies(namespace=SPACE, message_ttl_ms=5))
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
        wrong: list[tuple[dict[str, Any], str]] = [
            (THREE, r"ensemble_size=3 .*2 are known \(a, b\); start more .*--minimum-write-quorum"),
            (THREE | {"minimum_write_quorum": 3}, "ensemble_size=3"),
            ({"bookie_group": "fast"}, r"bookie_group=fast allows only bookies with the setting"),
        ]
        for policies, text in wrong:
            with pytest.raises(InvalidArgument, match=text):
                await client.change_policies(**level, **policies)
        directory.answered("b", BookieFacts(read_only=True))
        for policies in (
            {"ensemble_size": 2, "write_quorum": 2, "ack_quorum": 2},  # one of the two is away for a moment
            THREE | {"minimum_write_quorum": 1},  # bookies are still to come
            {"bookie_group": "preferred:fast"},
            {"broker_zone": "west"} if "namespace" in level else {"message_ttl_ms": 5},
        ):
            await client.change_policies(**level, **policies)
    await ledgers.close()


async def test_what_the_settings_ask_for_in_vain_hinders_no_other_policy() -> None:
    bookies = Bookies("a")
    ledgers = bookies.client()
    async with running_broker(ledgers, bookies.metadata, **THREE) as broker:
        client = FakeClient(broker)
        await client.change_policies(namespace=SPACE, message_ttl_ms=5)
        with pytest.raises(InvalidArgument, match="ensemble_size=3"):
            await client.change_policies(namespace=SPACE, minimum_write_quorum=2)
        await client.change_policies(namespace=SPACE, minimum_write_quorum=1)
    await ledgers.close()


async def test_a_group_without_brokers_is_refused() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        with pytest.raises(InvalidArgument, match=r"broker_group=west: no broker has .*preferred:west"):
            await client.change_policies(namespace=SPACE, broker_group="west")
        await client.change_policies(namespace=SPACE, broker_group="preferred:west")


async def test_rule_48_a_topic_that_cannot_follow_its_policies_costs_itself_only() -> None:
    namespaces = NamespacePolicies(MemoryMetadataStore(), BrokerSettings()).followed
    followed: list[str] = []

    def fails() -> None:
        raise AssertionError("a defect of one topic")

    namespaces.listen("a/b", fails)
    namespaces.listen("a/b", lambda: followed.append("another topic"))
    await namespaces.learn("a/b")
    assert followed == ["another topic"]
    await namespaces.close()


def test_the_table_has_the_defaults_of_the_settings() -> None:
    settings = BrokerSettings()
    for policy, row in BY_POLICY.items():
        assert getattr(settings, policy, row.default) == row.default, policy
    of_broker(settings)[1].check()


async def test_a_change_while_many_are_told_of_the_one_before_reaches_all_of_them() -> None:
    namespaces = NamespacePolicies(MemoryMetadataStore(), BrokerSettings())
    followed, seen = namespaces.followed, dict[int, int | None]()
    changing: list[asyncio.Future[int]] = []

    def told(number: int) -> None:
        known = followed.known("a/b")
        seen[number] = known and known.policies.message_ttl_ms
        if number == 30 and not changing:
            changing.append(asyncio.ensure_future(namespaces.change("a/b", {"message_ttl_ms": 2})))

    for number in range(100):
        followed.listen("a/b", partial(told, number))
    await namespaces.change("a/b", {"message_ttl_ms": 1})
    await followed.learn("a/b")
    await settle()
    assert set(seen.values()) == {2}
    await followed.close()

"""Nodes of the cluster that nobody can read: each costs what it speaks of, and nothing beside it."""

import pytest

from magnetar.broker.log.records import NamespaceRecord, namespace_path
from magnetar.broker.ownership.core.bundles import Bounds, Bundle, topic_hash
from magnetar.broker.ownership.records import TransferRecord, bounds_path, owner_path, transfer_path
from magnetar.proto.errors import DataDirectoryError, InvalidArgument
from magnetar.proto.ids import TopicName
from magnetar.proto.policies import Policies
from support.balance_kit import snapshot_of
from support.cluster_kit import Cluster, ClusterBroker, brokers
from unit.broker.ownership.test_ownership import until

GARBAGE = b"\xc1 not a record"
TOPICS = [TopicName.parse(f"topic-{number}") for number in range(20)]
NAMESPACE = "public/default"
BUNDLES = Bounds.even(4)


def bundle_of(name: TopicName) -> Bundle:
    return BUNDLES.bundle_of(name.full_namespace, topic_hash(name))


async def located(broker: ClusterBroker, name: TopicName) -> str:
    """The URL of the owner, when it is that broker's or another's."""
    return (await broker.ownership.locate(name, authoritative=True, unreachable="")).url


async def moved(cluster: Cluster, bundle: Bundle, source: str, target: str) -> None:
    """Asks for a move, and waits until it is done."""
    await cluster.brokers[source].ownership.administration.transfer(str(bundle), target)
    await until(lambda: bundle in cluster.brokers[target].ownership.held)


async def test_an_owner_node_that_cannot_be_read_costs_its_bundle_only() -> None:
    async with brokers("a", "b") as cluster:
        damaged = bundle_of(TOPICS[0])
        others = [name for name in TOPICS if bundle_of(name) != damaged]
        await cluster.metadata.create(owner_path(damaged), GARBAGE)
        await cluster.metadata.create(f"/owners/{NAMESPACE}/notes", b"of an operator")
        a = cluster.brokers["a"]
        for name in others:
            assert await located(a, name) == a.url
        with pytest.raises(DataDirectoryError, match=f"{owner_path(damaged)}.*delete it"):
            await located(a, TOPICS[0])
        # Requests are still carried out.
        await moved(cluster, bundle_of(others[0]), "a", "b")
        rows = await a.ownership.administration.bundles(NAMESPACE)
        assert [row.broker for row in rows].count("") == 1
        assert len((await snapshot_of(a.ownership)).owners) == 3
        await cluster.metadata.delete(owner_path(damaged))
        await until(lambda: a.ownership.view.owners(NAMESPACE).known is None)
        assert await located(a, TOPICS[0]) == a.url


async def test_bounds_that_cannot_be_read_cost_their_namespace_only() -> None:
    async with brokers("a", "b") as cluster:
        await cluster.metadata.create(bounds_path("t/damaged"), GARBAGE)
        request = TransferRecord("b", False, "asked for").encode()
        await cluster.metadata.create(transfer_path(Bundle("t/damaged", 0, 2**32 - 1)), request)
        await cluster.metadata.create("/transfers/notes", GARBAGE)
        a = cluster.brokers["a"]
        with pytest.raises(DataDirectoryError, match=bounds_path("t/damaged")):
            await located(a, TopicName.parse("t/damaged/x"))
        assert await located(a, TOPICS[0]) == a.url
        await moved(cluster, bundle_of(TOPICS[0]), "a", "b")


async def test_a_namespace_whose_policies_cannot_be_read_is_left_where_it_is() -> None:
    async with brokers("a") as cluster:
        a = cluster.brokers["a"]
        name = TopicName.parse("t/damaged/x")
        assert await located(a, name) == a.url
        await a.broker.topic(name, create=True)
        assert await located(a, TOPICS[0]) == a.url
        await cluster.metadata.put(namespace_path("t/damaged"), GARBAGE, version=0)
        bindings = (await snapshot_of(a.ownership)).bindings
        assert list(bindings) == ["t/damaged"]
        assert bindings["t/damaged"].strict
        assert await located(a, name) == a.url


async def test_a_broker_that_cannot_be_read_is_left_out() -> None:
    async with brokers("a") as cluster:
        await cluster.metadata.create("/brokers/z", GARBAGE)
        a = cluster.brokers["a"]
        assert [row.name for row in await a.ownership.administration.brokers()] == ["a"]
        assert await located(a, TOPICS[0]) == a.url


async def test_rule_48_policies_that_cannot_be_read_are_named_among_the_obstacles_of_a_drain() -> None:
    async with brokers("a", "b") as cluster:
        a = cluster.brokers["a"]
        await located(a, TOPICS[0])
        await cluster.metadata.create(namespace_path("t/damaged"), GARBAGE)
        await cluster.metadata.create(
            namespace_path("t/fine"), NamespaceRecord(Policies(broker_zone="nowhere")).encode()
        )
        with pytest.raises(InvalidArgument, match=namespace_path("t/damaged")):
            await a.ownership.administration.drain("b")

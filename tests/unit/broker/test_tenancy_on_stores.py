"""Tenants and namespaces on the embedded store, and on ZooKeeper whose servers lag behind each other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from magnetar.broker import Broker
from magnetar.broker.log.records import FORCED
from magnetar.broker.service.broker import BrokerService
from magnetar.broker.tenancy.objects import NAMESPACE
from magnetar.metadata.embedded import EmbeddedMetadataStore
from magnetar.proto.errors import MagnetarError, NotEmpty, NotFound, TopicBusy
from magnetar.proto.ids import TopicName
from support.broker_kit import running_broker
from unit.broker.test_partitions_on_zookeeper import brokers


class Everyone:
    """May do everything."""

    def authorize(self, operation: str, resource: str) -> None:
        """Allows it."""


ME = Everyone()


async def live(one: Broker, other: Broker) -> None:
    """From the creation of a tenant at one broker to the end of it at the other."""
    here, there = BrokerService(one).tenancy, BrokerService(other).tenancy
    await one.topic(TopicName.parse("orders"), create=True)
    await here.create_namespace(ME, "public/other")
    await one.topic(TopicName.parse("auto/made/orders"), create=True)
    await here.create_tenant(ME, "acme", admin_roles=["ann"])
    await here.create_namespace(ME, "acme/one", bundles=8)
    await there.set_properties(ME, "acme/one", {"color": "blue"})
    await asyncio.gather(
        *(here.grant(ME, "acme/one", f"a{number}", ["produce"]) for number in range(5)),
        *(there.grant(ME, "acme/one", f"b{number}", ["consume"]) for number in range(5)),
        there.update_tenant(ME, "acme", admin_roles=["bob"]),
    )
    assert len((await here.namespace(ME, "acme/one")).permissions) == 10
    assert await there.tenants(ME) == ["acme", "auto", "public"]
    assert await there.namespaces(ME, "public") == ["public/default", "public/other"]
    with pytest.raises(NotEmpty):
        await there.delete_tenant(ME, "acme")
    await one.partitioned.create(TopicName.parse("acme/one/parts"), 3)
    making = [one.topic(TopicName.parse(f"acme/one/{number}"), create=True) for number in range(5)]
    deleting = other.deletions.delete_namespace("acme/one", force=True)
    ended = await asyncio.gather(*making, deleting, return_exceptions=True)
    assert ended[-1] is None
    errors = [error for error in ended[:-1] if isinstance(error, BaseException)]
    assert all(isinstance(error, MagnetarError) for error in errors), errors
    await here.create_namespace(ME, "acme/one")
    await here.delete_namespace(ME, "acme/one")
    await there.delete_tenant(ME, "acme")
    with pytest.raises(NotFound):
        await here.tenant(ME, "acme")
    assert await one.metadata.children("/topics") == ["auto", "public"]
    for path in ("/partitioned", "/deletions"):
        assert await one.metadata.children(path) == []


async def test_on_the_embedded_store(tmp_path: Path) -> None:
    store = EmbeddedMetadataStore(str(tmp_path))
    async with running_broker(metadata=store) as broker:
        await live(broker, broker)
    await store.close()


@pytest.mark.parametrize("lag_s", [0.0, 0.4])
async def test_on_zookeeper(lag_s: float) -> None:
    async with brokers(2, 0.0, lag_s) as (one, other):
        await live(one, other)


async def test_a_topic_is_not_made_by_a_broker_that_does_not_know_of_the_deletion_yet() -> None:
    async with brokers(2, 0.0, 0.5) as (one, other):
        await other.topic(TopicName.parse("acme/one/a"), create=True)
        await one.objects.mark_deleted(NAMESPACE, "acme/one", FORCED)
        with pytest.raises(TopicBusy):
            await other.topic(TopicName.parse("acme/one/b"), create=True)

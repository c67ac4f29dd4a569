"""Several brokers of a cluster on one metadata store: who serves which topic, and how that changes."""

import asyncio
from typing import Any

import pytest

from magnetar.broker.ownership import transfers
from magnetar.broker.ownership.core.bundles import Bounds, topic_hash
from magnetar.broker.ownership.ownership import Located
from magnetar.broker.ownership.records import owner_path, transfer_path
from magnetar.broker.service.broker import BrokerService
from magnetar.broker.topics.core.producers import Claim
from magnetar.metadata import registration
from magnetar.proto import commands as c
from magnetar.proto.errors import (
    ConnectionLost,
    InvalidArgument,
    InvalidTopicName,
    NotFound,
    RequestTimeout,
    ServiceNotReady,
    TopicNotServed,
    Unsupported,
)
from magnetar.proto.ids import TopicName
from magnetar.proto.policies import Policies
from support.balance_kit import snapshot_of
from support.broker_kit import FakeClient, running_broker, settle
from support.cluster_kit import Cluster, ClusterBroker, brokers

TOPICS = [TopicName.parse(f"topic-{number}") for number in range(40)]
NAMESPACE = "public/default"


async def locate(
    broker: ClusterBroker, name: TopicName, *, authoritative: bool = False, unreachable: str = ""
) -> Located:
    """A look-up, as a listener makes it."""
    return await broker.ownership.locate(name, authoritative=authoritative, unreachable=unreachable)


async def owner(cluster: Cluster, name: TopicName, asked: str = "") -> ClusterBroker:
    """As a client finds the owner: follows answers that are not final."""
    by_url = {one.url: one for one in cluster.brokers.values()}
    broker = cluster.brokers[asked] if asked else next(iter(cluster.brokers.values()))
    authoritative = False
    for _ in range(10):
        found = await locate(broker, name, authoritative=authoritative)
        broker = by_url[found.url]
        if found.final:
            return broker
        authoritative = True
    raise AssertionError("a look-up goes in circles")


async def load_all(cluster: Cluster) -> dict[TopicName, str]:
    """Loads every topic where it belongs; the names of the owners."""
    found = {}
    for name in TOPICS:
        broker = await owner(cluster, name)
        await broker.broker.topic(name, create=True)
        found[name] = broker.broker.settings.name
    return found


async def loaded_pair(cluster: Cluster) -> tuple[ClusterBroker, ClusterBroker]:
    """All topics are loaded: the owner of the first one, and another broker."""
    await load_all(cluster)
    source = await owner(cluster, TOPICS[0])
    return source, next(one for one in cluster.brokers.values() if one is not source)


def keeps_all_but_one(source: ClusterBroker) -> asyncio.Event:
    """A move closes the first topic; the others stay until this is set."""
    gate = asyncio.Event()
    closing = source.broker.unload

    async def slowly(name: TopicName, error: Any) -> None:
        if name != TOPICS[0]:
            await gate.wait()
        await closing(name, error)

    source.broker.unload = slowly  # type: ignore[method-assign]
    return gate


def closed_at(source: ClusterBroker, *, at_once: int) -> list[TopicName]:
    """Topics that a move closes, so many at a time, in this order; all of them seem to have clients."""
    closed: list[TopicName] = []
    closing = source.broker.unload

    async def recorded(name: TopicName, error: Any) -> None:
        closed.append(name)
        await closing(name, error)

    source.broker.unload = recorded  # type: ignore[method-assign]
    source.broker.in_use = lambda name: True  # type: ignore[method-assign]
    source.ownership._transfers._on_their_way = asyncio.Semaphore(at_once)
    return closed


async def until(condition: Any) -> None:
    """Waits for what other tasks do."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


async def test_all_brokers_name_the_same_owner_and_only_it_serves() -> None:
    async with brokers("a", "b", "c", default_bundles=16) as cluster:
        owners = await load_all(cluster)
        assert len(set(owners.values())) > 1
        for name, owned_by in owners.items():
            for asked in cluster.brokers.values():
                assert await locate(asked, name) == Located(cluster.brokers[owned_by].url, True)
                if asked.broker.settings.name != owned_by:
                    with pytest.raises(TopicNotServed):
                        await asked.broker.topic(name, create=True)


async def test_look_ups_at_the_same_time_end_at_one_owner() -> None:
    async with brokers("a", "b", "c") as cluster:
        for name in TOPICS:
            found = await asyncio.gather(
                *(owner(cluster, name, asked) for asked in cluster.brokers for _ in "12345")
            )
            assert len({one.url for one in found}) == 1


async def test_rule_31_a_broker_that_lost_its_session_fences_every_topic_and_takes_part_again() -> None:
    async with brokers("a") as cluster:
        name = TOPICS[0]
        first = cluster.brokers["a"]
        topic = await (await owner(cluster, name)).broker.topic(name, create=True)
        second = await cluster.start("b")
        cluster.expire("a")
        assert not first.ownership.valid  # before any callback of the loop
        with pytest.raises(TopicNotServed):
            first.ownership.check(name)
        await until(lambda: topic.not_served is not None)
        with pytest.raises(TopicNotServed):
            topic.check_served()
        found = await owner(cluster, name, "b")
        await found.broker.topic(name, create=False)
        await until(lambda: first.ownership.valid)
        await second.ownership.administration.transfer(str(name), "a")
        assert await owner(cluster, name) is first


@pytest.mark.parametrize("stops", [False, True])
async def test_rule_31_a_topic_that_was_being_closed_when_the_session_was_lost_confirms_nothing(
    stops: bool,
) -> None:
    """Regression: its receipts went out in the next session of its broker, when the topic was another's."""
    async with brokers("a") as cluster:
        one = cluster.brokers["a"]
        name = TOPICS[0]
        await owner(cluster, name)
        client = FakeClient(one.broker)
        await client.producer(topic=name.name)
        client.publish(b"0")
        await client.confirmed(1)
        cluster.ledgers.hold = True
        client.publish(b"1", first=1)
        await settle()
        ending = one.broker.close() if stops else one.broker.unload(name, TopicNotServed("it moves"))
        closing = asyncio.create_task(ending)
        await settle()
        assert not closing.done()
        cluster.expire("a")
        await until(lambda: one.ownership.valid or closing.done())
        cluster.ledgers.confirm()
        await closing
        assert len(client.receipts) == 1


async def test_rule_34_a_broker_whose_session_is_lost_delivers_nothing() -> None:
    """Seed 81 of `once_delayed`: one that had stood still gave out again what was acknowledged at the next owner."""
    async with brokers("a") as cluster:
        one = cluster.brokers["a"]
        name = TOPICS[0]
        await owner(cluster, name)
        client = FakeClient(one.broker)
        await client.producer(topic=name.name)
        await client.consumer(topic=name.name)
        client.publish(b"0")
        assert await client.received(1) == [b"0"]
        cluster.expire("a")
        assert not one.ownership.valid  # before any callback of the loop
        client.frame(c.Redeliver(0, 1))
        await settle()
        assert client.values == [b"0"]


async def test_rule_31_an_owner_deletes_its_node_by_version() -> None:
    async with brokers("a", "b", default_bundles=1) as cluster:
        name = TOPICS[0]
        first = await owner(cluster, name)
        other = next(one for one in cluster.brokers.values() if one is not first)
        bundle = Bounds.even(1).bundles(NAMESPACE)[0]
        node = await cluster.metadata.get(owner_path(bundle))
        assert node is not None
        # Somebody else changes the node: the owner must not take it away.
        await cluster.metadata.put(owner_path(bundle), node.value, version=node.version)
        with pytest.raises(RequestTimeout, match="still at broker"):
            await other.ownership.administration.transfer(str(bundle), other.broker.settings.name)
        stored = await cluster.metadata.get(owner_path(bundle))
        assert stored is not None
        assert stored.version == node.version + 1


async def test_rule_31_what_a_broker_that_stops_hands_over_ends_with_its_session() -> None:
    """Seed 251 of `once`: it went on in the next session, and took away the next owner's node, of the same version."""
    async with brokers("a", default_bundles=1) as cluster:
        name = TOPICS[0]
        first = await owner(cluster, name)
        await first.broker.topic(name, create=True)
        second = await cluster.start("b")
        transfers = first.ownership._transfers
        asked, found, choosing = asyncio.Event(), asyncio.Event(), transfers._destination

        async def destination(bundle: Any, to: str) -> Any:
            asked.set()
            await found.wait()
            return await choosing(bundle, to)

        transfers._destination = destination  # type: ignore[method-assign]
        stopping = asyncio.create_task(first.broker.close())
        await asked.wait()
        cluster.expire("a")
        await until(lambda: first.ownership.valid or stopping.done())
        assert await owner(cluster, name, "b") is second
        path = owner_path(Bounds.even(1).bundles(NAMESPACE)[0])
        node = await cluster.metadata.get(path)
        found.set()
        await stopping
        assert node is not None
        assert await cluster.metadata.get(path) == node


async def test_a_transfer_moves_every_topic_of_the_bundle_and_clients_are_told_where() -> None:
    async with brokers("a", "b", default_bundles=1) as cluster:
        owners = await load_all(cluster)
        assert len(set(owners.values())) == 1
        source = cluster.brokers[owners[TOPICS[0]]]
        target = next(one for one in cluster.brokers.values() if one is not source)
        told: list[Any] = []

        class Port:
            peer: Any = None

            def receipts(self, rows: Any) -> None: ...

            def send_failed(self, sequence_id: int, error: Any) -> None: ...

            def send_delayed(self, error: Any) -> None: ...

            def hold(self, reason: str) -> None: ...

            def producer_closed(self, error: Any) -> None:
                told.append(error)

        topic = await source.broker.topic(TOPICS[3], create=False)
        await topic.open_producer(Claim("p", 0), lambda _: Port())
        await source.ownership.administration.transfer(str(TOPICS[0]), target.broker.settings.name)
        assert source.topics == []
        assert [row.broker for row in await source.ownership.administration.bundles(NAMESPACE)] == [
            target.broker.settings.name
        ]
        assert await cluster.metadata.children("/transfers") == []
        assert [error.details["url"] for error in told] == [target.url]
        assert isinstance(told[0], TopicNotServed)
        for name in TOPICS:
            found = await owner(cluster, name)
            assert found is target
            await found.broker.topic(name, create=False)
        assert len(target.topics) == len(TOPICS)


async def test_a_topic_may_be_loaded_at_the_destination_while_the_rest_of_its_bundle_still_moves() -> None:
    async with brokers("a", "b", default_bundles=1) as cluster:
        source, target = await loaded_pair(cluster)
        gate = keeps_all_but_one(source)
        moving = asyncio.create_task(
            source.ownership.administration.transfer(str(TOPICS[0]), target.broker.settings.name)
        )
        await until(lambda: TOPICS[0].name not in source.topics)
        assert await locate(source, TOPICS[0]) == Located(target.url, False)
        assert await locate(target, TOPICS[0], authoritative=True) == Located(target.url, True)
        await target.broker.topic(TOPICS[0], create=False)
        assert await locate(source, TOPICS[1]) == Located(source.url, True)
        gate.set()
        await moving
        assert await owner(cluster, TOPICS[1]) is target
        assert target.topics == [TOPICS[0].name]


async def test_topics_with_clients_leave_no_faster_than_their_next_owner_loads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers, "_LOADED_WITHIN_S", 60.0)
    async with brokers("a", "b", default_bundles=1) as cluster:
        source, target = await loaded_pair(cluster)
        closed = closed_at(source, at_once=4)
        moving = asyncio.create_task(
            source.ownership.administration.transfer(str(TOPICS[0]), target.broker.settings.name)
        )
        await until(lambda: len(closed) == 4 and len(source.topics) == len(TOPICS) - 4)
        for loaded in range(len(TOPICS)):
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(closed) == min(loaded + 4, len(TOPICS))
            await (await owner(cluster, closed[loaded])).broker.topic(closed[loaded], create=False)
            await until(lambda loaded=loaded: len(closed) == min(loaded + 5, len(TOPICS)))
        await moving
        assert len(target.topics) == len(TOPICS)


@pytest.mark.parametrize("limit", ["_LOADED_WITHIN_S", "_PACED_AT_STOP_S"])
async def test_a_broker_that_stops_does_not_wait_long_for_clients_that_do_not_come_back(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "_LOADED_WITHIN_S", 60.0)
    monkeypatch.setattr(transfers, limit, 0.005)
    async with brokers("a", "b", default_bundles=1) as cluster:
        await load_all(cluster)
        source = await owner(cluster, TOPICS[0])
        closed = closed_at(source, at_once=4)
        async with asyncio.timeout(5):
            await source.ownership.hand_over()
        assert len(closed) == len(TOPICS)


async def test_a_move_under_way_does_not_hold_up_a_broker_that_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it was paced for its own 20 s, and the other bundles were not handed over at all meanwhile."""
    monkeypatch.setattr(transfers, "_LOADED_WITHIN_S", 0.5)
    monkeypatch.setattr(transfers, "_PACED_AT_STOP_S", 0.005)
    async with brokers("a", "b", default_bundles=1) as cluster:
        source, target = await loaded_pair(cluster)
        closed = closed_at(source, at_once=1)
        moving = asyncio.create_task(
            source.ownership.administration.transfer(str(TOPICS[0]), target.broker.settings.name)
        )
        await until(lambda: closed)
        async with asyncio.timeout(10):  # 20 s if each topic were waited for
            await source.ownership.hand_over()
        assert len(closed) == len(TOPICS)
        moving.cancel()


async def test_a_move_does_not_wait_for_a_destination_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: until all topics were closed, one after another, clients were sent to a broker that had died."""
    monkeypatch.setattr(transfers, "_LOADED_WITHIN_S", 0.5)
    async with brokers("a", "b", default_bundles=1) as cluster:
        source, target = await loaded_pair(cluster)
        closed = closed_at(source, at_once=1)
        moving = asyncio.create_task(
            source.ownership.administration.transfer(str(TOPICS[0]), target.broker.settings.name)
        )
        await until(lambda: closed and not source.broker.has(closed[0]))
        await cluster.stop(target.broker.settings.name)
        await until(lambda: source.topics == [])  # 20 s if each topic were waited for
        moving.cancel()


async def test_a_broker_that_stops_does_not_wait_for_what_moves_to_it() -> None:
    """Regression: it waited as long as it may take to stop, and handed over nothing of its own then."""
    async with brokers("a", "b") as cluster:
        source, target = await loaded_pair(cluster)
        assert target.topics
        gate = keeps_all_but_one(source)
        moving = asyncio.create_task(
            source.ownership.administration.transfer(str(TOPICS[0]), target.broker.settings.name)
        )
        await until(lambda: TOPICS[0].name not in source.topics)
        await target.ownership.locate(TOPICS[0], authoritative=True, unreachable="")
        await cluster.start("c")
        async with asyncio.timeout(10):
            await target.ownership.hand_over()
        assert target.ownership.owned() == []
        gate.set()
        moving.cancel()


async def test_a_move_waits_for_no_topic_without_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_LOADED_WITHIN_S", 60.0)
    async with brokers("a", "b", default_bundles=1) as cluster:
        source, target = await loaded_pair(cluster)
        async with asyncio.timeout(5):
            await source.ownership.administration.transfer(str(TOPICS[0]), target.broker.settings.name)
        assert source.topics == []


async def test_two_clients_that_come_from_the_source_at_once_find_one_arrival() -> None:
    """Regression: both began one, and the node that was made belonged to neither."""
    async with brokers("a", "b", default_bundles=1) as cluster:
        source, target = await loaded_pair(cluster)
        gate = asyncio.Event()
        closing = source.broker.unload

        async def slowly(name: TopicName, error: Any) -> None:
            await closing(name, error)
            await gate.wait()

        source.broker.unload = slowly  # type: ignore[method-assign]
        moving = asyncio.create_task(source.ownership.administration.transfer(str(TOPICS[0]), ""))
        await until(lambda: len(source.topics) < len(TOPICS))
        closed = [name for name in TOPICS if name.name not in source.topics]
        target.ownership.view.owners(NAMESPACE).drop()
        found = await asyncio.gather(*(locate(target, name, authoritative=True) for name in closed))
        assert {one.url for one in found} == {target.url}
        gate.set()
        await moving
        await until(lambda: all(held.state.value == "owned" for held in target.ownership.held.values()))
        for name in TOPICS:
            assert await locate(source, name) == Located(target.url, True)
            await target.broker.topic(name, create=False)


async def test_a_bundle_that_does_not_arrive_is_let_go() -> None:
    async with brokers("a", "b", default_bundles=1) as cluster:
        source, target = await loaded_pair(cluster)
        gate = keeps_all_but_one(source)
        moving = asyncio.create_task(
            source.ownership.administration.transfer(str(TOPICS[0]), target.broker.settings.name)
        )
        await until(lambda: TOPICS[0].name not in source.topics)
        await locate(target, TOPICS[0], authoritative=True)
        await target.broker.topic(TOPICS[0], create=False)
        # The source goes in the middle of it, and a third one is faster.
        third = await cluster.start("c")
        cluster.expire(source.broker.settings.name)
        found = await owner(cluster, TOPICS[1], "c")
        assert found in (target, third, source)
        gate.set()
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
        await until(
            lambda: all(found is one or TOPICS[0].name not in one.topics for one in cluster.brokers.values())
        )


async def test_a_split_moves_nothing_and_keeps_every_owner() -> None:
    async with brokers("a", "b", default_bundles=1) as cluster:
        await load_all(cluster)
        source = await owner(cluster, TOPICS[0])
        loaded = {name: await source.broker.topic(name, create=False) for name in TOPICS}
        asked = next(one for one in cluster.brokers.values() if one is not source)
        parts = await asked.ownership.administration.split(f"{NAMESPACE}/0x00000000_0xffffffff")
        assert len(parts) == 2
        bundles = await asked.ownership.administration.bundles(NAMESPACE)
        assert [row.bundle for row in bundles] == parts
        assert {row.broker for row in bundles} == {source.broker.settings.name}
        for name, topic in loaded.items():
            assert await source.broker.topic(name, create=False) is topic
            assert await locate(asked, name) == Located(source.url, True)
        await asked.ownership.administration.transfer(parts[1], asked.broker.settings.name)
        half = int(parts[1].rpartition("/0x")[2][:8], 16)
        for name in TOPICS:
            assert await owner(cluster, name) is (source if topic_hash(name) < half else asked)


async def test_a_bundle_that_nobody_owns_is_divided_and_given_to_a_broker() -> None:
    async with brokers("a", "b", default_bundles=1) as cluster:
        a, b = cluster.brokers["a"].ownership, cluster.brokers["b"].ownership
        parts = await a.administration.split("other/space/0x00000000_0xffffffff")
        assert [row.bundle for row in await b.administration.bundles("other/space")] == parts
        assert len(parts) == 2
        await a.administration.transfer(parts[0], "")
        assert [row.broker for row in await b.administration.bundles("other/space")] == ["", ""]
        await a.administration.transfer(parts[1], "b")
        assert [row.broker for row in await a.administration.bundles("other/space")] == ["", "b"]


async def test_two_who_divide_a_bundle_that_nobody_owns_get_the_same_parts() -> None:
    async with brokers("a", "b", default_bundles=1) as cluster:
        a, b = cluster.brokers["a"].ownership, cluster.brokers["b"].ownership
        whole = "other/space/0x00000000_0xffffffff"
        await asyncio.gather(*(one.view.bounds("other/space") for one in (a, b)))
        of_a, of_b = await asyncio.gather(a.administration.split(whole), b.administration.split(whole))
        assert of_a == of_b
        assert len(of_a) == 2


async def test_a_bundle_that_was_divided_meanwhile_is_not_owned_as_a_whole() -> None:
    async with brokers("a", "b", default_bundles=1) as cluster:
        slow = cluster.brokers["b"]
        await slow.ownership.administration.bundles(NAMESPACE)  # knows the bounds as they were
        name = TOPICS[0]
        if await owner(cluster, name, "a") is slow:
            await cluster.brokers["a"].ownership.administration.transfer(str(name), "a")
        watched = slow.ownership.view._bounds.of(NAMESPACE)
        old = await watched.get()
        await cluster.brokers["a"].ownership.administration.split(f"{NAMESPACE}/0x00000000_0xffffffff")
        cluster.expire("a")
        watched.known = old  # as if the watch had not fired yet
        await locate(slow, name, authoritative=True)
        owned = [row for row in await slow.ownership.administration.bundles(NAMESPACE) if row.broker]
        assert owned
        assert all(not row.bundle.endswith("0x00000000_0xffffffff") for row in owned)


async def test_a_look_up_for_an_owner_that_cannot_be_reached_waits_for_its_successor() -> None:
    async with brokers("a", "b", "c") as cluster:
        name = TOPICS[0]
        dead = await owner(cluster, name)
        asked = next(one for one in cluster.brokers.values() if one is not dead)
        waiting = [asyncio.create_task(locate(asked, name, unreachable=dead.url)) for _ in range(100)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        cluster.expire(dead.broker.settings.name)
        found = await asyncio.gather(*waiting)
        assert all(located.url != dead.url for located in found)


async def test_an_owner_that_is_there_is_named_again_after_a_while() -> None:
    async with brokers("a", "b") as cluster:
        name = TOPICS[0]
        living = await owner(cluster, name)
        asked = next(one for one in cluster.brokers.values() if one is not living)
        assert await locate(asked, name, unreachable=living.url) == Located(living.url, True)


async def test_a_drained_broker_hands_over_everything_and_gets_nothing_until_that_is_undone() -> None:
    async with brokers("a", "b", default_bundles=8) as cluster:
        await load_all(cluster)
        a, b = cluster.brokers["a"], cluster.brokers["b"]
        await b.ownership.administration.drain("a", undo=False)
        await until(lambda: not a.topics and not a.ownership.held)
        assert {await owner(cluster, name) is b for name in TOPICS} == {True}
        assert (await locate(a, TopicName.parse("tenant/other/x"))).url == b.url
        assert (await b.ownership.administration.drain("a", undo=True)).over
        while (await b.ownership.administration.brokers())[0].state != "ready":
            await asyncio.sleep(0.001)
        await b.ownership.administration.transfer(str(TOPICS[0]), "a")
        assert await owner(cluster, TOPICS[0]) is a


async def test_a_broker_that_stops_hands_over_and_the_last_one_just_stops() -> None:
    async with brokers("a", "b", default_bundles=8) as cluster:
        await load_all(cluster)
        await cluster.stop("a")
        b = cluster.brokers["b"]
        for name in TOPICS:
            assert await owner(cluster, name) is b
            await b.broker.topic(name, create=False)
        await cluster.stop("b")
        assert await cluster.metadata.children("/brokers") == []


async def test_a_second_broker_of_a_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registration, "_START_PATIENCE_S", 0.0)
    async with brokers("a") as cluster:
        first = cluster.brokers["a"]
        with pytest.raises(ServiceNotReady, match=r"give this one a broker\.name of its own"):
            await cluster.start("a")
        assert caplog.text.count("another process is registered at /brokers/a") == 1
        assert first.ownership.valid


async def test_wrong_requests_have_one_clear_error() -> None:
    async with brokers("a") as cluster:
        ownership = cluster.brokers["a"].ownership
        await owner(cluster, TOPICS[0])
        with pytest.raises(InvalidArgument, match="has no bundle 0x00000000_0x00000001"):
            await ownership.administration.transfer("public/default/0x00000000_0x00000001", "")
        with pytest.raises(InvalidTopicName, match="want persistent://tenant/namespace/name"):
            await ownership.administration.transfer("nonsense/x/y/z", "")
        with pytest.raises(InvalidArgument, match="no broker zzz"):
            await ownership.administration.transfer(str(TOPICS[0]), "zzz")
        with pytest.raises(NotFound, match="no broker or bookie 'zzz'"):
            await ownership.administration.drain("zzz", undo=False)
        # Where it would go there is nobody.
        await ownership.administration.transfer(str(TOPICS[0]), "")
        assert await owner(cluster, TOPICS[0]) is cluster.brokers["a"]
        await cluster.metadata.get(transfer_path(Bounds.even(4).bundles(NAMESPACE)[0]))


async def test_a_broker_that_is_alone_owns_everything_and_unloads_what_it_is_asked_to() -> None:
    async with running_broker() as broker:
        assert await broker.ownership.locate(TOPICS[0], authoritative=False, unreachable="") == Located(
            broker.settings.service_url, True
        )
        service = BrokerService(broker)

        class Anyone:
            def authorize(self, operation: str, resource: str) -> None: ...

        assert len((await service.list_brokers(Anyone())).brokers) == 1
        with pytest.raises(Unsupported, match="alone"):
            await service.unload_bundle(Anyone(), str(TOPICS[0]), to="another")
        for named in (str(TOPICS[0]), (await service.list_bundles(Anyone(), NAMESPACE)).bundles[0].bundle):
            loaded = [await broker.find(name) for name in TOPICS[:2]]
            await service.unload_bundle(Anyone(), named)
            assert loaded[0].not_served is not None
            assert (loaded[1].not_served is None) == (named == str(TOPICS[0]))
            assert await broker.find(TOPICS[0]) is not loaded[0], "its next use loads it again"
        with pytest.raises(InvalidArgument):
            await service.unload_bundle(Anyone(), f"{NAMESPACE}/0x00000000_0x00000001")


async def test_an_owner_node_whose_answer_was_lost_is_found() -> None:
    async with brokers("a") as cluster:
        broker = cluster.brokers["a"]
        store = cluster.metadata
        real = store.commit
        lost = 0

        async def commit_and_lose(operations: Any) -> None:
            nonlocal lost
            await real(operations)
            lost += len(operations) == 2  # the bounds are checked, the owner's node is made
            if lost == 1 and len(operations) == 2:
                raise ConnectionLost("the answer is lost")

        store.commit = commit_and_lose  # type: ignore[method-assign]
        assert await locate(broker, TOPICS[0], authoritative=True) == Located(broker.url, True)
        assert lost == 1
        await broker.broker.topic(TOPICS[0], create=True)


async def test_a_namespace_is_confined_to_the_brokers_of_a_group_or_prefers_a_zone() -> None:
    async with brokers() as cluster:
        a = await cluster.start("a", group="fast", zone="x")
        b = await cluster.start("b", zone="y")
        namespaces = b.broker.namespaces
        await namespaces.change("t/confined", {"broker_group": "fast"})
        await namespaces.change("t/preferred", {"broker_group": "preferred:slow", "broker_zone": "y"})
        for number in range(20):
            assert (await locate(b, TopicName.parse(f"t/confined/{number}"))).url == a.url
            assert (await locate(a, TopicName.parse(f"t/preferred/{number}"))).url == b.url
        await cluster.stop("a")
        with pytest.raises(ServiceNotReady, match=r"no broker of group fast \(.* takes bundle t/confined"):
            await locate(b, TopicName.parse("t/confined/1"))


def test_brokers_are_policies_of_namespaces_alone() -> None:
    with pytest.raises(
        InvalidArgument, match="broker_zone is no policy of a topic; set it for the namespace"
    ):
        Policies(broker_zone="x").check().check_level("topic")
    with pytest.raises(
        InvalidArgument, match="broker_group is 'two words'; want the group that brokers have"
    ):
        Policies(broker_group="two words").check()


async def test_an_owner_says_since_when_it_has_what_was_moved_to_it() -> None:
    """So that a new leader of the balance does not move it back."""
    async with brokers("a", "b", default_bundles=2) as cluster:
        await load_all(cluster)
        one = await owner(cluster, TOPICS[0])
        other = next(found for found in cluster.brokers.values() if found is not one)
        placed = (await snapshot_of(one.ownership)).owners
        assert all(row.moved_ago_s > 600 for row in placed)
        await one.ownership.administration.transfer(str(TOPICS[0]), other.broker.settings.name)
        assert await owner(cluster, TOPICS[0]) is other
        moved = {row.bundle: row.moved_ago_s for row in (await snapshot_of(one.ownership)).owners}
        assert sorted(ago_s < 1 for ago_s in moved.values()) == [False, True]

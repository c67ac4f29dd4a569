"""What brokers of a cluster make of a metadata store that fails a request now and then. Found by the simulation."""

import asyncio
import contextlib
from typing import Any

import pytest

from magnetar.broker import ClientConnection
from magnetar.broker.ownership.balance import balancing
from magnetar.broker.ownership.balance.leader import BalanceLeader
from magnetar.broker.ownership.bundle_ownership import State
from magnetar.broker.ownership.core.bundles import Bounds, Bundle
from magnetar.broker.ownership.ownership import Located
from magnetar.broker.ownership.records import (
    READY,
    STOPPING,
    OwnerRecord,
    TransferRecord,
    broker_path,
    owner_path,
    transfer_path,
)
from magnetar.broker.service.broker import BrokerService
from magnetar.metadata.drains import BROKER, mark_drained
from magnetar.proto import commands as c
from magnetar.proto.errors import (
    ConnectionLost,
    MagnetarError,
    RequestTimeout,
    ServiceNotReady,
    TopicNotServed,
)
from support.cluster_kit import Cluster, brokers
from unit.broker.ownership.test_ownership import TOPICS, locate, owner, until


def fail_once(cluster: Cluster, method: str, path: str) -> list[str]:
    """The next request of this kind about a path is lost; a list of those that were."""
    real = getattr(cluster.metadata, method)
    lost: list[str] = []

    async def failing(asked: str, *arguments: Any, **options: Any) -> Any:
        if asked == path and not lost:
            lost.append(asked)
            raise ConnectionLost("the request is lost")
        return await real(asked, *arguments, **options)

    setattr(cluster.metadata, method, failing)
    return lost


async def test_a_broker_that_cannot_write_what_it_says_of_itself_keeps_its_session() -> None:
    async with brokers("a") as cluster:
        one = cluster.brokers["a"]
        topic = await (await owner(cluster, TOPICS[0])).broker.topic(TOPICS[0], create=True)
        session = one.ownership.session
        lost = fail_once(cluster, "put", broker_path("a"))
        await mark_drained(cluster.metadata, BROKER, "a")
        await until(lambda: lost)
        await one.ownership.administration.drain("a", undo=True)
        await until(lambda: one.ownership.state == READY)
        assert one.ownership.session is session
        assert topic.not_served is None


async def test_a_session_that_is_given_up_fences_every_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    async with brokers("a") as cluster:
        one = cluster.brokers["a"]
        topic = await (await owner(cluster, TOPICS[0])).broker.topic(TOPICS[0], create=True)

        def broken() -> dict[str, str]:
            raise RuntimeError("a defect, where the broker says what is wrong with it")

        monkeypatch.setattr(one.broker, "problems", broken)
        one.ownership.set_state(READY)
        await until(lambda: topic.not_served is not None)
        assert not one.ownership.held
        with pytest.raises(TopicNotServed):
            one.ownership.check(TOPICS[0])


async def test_a_request_whose_deletion_is_lost_is_deleted_all_the_same() -> None:
    async with brokers("a", "b", default_bundles=1) as cluster:
        name = TOPICS[0]
        source = await owner(cluster, name)
        (bundle,) = source.ownership.held
        lost = fail_once(cluster, "delete", transfer_path(bundle))
        assert len(await source.ownership.administration.split(str(bundle))) == 2
        assert lost
        assert await cluster.metadata.get(transfer_path(bundle)) is None


async def test_who_asks_an_owner_learns_that_the_store_was_late_and_not_the_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with brokers("a", default_bundles=1) as cluster:
        source = await owner(cluster, TOPICS[0])
        (bundle,) = source.ownership.held

        async def late() -> None:
            raise RequestTimeout("the store is late")

        monkeypatch.setattr(source.ownership.view.transfers, "get", late)
        with pytest.raises(RequestTimeout, match="the store is late"):
            await source.ownership.administration.split(str(bundle))
        assert await cluster.metadata.get(transfer_path(bundle)) is None


async def request_goes(cluster: Cluster, bundle: Bundle) -> None:
    """Asks for a move of the bundle, and waits until the request is deleted."""
    changes: list[bool] = []
    watch = cluster.metadata.watch(transfer_path(bundle), lambda _: changes.append(True))
    await cluster.metadata.create(transfer_path(bundle), TransferRecord("", False, "late").encode())
    await until(lambda: len(changes) == 2)  # made, and deleted
    watch.close()
    assert await cluster.metadata.get(transfer_path(bundle)) is None


async def test_a_request_about_a_bundle_that_was_divided_is_deleted() -> None:
    async with brokers("a", "b", default_bundles=1) as cluster:
        source = await owner(cluster, TOPICS[0])
        (bundle,) = source.ownership.held
        await source.ownership.administration.split(str(bundle))
        await request_goes(cluster, bundle)


async def test_a_request_to_an_owner_that_died_with_the_one_who_asked_is_deleted() -> None:
    """Regression: it stayed, and whoever owned the bundle one day would have let go of it again."""
    async with brokers("a", default_bundles=2) as cluster:
        source = await owner(cluster, TOPICS[0])
        held = set(source.ownership.held)
        (bundle,) = set(Bounds.even(2).bundles("public/default")) - held
        await request_goes(cluster, bundle)


async def test_a_move_that_could_not_be_announced_is_found_out() -> None:
    async with brokers("a", "b", default_bundles=1) as cluster:
        name = TOPICS[0]
        source = await owner(cluster, name)
        target = next(one for one in cluster.brokers.values() if one is not source)
        (bundle,) = source.ownership.held
        store: Any = cluster.metadata
        real_put, real_get, path = store.put, store.get, owner_path(bundle)
        answers = ["put", "get"]  # are lost

        async def put(asked: str, value: bytes, *, version: int) -> int:
            new: int = await real_put(asked, value, version=version)
            if asked == path and "put" in answers:
                answers.remove("put")
                raise ConnectionLost("the answer is lost")
            return new

        async def get(asked: str) -> Any:
            if asked == path and "put" not in answers and "get" in answers:
                answers.remove("get")
                raise ConnectionLost("the answer is lost")
            return await real_get(asked)

        store.put, store.get = put, get
        await source.ownership.administration.transfer(str(bundle), target.broker.settings.name)
        assert not answers
        assert await owner(cluster, name) is target
        assert not source.ownership.held


async def test_parts_that_are_found_before_the_answer_to_their_division_are_held_once() -> None:
    """Regression: a part was adopted, divided itself, and held again as a whole when the late answer came."""
    async with brokers("a", default_bundles=1) as cluster:
        broker, store = cluster.brokers["a"], cluster.metadata
        await owner(cluster, TOPICS[0])
        bundles = broker.ownership
        (whole,) = bundles.held
        committed, gate, real = asyncio.Event(), asyncio.Event(), store.commit

        async def commit_and_answer_late(operations: Any) -> None:
            await real(operations)
            if len(operations) == 4:  # bounds, the whole, its parts
                committed.set()
                await gate.wait()

        store.commit = commit_and_answer_late  # type: ignore[method-assign]
        dividing = asyncio.create_task(broker.ownership.administration.split(str(whole)))
        await committed.wait()
        bundles.view.drop(whole.namespace)
        bundles.look.set()
        for name in TOPICS:
            assert await locate(broker, name) == Located(broker.url, True)
        assert list(bundles.held) == [whole]
        gate.set()
        parts = await dividing
        assert sorted(map(str, bundles.held)) == sorted(parts)


@pytest.mark.parametrize("reads_fail", [False, True])
async def test_a_division_whose_answer_was_lost_is_found_by_reading(reads_fail: bool) -> None:
    async with brokers("a", default_bundles=1) as cluster:
        broker, store = cluster.brokers["a"], cluster.metadata
        await owner(cluster, TOPICS[0])
        bundles = broker.ownership
        (whole,) = bundles.held
        real, read = store.commit, store.children
        lost: list[str] = []

        async def commit_and_lose(operations: Any) -> None:
            await real(operations)
            if len(operations) == 4 and not lost:
                lost.append("commit")
                raise ConnectionLost("the answer is lost")

        async def children(path: str, **options: Any) -> list[str]:
            if reads_fail and lost == ["commit"] and path.startswith("/owners"):
                lost.append("read")
                raise ConnectionLost("the answer is lost")
            return await read(path, **options)

        store.commit, store.children = commit_and_lose, children  # type: ignore[method-assign]
        with contextlib.suppress(ConnectionLost):
            await broker.ownership.administration.split(str(whole))
        await until(lambda: len(bundles.held) == 2 and whole not in bundles.held)
        assert all(held.state is State.OWNED for held in bundles.held.values())
        assert len(lost) == 1 + reads_fail


async def test_look_ups_that_arrive_together_hold_one_bundle() -> None:
    async with brokers("a", "b", default_bundles=1) as cluster:
        name = TOPICS[0]
        source = await owner(cluster, name)
        target = next(one for one in cluster.brokers.values() if one is not source)
        (bundle,) = source.ownership.held
        closing = asyncio.Event()

        async def close_later(*_: Any) -> None:
            await closing.wait()

        transfers: Any = source.ownership._transfers
        transfers._close_topics = close_later
        moving = asyncio.create_task(
            source.ownership.administration.transfer(str(bundle), target.broker.settings.name)
        )
        held = source.ownership.held
        await until(lambda: bundle in held and held[bundle].state is State.MOVING)
        await asyncio.gather(*(locate(target, name, authoritative=True) for _ in range(5)))
        closing.set()
        await moving
        await until(lambda: target.ownership.held.get(bundle) is not None)
        await until(lambda: target.ownership.held[bundle].state is State.OWNED)


async def test_rule_31_the_receipt_of_an_acknowledgement_asks_whether_the_broker_is_valid() -> None:
    answers: list[Any] = []

    class Link:
        def answer(self, request_id: int, result: Any = None) -> None:
            answers.append(request_id)

        def answer_error(self, request_id: int, error: MagnetarError) -> None:
            answers.append(error)

    class Subscription:
        def acknowledge(self, consumer: Any, rows: Any, *, cumulative: bool, done: Any) -> None:
            self.done = done

    async with brokers("a") as cluster:
        one = cluster.brokers["a"]
        connection: Any = ClientConnection(BrokerService(one.broker))
        connection.connection_ready(Link())
        subscription = Subscription()
        opened = type("Opened", (), {"subscription": subscription, "consumer": None})()
        connection._consumer = lambda consumer_id: opened
        connection._ack(c.Ack(7, 1), b"")
        subscription.done(None)
        assert answers == [7]
        cluster.expire("a")
        subscription.done(None)
        assert isinstance(answers[1], TopicNotServed)


async def test_a_broker_whose_store_is_closed_first_does_not_spin() -> None:
    """Regression: it asked for a session without end, in one turn of the loop."""
    async with brokers("a") as cluster:
        await cluster.metadata.close()
        async with asyncio.timeout(5):
            await cluster.brokers["a"].broker.close()


async def test_a_look_up_that_chose_this_broker_finds_the_bundle_taken_meanwhile() -> None:
    """Regression: it expected the bundle to be on its way still, and failed by an assertion."""
    async with brokers("a", default_bundles=1) as cluster:
        one = cluster.brokers["a"]
        bundles: Any = one.ownership
        chosen, go_on = asyncio.Event(), asyncio.Event()
        choose = bundles.choose

        async def slowly(*arguments: Any, **options: Any) -> Any:
            name = await choose(*arguments, **options)
            chosen.set()
            await go_on.wait()
            return name

        bundles.choose = slowly
        slow = asyncio.create_task(locate(one, TOPICS[0]))
        await chosen.wait()
        found = await locate(one, TOPICS[1], authoritative=True)
        go_on.set()
        assert await slow == found == Located(one.url, True)


async def test_a_bundle_is_not_on_its_way_for_ever_when_taking_it_fails_by_a_defect() -> None:
    """Regression: look-ups then looked again without end, in one turn of the loop."""
    async with brokers("a", default_bundles=1) as cluster:
        one = cluster.brokers["a"]
        real: Any = cluster.metadata.commit

        async def broken(operations: Any) -> Any:
            if len(operations) == 1:
                return await real(operations)
            cluster.metadata.commit = real  # type: ignore[method-assign]
            raise RuntimeError("a defect")

        cluster.metadata.commit = broken  # type: ignore[method-assign]
        async with asyncio.timeout(5):
            assert (await locate(one, TOPICS[0])).final


async def test_a_look_up_ends_though_the_store_refuses_every_owner() -> None:
    async with brokers("a", default_bundles=1) as cluster:
        real: Any = cluster.metadata.commit
        attempts = 0

        async def refuse(operations: Any) -> Any:
            nonlocal attempts
            if len(operations) == 1:
                return await real(operations)
            attempts += 1
            raise ConnectionLost("the request is lost")

        cluster.metadata.commit = refuse  # type: ignore[method-assign]
        async with asyncio.timeout(10):
            with pytest.raises(ServiceNotReady, match="cannot take bundle"):
                await locate(cluster.brokers["a"], TOPICS[0])
        assert attempts < 1000, "there is a pause between them"


async def test_a_defect_in_one_look_at_requests_does_not_end_all_others() -> None:
    async with brokers("a", "b", default_bundles=1) as cluster:
        source = await owner(cluster, TOPICS[0])
        (bundle,) = source.ownership.held
        view: Any = source.ownership.view
        real = view.draining.get
        failed: list[str] = []

        async def broken() -> Any:
            view.draining.get = real
            failed.append("a defect")
            raise RuntimeError("a defect")

        view.draining.get = broken
        assert len(await source.ownership.administration.split(str(bundle))) == 2
        assert failed


async def test_a_defect_in_a_round_does_not_end_the_balance_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: nobody was told, and nothing was balanced until the broker had another session."""
    monkeypatch.setattr(balancing, "_RETRY_S", 0.001)
    served: list[str] = []

    async def serve(self: Any, session: Any) -> None:
        served.append("once more")
        if len(served) == 1:
            raise RuntimeError("a defect")
        await asyncio.Event().wait()

    monkeypatch.setattr(BalanceLeader, "serve", serve)
    async with brokers("a"):
        await until(lambda: len(served) == 2)


async def test_a_broker_whose_session_cannot_be_closed_stops_all_the_same() -> None:
    """Regression: what failed took the place of the cancellation, and it asked for another session."""
    async with brokers("a", "b") as cluster:
        one = cluster.brokers["a"]
        session: Any = one.ownership.session
        real = session.close

        async def failing() -> None:
            raise ConnectionLost("the answer is lost")

        session.close = failing
        async with asyncio.timeout(5):
            await cluster.stop("a")
        await real()
        assert await cluster.metadata.children("/brokers") == ["b"]


async def test_a_broker_that_is_told_to_stop_without_a_session_takes_nothing_in_the_next_one() -> None:
    async with brokers("a", "b") as cluster:
        one, other = cluster.brokers["a"], cluster.brokers["b"]
        store: Any = cluster.metadata
        real, open_again = store.open_session, asyncio.Event()

        async def later(timeout_s: float) -> Any:
            await open_again.wait()
            return await real(timeout_s)

        store.open_session = later
        cluster.expire("a")
        await until(lambda: not one.ownership.valid)
        await one.ownership.hand_over()
        open_again.set()
        await until(lambda: one.ownership.valid)
        for name in TOPICS:
            assert await locate(one, name, authoritative=True) == Located(other.url, False)
        assert not one.ownership.held


async def test_a_broker_that_stops_takes_nothing_before_its_node_says_so() -> None:
    async with brokers("a", "b", default_bundles=16) as cluster:
        one, other = cluster.brokers["a"], cluster.brokers["b"]
        store: Any = cluster.metadata
        real, may_change = store.put, asyncio.Event()

        async def later(path: str, value: bytes, *, version: int) -> int:
            if path == broker_path("a"):
                await may_change.wait()
            new: int = await real(path, value, version=version)
            return new

        store.put = later
        one.ownership.set_state(STOPPING)
        for name in TOPICS:
            assert await locate(one, name) == Located(other.url, False)
        may_change.set()


async def test_rule_31_an_owner_whose_answer_was_lost_leaves_the_node_of_the_next_one_alone() -> None:
    """Its version may be the same: it counts from the node's creation on."""
    async with brokers("a", "b", default_bundles=1) as cluster:
        source = await owner(cluster, TOPICS[0])
        target = next(one for one in cluster.brokers.values() if one is not source)
        (bundle,) = source.ownership.held
        path, session = owner_path(bundle), target.ownership.session
        record = OwnerRecord(target.broker.settings.name, target.url, "", session.session_id).encode()
        store: Any = cluster.metadata
        real, deleted = store.delete, []

        async def losing(asked: str, *, version: int | None = None) -> None:
            await real(asked, version=version)
            if asked == path:
                deleted.append(version)
                await store.create(path, record, session=session)
                while (await store.get(path)).version != version:
                    await store.put(path, record, version=(await store.get(path)).version)
                raise ConnectionLost("the answer is lost")

        store.delete = losing
        await source.ownership.administration.transfer(str(bundle), target.broker.settings.name)
        assert len(deleted) == 1
        assert await owner(cluster, TOPICS[0]) is target

"""The elected balancer on a store in memory: who leads, what it reads and requests, and what it must not do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest

from magnetar.broker.ownership.balance.leader import BalanceLeader
from magnetar.broker.ownership.balance.loads import BUNDLE_LOADS_PATH, bundle_loads_path, encode_bundle_loads
from magnetar.broker.ownership.balance.settings import BalanceSettings
from magnetar.broker.ownership.records import BALANCER_PATH, TransferRecord
from magnetar.metadata.store import Session
from magnetar.proto.errors import ConnectionLost, StorageFailed
from support.balance_kit import ClusterNodes
from support.balance_scenario import row_of
from support.memory_metadata import MemoryMetadataStore
from support.virtual_time import in_virtual_time

SETTINGS = BalanceSettings()
NAMES = [f"t/n/0x{number:08x}_0x{number + 9:08x}" for number in range(0, 40, 10)]


class Store(MemoryMetadataStore):
    """Counts the rounds that read the reports, in one of which the session may end; or fails them."""

    reads = 0
    session: Session | None = None  # ends during the third reading
    error: Exception | None = None

    async def children(self, path: str, *, after: str = "", limit: int = 0) -> list[str]:
        """See MetadataStore."""
        if path == BUNDLE_LOADS_PATH:
            self.reads += 1
            if self.error is not None:
                raise self.error
            if self.session is not None and self.reads == 3:
                self.expire(self.session.session_id)
        return await super().children(path, after=after, limit=limit)


class Cluster:
    """Broker a has everything, b nothing."""

    def __init__(self) -> None:
        self.store = Store()
        self.nodes = ClusterNodes(self.store)
        self.serving: list[asyncio.Task[None]] = []

    async def fill(self) -> None:
        """The nodes of both brokers."""
        session = await self.store.open_session(10)
        await self.nodes.add_broker(session, "a", cpu=0.6)
        await self.nodes.add_broker(session, "b", cpu=0.0)
        rows = [row_of(bundle, 0.15) for bundle in NAMES]
        for bundle in NAMES:
            await self.nodes.own(session, bundle, "a")
        await self.store.create(bundle_loads_path("a"), encode_bundle_loads(rows), session=session)

    async def lead(self, name: str) -> tuple[BalanceLeader, Session]:
        """One more contender."""
        session = await self.store.open_session(10)
        leader = self.nodes.leader(name, SETTINGS)
        self.serving.append(asyncio.ensure_future(leader.serve(session)))
        return leader, session

    async def requested(self) -> list[TransferRecord]:
        """What owners are asked to do."""
        return list((await self.nodes.requests()).values())

    async def close(self) -> None:
        """Everything."""
        for task in self.serving:
            task.cancel()
        await asyncio.gather(*self.serving, return_exceptions=True)
        await self.nodes.close()
        await self.store.close()


@contextlib.asynccontextmanager
async def filled() -> AsyncIterator[Cluster]:
    """A cluster with its nodes."""
    cluster = Cluster()
    try:
        await cluster.fill()
        yield cluster
    finally:
        await cluster.close()


@in_virtual_time
async def test_it_requests_moves_after_three_rounds_and_leaves_requests_alone() -> None:
    async with filled() as cluster:
        leader, _ = await cluster.lead("a")
        await asyncio.sleep(50)
        assert leader.rounds == 2
        assert await cluster.requested() == []
        await asyncio.sleep(20)
        first = await cluster.nodes.requests()
        assert [(one.to, one.split) for one in first.values()] == [("b", False), ("b", False)]
        node = await cluster.store.get(BALANCER_PATH)
        assert node is not None
        assert node.value == b"a"
        await asyncio.sleep(3000)
        requests = await cluster.nodes.requests()
        assert len(requests) < len(NAMES), "each of them stays, and counts"
        assert first.items() <= requests.items()
        assert leader.figures()["balancer_elected"] == 1
        assert leader.figures()["balancer_moves_total"] >= 1


@in_virtual_time
async def test_one_leads_and_the_next_one_begins_anew() -> None:
    async with filled() as cluster:
        first, session = await cluster.lead("a")
        second, _ = await cluster.lead("b")
        await asyncio.sleep(45)
        assert (first.elected, second.elected) == (True, False)
        assert set(first.figures()) == set(second.figures())
        cluster.store.expire(session.session_id)
        await asyncio.sleep(50)
        assert (first.elected, second.elected) == (False, True)
        assert await cluster.requested() == [], "it has seen two rounds itself"
        await asyncio.sleep(30)
        assert len(await cluster.requested()) == 2


async def stale_leader_does_nothing() -> None:
    """The session ends while the leader reads, in the round that would request a move."""

    async with filled() as cluster:
        leader, cluster.store.session = await cluster.lead("a")
        await asyncio.sleep(600)
        assert cluster.store.reads == 3
        assert await cluster.requested() == []
        assert not leader.elected


@in_virtual_time
async def test_a_leader_whose_session_ends_in_a_round_requests_nothing_more() -> None:
    await stale_leader_does_nothing()


@in_virtual_time
async def test_errors_that_may_pass_cost_a_round_and_others_end_it() -> None:
    async with filled() as cluster:
        leader, _ = await cluster.lead("a")
        await asyncio.sleep(1)
        cluster.store.error = ConnectionLost()
        await asyncio.sleep(90)
        assert (leader.elected, leader.rounds) == (True, 1)
        cluster.store.error = None
        await asyncio.sleep(60)
        assert leader.rounds == 3
        cluster.store.error = StorageFailed()
        await asyncio.sleep(30)
        assert cluster.serving[0].done()
        with pytest.raises(StorageFailed):
            await cluster.serving[0]


@pytest.mark.parametrize(
    "damage", [b"", b"\xc1", b"\x81\xa6format\x02", b"\x82\xa6format\x01\xa7bundles\x91\x91\x01"]
)
def test_a_damaged_report_costs_its_broker_only(damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    @in_virtual_time
    async def run() -> None:
        async with filled() as cluster:
            await cluster.store.create(bundle_loads_path("b"), damage)
            await cluster.lead("a")
            await asyncio.sleep(70)
            assert len(await cluster.requested()) == 2

    with caplog.at_level(logging.INFO):
        run()
    assert "the balancer does without the loads of b: the metadata of /bundle-loads/b" in caplog.text
    assert "moves to b: a is at 0.60 of a core, above the mean of 0.30" in caplog.text

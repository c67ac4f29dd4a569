"""The elected balancer on a store in memory: who leads, what it reads and requests, and what it must not do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from magnetar.broker.ownership.balance.core.facts import BrokerFacts
from magnetar.broker.ownership.balance.leader import BalanceLeader
from magnetar.broker.ownership.balance.records import bundle_loads_path, encode_bundle_loads
from magnetar.broker.ownership.balance.settings import BalanceSettings
from magnetar.broker.ownership.records import BALANCER_PATH
from magnetar.metadata.store import Session
from magnetar.proto.errors import ConnectionLost, StorageFailed
from support.balance_kit import StoreFacts
from support.balance_scenario import row_of
from support.memory_metadata import MemoryMetadataStore
from support.virtual_time import in_virtual_time

SETTINGS = BalanceSettings()
NAMES = [f"t/n/0x{number:08x}_0x{number + 9:08x}" for number in range(0, 40, 10)]


class Cluster:
    """Broker a has everything, b nothing."""

    def __init__(self) -> None:
        self.store = MemoryMetadataStore()
        self.facts = StoreFacts(self.store)
        self.serving: list[asyncio.Task[None]] = []

    async def fill(self) -> None:
        """The nodes of both brokers."""
        session = await self.store.open_session(10)
        await self.facts.add_broker(session, BrokerFacts("a", cpu=0.6))
        await self.facts.add_broker(session, BrokerFacts("b", cpu=0.0))
        rows = [row_of(bundle, 0.15) for bundle in NAMES]
        for bundle in NAMES:
            await self.facts.own(session, bundle, "a")
        await self.store.create(bundle_loads_path("a"), encode_bundle_loads(rows), session=session)

    async def lead(self, name: str, *, facts: Any = None) -> tuple[BalanceLeader, Session]:
        """One more contender."""
        session = await self.store.open_session(10)
        leader = BalanceLeader(self.store, facts or self.facts, SETTINGS, name, 10.0)
        self.serving.append(asyncio.ensure_future(leader.serve(session)))
        return leader, session

    async def close(self) -> None:
        """Everything."""
        for task in self.serving:
            task.cancel()
        await asyncio.gather(*self.serving, return_exceptions=True)
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
        assert cluster.facts.requested == []
        await asyncio.sleep(20)
        assert [row[1:] for row in cluster.facts.requested] == [("b", False), ("b", False)]
        node = await cluster.store.get(BALANCER_PATH)
        assert node is not None
        assert node.value == b"a"
        requests = [await cluster.store.get(f"/transfers/{row[0]}") for row in cluster.facts.requested]
        await asyncio.sleep(3000)
        assert len(cluster.facts.requested) < len(NAMES), "each of them stays, and counts"
        assert requests == [
            await cluster.store.get(f"/transfers/{row[0]}") for row in cluster.facts.requested[:2]
        ]
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
        assert cluster.facts.requested == [], "it has seen two rounds itself"
        await asyncio.sleep(30)
        assert len(cluster.facts.requested) == 2


async def stale_leader_does_nothing() -> None:
    """The session ends while the leader reads, in the round that would request a move."""

    class Slow(StoreFacts):
        """Its session ends during the third read."""

        session: Session
        reads = 0

        async def transfers(self) -> Any:
            self.reads += 1
            if self.reads == 3:
                cluster.store.expire(self.session.session_id)
            return await super().transfers()

    async with filled() as cluster:
        slow = Slow(cluster.store)
        leader, slow.session = await cluster.lead("a", facts=slow)
        await asyncio.sleep(600)
        assert slow.reads == 3
        assert slow.requested == []
        assert not leader.elected


@in_virtual_time
async def test_a_leader_whose_session_ends_in_a_round_requests_nothing_more() -> None:
    await stale_leader_does_nothing()


@in_virtual_time
async def test_errors_that_may_pass_cost_a_round_and_others_end_it() -> None:
    class Failing(StoreFacts):
        """As it is told."""

        error: Exception | None = None

        async def owners(self) -> Any:
            if self.error is not None:
                raise self.error
            return await super().owners()

    async with filled() as cluster:
        failing = Failing(cluster.store)
        leader, _ = await cluster.lead("a", facts=failing)
        await asyncio.sleep(1)
        failing.error = ConnectionLost()
        await asyncio.sleep(90)
        assert (leader.elected, leader.rounds) == (True, 1)
        failing.error = None
        await asyncio.sleep(60)
        assert leader.rounds == 3
        failing.error = StorageFailed()
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
            assert len(cluster.facts.requested) == 2

    with caplog.at_level(logging.INFO):
        run()
    assert (
        "the balancer does without the loads of b: the metadata of /bundle-loads/b is damaged" in caplog.text
    )
    assert "moves to b: a is at 0.60 of a core, above the mean of 0.30" in caplog.text

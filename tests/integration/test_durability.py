"""Durability over real bookie processes: a hung one of three holds up nobody, one of two is enough until both are back.

The broker and its ledger client run here, so that a test sees what waits in their memory.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bench.service_process import Role

from magnetar.broker import Broker
from magnetar.ledger import BookieInfoReader, LedgerClient, LedgerSettings, TcpTransport
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto import commands as c
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.connection import ConnectionOptions
from support.bookie_fleet import MIB, BookieFleet
from support.broker_kit import FakeClient, degraded_topics, running_broker
from support.memory_metadata import MemoryMetadataStore

pytestmark = [pytest.mark.timeout(180), pytest.mark.real]

ADD_TIMEOUT_S = 20.0  # no bookie that hangs for a few seconds is replaced
# What a bookie that hangs would make of a send is ADD_TIMEOUT_S; what a busy machine makes of it is less than this.
HELD_UP_S = 2.0
VALUE_BYTES = 16 << 10


@asynccontextmanager
async def broker_over(
    fleet: BookieFleet, metadata: MemoryMetadataStore, ledger: dict[str, Any], **settings: Any
) -> AsyncIterator[tuple[Broker, TcpTransport]]:
    """A broker of this process over the bookies of others."""
    ledger_settings = LedgerSettings(
        **(
            {"reconnect_backoff_s": 0.1, "reconnect_backoff_max_s": 0.2, "bookie_info_interval_s": 0.2}
            | ledger
        )
    )
    rng = random.Random(1)
    directory = fleet.directory()
    transport = TcpTransport(directory, ledger_settings, ConnectionOptions("durability test"))
    survey = BookieInfoReader(directory, transport, ledger_settings, rng)
    await survey.start()
    ledgers = LedgerClient(StoredLedgers(metadata), transport, directory, ledger_settings, rng, SystemClock())
    try:
        async with running_broker(
            ledgers, metadata, SystemClock(), retry_max_ms=200, ledger_change_spread_ms=200, **settings
        ) as broker:
            yield broker, transport
    finally:
        await survey.close()
        await ledgers.close()
        await transport.close()


def receipted(client: FakeClient, count: int) -> bool:
    return sum(row[1] for row in client.receipts) >= count


async def send(client: FakeClient, first: int, count: int, *, size: int = 20) -> list[float]:
    """One after the other; seconds until each had its receipt."""
    took: list[float] = []
    for number in range(first, first + count):
        began = time.perf_counter()
        client.publish(b"%d" % number + bytes(size), first=number)
        await client.until(partial(receipted, client, number + 1), timeout=60)
        took.append(time.perf_counter() - began)
    return took


def p99(times: list[float]) -> float:
    return sorted(times)[len(times) * 99 // 100]


@pytest.mark.parametrize(("ack_quorum", "role"), [(2, "daemon"), (2, "journal-writer"), (3, "daemon")])
async def test_two_of_three_step_around_a_bookie_that_hangs(
    tmp_path: Path, ack_quorum: int, role: Role
) -> None:
    """3/3/2 does; 3/3/3 is held up, which shows that the bookie hangs and that the measure is one."""
    metadata = MemoryMetadataStore()
    sizes = {"ensemble_size": 3, "write_quorum": 3, "ack_quorum": ack_quorum}
    limit = 2 * MIB
    ledger = {"add_timeout_s": ADD_TIMEOUT_S, "max_outstanding_bytes": limit, "speculative_read_s": 0.1}
    async with (
        BookieFleet(tmp_path, 3) as fleet,
        broker_over(fleet, metadata, ledger, **sizes) as (broker, links),
    ):
        client = FakeClient(broker)
        await client.producer()
        await send(client, 0, 50)
        (topic,) = broker.topics.values()
        (info,) = topic.ledger.list.ledgers
        fleet.hang("b2", role)
        if ack_quorum == 3:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(send(client, 50, 1), HELD_UP_S)
            fleet.resume()
            await client.confirmed(51)
            return
        count = 500  # 8 MB for each bookie, four times what may wait for one
        times = await send(client, 50, count, size=VALUE_BYTES)
        print(
            f"p50 {sorted(times)[count // 2] * 1e3:.1f} ms, p99 {p99(times) * 1e3:.1f} ms, one of three hangs"
        )
        assert p99(times) < HELD_UP_S
        assert topic.ledger.list.ledgers == [info], "the same ledger"
        opened = topic.ledger.appending.open_ledger
        assert opened is not None
        assert len(opened.writer.metadata.ensembles) == 1, "on the same bookies"
        (link,) = [channel._link for name, channel in links._add_channels.items() if name == "b2"]
        assert link is not None
        waiting = link._adds.outstanding_bytes
        assert waiting <= limit, "what waits for it is bounded"
        assert waiting > limit // 2, "and waits for it, which shows that it hangs"
        fleet.resume()
        async with asyncio.timeout(60):
            while link._adds.outstanding_bytes:
                await asyncio.sleep(0.02)
        await send(client, 50 + count, 20)
        await client.consumer()
        values = await client.received(70 + count)
        assert [int(value.split(b"\0")[0]) for value in values] == list(range(70 + count))


async def test_two_bookies_one_dies_and_returns(tmp_path: Path) -> None:
    metadata = MemoryMetadataStore()
    settings: dict[str, Any] = {
        "ensemble_size": 2,
        "write_quorum": 2,
        "ack_quorum": 2,
        "minimum_write_quorum": 1,
        "maintenance_interval_s": 0.5,
    }
    async with BookieFleet(tmp_path, 2) as fleet:
        async with broker_over(fleet, metadata, {"add_timeout_s": 2.0}, **settings) as (broker, _):
            client = FakeClient(broker)
            await client.producer()
            await client.consumer()
            await send(client, 0, 20)
            (topic,) = broker.topics.values()
            assert await degraded_topics(broker) == 0
            await fleet.kill("b1", "daemon")
            await send(client, 20, 20)
            stats = await client.ask(c.TopicStats, "orders")
            assert stats["degraded"] is True
            assert stats["open_ledger"]["bookies"] == ["b2"]
            assert await degraded_topics(broker) == 1
            await client.received(40)
            await client.ack(*[message.row() for message in client.messages[1:]])  # the first one keeps all
            await fleet.start("b1")
            async with asyncio.timeout(30):  # nobody writes meanwhile: it returns by itself
                while await degraded_topics(broker):
                    await asyncio.sleep(0.02)
            await send(client, 40, 20)
            stats = await client.ask(c.TopicStats, "orders")
            assert stats["degraded"] is False
            assert sorted(stats["open_ledger"]["bookies"]) == ["b1", "b2"]
            # And the other way round: now the first one has to do alone.
            await fleet.kill("b2", "daemon")
            await send(client, 60, 20)
            await fleet.start("b2")
            assert topic.not_served is None
        async with broker_over(fleet, metadata, {"add_timeout_s": 2.0}, **settings) as (broker, _):
            reader = FakeClient(broker)
            await reader.consumer(subscription="another")
            values = await reader.received(80)
            assert [int(value.split(b"\0")[0]) for value in values] == list(range(80))

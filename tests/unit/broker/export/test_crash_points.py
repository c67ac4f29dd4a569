"""The broker dies at every call to the metadata store on the way of a batch, before and after the call took effect.

Whoever comes next must find the batch once or not at all, and after a sweep no staged ledger that is not attached.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgpack
import pytest

from magnetar.proto import commands as c
from magnetar.proto.errors import MagnetarError
from support.archives import MemoryArchives
from support.bookies import Bookies
from support.broker_kit import TOPIC, FakeClient, settle
from support.doomed import Doomed, kill, ledger_client, until_dead
from support.export_kit import Job, export_broker, read_all, record_of, staged_nodes, stored_ledgers
from support.virtual_time import in_virtual_time


async def drive(job: Job, rows: list[list[int]], *, give_up: bool) -> None:
    """The driver's commit, or its abort; then what is left of the transaction goes."""
    if not give_up:
        await job.attach(0, *rows)
    await job.client.ask(c.DiscardStaged, "orders", "t")


async def stage_all(job: Job) -> tuple[list[list[int]], list[int]]:
    """Rows of three tasks (one had nothing to write), and all staged ids, those of a failed task among them."""
    rows = [await job.stage([b"x0", b"x1"], [b"x2"]), await job.stage(), await job.stage([b"x3"])]
    failed = await job.open()
    failed.detach()
    return rows, [*(row[0] for row in rows), failed.ledger_id]


@pytest.mark.parametrize("takes_effect", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("give_up", [False, True], ids=["attach", "abort"])
@pytest.mark.parametrize("publishing", [False, True], ids=["idle", "publishing"])
@pytest.mark.parametrize("small", [False, True], ids=["attached", "published"])
async def test_a_crash_at_every_metadata_call(
    takes_effect: bool, give_up: bool, publishing: bool, small: bool
) -> None:
    points = 0
    while await crash_at(
        points, takes_effect=takes_effect, give_up=give_up, publishing=publishing, small=small
    ):
        points += 1
        assert points < 60
    assert points > (3 if give_up else 8)


async def crash_at(point: int, *, takes_effect: bool, give_up: bool, publishing: bool, small: bool) -> bool:
    attach_min_bytes = 1 << 20 if small else 0
    bookies = Bookies("b1")
    doomed = Doomed(bookies.metadata)
    before = asyncio.all_tasks()
    manager = export_broker(
        bookies, ledger_client(bookies, doomed), doomed, attach_min_bytes=attach_min_bytes
    )
    broker = await manager.__aenter__()
    job = Job(bookies, broker)
    client = FakeClient(broker)
    if publishing:
        await client.producer()
        client.publish(b"0", b"1")
        await client.confirmed(2)
    rows, staged = await stage_all(job)
    doomed.arm(point, takes_effect=takes_effect)
    driving = asyncio.ensure_future(drive(job, rows, give_up=give_up))
    if publishing:
        client.publish(b"2", first=2)
    died = await until_dead(doomed, driving)
    await kill(before)
    with contextlib.suppress(asyncio.CancelledError):
        await driving
    confirmed = sum(row[1] for row in client.receipts)

    ledgers = ledger_client(bookies, bookies.metadata)
    async with export_broker(bookies, ledgers, attach_min_bytes=attach_min_bytes) as successor:
        await successor.topic(TOPIC, create=False)
        again = Job(bookies, successor)
        with contextlib.suppress(MagnetarError) if give_up else contextlib.nullcontext():
            await drive(again, rows, give_up=give_up)
        await settle()
        attached = 0 if give_up or small else 2
        await check(bookies, successor, staged, confirmed, give_up=give_up, attached=attached)
        await again.close()
    await ledgers.close()
    return died


async def check(
    bookies: Bookies, broker: Any, staged: list[int], confirmed: int, *, give_up: bool, attached: int
) -> None:
    topic = broker.topics[str(TOPIC)]
    batch = [] if give_up else [b"x0", b"x1", b"x2", b"x3"]
    total: int = topic.ledger.list.message_count
    values = await read_all(broker, total) if total else []
    assert [value for value in values if value.startswith(b"x")] == batch
    if batch:
        at = values.index(b"x0")
        assert values[at : at + 4] == batch, "all of it in one place"
    rest = [value for value in values if not value.startswith(b"x")]
    assert rest == [b"0", b"1", b"2"][: len(rest)]
    assert len(rest) >= confirmed
    record = await record_of(bookies)
    listed = [info.stored_id for info in record.ledgers]
    ids = [info.ledger_id for info in record.ledgers]
    assert ids == sorted(ids)
    left = [stored_id for stored_id in await stored_ledgers(bookies) if stored_id in staged]
    assert left == sorted(set(staged) & set(listed)), "no orphan, and nothing attached is gone"
    assert len(left) == attached
    assert await staged_nodes(bookies) == []
    assert len(topic.export.staging) == 0
    state = await FakeClient(broker).ask(c.QueryState, "orders", "q")
    assert state == {"batch": -1 if give_up else 0}
    # Who reads behind the batch goes on.
    client = FakeClient(broker)
    answer = await client.producer()
    client.publish(b"end", epoch=answer["epoch"])
    await client.confirmed(1)
    assert (await read_all(broker, total + 1))[-1] == b"end"


@pytest.mark.parametrize("takes_effect", [False, True], ids=["before", "after"])
@in_virtual_time
async def test_a_crash_while_staging_leaves_nothing_that_is_not_swept(takes_effect: bool) -> None:
    for point in range(10):
        bookies = Bookies("b1")
        doomed = Doomed(bookies.metadata)
        before = asyncio.all_tasks()
        manager = export_broker(bookies, ledger_client(bookies, doomed), doomed)
        broker = await manager.__aenter__()
        job = Job(bookies, broker)
        await job.client.ask(c.CreateTopic, "orders")
        doomed.arm(point, takes_effect=takes_effect)
        staging = asyncio.ensure_future(job.stage([b"a"]))
        died = await until_dead(doomed, staging)
        await kill(before)
        with contextlib.suppress(asyncio.CancelledError):
            await staging
        ledgers = ledger_client(bookies, bookies.metadata)
        async with export_broker(bookies, ledgers, topic_idle_unload_ms=0) as successor:
            topic = await successor.topic(TOPIC, create=False)
            await asyncio.sleep(successor.settings.staged_ttl_ms / 1000 + 1)
            await topic.export.staging.sweep()
            await settle()
            assert await stored_ledgers(bookies) == []
            assert await staged_nodes(bookies) == []
        await ledgers.close()
        if not died:
            assert point >= 3
            return
    raise AssertionError("it never got through")


@pytest.mark.parametrize("takes_effect", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("publishing", [False, True], ids=["idle", "publishing"])
async def test_a_crash_while_archiving_loses_nothing_and_the_next_run_finishes(
    takes_effect: bool, publishing: bool
) -> None:
    points = 0
    while await archiving_crashes_at(points, takes_effect=takes_effect, publishing=publishing):
        points += 1
        assert points < 40
    # The list, and three ledgers' metadata.
    assert points >= 4


async def archiving_crashes_at(point: int, *, takes_effect: bool, publishing: bool) -> bool:
    bookies = Bookies("b1")
    doomed = Doomed(bookies.metadata)
    before = asyncio.all_tasks()
    archives = MemoryArchives()
    manager = export_broker(
        bookies, ledger_client(bookies, doomed), doomed, archives=archives, max_ledger_entries=1
    )
    broker = await manager.__aenter__()
    client = FakeClient(broker)
    await client.producer()
    for number in range(4):
        client.publish(b"%d" % number, first=number)
        await client.confirmed(number + 1)
    await settle()
    rows = (await client.ask(c.TopicLedgers, "orders"))["ledgers"]
    files = msgpack.packb([[row[0], row[1], row[3], row[4]] for row in rows[:3]])
    await archives.copy(broker, rows[:3], at="file:///a")
    doomed.arm(point, takes_effect=takes_effect)

    async def ask(one: FakeClient) -> Any:
        return await one.ask(c.ArchiveLedgers, "orders", "file:///a", payload=files)

    asking = asyncio.ensure_future(ask(client))
    if publishing:
        client.publish(b"4", first=4)
    died = await until_dead(doomed, asking)
    await kill(before)
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    confirmed = sum(row[1] for row in client.receipts)

    ledgers = ledger_client(bookies, bookies.metadata)
    async with export_broker(
        bookies, ledgers, archives=archives, max_ledger_entries=1, max_lease_ms=1
    ) as successor:
        again = FakeClient(successor)
        # Each ledger is at the bookies or archived, whatever else happened.
        found = (await again.ask(c.TopicLedgers, "orders"))["ledgers"]
        assert [row[:5] for row in found][:3] == [row[:5] for row in rows[:3]]
        kept = [row[1] for row in found if len(row) == 10]
        assert set(kept) <= set(await stored_ledgers(bookies))
        await asyncio.sleep(0.002)
        answer = await ask(again)
        assert answer["archived"] + answer["known"] == 3
        await settle()
        found = (await again.ask(c.TopicLedgers, "orders"))["ledgers"]
        assert [row[9:] for row in found[:3]] == [[b"", "file:///a"]] * 3
        stored = await stored_ledgers(bookies)
        assert {row[1] for row in found[3:]} <= {*stored}
        assert not {row[1] for row in rows[:3]} & {*stored}
        values = await read_all(successor, sum(row[4] for row in found))
        assert values == [b"0", b"1", b"2", b"3", b"4"][: len(values)]
        assert len(values) >= confirmed
    await ledgers.close()
    return died

"""The broker dies at every call to the metadata store on the way of a batch, before and after the call took effect.

Whoever comes next must find the batch once or not at all, and after a sweep no staged ledger that is not attached.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest

from magnetar.ledger import LedgerClient, LedgerSettings, LocalTransport, StaticBookies
from magnetar.proto import commands as c
from magnetar.proto.errors import MagnetarError
from support.bookies import Bookies
from support.broker_kit import TOPIC, FakeClient, settle
from support.export_kit import Job, export_broker, read_all, record_of, staged_nodes, stored_ledgers

WRITES = ("create", "put", "delete", "next_id", "commit")


class Doomed:
    """A metadata store whose process dies at the n-th write from `arm` on: that call and all later ones never return."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.dead = asyncio.Event()
        self.left: int | None = None
        self.takes_effect = False
        self.calls: list[str] = []

    def arm(self, left: int, *, takes_effect: bool) -> None:
        self.left, self.takes_effect = left, takes_effect

    def __getattr__(self, name: str) -> Any:
        target = getattr(self.store, name)
        if name not in (*WRITES, "get", "children"):
            return target

        async def call(*args: Any, **named: Any) -> Any:
            if self.dead.is_set():
                await asyncio.get_running_loop().create_future()
            if name in WRITES and self.left is not None:
                self.calls.append(f"{name} {args[0]}")
                self.left -= 1
                if self.left < 0:
                    self.dead.set()
                    if self.takes_effect:
                        await target(*args, **named)
                    await asyncio.get_running_loop().create_future()
            return await target(*args, **named)

        return call


def ledger_client(bookies: Bookies, metadata: Any) -> LedgerClient:
    directory = StaticBookies(dict.fromkeys(bookies, ("127.0.0.1", 1)))
    transport = LocalTransport(bookies)
    return LedgerClient(metadata, transport, directory, LedgerSettings(), random.Random(3), bookies.clock)


async def kill(others: set[asyncio.Task[Any]]) -> None:
    """Ends every task that the dead broker, and who talked to it, left behind."""
    mine = asyncio.all_tasks() - others
    for task in mine:
        task.cancel()
    await asyncio.wait(mine, timeout=5)


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


async def until_dead(doomed: Doomed, work: asyncio.Future[Any]) -> bool:
    """True if it died; False if the work was done before."""
    death = asyncio.ensure_future(doomed.dead.wait())
    await asyncio.wait([death, work], return_when=asyncio.FIRST_COMPLETED, timeout=10)
    died = doomed.dead.is_set()
    if not died:
        await settle()  # what goes on behind the answer
        died = doomed.dead.is_set()
    death.cancel()
    return died


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
        async with export_broker(bookies, ledgers) as successor:
            topic = await successor.topic(TOPIC, create=False)
            for transaction in topic.export.staging._transactions.values():
                transaction.expires_at = 0.0
            await topic.export.staging.sweep()
            await settle()
            assert await stored_ledgers(bookies) == []
            assert await staged_nodes(bookies) == []
        await ledgers.close()
        if not died:
            assert point >= 3
            return
    raise AssertionError("it never got through")

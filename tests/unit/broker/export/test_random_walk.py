"""Publishers, jobs, consumers, trims, archives, deletions of attempts and crashes of the broker in random order, on a model.

What must hold all the time: every batch that was attached is there once, whole and in one place; published messages are in
order, none that was confirmed is missing; nothing staged outlives its sweep; what is archived stays as it was, and stands
before everything else. A failing seed is replayed by its number.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import msgpack
import pytest

from magnetar.broker.log import ledger_list
from magnetar.ledger import LedgerClient
from magnetar.metadata.ledgers import ledger_path
from magnetar.proto import commands as c
from magnetar.proto.errors import MagnetarError
from magnetar.proto.ids import MessageId
from support.archives import MemoryArchives
from support.bookies import Bookies
from support.broker_kit import TOPIC, FakeClient, settle
from support.export_kit import (
    Job,
    crash,
    export_broker,
    read_all,
    record_of,
    staged_nodes,
    stored_ledgers,
)

STEPS = 40


class Walk:
    """One run. Published values are numbers; those of a batch begin with q."""

    def __init__(self, seed: int, small: bool) -> None:
        self.small = small
        self.rng = random.Random(seed)
        self.bookies = Bookies("b1", "b2")
        self.published = 0
        self.batch = 0
        self.attached: list[list[bytes]] = []
        self.unsure: list[bytes] | None = (
            None  # a batch of which the driver does not know whether it is there
        )
        self.archived: dict[int, tuple[list[Any], list[bytes]]] = {}  # rows and values, by position id
        self.archives = MemoryArchives()

    async def run(self) -> None:
        left = STEPS
        while left > 0:
            ledgers = self.bookies.client()
            try:
                left = await self._life(ledgers, left)
            finally:
                await ledgers.close()

    async def _life(self, ledgers: LedgerClient, left: int) -> int:
        """A broker until it crashes or the run ends."""
        rng = self.rng
        async with export_broker(
            self.bookies,
            ledgers,
            archives=self.archives,
            max_ledger_entries=rng.randrange(1, 5),
            max_lease_ms=1,
            # In the small walk most batches are published, and some attached.
            attach_min_bytes=rng.randrange(200, 600) if self.small else 0,
        ) as broker:
            self.client = FakeClient(broker)
            self.epoch = (await self.client.producer())["epoch"]
            self.job = Job(self.bookies, broker)
            self.sent = 0
            if self.unsure is not None:
                await self._repeat(self.unsure)
            while left > 0:
                left -= 1
                step = rng.choice(
                    [self._publish] * 4
                    + [self._attach] * 4
                    + [self._abort, self._replay, self._trim, self._hold]
                    + [self._archive] * 2
                )
                await step(broker)
                if rng.random() < 0.08:
                    await self._check(broker)
                    if rng.random() < 0.5:
                        await self._attach_and_die(broker)
                    else:
                        await crash(broker)
                    await self.job.ledgers.close()
                    return left
            await self._check(broker)
            await self.job.ledgers.close()
        return 0

    async def _publish(self, _broker: Any) -> None:
        for _ in range(self.rng.randrange(1, 4)):
            self.client.publish(b"%d" % self.published, first=self.sent, epoch=self.epoch)
            self.published += 1
            self.sent += 1
            if self.rng.random() < 0.5:
                await settle(self.rng.randrange(4))

    async def _stage(self) -> tuple[list[list[int]], list[bytes]]:
        rows, values = [], []
        for task in range(self.rng.randrange(1, 4)):
            entries = [
                [
                    b"q%d.%d.%d.%d" % (self.batch, task, entry, index)
                    for index in range(self.rng.randrange(1, 3))
                ]
                for entry in range(self.rng.randrange(3))
            ]
            rows.append(await self.job.stage(*entries))
            values += [value for entry in entries for value in entry]
        return rows, values

    async def _attach(self, broker: Any) -> None:
        rows, values = await self._stage()
        before = self.published
        attempts = [self.job.attach(self.batch, *rows) for _ in range(self.rng.randrange(1, 3))]
        if self.rng.random() < 0.5:
            await self._publish(broker)
        answers = await asyncio.gather(*attempts, return_exceptions=True)
        assert any(isinstance(answer, dict) and answer["attached"] for answer in answers), (before, answers)
        self.batch += 1
        self.attached.append(values)

    async def _attach_and_die(self, broker: Any) -> None:
        """The broker crashes at some step of a commit; what no bookie has confirmed since may be lost, or not."""
        rows, self.unsure = await self._stage()
        kept = {name: dict(bookie.entries) for name, bookie in self.bookies.items()}
        for bookie in self.bookies.values():
            bookie.hold_adds()
        attaching = self.job.attach(self.batch, *rows)
        await settle(self.rng.randrange(80))
        await crash(broker)
        await asyncio.wait([attaching])
        if self.rng.random() < 0.5 and attaching.exception() is not None:
            for name, bookie in self.bookies.items():
                bookie.entries = kept[name]
        for bookie in self.bookies.values():
            bookie.release()

    async def _repeat(self, values: list[bytes]) -> None:
        """The driver is started again, and replays its last batch."""
        rows = [await self.job.stage(*[[value] for value in values])]
        await self.job.attach(self.batch, *rows)
        self.batch += 1
        self.attached.append(values)
        self.unsure = None

    async def _abort(self, _broker: Any) -> None:
        await self._stage()
        await self.job.client.ask(c.DiscardStaged, "orders", "t")

    async def _replay(self, _broker: Any) -> None:
        """A task's second run, after the batch was attached."""
        if self.batch:
            rows, _ = await self._stage()
            assert not (await self.job.attach(self.batch - 1, *rows))["attached"]

    async def _hold(self, broker: Any) -> None:
        """The bookies answer late: what is pending must be waited for."""
        rows, values = await self._stage()
        for bookie in self.bookies.values():
            bookie.hold_adds()
        await self._publish(broker)
        attaching = self.job.attach(self.batch, *rows)
        await settle(self.rng.randrange(30))
        for bookie in self.bookies.values():
            bookie.release()
        assert (await attaching)["attached"]
        self.batch += 1
        self.attached.append(values)

    async def _trim(self, broker: Any) -> None:
        """A durable subscription that acknowledges what it gets; sometimes a lease."""
        consumer = FakeClient(broker)
        kept = broker.topics[str(TOPIC)].ledger.list.ledgers
        behind = MessageId(kept[0].ledger_id if kept else 0, 0, 0).to_bytes()
        await consumer.consumer(5, "done", start=self.rng.choice([("earliest", None), ("id", behind)]))
        await settle(20)
        rows = [message.row() for message in consumer.messages]
        if rows:
            await consumer.ack(*rows[: self.rng.randrange(len(rows) + 1)], consumer_id=5)
        lease = None
        if self.rng.random() < 0.3:
            lease = await self.client.ask(c.KeepLedgers, "orders", "", 60_000)
        topic = broker.topics[str(TOPIC)]
        await asyncio.sleep(0.002)
        topic.maintain()
        await topic.maintenance.trimmed()
        if lease is not None:
            first = topic.ledger.list.ledgers[0].ledger_id if topic.ledger.list.ledgers else None
            assert first == lease["first"] or topic.export.leases.lowest() is None
        await consumer.ask(c.Unsubscribe, 5)

    async def _archive(self, broker: Any) -> None:
        """What a job does that has written the files of some ledgers of the beginning."""
        await self.client.confirmed(self.sent)
        await settle()
        kept = [row for row in await self._rows() if len(row) == 10]
        closed = list(itertools.takewhile(lambda row: row[8] and row[3], kept))
        closed = closed[: self.rng.randrange(len(closed) + 1)]
        values = (await self._read(broker, sum(row[4] for row in closed)))[1]
        await self.archives.copy(broker, closed, at="file:///a")
        await asyncio.sleep(0.002)  # leases of earlier steps are over
        told = msgpack.packb([[row[0], row[1], row[3], row[4]] for row in closed])
        asking = self.client.ask(c.ArchiveLedgers, "orders", "file:///a", payload=told)
        if self.rng.random() < 0.5:
            await self._publish(broker)
        answer = await asking
        assert (answer["archived"], answer["kept"]) == (len(closed), None)
        for row in closed:
            self.archived[row[0]] = ([*row[:9], b"", "file:///a"], values[: row[4]])
            values = values[row[4] :]

    async def _rows(self) -> list[list[Any]]:
        rows: list[list[Any]] = (await self.client.ask(c.TopicLedgers, "orders"))["ledgers"]
        return rows

    async def _read(self, broker: Any, count: int) -> tuple[list[bytes], list[bytes]]:
        """What is archived, and the first `count` messages that are at the bookies."""
        archived = sum(len(values) for _, values in self.archived.values())
        found = await read_all(broker, archived + count) if archived + count else []
        return found[:archived], found[archived : archived + count]

    async def _check_archived(self, archived: list[bytes], found: list[bytes]) -> None:
        """What was read: the archived part, and all that is kept at the bookies."""
        assert archived == [value for _, values in self.archived.values() for value in values]
        rows = await self._rows()
        assert [row for row in rows if len(row) > 10] == [row for row, _ in self.archived.values()]
        assert [row[0] for row in rows] == sorted(row[0] for row in rows)
        assert all(before[2] + before[4] <= after[2] for before, after in itertools.pairwise(rows))
        whole = archived + found
        published = [int(value) for value in whole if not value.startswith(b"q")]
        assert published == sorted(set(published))
        order = {value: at for at, value in enumerate(value for values in self.attached for value in values)}
        batches = [order[value] for value in whole if value.startswith(b"q")]
        assert batches == sorted(set(batches))

    async def _check(self, broker: Any) -> None:
        await self.client.confirmed(self.sent)
        topic = broker.topics[str(TOPIC)]
        list_ = topic.ledger.list
        kept = list_.ledgers
        total = list_.message_count - (kept[0].first_index if kept else list_.message_count)
        archived, found = await self._read(broker, total)
        published = [value for value in found if not value.startswith(b"q")]
        everything = [b"%d" % number for number in range(self.published)]
        assert published == everything[len(everything) - len(published) :]
        flat = [value for values in self.attached for value in values]
        batches = [value for value in found if value.startswith(b"q")]
        assert batches == flat[len(flat) - len(batches) :]
        assert list_.message_count == self.published + len(flat)
        ids = [info.ledger_id for info in kept]
        assert ids == sorted(ids)
        await self._check_archived(archived, found)
        await self.job.client.ask(c.DiscardStaged, "orders", "t")
        await settle()
        assert await staged_nodes(self.bookies) == []
        record = await record_of(self.bookies)
        listed = {info.stored_id for info in record.ledgers} | {info.stored_id for info in kept}
        topics = []
        for stored_id in await stored_ledgers(self.bookies):
            node = await self.bookies.metadata.get(ledger_path(stored_id))
            if node is not None and b"cursor" not in node.value:
                topics.append(stored_id)
        assert set(topics) <= listed, "orphans"


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("small", [False, True], ids=["attached", "published"])
@pytest.mark.parametrize("segments", [False, True], ids=["head", "segments"])
async def test_a_random_walk(seed: int, small: bool, segments: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`segments`: of two ledgers each, so that most of the list stands in them."""
    if segments:
        monkeypatch.setattr(ledger_list, "HEAD_LEDGERS", 1)
        monkeypatch.setattr(ledger_list, "SEGMENT_LEDGERS", 2)
    try:
        await Walk(seed, small).run()
    except MagnetarError as error:
        raise AssertionError(f"seed {seed}: {error!r}") from error

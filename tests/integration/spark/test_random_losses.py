"""Random histories of topics that come, go, are made again, are archived and are trimmed under a stream that pauses.

Every value is written once, so one that is seen twice shows itself, and one that is not seen must be of a topic for which an
error said so. Writers repeat batches, go back in their numbers, and write other rows under a number that is taken. Archives
are made, and copied elsewhere, between batches, between the plan of a batch and its tasks, and while the stream's driver is
away for longer than its lease.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from magnetar.proto.errors import InvalidArgument, MessageLost
from magnetar.spark.batch_source import TopicReader
from magnetar.spark.count import count_messages
from magnetar.spark.jobs import archive
from magnetar.spark.options import ReadOptions, WriteOptions
from magnetar.spark.sink import attach, write_task
from magnetar.spark.stream_source import TopicStreamReader
from magnetar.spark.versions import ReadAllAvailable, ReadLimit, ReadMaxRows
from support.long_form import times
from support.service import Service
from support.spark_tasks import LocalSession
from support.spark_topics import Topics, full

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180), pytest.mark.real, pytest.mark.spark]

STEPS = 80
SEEDS = times(2, 10)
LEASE_S = 0.4


class World:
    """Topics of one seed, their writers, and one query that reads all of them by a pattern."""

    def __init__(
        self, service: Service, topics: Topics, seed: int, log: pytest.LogCaptureFixture, path: Path
    ) -> None:
        self.log = log
        self.archives = path
        self.archive_number = 0
        self.archived: set[str] = set()  # topics that have a ledger that is nowhere but in an archive
        self.service, self.topics, self.rng = service, topics, random.Random(seed)
        self.names = [full(f"losses-{seed}-{letter}") for letter in "abc"]
        self.pattern = f"losses-{seed}-.*"
        self.there: set[str] = set()
        self.written: dict[str, list[bytes]] = {name: [] for name in self.names}  # whenever, by name
        self.stored: dict[str, list[bytes]] = {}  # by topic: what it holds, unless it is in `trimmed`
        self.trimmed: set[str] = set()  # topics of which everything was acknowledged once
        self.seen: list[tuple[str, bytes]] = []
        self.lost: set[str] = set()  # topics of which an error said that something is lost
        self.batches: dict[str, tuple[int, list[bytes]]] = {}  # by topic: the last one of the query "q"
        self.number = 0
        self.create()
        self.query(forgiving=False)
        self.offset: Any = json.loads(json.dumps(self.reader.initialOffset()))

    def query(self, *, forgiving: bool) -> None:
        """The query's driver starts."""
        given = {
            "service_url": self.service.url,
            "topics_pattern": self.pattern,
            "lease_s": f"{LEASE_S}",
            "fail_on_data_loss": "false" if forgiving else "true",
        }
        self.reader = TopicStreamReader(ReadOptions.parse(given), ("topic", "value"))

    def values(self) -> list[bytes]:
        """New ones."""
        count = self.rng.choice((1, 4, 20))
        self.number += count
        return [b"%d" % n for n in range(self.number - count, self.number)]

    # --- steps -------------------------------------------------------------------------------------------------------

    def create(self) -> None:
        name = self.rng.choice(self.names)
        if name not in self.there:
            self.topics.create(name)
            self.there.add(name)
            self.batches.pop(name, None)
            self.stored[name] = []
            self.trimmed.discard(name)
            self.archived.discard(name)

    def produce(self) -> None:
        for name in self.rng.sample(sorted(self.there), min(1, len(self.there))):
            values = self.values()
            self.topics.produce(name, values, per_entry=self.rng.choice((1, 1, 3, 0)))
            self.confirmed(name, values)

    def confirmed(self, name: str, values: list[bytes]) -> None:
        """The topic has them now."""
        self.written[name] += values
        self.stored[name] += values

    def write(self) -> None:
        """A batch, the last one again, an older number, or other rows under a number that is taken."""
        for name in self.rng.sample(sorted(self.there), min(1, len(self.there))):
            number, last = self.batches.get(name, (-1, []))
            wanted = max(0, number + self.rng.choice((1, 1, 0, -1)))
            values = last if last and self.rng.random() < 0.5 and wanted <= number else self.values()
            options = WriteOptions.parse({"service_url": self.service.url, "topic": name})
            rows = pa.record_batch({"value": pa.array(self.rng.sample(values, len(values)), pa.binary())})
            written = [write_task(options, "q", wanted, iter([rows]))]
            if wanted > number:
                assert attach(options, written)
                self.batches[name] = wanted, values
                self.confirmed(name, values)
            elif (wanted, values) == (number, last):
                assert not attach(options, written)
            else:
                with pytest.raises(InvalidArgument, match="is not written"):
                    attach(options, written)

    def delete(self) -> None:
        if self.there and self.rng.random() < 0.4:
            name = self.rng.choice(sorted(self.there))
            self.topics.ask(lambda client: client.admin.delete_topic(name, force=True))
            self.there.remove(name)
            self.unseen(name)

    def trim(self) -> None:
        """Somebody else acknowledges everything, while the query's driver is away for longer than its lease."""
        if self.there and self.rng.random() < 0.4:
            self.reader.stop()
            name = self.rng.choice(sorted(self.there))
            self.forget_subscriptions(name)
            self.number += 1
            self.topics.subscribe_at_end(name, f"everything-{self.number}")
            self.trimmed.add(name)
            self.unseen(name)
            self.pause()
            self.query(forgiving=False)

    def forget_subscriptions(self, name: str) -> None:
        """Nobody but leases keeps what the topic has."""
        for subscription in self.topics.stats(name)["subscriptions"]:
            self.topics.ask(
                lambda client, one=subscription: client.admin.delete_subscription(name, one)  # type: ignore[misc]
            )

    def pause(self) -> None:
        """For longer than the query's lease, which nobody renews."""
        deadline = time.monotonic() + 2 * LEASE_S
        self.topics.wait_for(lambda: time.monotonic() > deadline, "the lease is over")

    def archive(self) -> None:
        """What the query and others need no more leaves the bookies; with the driver away that is all that is closed."""
        if not self.there:
            return
        name = self.rng.choice(sorted(self.there))
        away = self.rng.random() < 0.5
        if self.rng.random() < 0.5:
            self.forget_subscriptions(name)
        if away:
            self.reader.stop()
            self.pause()
        trimmed = self.rng.random() < 0.8
        result = archive(cast("Any", LocalSession()), self.service.url, [name], self.place(), trim=trimmed)
        if result.trimmed:
            self.archived.add(name)
        if away:
            self.query(forgiving=False)

    def place(self) -> str:
        """Of the archive of all topics. A topic that is made again finds what its predecessor left there."""
        return str(self.archives / f"archive-{self.archive_number}")

    def move(self) -> None:
        """The archive is copied elsewhere, the topics learn of it, and the old one is removed."""
        if self.archived and self.archived <= self.there and self.rng.random() < 0.3:
            old = self.place()
            self.archive_number += 1
            shutil.copytree(old, self.place())
            names = sorted(self.archived)
            result = archive(cast("Any", LocalSession()), self.service.url, names, self.place(), moved=True)
            assert result.elsewhere == 0, result
            shutil.rmtree(old)

    def look(self) -> None:
        """A batch read of a topic has all of it, wherever its ledgers are, or what is left of one that was trimmed."""
        for name in self.rng.sample(sorted(self.there), min(1, len(self.there))):
            given = {"service_url": self.service.url, "topic": name, "lease_s": f"{LEASE_S}"}
            reader = TopicReader(ReadOptions.parse(given | {"fail_on_data_loss": "false"}), ("value",))
            values = [
                value
                for partition in reader.partitions()
                for batch in reader.read(partition)
                for value in batch.column(0).to_pylist()
            ]
            assert len({*values}) == len(values), "a message was read twice"
            if name in self.trimmed:
                assert {*values} <= {*self.stored[name]}
            else:
                assert {*values} == {*self.stored[name]}
                assert count_messages(**given) == len(values)

    def unseen(self, name: str) -> None:
        """What is done to a topic that the query never met costs it nothing that it could know of."""
        if name not in self.offset["topics"]:
            self.lost.add(name)

    def batch(self) -> bool:
        """One micro-batch; False if nothing was there.

        A query that fails is started again. One that fails once more, and says what is lost, is believed, and goes on.
        """
        limit: ReadLimit = self.rng.choice((ReadAllAvailable(), ReadMaxRows(5)))
        archive_meanwhile = self.archive if self.rng.random() < 0.2 else lambda: None
        try:
            end, rows = self.read(limit, archive_meanwhile)
        except MessageLost:
            self.start_again(forgiving=False)
            end, rows = self.read_or_learn_what_is_lost(limit)
        if self.rng.random() < 0.3:
            self.start_again(forgiving=False)
        self.seen += rows
        moved = bool(end["topics"] != self.offset["topics"])
        self.offset = end
        return moved

    def read_or_learn_what_is_lost(self, limit: ReadLimit) -> tuple[Any, list[tuple[str, bytes]]]:
        try:
            return self.read(limit)
        except MessageLost:
            self.start_again(forgiving=True)
            self.log.clear()
            end, rows = self.read(limit)
            named = {*re.findall(r"persistent://\S+-[abc]", self.log.text)}
            assert named, "it goes on without saying what is lost"
            self.lost |= named
            self.start_again(forgiving=False)
            return end, rows

    def start_again(self, *, forgiving: bool) -> None:
        """The query's driver ends, and another one begins from its checkpoint."""
        self.reader.stop()
        self.query(forgiving=forgiving)

    def read(
        self, limit: ReadLimit, meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[Any, list[tuple[str, bytes]]]:
        """The next micro-batch. `meanwhile`: what happens once its tasks are planned."""
        end = json.loads(json.dumps(self.reader.latestOffset(self.offset, limit)))
        rows: list[tuple[str, bytes]] = []
        partitions = self.reader.partitions(self.offset, end)
        meanwhile()
        for partition in partitions:
            for batch in self.reader.read(partition):
                rows += zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True)
        self.reader.commit(end)
        return end, rows


@pytest.mark.parametrize("seed", range(SEEDS))
def test_each_message_once_or_an_error_that_says_so(
    service: Service, topics: Topics, seed: int, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    world = World(service, topics, seed, caplog, tmp_path)
    steps = (
        world.create,
        world.produce,
        world.produce,
        world.write,
        world.write,
        world.batch,
        world.delete,
        world.trim,
        world.archive,
        world.move,
        world.look,
    )
    for _ in range(STEPS):
        world.rng.choice(steps)()
    while world.batch():
        pass
    world.reader.stop()
    assert len({*world.seen}) == len(world.seen), "a message was read twice"
    for name in world.names:
        seen = {value for topic, value in world.seen if topic == name}
        assert seen <= {*world.written[name]}
        if name not in world.lost:
            assert seen == {*world.written[name]}, f"messages of {name} are missing, and no error said so"

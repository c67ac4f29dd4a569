"""Random histories of topics that come, go, are made again and are trimmed under a stream that pauses.

Every value is written once, so one that is seen twice shows itself, and one that is not seen must be of a topic for which an
error said so. Writers repeat batches, go back in their numbers, and write other rows under a number that is taken.
"""

from __future__ import annotations

import functools
import json
import random
import re
import time
from typing import Any

import pyarrow as pa
import pytest

from magnetar.client import Client
from magnetar.proto.errors import InvalidArgument, MessageLost
from magnetar.spark.options import ReadOptions, WriteOptions
from magnetar.spark.schema import RowColumns
from magnetar.spark.sink import attach, write_task
from magnetar.spark.stream_source import TopicStreamReader
from magnetar.spark.versions import ReadAllAvailable, ReadLimit, ReadMaxRows
from support.service import Service
from support.spark_topics import Topics, full

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

STEPS = 60
LEASE_S = 0.4


class World:
    """Topics of one seed, their writers, and one query that reads all of them by a pattern."""

    def __init__(self, service: Service, topics: Topics, seed: int, log: pytest.LogCaptureFixture) -> None:
        self.log = log
        self.service, self.topics, self.rng = service, topics, random.Random(seed)
        self.names = [full(f"losses-{seed}-{letter}") for letter in "abc"]
        self.pattern = f"losses-{seed}-.*"
        self.there: set[str] = set()
        self.written: dict[str, list[bytes]] = {name: [] for name in self.names}  # whenever, by name
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
        self.reader = TopicStreamReader(ReadOptions.parse(given), RowColumns(("topic", "value")))

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

    def produce(self) -> None:
        for name in self.rng.sample(sorted(self.there), min(1, len(self.there))):
            values = self.values()
            self.topics.produce(name, values, per_entry=self.rng.choice((1, 3, 0)))
            self.written[name] += values

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
                self.written[name] += values
            elif (wanted, values) == (number, last):
                assert not attach(options, written)
            else:
                with pytest.raises(InvalidArgument, match="is not written"):
                    attach(options, written)

    def delete(self) -> None:
        if self.there and self.rng.random() < 0.4:
            name = self.rng.choice(sorted(self.there))
            self.topics.ask(lambda client: client.delete_topic(name, force=True))
            self.there.remove(name)
            self.unseen(name)

    def trim(self) -> None:
        """Somebody else acknowledges everything, while the query's driver is away for longer than its lease."""
        if self.there and self.rng.random() < 0.4:
            self.reader.stop()
            name = self.rng.choice(sorted(self.there))
            for subscription in self.topics.stats(name)["subscriptions"]:
                self.topics.ask(
                    functools.partial(Client.delete_subscription, topic=name, subscription=subscription)
                )
            self.number += 1
            self.topics.consume_all(name, f"everything-{self.number}")
            self.unseen(name)
            deadline = time.monotonic() + 2 * LEASE_S
            self.topics.wait_for(lambda: time.monotonic() > deadline, "the lease is over")
            self.query(forgiving=False)

    def unseen(self, name: str) -> None:
        """What is done to a topic that the query never met costs it nothing that it could know of."""
        if name not in self.offset["topics"]:
            self.lost.add(name)

    def batch(self) -> bool:
        """One micro-batch; False if nothing was there. An error that says what is lost is believed, and gone on from."""
        limit: ReadLimit = self.rng.choice((ReadAllAvailable(), ReadMaxRows(5)))
        try:
            end, rows = self.read(limit)
        except MessageLost:
            self.reader.stop()
            self.query(forgiving=True)
            self.log.clear()
            end, rows = self.read(limit)
            told = {*re.findall(r"persistent://\S+-[abc]", self.log.text)}
            assert told, "it goes on without saying what is lost"
            self.lost |= told
            self.reader.stop()
            self.query(forgiving=False)
        if self.rng.random() < 0.3:
            self.reader.stop()
            self.query(forgiving=False)
        self.seen += rows
        moved = bool(end["topics"] != self.offset["topics"])
        self.offset = end
        return moved

    def read(self, limit: ReadLimit) -> tuple[Any, list[tuple[str, bytes]]]:
        end = json.loads(json.dumps(self.reader.latestOffset(self.offset, limit)))
        rows: list[tuple[str, bytes]] = []
        for partition in self.reader.partitions(self.offset, end):
            for batch in self.reader.read(partition):
                rows += zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True)
        self.reader.commit(end)
        return end, rows


@pytest.mark.parametrize("seed", range(4))
def test_each_message_once_or_an_error_that_says_so(
    service: Service, topics: Topics, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(service, topics, seed, caplog)
    steps = (
        world.create,
        world.produce,
        world.produce,
        world.write,
        world.write,
        world.batch,
        world.delete,
        world.trim,
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

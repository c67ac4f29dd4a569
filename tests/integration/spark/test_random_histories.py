"""Random histories of two topics, read as Spark would ask for them, but without a session: hundreds of plans in seconds.

Producers, sinks, and restarts of a stream alternate. Whatever was confirmed is the model: each batch of the stream has the
rows between its offsets, also when another process asks for it again; each range of a batch read has the model's rows.
"""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from magnetar.proto.ids import MessageId
from magnetar.spark.batch_source import TopicPiece, TopicReader
from magnetar.spark.options import ReadOptions, WriteOptions
from magnetar.spark.plan import LedgerSlice
from magnetar.spark.sink import attach, write_task
from magnetar.spark.stream_source import TopicStreamReader
from magnetar.spark.versions import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows
from support.long_form import times
from support.service import Service
from support.spark_topics import Sent, Topics, full

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120), pytest.mark.real]

COLUMNS = ("topic", "offset", "message_id", "append_time", "value")
STEPS = 40
SEEDS = times(2, 10)


class Stored(NamedTuple):
    """A row of the model."""

    offset: int
    message_id: bytes
    append_time: int  # ms
    value: bytes | None


class History:
    """Topics of one seed, and what they must hold."""

    def __init__(self, service: Service, topics: Topics, seed: int) -> None:
        self.service, self.topics, self.rng = service, topics, random.Random(seed)
        self.names = [full(f"history-{seed}-{letter}") for letter in "ab"]
        self.values: dict[str, list[bytes | None]] = {name: [] for name in self.names}
        self.written = 0
        for name in self.names:
            topics.create(name)
            topics.consume_all(name, "holds-everything")  # never acknowledges what comes

    def options(self, **options: str) -> ReadOptions:
        size = str(self.rng.choice((200, 2000, 1 << 20)))
        return ReadOptions.parse(
            {
                "service_url": self.service.url,
                "topics": ",".join(self.names),
                "partition_bytes": size,
                **options,
            }
        )

    def some_values(self) -> list[bytes | None]:
        count = self.rng.choice((1, 3, 30))
        values: list[bytes | None] = []
        for _ in range(count):
            self.written += 1
            values.append(b"%d:" % self.written + self.rng.randbytes(self.rng.choice((0, 5, 200))))
        return values

    def produce(self) -> None:
        name, values = self.rng.choice(self.names), self.some_values()
        messages = [Sent(value, self.rng.choice((None, "k", b"\xff"))) for value in values]
        self.topics.produce(
            name,
            messages,
            batching=self.rng.random() < 0.6,
            compression=self.rng.choice(("none", "lz4", "zstd", "zlib", "snappy")),
            per_entry=self.rng.choice((0, 2, 7)),
        )
        self.values[name] += values

    def write(self) -> None:
        """As a sink with two tasks does it, and once more as a driver that does not know that it had committed."""
        name = self.rng.choice(self.names)
        options = WriteOptions.parse({"service_url": self.service.url, "topic": name})
        query, parts = f"query-{self.rng.getrandbits(40)}", [self.some_values(), self.some_values()]

        def run() -> bool:
            batches = [pa.record_batch({"value": pa.array(part, pa.binary())}) for part in parts]
            return attach(options, [write_task(options, query, 0, iter([batch])) for batch in batches])

        assert run()
        if self.rng.random() < 0.3:
            assert not run()
        self.values[name] += parts[0] + parts[1]

    def range(self) -> None:
        """A batch read between two places, by id, offset or time; their offsets alone are known without reading it."""
        stored = self.stored()
        name = self.rng.choice(self.names)
        model = stored[name]
        if not model:
            return
        low, high = sorted((self.rng.choice(model), self.rng.choice(model)))

        def place(row: Stored) -> str:
            message_id = str(MessageId.from_bytes(row.message_id))
            return str(self.rng.choice((message_id, f"offset:{row.offset}", row.append_time)))

        start, end = place(low), place(high)
        first, last = (
            next(row.offset for row in model if row.append_time >= int(text))
            if text.isdigit()
            else one.offset
            for text, one in ((start, low), (end, high))
        )
        expected = model[first:last]
        options = self.options(start=json.dumps({name: start}), end=json.dumps({name: end}))
        assert rows_of(TopicReader(options, tuple(COLUMNS))).get(name, []) == expected, (start, end)
        assert offsets_of(options, name) == [row.offset for row in expected], (start, end)

    def stored(self) -> dict[str, list[Stored]]:
        """All there is, which must be what was confirmed, in its order."""
        found = rows_of(TopicReader(self.options(), tuple(COLUMNS)))
        for name in self.names:
            found.setdefault(name, [])
            assert [row.value for row in found[name]] == self.values[name]
            assert [row.offset for row in found[name]] == list(range(len(found[name])))
            ids = [MessageId.from_bytes(row.message_id) for row in found[name]]
            assert ids == sorted(ids)
            assert offsets_of(self.options(), name) == list(range(len(found[name])))
        return found


def rows_of(reader: Any, *offsets: Any) -> dict[str, list[Stored]]:
    """By topic, in the order of the partitions."""
    found: dict[str, list[Stored]] = {}
    for partition in reader.partitions(*offsets):
        for batch in reader.read(partition):
            topics, *columns = (batch.column(name) for name in COLUMNS)
            columns[2] = columns[2].cast(pa.int64())
            for topic, offset, message_id, append_us, value in zip(
                topics.to_pylist(), *(column.to_pylist() for column in columns), strict=True
            ):
                found.setdefault(topic, []).append(Stored(offset, message_id, append_us // 1000, value))
    return found


def offsets_of(options: ReadOptions, topic: str) -> list[int]:
    """What the list of ledgers says of a range of a topic: no task asks a bookie."""
    reader = TopicReader(options, ("partition", "topic", "offset"))
    partitions = reader.partitions()
    assert not any(isinstance(one, TopicPiece) for one in partitions)
    batches = [batch for one in partitions for batch in reader.read(one)]
    return [
        offset
        for batch in batches
        for name, offset in zip(batch.column(1).to_pylist(), batch.column(2).to_pylist(), strict=True)
        if name == topic
    ]


class Query:
    """A stream and its checkpoint; `restart` makes the reader anew from what Spark would have kept."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.restart()
        self.offset = json.loads(json.dumps(self.reader.initialOffset()))
        self.seen: dict[str, list[Stored]] = {name: [] for name in history.names}

    def restart(self) -> None:
        self.reader = TopicStreamReader(self.history.options(), tuple(COLUMNS))

    def limit(self) -> ReadLimit:
        rng = self.history.rng
        return rng.choice(
            (ReadAllAvailable(), ReadMaxRows(rng.choice((1, 7, 50))), ReadMaxBytes(rng.choice((1, 900))))
        )

    def batch(self, *, quiet: bool = False) -> int:
        """One micro-batch; returns its rows. Unless `quiet`, the driver may die before Spark knows that it is done."""
        limit = self.limit()
        end = json.loads(json.dumps(self.reader.latestOffset(self.offset, limit)))
        rows = rows_of(self.reader, self.offset, end)
        if not quiet and self.history.rng.random() < 0.4:
            self.history.produce()
            self.restart()
            assert rows_of(self.reader, self.offset, end) == rows
        count = sum(map(len, rows.values()))
        assert not isinstance(limit, ReadMaxRows) or count <= limit.max_rows
        for name, more in rows.items():
            self.seen[name] += more
        self.offset = end
        self.reader.commit(end)
        return count


@pytest.mark.parametrize("seed", range(SEEDS))
def test_batches_and_ranges_have_exactly_the_rows_between_their_places(
    service: Service, topics: Topics, seed: int
) -> None:
    history = History(service, topics, seed)
    history.produce()
    query = Query(history)
    for _ in range(STEPS):
        history.rng.choice((history.produce, history.write, history.range, query.batch, query.batch))()
    while query.batch(quiet=True):
        pass
    assert query.seen == history.stored()


def test_a_batch_of_a_stream_asks_for_its_own_entries_only(service: Service, topics: Topics) -> None:
    topics.produce("own-entries", [b"%d" % n for n in range(8)], per_entry=2)
    options = ReadOptions.parse({"service_url": service.url, "topic": "own-entries"})
    reader = TopicStreamReader(options, tuple(COLUMNS))
    offset, asked = reader.initialOffset(), []
    for _ in range(4):
        end = reader.latestOffset(offset, ReadMaxRows(2))
        for piece in reader.partitions(offset, end):
            assert isinstance(piece, TopicPiece)
            asked += [(one.first, one.last) for one in piece.slices if isinstance(one, LedgerSlice)]
        offset = end
    reader.stop()
    assert asked == [(0, 0), (1, 1), (2, 2), (3, 3)]

"""Entries become rows: every column, for batches of every kind, against a slow reading message by message."""

from __future__ import annotations

import random
import zlib
from typing import Any

import pyarrow as pa
import pytest

from magnetar.proto.batch import (
    FORMAT_NATIVE,
    FORMATS,
    KEYS,
    METADATA,
    DecodedBatch,
    decode_batch,
    encode_batch,
)
from magnetar.proto.batch_extensions import entry_flags
from magnetar.proto.compression import Compression
from magnetar.proto.entry import Entry, encode_entry
from magnetar.proto.ids import MessageId
from magnetar.proto.ledger_entry import encode_ledger_entry
from magnetar.proto.pulsar.batch import admit_pulsar
from magnetar.spark.columns import Rows, Source
from magnetar.spark.plan import Range
from magnetar.spark.schema import COLUMNS, topic_schema
from magnetar.spark.versions import arrow_schema
from support.pulsar_messages import batch, frame, single

TOPIC = ("persistent://public/default/orders", -1)
SOURCE = Source(9, 1000)


def pulsar_batch(rng: random.Random, values: list[bytes | None], number: int) -> bytes:
    keys: list[dict[str, Any]] = [rng.choice(({}, {"partition_key": "key-ä"})) for _ in values]
    if len(values) == 1 and rng.random() < 0.5:
        sent = frame(
            values[0] or b"", {"a": "1"}, null_value=values[0] is None, sequence_id=number, **keys[0]
        )
    else:
        singles = [
            single(
                value,
                rng.choice((None, {"a": "1", "b": "ü"})),
                sequence_id=number + 2 * i,
                event_time=i,
                **key,
            )
            for i, (value, key) in enumerate(zip(values, keys))
        ]
        sent = batch(singles, sequence_id=number, highest_sequence_id=number + 2 * len(values))
    return admit_pulsar([sent]).batches[0]


def random_batch(rng: random.Random, number: int) -> tuple[bytes, int]:
    n = rng.choice((1, 1, 2, 5, 40))
    values = [rng.choice((None, b"", rng.randbytes(rng.randrange(200)))) for _ in range(n)]
    if rng.random() < 0.3:
        return pulsar_batch(rng, values, number), n
    if n == 1 and rng.random() < 0.5:
        return encode_batch([values[0] or b""], sequence_id=number, publish_time_ms=1000 + number), 1
    return (
        encode_batch(
            values,
            sequence_id=number,
            publish_time_ms=1000 + number,
            keys=rng.choice((None, [rng.choice((None, "key-ä", b"\xff\x00")) for _ in range(n)])),
            properties=rng.choice((None, [rng.choice((None, {"a": "1", "b": "ü"}, {})) for _ in range(n)])),
            event_times_ms=rng.choice((None, [rng.choice((None, 77)) for _ in range(n)])),
            sequence_ids=rng.choice((None, None, [number + 3 * i for i in range(n)])),
            compression=rng.choice(list(Compression)),
        ),
        n,
    )


def random_entry(rng: random.Random, entry_id: int, first_index: int) -> tuple[bytes, int]:
    if rng.random() < 0.3:
        count = rng.choice((1, 7))
        batches = [
            (encode_batch([rng.randbytes(9)], sequence_id=i, publish_time_ms=5 + i), 1) for i in range(count)
        ]
    else:
        batches = [random_batch(rng, 100 * i) for i in range(rng.choice((1, 3, 6)))]
    entry = encode_entry(
        [batch for batch, _ in batches],
        [n for _, n in batches],
        [rng.randrange(2) for _ in batches],
        ["first", "second"],
        first_index=first_index,
        append_time_ms=5000 + entry_id,
    )
    return encode_ledger_entry(7, entry_id, entry_id - 1, 0, entry), sum(n for _, n in batches)


def read_slowly(ledger_entry: bytes, entry_id: int) -> list[dict[str, Any]]:
    entry = Entry(ledger_entry, 40)
    rows: list[dict[str, Any]] = []
    for position in range(entry.batch_count):
        batch = decode_batch(bytes(entry.batch(position)))
        metadata = batch.metadata or {}
        for i, value in enumerate(batch.values):
            index = entry.batch_start_index(position) + i
            key = batch.keys[i] if batch.keys else None
            properties = metadata.get(1, [None] * len(batch.values))[i]
            rows.append(
                {
                    "key": key.encode() if isinstance(key, str) else key,
                    "value": value,
                    "topic": TOPIC[0],
                    "partition": -1,
                    "message_id": MessageId(9, entry_id, index).to_bytes(),
                    "offset": 1000 + entry.first_index + index,
                    "publish_time": batch.header.publish_time_ms,
                    "event_time": metadata.get(2, [None] * len(batch.values))[i],
                    "append_time": entry.append_time_ms,
                    "properties": None if properties is None else sorted(properties.items()),
                    "producer": ["first", "second"][entry.producers[position]],
                    "sequence_id": metadata[4][i] if 4 in metadata else batch.header.sequence_id + i,
                }
            )
    return rows


def as_rows(batch: Any) -> list[dict[str, Any]]:
    batch.validate(full=True)
    found = []
    for row in batch.to_pylist():
        for name in ("publish_time", "event_time", "append_time"):
            row[name] = None if row[name] is None else round(row[name].timestamp() * 1000)
        row["properties"] = None if row["properties"] is None else sorted(row["properties"])
        found.append(row)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_rows_equal_a_reading_message_by_message(seed: int) -> None:
    rng = random.Random(seed)
    rows, wanted = Rows(tuple(COLUMNS), *TOPIC), []
    first_index = 0
    for entry_id in range(rng.choice((1, 6))):
        entry, count = random_entry(rng, entry_id, first_index)
        rows.add(entry, SOURCE, Range())
        wanted += read_slowly(entry, entry_id)
        first_index += count
        assert rows.count == len(wanted)
    assert as_rows(rows.take()) == wanted
    assert rows.count == 0


@pytest.mark.parametrize("seed", range(60))
def test_ranges_cut_rows_within_entries(seed: int) -> None:
    rng = random.Random(seed)
    entries, everything, first_index = [], [], 0
    for entry_id in range(5):
        entry, count = random_entry(rng, entry_id, first_index)
        entries.append(entry)
        everything += read_slowly(entry, entry_id)
        first_index += count
    low, high = sorted(rng.choices(range(len(everything) + 1), k=2))
    kind = rng.choice(("position", "offset", "time"))
    if kind == "offset":
        wanted = Range(from_offset=1000 + low, before_offset=1000 + high)
        expected = everything[low:high]
    elif kind == "time":
        wanted = Range(from_append_ms=5001, before_append_ms=5000 + rng.randrange(6))
        expected = [row for row in everything if 5001 <= row["append_time"] < wanted.before_append_ms]
    else:
        ids = [MessageId.from_bytes(row["message_id"])[:3] for row in everything] + [(9, 5, 0)]
        wanted = Range(from_position=ids[low], before_position=ids[high])
        expected = everything[low:high]
    rows = Rows(tuple(COLUMNS), *TOPIC)
    for entry in entries:
        rows.add(entry, SOURCE, wanted)
    assert as_rows(rows.take()) == expected


def test_only_the_columns_that_are_wanted() -> None:
    entry, _ = random_entry(random.Random(1), 0, 0)
    rows = Rows(("offset", "value"), *TOPIC)
    rows.add(entry, SOURCE, Range())
    assert rows.take().schema.names == ["offset", "value"]


def test_the_arrow_schema_is_the_one_that_spark_derives() -> None:
    derived = arrow_schema(topic_schema())
    entry, _ = random_entry(random.Random(1), 0, 0)
    rows = Rows(tuple(COLUMNS), *TOPIC)
    rows.add(entry, SOURCE, Range())
    assert derived.equals(rows.take().schema)


def test_columns_that_are_not_wanted_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    decoded: list[int] = []
    native = FORMATS[FORMAT_NATIVE]

    def decode(batch: DecodedBatch, which: int) -> Any:
        decoded.append(which)
        return native(batch, which)

    monkeypatch.setitem(FORMATS, FORMAT_NATIVE, decode)
    entries, first = [], 0
    for entry_id in range(20):
        entry, count = random_entry(rng, entry_id, first)
        entries.append(entry)
        first += count
    for names, of in ((("offset", "append_time", "producer"), {METADATA}), (("key",), {KEYS, METADATA})):
        rows = Rows(names, *TOPIC)
        for entry in entries:
            rows.add(entry, SOURCE, Range())
        assert rows.take().num_rows == first
        assert {*decoded} == of
        decoded.clear()


def test_rows_of_several_ledgers_stand_in_one_batch() -> None:
    rng = random.Random(4)
    rows = Rows(("message_id", "offset", "append_time"), *TOPIC)
    places = [Source(9, 1000), Source(12, 2000, 77)]
    expected = []
    for source in places:
        entry, count = random_entry(rng, 3, 0)
        rows.add(entry, source, Range())
        expected += [(source.ledger, source.first_offset + n, source.append_ms or 5003) for n in range(count)]
    batch = rows.take()
    ids = [MessageId.from_bytes(one).ledger for one in batch.column(0).to_pylist()]
    times = batch.column(2).cast(pa.int64()).to_pylist()
    assert list(zip(ids, batch.column(1).to_pylist(), [one // 1000 for one in times])) == expected


def test_a_time_that_no_reader_can_show_is_null() -> None:
    times = [None, 77, 1_700_000_000_000_000_000, -1, (1 << 64) - 1]
    batch = encode_batch([b"v"] * 5, sequence_id=0, publish_time_ms=0, event_times_ms=times)
    entry = encode_entry([batch], [5], [0], ["p"], first_index=0, append_time_ms=0)
    rows = Rows(["event_time"], *TOPIC)
    rows.add(encode_ledger_entry(3, 0, -1, 0, entry), SOURCE, Range())
    assert [time and time.timestamp() for time in rows.take().column(0).to_pylist()] == [
        None, 0.077, None, None, None
    ]  # fmt: skip


def test_a_compressed_message_in_chunks_of_a_producer_of_pulsar() -> None:
    value = random.Random(1).randbytes(300) + bytes(9000)
    packed = zlib.compress(value)
    pieces = [packed[at : at + 100] for at in range(0, len(packed), 100)]
    fields: dict[str, Any] = {
        "uuid": "u", "num_chunks_from_msg": len(pieces), "total_chunk_msg_size": len(packed), "compression": 2,
        "uncompressed_size": len(value),
    }  # fmt: skip
    admitted = admit_pulsar(
        [frame(piece, {"a": "1"}, chunk_id=at, **fields) for at, piece in enumerate(pieces)]
    )
    n = len(pieces)
    entry = encode_entry(
        admitted.batches,
        [1] * n,
        [0] * n,
        ["p"],
        first_index=0,
        append_time_ms=1,
        flags=entry_flags(admitted.batches),
    )
    rows = Rows(("value", "properties", "offset"), *TOPIC)
    rows.add(encode_ledger_entry(7, 0, -1, 0, entry), SOURCE, Range())
    assert rows.take().to_pylist() == [{"value": value, "properties": [("a", "1")], "offset": 1000}]

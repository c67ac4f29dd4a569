"""What tasks append: key by key where that is asked for, and digests that know a batch again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from magnetar.proto.batch import decode_batch
from magnetar.proto.bookie_identity import NOT_KNOWN, BookieIdentity
from magnetar.proto.entry import Entry
from magnetar.proto.errors import InvalidArgument
from magnetar.spark.options import WriteOptions
from magnetar.spark.packing import CONTENT_MODULUS, Packer
from magnetar.spark.sink import TopicWriter
from magnetar.spark.staged import bookies_of, places_of

GOOD = {"service_url": "magnetar://127.0.0.1:7650", "topic": "orders"}


def rows_of(messages: Sequence[tuple[bytes | None, Any]], key_type: pa.DataType) -> pa.RecordBatch:
    values, keys = zip(*messages, strict=True)
    return pa.record_batch({"value": pa.array(values, pa.binary()), "key": pa.array(keys, key_type)})


def packed(packer: Packer, rows: pa.RecordBatch) -> list[list[tuple[bytes | None, Any]]]:
    """Batch by batch."""
    found = []
    for one in packer.pack(rows, 5):
        entry = Entry(one.payload)
        for number in range(entry.batch_count):
            batch = decode_batch(bytes(entry.batch(number)))
            assert batch.header.sequence_id == entry.base_index + entry.batch_start_index(number)
            found.append(
                list(zip(batch.values, batch.keys or [None] * batch.header.message_count, strict=True))
            )
    return found


@pytest.mark.parametrize("key_type", [pa.string(), pa.binary()])
def test_a_batch_of_each_key_in_the_order_of_the_rows(key_type: pa.DataType) -> None:
    rng = random.Random(1)
    keys = ["a", "b", "ä", "", None] if key_type == pa.string() else [b"a", b"\xff", b"", None]
    messages = [(b"%d" % n, rng.choice(keys)) for n in range(500)]
    batches = packed(
        Packer("p", WriteOptions.parse({**GOOD, "key_batches": "true"}), 1000), rows_of(messages, key_type)
    )
    assert len(batches) == len(keys)
    for batch in batches:
        assert len({key for _, key in batch}) == 1
        assert batch == [message for message in messages if message[1] == batch[0][1]]
    plain = packed(Packer("p", WriteOptions.parse(GOOD), 1000), rows_of(messages, key_type))
    assert plain == [messages]


def test_a_digest_is_of_the_rows_and_not_of_their_order_or_tasks() -> None:
    rng = random.Random(2)
    messages = [(rng.choice((None, b"", rng.randbytes(9))), rng.choice((None, "k", "l"))) for _ in range(300)]

    def digest(parts: Sequence[Sequence[tuple[bytes | None, Any]]]) -> int:
        total = 0
        for part in parts:
            packer = Packer("p", WriteOptions.parse(GOOD), 1000)
            assert packed(packer, rows_of(part, pa.string()))
            total += packer.content
        return total % CONTENT_MODULUS

    whole = digest([messages])
    for _ in range(20):
        rng.shuffle(messages)
        cut = rng.randrange(1, 299)
        assert digest([messages[:cut], messages[cut:]]) == whole
    for number in range(0, 300, 30):
        value, key = messages[number]
        for other in (((value or b"") + b"x", key), (value, "other")):
            assert digest([[*messages[:number], other, *messages[number + 1 :]]]) != whole
    assert digest([messages[1:]]) != whole
    assert digest([[(None, "k")]]) != digest([[(b"k", None)]]) != digest([[(b"k", "")]])
    swapped = [(b"one", "k"), (b"two", "l")]
    assert digest([swapped]) != digest([[(b"two", "k"), (b"one", "l")]])


@pytest.mark.parametrize(
    ("column", "wrong"),
    [
        (pa.array([[("a", None)]], pa.map_(pa.string(), pa.string())), "null"),
        (pa.array([[("a", "x" * 2000)]], pa.map_(pa.string(), pa.string())), "properties"),
        (pa.array([b"\xff"]).cast(pa.string(), safe=False), "no UTF-8"),
        (
            pa.MapArray.from_arrays(
                pa.array([0, 1], pa.int32()),
                pa.array(["a"]),
                pa.array([b"\xff"]).cast(pa.string(), safe=False),
            ),
            "no UTF-8",
        ),
        (pa.array([-1_000_000], pa.timestamp("us", "UTC")), "epoch"),
        (pa.array([1 << 60], pa.timestamp("us", "UTC")), "year 9999"),
    ],
)
def test_rule_47_rows_keep_the_rules_of_messages(column: pa.Array, wrong: str) -> None:
    names = {"map": "properties", "string": "key"}
    name = names.get(str(column.type).partition("<")[0], "event_time")
    rows = pa.record_batch({"value": pa.array([b"v"]), name: column})
    with pytest.raises(InvalidArgument, match=wrong):
        list(Packer("p", WriteOptions.parse(GOOD), 1000).pack(rows, 5))


def test_a_batch_that_is_repeated_may_have_its_properties_in_another_order() -> None:
    contents = set()
    for pairs in ([("a", "1"), ("b", "2")], [("b", "2"), ("a", "1")]):
        packer = Packer("p", WriteOptions.parse(GOOD), 1000)
        column = pa.array([pairs], pa.map_(pa.string(), pa.string()))
        list(packer.pack(pa.record_batch({"value": pa.array([b"v"]), "properties": column}), 5))
        contents.add(packer.content)
    assert len(contents) == 1


def test_a_digest_that_nobody_compares_is_not_made() -> None:
    schema = StructType([StructField("value", BinaryType())])
    for given, made in (({}, False), ({"query": "q", "batch": "1"}, True)):
        writer = TopicWriter(WriteOptions.parse(GOOD | given), schema)
        packer = Packer("p", writer._options, 1000)
        assert packed(packer, rows_of([(b"v", None)], pa.string()))
        assert bool(packer.content) == made


@pytest.mark.parametrize(
    ("labels", "placement"), [(("", ""), "random"), (("r1", ""), "rack"), (("r1", "z1"), "zone")]
)
def test_a_task_knows_where_bookies_stand(labels: tuple[str, str], placement: str) -> None:
    made = {
        "bookies": {"gone": "10.0.0.1:3181"},
        "identities": {"gone": [1, "gone", 2, 3, 4]},
        "writable": [["b1", "10.0.0.2:3181", *labels, "fast"], ["b2", "10.0.0.3:3181", "", "", ""]],
    }
    directory, found = places_of(made)
    assert bookies_of(made)["gone"].identity == BookieIdentity(1, "gone", 2, 3, 4)
    assert bookies_of(made)["b1"].identity == NOT_KNOWN
    assert found == placement
    assert directory.labels("b1") == (*labels, "fast")
    assert directory.address("gone") == ("10.0.0.1", 3181)

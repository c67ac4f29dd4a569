"""Native batches as Pulsar's consumers get them: the protobuf runtime reads what was sent, and so do we."""

from __future__ import annotations

import base64
import contextlib
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.proto.batch import Columns, Key, decode_batch, encode_columns
from magnetar.proto.batch_extensions import (
    EXT_CHUNK,
    EXT_DELIVER_AT_MS,
    EXT_SCHEMA_VERSION,
    EXT_WHOLE,
    Chunk,
    WholeMessage,
)
from magnetar.proto.compression import Compression
from magnetar.proto.errors import InvalidArgument, MalformedFrame
from magnetar.proto.message_rules import MAX_TIME_MS
from magnetar.proto.pulsar.batch import admit_pulsar
from magnetar.proto.pulsar.transcoding import Slice, to_pulsar
from support.pulsar_messages import read_frame

NOW_MS = 1_700_000_000_000
LIMIT = 5 * 1024 * 1024


def _native(columns: Columns, sequence_id: int = 0, **more: Any) -> bytes:
    (batch,) = encode_columns(columns, sequence_id, NOW_MS, **more).batches()
    return batch


Row = tuple[bytes | None, Key, dict[str, str], int, int]


def _rows(slices: Sequence[Slice]) -> list[Row]:
    """Value, key, properties, event time and sequence id of each message, as Pulsar's clients find them."""
    rows: list[Row] = []
    for first, messages, data in slices:
        assert first == len(rows)
        metadata, found = read_frame(bytes(data))
        assert metadata.HasField("num_messages_in_batch") == (messages > 1)
        assert (metadata.producer_name, metadata.publish_time) == ("p", NOW_MS)
        assert len(found) == messages
        before = len(rows)
        for single, value in found:
            one = single or metadata
            key: Key = one.partition_key if one.HasField("partition_key") else None
            if one.partition_key_b64_encoded:
                key = base64.b64decode(one.partition_key)
            properties = {pair.key: pair.value for pair in one.properties}
            assert not (one.null_value and value)
            rows.append((None if one.null_value else value, key, properties, one.event_time, one.sequence_id))
        assert metadata.sequence_id == rows[before][4]
        assert (metadata.highest_sequence_id or metadata.sequence_id) == rows[-1][4]
    return rows


_TEXT = st.text(st.characters(codec="utf-8"), max_size=6)
_SOME_KEY = st.one_of(st.none(), _TEXT, st.binary(max_size=6))


@st.composite
def _columns(draw: st.DrawFn) -> tuple[Columns, int]:
    values = draw(st.lists(st.one_of(st.none(), st.binary(max_size=40)), min_size=1, max_size=12))

    def column(one: st.SearchStrategy[Any]) -> Any:
        return draw(st.one_of(st.none(), st.lists(one, min_size=len(values), max_size=len(values))))

    ids = draw(
        st.one_of(
            st.none(),
            st.lists(st.integers(0, 2**63 - 1), min_size=len(values), max_size=len(values), unique=True).map(
                sorted
            ),
        )
    )
    first = ids[0] if ids else draw(st.sampled_from([0, 1, 120, 127, 128, 16_380, 1 << 40]))
    properties = column(st.one_of(st.none(), st.dictionaries(_TEXT, _TEXT, max_size=2)))
    times = column(st.one_of(st.none(), st.integers(1, MAX_TIME_MS)))
    return Columns(values, column(_SOME_KEY), properties, times, None, ids), first


@given(_columns(), st.sampled_from([LIMIT, 400]), st.sampled_from(list(Compression)))
def test_every_message_arrives_as_it_was_sent(
    sent: tuple[Columns, int], limit: int, compression: Compression
) -> None:
    columns, first = sent
    n = len(columns.values)
    slices = to_pulsar(_native(columns, first, compression=compression), "p", limit)
    assert [number for number, *_ in _rows(slices)] == columns.values
    assert _rows(slices) == list(
        zip(
            columns.values,
            columns.keys or [None] * n,
            [one or {} for one in columns.properties or [None] * n],
            [one or 0 for one in columns.event_times_ms or [0] * n],
            columns.sequence_ids or range(first, first + n),
            strict=True,
        )
    )


@given(_columns())
def test_what_was_transcoded_is_read_back(sent: tuple[Columns, int]) -> None:
    """As if a producer of Pulsar had sent it."""
    batch = _native(*sent)
    (only,) = to_pulsar(batch, "p", LIMIT)
    native, back = decode_batch(batch), decode_batch(admit_pulsar([bytes(only.data)]).batches[0])
    assert back.values == native.values

    def present(column: list[Any] | None) -> list[Any] | None:
        return None if column is None or not any(one is not None and one != {} for one in column) else column

    assert present(back.keys) == present(native.keys)
    if len(native.values) > 1:  # of a single message the sequence id is that of the batch
        assert {k: present(v) for k, v in (back.metadata or {}).items() if present(v)} == {
            k: [one or None for one in v] if k == 1 else v
            for k, v in (native.metadata or {}).items()
            if present(v) and not (k == 4 and v == list(range(v[0], v[0] + len(v))))
        }


def test_a_batch_that_is_too_large_is_cut_at_the_same_places_every_time() -> None:
    values: list[bytes | None] = [bytes(9000), *[bytes(1000)] * 9, bytes(9000), b"", None]
    batch = _native(Columns(values), 100, compression=Compression.ZSTD)
    slices = to_pulsar(batch, "p", 4500)
    assert [(first, messages) for first, messages, _ in slices] == [
        (0, 1),
        (1, 4),
        (5, 4),
        (9, 1),
        (10, 1),
        (11, 2),
    ]
    assert all(len(one.data) <= 4500 for one in slices if one.first not in (0, 10))
    assert slices == to_pulsar(batch, "p", 4500)
    assert [row[4] for row in _rows(slices)] == list(range(100, 113))


def test_what_stands_in_the_extensions() -> None:
    extensions = {EXT_DELIVER_AT_MS: NOW_MS, EXT_SCHEMA_VERSION: bytes(8)}
    for values in ([b"a"], [b"a", b"b"]):
        (one,) = to_pulsar(_native(Columns(values), extensions=extensions), "p", LIMIT)
        metadata, _ = read_frame(bytes(one.data))
        assert (metadata.deliver_at_time, metadata.schema_version) == (NOW_MS, bytes(8))


@pytest.mark.parametrize("codec", [Compression.NONE, Compression.ZSTD])
def test_chunks(codec: Compression) -> None:
    chunk, whole = Chunk(b"8 bytes.", 1, True), WholeMessage(2, 7, codec, 9 if codec else 0)
    batch = _native(Columns([b"abc"]), 5, extensions={EXT_CHUNK: chunk, EXT_WHOLE: whole})
    (one,) = to_pulsar(batch, "p", LIMIT)
    metadata, found = read_frame(bytes(one.data))
    assert found == [(None, b"abc")]
    assert metadata.uuid == f"p-{b'8 bytes.'.hex()}"
    assert (metadata.chunk_id, metadata.num_chunks_from_msg, metadata.total_chunk_msg_size) == (1, 2, 7)
    assert (metadata.compression, metadata.uncompressed_size) == ((3, 9) if codec else (0, 0))
    back = decode_batch(admit_pulsar([bytes(one.data)]).batches[0])
    assert (back.extensions[EXT_WHOLE], back.values) == ([*whole], [b"abc"])
    with pytest.raises(InvalidArgument, match="as a stream"):
        to_pulsar(_native(Columns([b"abc"]), 5, extensions={EXT_CHUNK: chunk}), "p", LIMIT)


def test_damage_that_no_checksum_shows_is_malformed() -> None:
    """What a client may have written into the columns, which no broker looks at."""
    rng = random.Random(1)
    whole = {EXT_CHUNK: Chunk(b"8 bytes.", 0, False), EXT_WHOLE: WholeMessage(2, 7, 1, 9)}
    good = [
        _native(Columns([b"a", None], ["k", b"k"], [{"a": "b"}, None], [1, 2], None, [7, 9])),
        _native(Columns([b"a"], ["k"])),
        _native(Columns([b"a"]), extensions=whole),
    ]
    transcoded = 0
    for _ in range(3000):
        content = bytearray(rng.choice(good)[12:])
        for _ in range(rng.randrange(1, 4)):
            content[rng.randrange(len(content))] = rng.choice((0, 0x40, 0x80, 0xFF, rng.randrange(256)))
        damaged = (len(content) + 8).to_bytes(4, "big") + bytes(8) + content
        with contextlib.suppress(MalformedFrame, InvalidArgument):
            transcoded += len(to_pulsar(memoryview(damaged), "p", LIMIT))
    assert transcoded > 500

"""Batch format 2: what Pulsar's producers send is admitted, stored verbatim, and read by native consumers."""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Callable
from typing import Any

import cramjam
import lz4.block
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_digest

from magnetar.proto.admission import AdmittedGroups, admit_groups
from magnetar.proto.batch import (
    FORMAT_PULSAR,
    META_EVENT_TIMES_MS,
    META_PROPERTIES,
    META_SEQUENCE_IDS,
    DecodedBatch,
    decode_batch,
    decode_batch_header,
    encode_batch,
    key_hash_of,
)
from magnetar.proto.batch_extensions import (
    EXT_BATCH_OF_ONE,
    EXT_SCHEMA_VERSION,
    BatchExtensions,
    Chunk,
    WholeMessage,
    batch_extensions,
    entry_flags,
)
from magnetar.proto.entry import Entry, encode_entry
from magnetar.proto.entry_messages import entry_key_hashes, entry_keys, entry_values
from magnetar.proto.errors import ChecksumMismatch, InvalidArgument, MalformedFrame
from magnetar.proto.ids import MAX_MESSAGES_PER_BATCH
from magnetar.proto.message_rules import MAX_TIME_MS
from magnetar.proto.pulsar import wire_pb2 as wire
from magnetar.proto.pulsar.batch import admit_pulsar
from support.pulsar_messages import batch, frame, single

NOW_MS = 1_700_000_000_000


def _one(data: bytes) -> DecodedBatch:
    (stored,) = admit_pulsar([data]).batches
    return decode_batch(stored)


def _entry(admitted: AdmittedGroups) -> Entry:
    names = [0] * len(admitted.batches)
    flags = entry_flags(admitted.batches)
    return Entry(
        encode_entry(
            admitted.batches, admitted.counts, names, ["p"], first_index=0, append_time_ms=1, flags=flags
        )
    )


# --- admission -------------------------------------------------------------------------------------------------------


def test_the_bytes_are_stored_as_they_came() -> None:
    sent = [
        frame(b"a", sequence_id=300),
        batch(
            [single(b"b", sequence_id=301), single(b"c", sequence_id=302)],
            sequence_id=301,
            highest_sequence_id=302,
        ),
        frame(b"d", sequence_id=303, publish_time=NOW_MS + 1),
    ]
    admitted = admit_pulsar(sent)
    assert admitted.counts == [1, 2, 1]
    assert admitted.sequence_ids == [300, 301, 303]
    assert admitted.extensions is None
    for stored, one, time_ms in zip(admitted.batches, sent, (NOW_MS, NOW_MS, NOW_MS + 1), strict=True):
        header = decode_batch_header(stored)
        assert (header.format, header.size, header.publish_time_ms) == (FORMAT_PULSAR, len(stored), time_ms)
        assert stored[header.header_length :] == one
    assert entry_values(_entry(admitted)) == [b"a", b"b", b"c", b"d"]


def test_a_producer_that_leaves_checksums_out_gets_them() -> None:
    with_it, without = frame(b"a"), frame(b"a", checksum=False)
    assert admit_pulsar([without]) == admit_pulsar([with_it])


@pytest.mark.parametrize(
    ("fields", "last"),
    [
        ({"sequence_id": 5, "highest_sequence_id": 7}, 7),  # Java
        ({"sequence_id": 5}, 5),  # Go
        ({"sequence_id": 7, "highest_sequence_id": 7}, 7),  # Java by key, C++ 4.0
        ({"sequence_id": 5, "highest_sequence_id": 4}, 5),
    ],
)
def test_sequence_ids_are_never_counted(fields: dict[str, int], last: int) -> None:
    singles = [single(b"a", sequence_id=5), single(b"b", sequence_id=6), single(b"c", sequence_id=7)]
    admitted = admit_pulsar([batch(singles, **fields)])
    assert admitted.sequence_ids == [fields["sequence_id"]]
    assert admitted.last_sequence_id(0) == last
    read = decode_batch(admitted.batches[0])
    own = (read.metadata or {}).get(META_SEQUENCE_IDS) or [read.header.sequence_id + at for at in range(3)]
    assert own == [5, 6, 7]


def test_the_extensions_say_what_the_broker_needs() -> None:
    due = NOW_MS + 60_000
    sent = [
        frame(b"a", deliver_at_time=due),
        frame(b"b", deliver_at_time=-1),
        frame(b"c", schema_version=bytes(8)),
        batch([single(b"d")]),
    ]
    admitted = admit_pulsar(sent)
    assert admitted.extensions == {0: BatchExtensions(due)}
    read = [decode_batch(one) for one in admitted.batches]
    assert [dict(one.extensions) for one in read] == [
        {1: due},
        {},
        {EXT_SCHEMA_VERSION: bytes(8)},
        {EXT_BATCH_OF_ONE: True},
    ]
    assert _entry(admitted).flags == entry_flags(admitted.batches[:1]) != 0


def test_chunks() -> None:
    message = random.Random(1).randbytes(1000)
    packed = lz4.block.compress(message, store_size=False)
    pieces = [packed[at : at + 400] for at in range(0, len(packed), 400)]
    fields: dict[str, Any] = {
        "uuid": "p-7", "num_chunks_from_msg": 3, "total_chunk_msg_size": len(packed), "sequence_id": 7, "compression": 1,
        "uncompressed_size": 1000,
    }  # fmt: skip
    admitted = admit_pulsar([frame(piece, chunk_id=number, **fields) for number, piece in enumerate(pieces)])
    chunk_id = xxh3_64_digest(b"p-7 3 %d 1000" % len(packed))
    whole = WholeMessage(3, len(packed), 1, 1000)
    assert admitted.extensions == {
        number: BatchExtensions(chunk=Chunk(chunk_id, number, number == 2), whole=whole)
        for number in range(3)
    }
    assert entry_values(_entry(admitted)) == pieces
    for position, stored in enumerate(admitted.batches):
        header = decode_batch_header(stored)
        assert batch_extensions(stored, header.header_length) == admitted.extensions[position]


def test_the_key_hash_is_that_by_which_pulsar_routes() -> None:
    sent = [
        frame(b"", partition_key="k"),
        frame(b"", partition_key="AQI=", partition_key_b64_encoded=True),
        frame(b"", partition_key="k", ordering_key=b"o"),
        batch([single(b"", partition_key="k"), single(b"", partition_key="l")], partition_key="k"),
        frame(b"", partition_key="no base64", partition_key_b64_encoded=True),
    ]
    admitted = admit_pulsar(sent)
    hashes = [key_hash_of(key) for key in (b"k", b"\1\2", b"o", b"k", b"no base64")]
    headers = [decode_batch_header(one) for one in admitted.batches]
    assert [one.key_hash for one in headers] == hashes
    assert all(one.keyed and not one.mixed_keys for one in headers)
    ends, found = entry_key_hashes(_entry(admitted))
    assert (list(ends), found) == ([1, 2, 3, 5, 6], hashes)
    assert entry_keys(_entry(admitted)) == ["k", b"\1\2", "k", "k", "l", b"no base64"]


@pytest.mark.parametrize(
    ("sent", "error", "text"),
    [
        (frame(b"a")[:-1] + b"b", ChecksumMismatch, "checksum"),
        (frame(b"a")[:8], ChecksumMismatch, "checksum"),
        (b"", MalformedFrame, "longer than"),
        (b"\x0e\x01", MalformedFrame, "longer than"),
        ((100).to_bytes(4, "big") + b"\x0a\x01p", MalformedFrame, "longer than"),
        (b"\x00\x00\x00\x03\x0a\x01p", MalformedFrame, "cut short"),
        (frame(b"", publish_time=MAX_TIME_MS + 1), InvalidArgument, "not a time"),
        (frame(b"", event_time=MAX_TIME_MS + 1), InvalidArgument, "not a time"),
        (frame(b"", deliver_at_time=MAX_TIME_MS + 1), InvalidArgument, "not a time"),
        (frame(b"", sequence_id=1 << 63), InvalidArgument, "not a sequence id"),
        (frame(b"", highest_sequence_id=1 << 63), InvalidArgument, "not a sequence id"),
        (frame(b"", num_messages_in_batch=0), InvalidArgument, "0 messages"),
        (frame(b"", num_messages_in_batch=-1), InvalidArgument, "-1 messages"),
        (frame(b"", num_messages_in_batch=MAX_MESSAGES_PER_BATCH + 1), InvalidArgument, "more than"),
        (frame(b"", num_chunks_from_msg=2, chunk_id=2, uuid="u"), InvalidArgument, "not a chunk"),
        (frame(b"", num_chunks_from_msg=2, chunk_id=0), InvalidArgument, "not a chunk"),
        (batch([single(b""), single(b"")], num_chunks_from_msg=2, uuid="u"), InvalidArgument, "of its own"),
        (frame(b"", marker_type=10), InvalidArgument, "markers"),
        (frame(b"", txnid_least_bits=0, txnid_most_bits=1), InvalidArgument, "transactions"),
        (frame(b"", schema_version=bytes(70_000)), InvalidArgument, "schema version"),
    ],
)
def test_what_is_refused(sent: bytes, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as raised:
        admit_pulsar([frame(b"good"), frame(b"good", sequence_id=1), sent])
    assert raised.value.details["position"] == 2  # type: ignore[attr-defined]


UNLIKE: list[dict[str, Any]] = [
    {}, {"publish_time": 1_700_000_000_001}, {"producer_name": "q"}, {"partition_key": "k"}, {"partition_key": "l"},
    {"event_time": 7}, {"num_messages_in_batch": 1}, {"num_messages_in_batch": 3}, {},
]  # fmt: skip


def test_what_is_like_the_message_before_it_is_admitted_as_it_is_alone() -> None:
    frames = [
        frame(b"x" * 10, sequence_id=number) for number in [*range(100, 300), 16_383, 16_384, 129, 1, 128]
    ]
    frames += [frame(b"y" * 20, sequence_id=130, **fields) for fields in UNLIKE]
    frames += [
        frame(b"z", sequence_id=131, deliver_at_time=5),
        frame(b"z", sequence_id=132, deliver_at_time=5),
    ]
    for number in (140, 150, 141):  # the last one has an id below the highest of its batch
        frames.append(frame(b"z", sequence_id=number, highest_sequence_id=150))
    frames += [frame(b"z", sequence_id=number, checksum=False) for number in (142, 143, 144)]
    random.Random(0).shuffle(tail := frames[200:])
    for some in (frames, frames[:200] + tail, frames[::-1]):
        admitted = admit_pulsar(some)
        alone = [admit_pulsar([one]) for one in some]
        assert admitted.batches == [one.batches[0] for one in alone]
        assert admitted.counts == [one.counts[0] for one in alone]
        assert admitted.sequence_ids == [one.sequence_ids[0] for one in alone]
        expected = {place: one.extensions[0] for place, one in enumerate(alone) if one.extensions}
        assert (admitted.extensions or {}) == expected


@pytest.mark.parametrize("place", [0, 3, 7, 12, 18, 25, 30])
def test_damage_is_seen_in_what_is_like_the_message_before_it(place: int) -> None:
    first, second = frame(b"x" * 9, sequence_id=200), bytearray(frame(b"x" * 9, sequence_id=201))
    second[place] ^= 4
    with pytest.raises((ChecksumMismatch, MalformedFrame)) as raised:
        admit_pulsar([first, first, bytes(second)])
    assert raised.value.details["position"] == 2


def test_metadata_in_another_order_is_read_as_well() -> None:
    usual = frame(b"a", sequence_id=300, partition_key="k")
    end = 10 + int.from_bytes(usual[6:10], "big")
    fields = usual[10:end]
    assert fields[:3] == b"\x0a\x01p"
    turned = frame(b"a", checksum=False)[:0] + (end - 10).to_bytes(4, "big") + fields[3:] + fields[:3] + b"a"
    admitted, expected = admit_pulsar([turned]), admit_pulsar([usual])
    assert admitted[1:] == expected[1:]
    assert admitted.batches[0][12:48] == expected.batches[0][12:48]


@pytest.mark.parametrize("extensions", [{}, {"deliver_at_time": NOW_MS}])
def test_such_a_batch_is_not_taken_from_native_producers_who_may_put_anything_into_it(
    extensions: dict[str, Any],
) -> None:
    """Its bytes go to Pulsar's consumers as they are: only what `admit_pulsar` has looked at may be stored."""
    [made] = admit_pulsar([frame(b"a", **extensions)]).batches
    with pytest.raises(InvalidArgument, match="format 2"):
        admit_groups([encode_batch([b"n"], sequence_id=9, publish_time_ms=1), made])


# --- what native consumers read --------------------------------------------------------------------------------------

_TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"value": st.one_of(st.none(), st.binary(max_size=200))},
        optional={
            "properties": st.dictionaries(_TEXT, _TEXT, min_size=1, max_size=3),
            "partition_key": st.one_of(_TEXT, st.just("@@")),
            "event_time": st.integers(1, MAX_TIME_MS),
            "sequence_id": st.integers(0, (1 << 63) - 1),
        },
    ),
    min_size=1,
    max_size=12,
)
_COMPRESS: dict[int, Callable[[bytes], bytes]] = {
    0: lambda data: data,
    1: lambda data: lz4.block.compress(data, store_size=False),
    2: zlib.compress,
    3: zstandard.ZstdCompressor().compress,
    4: lambda data: bytes(cramjam.snappy.compress_raw(data)),
}


@given(_MESSAGES, st.sampled_from(sorted(_COMPRESS)))
def test_a_batch_has_the_messages_that_were_put_into_it(messages: list[dict[str, Any]], codec: int) -> None:
    payload = b"".join(single(**message) for message in messages)
    read = _one(
        frame(
            _COMPRESS[codec](payload),
            num_messages_in_batch=len(messages),
            compression=codec,
            uncompressed_size=len(payload),
            sequence_id=5,
        )
    )
    metadata, n = read.metadata or {}, len(messages)
    assert read.values == [message["value"] for message in messages]
    assert (read.keys or [None] * n) == [message.get("partition_key") for message in messages]
    assert (metadata.get(META_PROPERTIES) or [None] * n) == [
        message.get("properties") for message in messages
    ]
    assert (metadata.get(META_EVENT_TIMES_MS) or [None] * n) == [
        message.get("event_time") for message in messages
    ]
    own = metadata.get(META_SEQUENCE_IDS) or list(range(5, 5 + n))
    assert own == [message.get("sequence_id", 5) for message in messages]


@given(st.one_of(st.none(), st.binary(max_size=200)), st.sampled_from(sorted(_COMPRESS)))
def test_a_message_that_is_no_batch(value: bytes | None, codec: int) -> None:
    payload = value or b""
    fields: dict[str, Any] = {"compression": codec, "uncompressed_size": len(payload)} if codec else {}
    if value is None:
        fields["null_value"] = True
    read = _one(frame(_COMPRESS[codec](payload), {"a": "1"}, partition_key="k", event_time=7, **fields))
    assert read.values == [value]
    assert read.keys == ["k"]
    assert read.metadata == {META_PROPERTIES: [{"a": "1"}], META_EVENT_TIMES_MS: [7]}


def test_a_byte_that_looks_like_the_tag_of_a_sequence_id() -> None:
    singles = [
        single(b"a" * 64, ordering_key=b"@a"),
        single(b"b", ordering_key=b"@@"),
        single(b"c", sequence_id=64),
    ]
    read = _one(batch(singles, sequence_id=9))
    assert read.values == [b"a" * 64, b"b", b"c"]
    assert read.metadata == {META_SEQUENCE_IDS: [9, 9, 64]}


def test_what_is_no_time_or_no_text() -> None:
    raw = wire.SingleMessageMetadata(payload_size=0, event_time=MAX_TIME_MS + 1).SerializeToString()
    written = bytes(raw) + b"\x12\x01\xff" + b"\x0a\x06\x0a\x01\xff\x12\x01b"
    read = _one(batch([len(written).to_bytes(4, "big") + written]))
    assert read.keys == [b"\xff"]
    assert read.metadata == {META_PROPERTIES: [{"\N{REPLACEMENT CHARACTER}": "b"}]}


def test_an_encrypted_batch_is_admitted_and_not_read() -> None:
    made = wire.MessageMetadata(
        producer_name="p", sequence_id=0, publish_time=NOW_MS, num_messages_in_batch=3
    )
    made.encryption_keys.add(key="k", value=b"v")
    metadata = bytes(made.SerializeToString())
    admitted = admit_pulsar([len(metadata).to_bytes(4, "big") + metadata + b"whatever"])
    assert admitted.counts == [3]
    with pytest.raises(MalformedFrame, match="encrypted"):
        decode_batch(admitted.batches[0])


@given(st.data())
def test_damage_is_seen_or_harmless(data: st.DataObject) -> None:
    good = data.draw(
        st.sampled_from(
            [
                frame(b"abc", {"a": "1"}, partition_key="k"),
                batch(
                    [single(b"a", sequence_id=300), single(None, {"a": "b"}), single(b"ccc", event_time=9)]
                ),
            ]
        )
    )
    content = bytearray(good[6:])
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(1, len(content))) :]
    with contextlib.suppress(MalformedFrame, ChecksumMismatch, InvalidArgument):
        for stored in admit_pulsar([bytes(content)]).batches:
            decode_batch(stored)

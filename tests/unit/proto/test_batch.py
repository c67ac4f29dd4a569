"""Batches: what goes in comes out, damage is seen, lengths are checked."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
from itertools import accumulate
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_digest

from magnetar.proto.admission import admit_groups
from magnetar.proto.batch import (
    META_EVENT_TIMES_MS,
    META_PROPERTIES,
    META_SEQUENCE_IDS,
    Columns,
    DecodedBatch,
    EncodedBatches,
    decode_batch,
    decode_batch_header,
    encode_batch,
    encode_group,
    encode_singles,
    key_hash_of,
)
from magnetar.proto.batch_extensions import (
    EXT_DELIVER_AT_MS,
    BatchExtensions,
    Chunk,
    entry_extensions,
    entry_flags,
)
from magnetar.proto.compression import MAX_RAW_COLUMN_BYTES, Compression, compress, decompress
from magnetar.proto.entry import ENTRY_CHUNKED, ENTRY_DELAYED, Entry, encode_entry
from magnetar.proto.entry_messages import entry_keys, entry_values, without_values
from magnetar.proto.errors import ChecksumMismatch, InvalidArgument, MagnetarError, MalformedFrame
from magnetar.proto.frames import FrameParser


def test_each_of_a_run_of_batches_has_its_own_extensions() -> None:
    """Those whose bytes are those of the one before are not decoded again, but another of the same size is."""
    due_ms = 1_800_000_000_000

    def batch(messages: int, extensions: dict[int, int]) -> bytes:
        return encode_batch([b"a"] * messages, sequence_id=7, publish_time_ms=1, extensions=extensions)

    batches = [batch(1, {1: due_ms}), batch(2, {1: due_ms}), batch(1, {1: due_ms + 1}), batch(1, {1: due_ms})]
    found = admit_groups(batches).extensions or {}
    assert [found[position].deliver_at_ms for position in range(4)] == [due_ms, due_ms, due_ms + 1, due_ms]
    with pytest.raises(InvalidArgument, match="last sequence id"):
        admit_groups([*batches, batch(1, {3: due_ms})])


values_strategy = st.lists(st.one_of(st.none(), st.binary(max_size=60)), min_size=1, max_size=20)


def test_admission_reads_and_checks_extensions() -> None:
    plain = encode_batch([b"a"], sequence_id=0, publish_time_ms=1)
    delayed = encode_batch([b"b", b"c"], sequence_id=1, publish_time_ms=1, extensions={1: 77, 200: "unknown"})
    gaps = encode_batch(
        [b"d", b"e"], sequence_id=3, publish_time_ms=1, sequence_ids=[3, 9], extensions={3: 9}
    )
    chunk = encode_batch([b"f"], sequence_id=10, publish_time_ms=1, extensions={4: [b"12345678", 2, False]})
    admitted = admit_groups([plain, delayed + gaps, chunk])
    assert admitted.extensions == {
        1: BatchExtensions(deliver_at_ms=77),
        2: BatchExtensions(last_sequence_id=9),
        3: BatchExtensions(chunk=Chunk(b"12345678", 2, False)),
    }
    assert [admitted.last_sequence_id(position) for position in range(4)] == [0, 2, 9, 10]
    part = admitted.part(2, 4)
    assert part.sequence_ids == [3, 10]
    assert part.extensions == {0: admitted.extensions[2], 1: admitted.extensions[3]}
    assert admitted.part(0, 1).extensions is None
    flags = entry_flags(admitted.batches)
    assert flags == ENTRY_DELAYED | ENTRY_CHUNKED
    entry = Entry(
        encode_entry(
            admitted.batches, admitted.counts, [0] * 4, ["p"], first_index=0, append_time_ms=1, flags=flags
        )
    )
    assert entry_extensions(entry) == admitted.extensions
    slice_ = Entry(b"".join(entry.slice(1, 3)))
    assert slice_.flags == flags
    assert entry_extensions(slice_) == {0: admitted.extensions[1], 1: admitted.extensions[2]}


@pytest.mark.parametrize(
    ("extensions", "sequence_ids"),
    [
        ({1: -1}, None),
        ({1: 1 << 60}, None),
        ({1: "soon"}, None),
        ({3: 9}, None),
        ({3: 1 << 63}, [3, 1 << 63]),
        ({3: 9}, [4, 9]),
        ({3: 9}, [3, 8]),
        ({3: 3}, [3, 3]),
        ({3: None}, [3, 9]),
        ({4: [b"1234", 0, True]}, None),
        ({4: [b"12345678", -1, True]}, None),
        ({4: [b"12345678", True, True]}, None),
        ({4: [b"12345678", 0, True]}, [3, 4]),  # not alone
        ({"text": 1}, None),
    ],
)
def test_rule_47_extensions_that_no_reader_could_believe_are_refused(
    extensions: dict[Any, Any], sequence_ids: list[int] | None
) -> None:
    values = [b"a"] if sequence_ids is None else [b"a", b"b"]
    bad = encode_batch(
        values, sequence_id=3, publish_time_ms=1, sequence_ids=sequence_ids, extensions=extensions
    )
    good = encode_batch([b"a"], sequence_id=2, publish_time_ms=1)
    for payload in (bad, good + bad):
        with pytest.raises((InvalidArgument, MalformedFrame)) as failed:
            admit_groups([good, payload])
        assert failed.value.details["position"] == 1


@given(values_strategy, st.sampled_from(list(Compression)), st.data())
def test_round_trip(values: list[bytes | None], compression: Compression, data: st.DataObject) -> None:
    n = len(values)
    column = st.lists(st.one_of(st.none(), st.text(max_size=5)), min_size=n, max_size=n)
    keys = data.draw(st.one_of(st.none(), column))
    properties = [{"a": "b"}] * n if data.draw(st.booleans()) else None
    times: list[int | None] | None = [5] * n if data.draw(st.booleans()) else None
    encoded = encode_batch(
        values,
        sequence_id=3,
        publish_time_ms=11,
        keys=keys,
        properties=properties,
        event_times_ms=times,
        compression=compression,
        extensions={1: 77, 200: "unknown"},
    )
    batch = decode_batch(encoded)
    assert batch.values == values
    assert (batch.keys or [None] * n) == (keys or [None] * n)
    assert (batch.metadata or {}).get(META_PROPERTIES) == properties
    assert (batch.metadata or {}).get(META_EVENT_TIMES_MS) == times
    assert batch.extensions == {1: 77, 200: "unknown"}
    header = batch.header
    assert (header.message_count, header.sequence_id, header.publish_time_ms) == (n, 3, 11)
    different = set(keys or [None])
    assert header.keyed == (len(different) == 1 and None not in different)
    assert header.mixed_keys == (len(different) > 1)
    assert header.key_hash == (key_hash_of(keys[0] or "") if keys and header.keyed else 0)
    assert header.size == len(encoded)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.sampled_from(list(Compression))), min_size=1),
    st.data(),
)
def test_what_is_left_without_values_has_the_same_headers_keys_and_metadata(
    kinds: list[tuple[int, bool, Compression]], data: st.DataObject
) -> None:
    batches = [
        encode_batch(
            [b"v" * 100] * count,
            sequence_id=number,
            publish_time_ms=number,
            keys=[f"k{n}" for n in range(count)] if keyed else None,
            properties=[{"n": str(n)} for n in range(count)] if number % 2 else None,
            compression=compression,
            extensions={1: 77} if number % 3 == 0 else None,
        )
        for number, (count, keyed, compression) in enumerate(kinds)
    ]
    counts = [count for count, _, _ in kinds]
    stored = Entry(encode_entry(batches, counts, [0] * len(counts), ["p"], first_index=5, append_time_ms=9))
    first = data.draw(st.integers(0, len(counts) - 1))
    hidden = [(stored.batch_start_index(first), stored.end_indexes[first] - 1)]
    slices = [stored.slice(first, len(counts)), stored.gather(first, len(counts), hidden)]
    for entry in (Entry(b"".join(parts)) for parts in slices):
        left = without_values(entry)
        assert len(left.data) < len(entry.data) or len(entry.data) < 200
        assert (left.base_index, left.end_indexes, left.producers) == (
            entry.base_index,
            entry.end_indexes,
            entry.producers,
        )
        assert (left.append_time_ms, left.first_index, left.producer_names) == (9, 5, ["p"])
        assert entry_keys(left) == entry_keys(entry)
        for position in range(entry.batch_count):
            start, end = entry.batch_bounds(position)
            if start < end:
                before = DecodedBatch(entry.data, start, verify=True)
                after = DecodedBatch(left.data, left.batch_bounds(position)[0], verify=False)
                assert (after.metadata, after.extensions, after.keys) == (
                    before.metadata,
                    before.extensions,
                    before.keys,
                )
                assert after.header._replace(length=before.header.length) == before.header


def test_single_is_the_short_form_of_the_same_batch() -> None:
    assert encode_batch([b"v"], sequence_id=5, publish_time_ms=6) == encode_batch(
        [b"v"], sequence_id=5, publish_time_ms=6
    )
    assert decode_batch(encode_batch([b""], sequence_id=5, publish_time_ms=6)).values == [b""]


@pytest.mark.parametrize("compression", list(Compression))
def test_every_flipped_bit_is_noticed(compression: Compression) -> None:
    encoded = encode_batch(
        [b"hello"] * 4, sequence_id=1, publish_time_ms=2, keys=["k"] * 4, compression=compression
    )
    for bit in range(len(encoded) * 8):
        damaged = bytearray(encoded)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises((ChecksumMismatch, MalformedFrame)):
            decode_batch(bytes(damaged))
        with pytest.raises((ChecksumMismatch, MalformedFrame)):
            admit_groups([bytes(damaged)])


def test_random_bytes_raise_nothing_but_our_errors() -> None:
    rng = random.Random(1)
    good = encode_batch([b"x"] * 3, sequence_id=0, publish_time_ms=0, keys=["a", "b", None])
    for _ in range(3000):
        data = bytearray(good[: rng.randrange(len(good) + 1)])
        for _ in range(rng.randrange(4)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        for offset in (0, 3):
            with contextlib.suppress(MagnetarError):
                decode_batch(bytes(data), offset, verify=False)
        with contextlib.suppress(MagnetarError):
            admit_groups([bytes(data)])


def test_admit_splits_groups_and_names_the_bad_payload() -> None:
    one = encode_batch([b"1"], sequence_id=10, publish_time_ms=0)
    two = encode_batch([b"2", b"3"], sequence_id=11, publish_time_ms=0)
    admitted = admit_groups([one, one + two, two])
    assert admitted.batches == [one, one, two, two]
    assert admitted.counts == [1, 1, 2, 2]
    assert admitted.sequence_ids == [10, 10, 11, 11]
    short = (43).to_bytes(4) + bytes(43)  # as long as it says
    for bad in (b"", short, one[:-1], one + two[:-1], one + b"\0", one[:-1] + b"\0"):
        with pytest.raises((ChecksumMismatch, MalformedFrame)) as caught:
            admit_groups([one, bad])
        assert caught.value.details["position"] == 1


def test_columns_of_other_lengths_are_refused() -> None:
    with pytest.raises(MalformedFrame):
        decode_batch(encode_batch([b"1", b"2"], sequence_id=0, publish_time_ms=0, keys=["a"]))
    with pytest.raises(MalformedFrame):
        decode_batch(encode_batch([b"1", b"2"], sequence_id=0, publish_time_ms=0, sequence_ids=[4]))
    ids = encode_batch([b"1", b"2"], sequence_id=4, publish_time_ms=0, sequence_ids=[4, 9])
    assert (decode_batch(ids).metadata or {})[META_SEQUENCE_IDS] == [4, 9]


def test_unknown_format_asks_for_an_upgrade() -> None:
    data = bytearray(encode_batch([b"1"], sequence_id=0, publish_time_ms=0))
    data[12] = 9
    with pytest.raises(MalformedFrame, match="upgrade"):
        decode_batch(bytes(data), verify=False)
    assert decode_batch_header(bytes(data)).format == 9


@pytest.mark.parametrize("codec", list(Compression)[1:])
def test_inflation_is_bounded(codec: Compression) -> None:
    packed = compress(codec, b"a" * 1000)
    assert decompress(codec, packed) == b"a" * 1000
    for wrong in (999, 1001, 0, MAX_RAW_COLUMN_BYTES + 1, 0xFFFFFFFF):
        with pytest.raises(MalformedFrame):
            decompress(codec, struct.pack(">I", wrong) + packed[4:])
    with pytest.raises(MalformedFrame):
        decompress(codec, b"\0\0")
    with pytest.raises(MalformedFrame):
        decompress(7, packed)


@pytest.mark.parametrize("codec", list(Compression)[1:])
def test_a_bomb_that_says_it_is_small_is_not_inflated(codec: Compression) -> None:
    bomb = struct.pack(">I", 10) + compress(codec, bytes(64 * 1024 * 1024))[4:]
    tracemalloc.start()
    try:
        with pytest.raises(MalformedFrame, match=r"damaged|10"):
            decompress(codec, bomb)
        assert tracemalloc.get_traced_memory()[1] < 1024 * 1024 + 2 * len(bomb)
    finally:
        tracemalloc.stop()
    with pytest.raises(MalformedFrame):
        decompress(codec, compress(codec, b"a" * 1000)[:-3])


def test_compression_names() -> None:
    assert Compression.parse("zstd") is Compression.ZSTD
    with pytest.raises(InvalidArgument, match="none, lz4, zstd, zlib, snappy"):
        Compression.parse("brotli")


@pytest.mark.parametrize(
    ("key", "hashed"),
    [
        ("", 0), ("a", 1009084850), ("k1", 2110152746), ("key1", 462881061), ("order-4711", 1895557592),
        ("ключ", 442048578), ("\N{KEY}", 856740613), ("x" * 1000, 1897939982), (b"\x00\x01\x02\xff", 713355028),
    ],
)  # fmt: skip
def test_the_hash_of_a_key_is_pulsars(key: str | bytes, hashed: int) -> None:
    """Computed by `Murmur3_32Hash.getInstance().makeHash(byte[])` of Pulsar's Java client 4.0.6, without the sign."""
    assert key_hash_of(key) & 0x7FFF_FFFF == hashed
    assert key_hash_of("k1") == 2110152746 + (1 << 31)


@given(values_strategy, st.sampled_from(list(Compression)), st.data())
def test_batches_of_one_are_the_batches_that_encode_batch_makes(
    values: list[bytes | None], compression: Compression, data: st.DataObject
) -> None:
    n = len(values)
    key = st.one_of(st.none(), st.text(max_size=5), st.binary(max_size=40))
    keys = data.draw(st.one_of(st.none(), st.lists(key, min_size=n, max_size=n)))
    properties = data.draw(
        st.one_of(st.none(), st.lists(st.sampled_from([None, {"a": "b"}]), min_size=n, max_size=n))
    )
    encoded = encode_singles(Columns(values, keys, properties), 7, 11, compression)
    each = [
        encode_batch(
            [values[i]],
            sequence_id=7 + i,
            publish_time_ms=11,
            keys=None if keys is None or keys[i] is None else [keys[i]],
            properties=None if properties is None or properties[i] is None else [properties[i]],
            compression=compression,
        )
        for i in range(n)
    ]
    assert encoded.batches() == each
    assert FrameParser().feed(encoded.frames(b"h", n // 2)) == [(b"h", each[n // 2 :])]
    entry = Entry(encode_entry(each, [1] * n, [0] * n, ["p"], first_index=0, append_time_ms=0))
    assert entry_values(entry) == values
    assert entry_keys(entry) == (keys or [None] * n)


def test_entries_that_contradict_their_batches_are_malformed() -> None:
    one = encode_batch([b"1"], sequence_id=0, publish_time_ms=0, keys=["k"])
    two = encode_batch([b"1", b"2"], sequence_id=0, publish_time_ms=0, keys=["k", "l"])

    def entry(batches: list[bytes], counts: list[int]) -> Entry:
        return Entry(encode_entry(batches, counts, [0] * len(counts), ["p"], first_index=0, append_time_ms=0))

    assert entry_keys(entry([one, two], [1, 2])) == ["k", "k", "l"]
    for batches, counts in (([one, two], [1, 3]), ([two], [1]), ([one[:-1], two], [1, 2]), ([b"short"], [1])):
        with pytest.raises((MalformedFrame, ChecksumMismatch)):
            entry_values(entry(batches, counts))
    # A checksum that fits does not make lengths fit.
    rest = bytearray(one[12:])
    rest[28:32] = (1000).to_bytes(4, "big")
    evil = one[:4] + xxh3_64_digest(bytes(rest)) + bytes(rest)
    with pytest.raises(MalformedFrame, match="longer than the batch"):
        entry_values(entry([evil], [1]))


def test_batches_by_key_are_sent_again_from_the_first_that_is_not_confirmed() -> None:
    columns = Columns([b"0", b"1", b"2", b"3"], ["a", "b", "a", "c"])
    encoded, order = encode_group(columns, 5, 0, by_key=True)
    assert order == [0, 2, 1, 3]
    whole = b"".join(encoded.batches())
    batches = [decode_batch(whole, 0)]
    while (at := sum(batch.header.size for batch in batches)) < len(whole):
        batches.append(decode_batch(whole, at))
    assert [batch.values for batch in batches] == [[b"0", b"2"], [b"1"], [b"3"]]
    assert [batch.header.sequence_id for batch in batches] == [5, 7, 8]
    assert all(batch.header.keyed for batch in batches)
    for confirmed, left in ((0, 3), (2, 2), (3, 1)):
        assert encoded.frames(b"\x93\x01\x00\x00", confirmed).count(b"\x93\x01\x00\x00") == left


T = TypeVar("T")
Message = tuple[bytes | None, str | bytes | None, int, int | None]
NOW_MS = 1_700_000_000_000


def decoded_of(encoded: EncodedBatches) -> list[Message]:
    """What each stored message is: value, key, sequence id, delivery time; every batch admitted and read in each way."""
    batches = encoded.batches()
    admitted = admit_groups(batches)
    entry = Entry(
        encode_entry(
            batches,
            admitted.counts,
            [0] * len(batches),
            ["p"],
            first_index=0,
            append_time_ms=0,
            flags=entry_flags(batches),
        )
    )
    values, keys = entry_values(entry), entry_keys(entry)
    messages: list[Message] = []
    last = -1
    for position, data in enumerate(batches):
        batch = decode_batch(data)
        count = batch.header.message_count
        first = batch.header.sequence_id
        ids = (batch.metadata or {}).get(META_SEQUENCE_IDS) or range(first, first + count)
        assert last < ids[0]
        last = admitted.last_sequence_id(position)
        assert last == ids[-1]
        due = batch.extensions.get(EXT_DELIVER_AT_MS)
        messages += [
            (value, key, number, due)
            for value, key, number in zip(batch.values, batch.keys or [None] * count, ids)
        ]
    assert [message[0] for message in messages] == values
    assert [message[1] for message in messages] == keys
    return messages


@given(st.data(), st.sampled_from(["group", "by_key", "singles"]), st.sampled_from(list(Compression)))
def test_sequence_ids_keys_and_delivery_times_stay_with_their_messages(
    data: st.DataObject, way: str, compression: Compression
) -> None:
    count = data.draw(st.integers(1, 12))

    def column(one: st.SearchStrategy[T]) -> list[T] | None:
        return data.draw(st.none() | st.lists(one, min_size=count, max_size=count))

    values = column(st.binary(max_size=5)) or [b"v"] * count
    keys = column(st.sampled_from([None, "a", "b", b"\xff"]))
    if data.draw(st.booleans()):
        keys = column(st.sampled_from(["a", "b"]))
    times = column(
        st.sampled_from([None, 5, NOW_MS, NOW_MS + 10]) if data.draw(st.booleans()) else st.just(7)
    )
    gaps = column(st.integers(1, 3))
    ids = None if gaps is None else list(accumulate(gaps, initial=4))[1:]
    columns = Columns(values, keys, sequence_ids=ids, deliver_at_ms=times)
    first = 9 if ids is None else ids[0]
    order = None
    if way == "singles":
        encoded = encode_singles(columns, first, NOW_MS, compression)
    else:
        encoded, order = encode_group(columns, first, NOW_MS, compression, by_key=way == "by_key")
    stored = decoded_of(encoded)
    assert [number for *_, number, _ in stored] == sorted(number for *_, number, _ in stored)
    messages = stored if order is None else [stored[place] for place in order]
    assert [message[0] for message in messages] == values
    assert [message[1] for message in messages] == (keys or [None] * count)
    assert [message[3] for message in messages] == (times or [None] * count)
    assert [message[2] for message in stored] == (ids or list(range(9, 9 + count)))
    if ids is not None:
        assert order is None


def test_messages_that_are_due_at_different_times_are_batches_of_one_that_broker_and_consumer_read_quickly() -> (
    None
):
    times = [NOW_MS + 10 * n for n in range(100)]
    columns = Columns([b"%d" % n for n in range(100)], [f"k{n}" for n in range(100)], deliver_at_ms=times)
    encoded, order = encode_group(columns, 5, NOW_MS)
    assert order is None
    slow = [
        encode_batch(
            [value],
            sequence_id=5 + n,
            publish_time_ms=NOW_MS,
            keys=[f"k{n}"],
            extensions={EXT_DELIVER_AT_MS: due},
        )
        for n, (value, due) in enumerate(zip(columns.values, times))
    ]
    assert encoded.batches() == slow
    neighbours, _ = encode_group(
        columns._replace(deliver_at_ms=[NOW_MS] * 60 + [NOW_MS + 10] * 40), 5, NOW_MS
    )
    assert [decode_batch(batch).header.message_count for batch in neighbours.batches()] == [60, 40]

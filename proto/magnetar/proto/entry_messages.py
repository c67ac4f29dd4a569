"""The messages of an entry, or a slice of one: values, keys and hashes of keys, of all batches in one call.

Batches of one message, which is what unbatched producers send, are read without an object for each.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise, repeat

from xxhash import xxh3_64_digest

from .batch import (
    CHECKSUM_END,
    DELAYED_MARK,
    DELAYED_MARKS,
    DELAYED_TEXT_KEY_MARK,
    FLAG_KEYED,
    FLAG_MIXED_KEYS,
    FORMAT_PULSAR,
    SINGLE_MARK,
    TEXT_KEY_MARK,
    DecodedBatch,
    Key,
    key_hash_of,
)
from .batch_extensions import BATCH_HEADER_BYTES, DELAYED_HEADER_BYTES
from .entry import Entry
from .errors import ChecksumMismatch, MalformedFrame

# Of a single message: checksum; format, flags, header length and count; lengths of keys and metadata, as one number.
_SINGLE = struct.Struct(">4x8s8s20xQ")
assert _SINGLE.size == BATCH_HEADER_BYTES


def _spans(entry: Entry) -> Iterable[tuple[int, int]]:
    """Where each batch begins and ends in `entry.data`. One that was left out is empty."""
    shift = entry.body - entry.base_offset
    ends = [end + shift for end in entry.end_offsets]
    return zip((entry.body, *ends), ends)


def entry_values(entry: Entry, hidden: bytes | bytearray = b"") -> list[bytes | None]:
    """The values of all messages of an entry (or slice), each batch verified. Raises ChecksumMismatch or MalformedFrame.

    `hidden`: a byte a message, not 0 where the ack set names it. A batch that was left out for it has None as its values.
    240 ns for a batch that is one message, which is what an unbatched producer sends; 60 more if it has a key.
    """
    data = entry.data
    values: list[bytes | None] = []
    append, unpack, digest = values.append, _SINGLE.unpack_from, xxh3_64_digest
    mark, keyed_mark = SINGLE_MARK, TEXT_KEY_MARK
    # Large batches stand alone in their entry; of many small ones a copy is cheaper than a view.
    source = data if entry.batch_count > 1 else memoryview(data)
    for position, (start, end) in enumerate(_spans(entry)):
        if end - start < BATCH_HEADER_BYTES or end > len(data):
            first, last = entry.batch_start_index(position), entry.end_indexes[position]
            if end != start or 0 in (hidden[first - entry.base_index : last - entry.base_index] or b"\0"):
                raise MalformedFrame("an entry table contradicts its batches")
            values += [None] * (last - first)
            continue
        checksum, kind, lengths = unpack(data, start)
        if kind == mark or kind == keyed_mark:  # noqa: SIM109 (no tuple is made)
            head = BATCH_HEADER_BYTES
        else:
            head = DELAYED_HEADER_BYTES if kind in DELAYED_MARKS else 0
        if head:
            if digest(source[start + CHECKSUM_END : end]) != checksum:
                raise ChecksumMismatch("a batch does not match its checksum: it was damaged on its way")
            value_start, value_end = start + head, end
            if lengths:
                value_end -= (lengths >> 32) + (lengths & 0xFFFFFFFF)
                if value_end < value_start:
                    raise MalformedFrame("the columns of a batch are longer than the batch")
            append(data[value_start:value_end])
        else:
            batch = DecodedBatch(data, start, verify=True)
            expected = entry.end_indexes[position] - entry.batch_start_index(position)
            if batch.header.size != end - start or batch.header.message_count != expected:
                raise MalformedFrame(
                    "a batch has another size or number of messages than the entry's table says"
                )
            values += batch.values
    if len(values) != entry.message_count:
        raise MalformedFrame("an entry has not the messages that its table says")
    return values


def entry_keys(entry: Entry) -> list[Key]:
    """The keys of all messages of an entry (or slice) whose batches were verified. Raises MalformedFrame."""
    data = entry.data
    keys: list[Key] = []
    for position, (start, end) in enumerate(_spans(entry)):
        if end == start:  # left out
            keys += [None] * (entry.end_indexes[position] - entry.batch_start_index(position))
            continue
        _, kind, lengths = _SINGLE.unpack_from(data, start)
        if kind == SINGLE_MARK or kind == DELAYED_MARK:  # noqa: SIM109 (no tuple is made)
            keys.append(None)
        elif kind == TEXT_KEY_MARK or kind == DELAYED_TEXT_KEY_MARK:  # noqa: SIM109
            key_end = end - (lengths & 0xFFFFFFFF)
            try:
                keys.append(data[key_end - (lengths >> 32) : key_end].decode())
            except UnicodeDecodeError as error:
                raise MalformedFrame(f"the key of a message is damaged: {error}") from error
        else:
            batch = DecodedBatch(data, start, verify=False)
            keys += batch.keys or repeat(None, batch.header.message_count)
    if len(keys) != entry.message_count:
        raise MalformedFrame("an entry has not as many keys as messages")
    return keys


_LENGTHS = struct.Struct(
    ">12xBxH24xII"
)  # of a batch: its format; lengths of its header, its keys and its metadata
assert _LENGTHS.size == BATCH_HEADER_BYTES


def without_values(entry: Entry) -> Entry:
    """What is left of an entry (or slice) once its values were taken out: headers, keys and metadata. Not to be verified.

    500 ns for a batch. They were verified.
    """
    data = entry.data
    batches: list[bytes] = []
    for start, end in _spans(entry):
        if start == end:  # left out
            batches.append(b"")
            continue
        format_id, header_length, keys_length, metadata_length = _LENGTHS.unpack_from(data, start)
        head = start + header_length
        if format_id == FORMAT_PULSAR:
            from .pulsar.columns import without_payload

            left = without_payload(data[head:end])
        else:
            left = data[end - keys_length - metadata_length : end]
        batches.append((header_length + len(left) - 4).to_bytes(4) + data[start + 4 : head] + left)
    return entry.replaced(batches)


_KEY_HASH = struct.Struct(">13xB6xIq")  # flags, key hash and sequence id of a batch
_LEFT_OUT = (0, 0, 0)


def entry_key_hashes(entry: Entry) -> tuple[Sequence[int], list[int]]:
    """The key hash of every message of a whole entry: run i, which ends before message ends[i], has hashes[i].

    Runs are batches, 150 ns each; a batch whose messages have different keys is decoded, and each of its messages is a run
    of its own. Those of a batch without a key have Pulsar's hash of its producer and sequence id. Raises MalformedFrame.
    """
    data, body = entry.data, entry.body
    starts = [body, *[body + end for end in entry.end_offsets]]
    unpack = _KEY_HASH.unpack_from
    found = [unpack(data, start) if start < end else _LEFT_OUT for start, end in pairwise(starts)]
    names = [name.encode() for name in entry.producer_names]
    hashes = [
        key_hash if flags & FLAG_KEYED else key_hash_of(b"%b-%d" % (names[producer], sequence_id))
        for (flags, key_hash, sequence_id), producer in zip(found, entry.producers)
    ]
    if not any(flags & FLAG_MIXED_KEYS for flags, _, _ in found):
        return entry.end_indexes, hashes
    ends: list[int] = []
    mixed: list[int] = []
    for position, ((flags, _, _), key_hash) in enumerate(zip(found, hashes)):
        end = entry.end_indexes[position]
        if flags & FLAG_MIXED_KEYS:
            keys = DecodedBatch(data, starts[position], verify=False).keys or []
            ends += range(end - len(keys) + 1, end + 1)
            mixed += [key_hash if key is None else key_hash_of(key) for key in keys]
        else:
            ends.append(end)
            mixed.append(key_hash)
    return ends, mixed

"""Admission: what the broker looks at in a batch before it appends it.

Checksums, the table of a group, and what readers of any kind rely on (`message_rules`); values and keys stay as they are.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64_digest

from .batch import (
    FLAG_COMPRESSION_SHIFT,
    FORMAT_NATIVE,
    META_EVENT_TIMES_MS,
    META_PROPERTIES,
    UNDECODABLE,
    BatchHeader,
    decode_batch_header,
    verify_batch,
)
from .compression import Compression, decompress
from .entry import Entry
from .errors import ChecksumMismatch, InvalidArgument, MalformedFrame
from .message_rules import MAX_TIME_MS, check_message_count, checked_time_ms

_ADMIT = struct.Struct(">I8sxxxxI4xQQ4xI")


class AdmittedGroups(NamedTuple):
    """What `admit_groups` found: batches in order, with message counts, sequence ids and sizes as parallel lists."""

    batches: list[bytes]
    counts: list[int]
    sequence_ids: list[int]


def admit_groups(payloads: Sequence[bytes]) -> AdmittedGroups:
    """Verifies the SEND payloads of one run and splits them into batches, before the broker appends them.

    Raises ChecksumMismatch, MalformedFrame, or InvalidArgument for what breaks `message_rules`; its details hold "position",
    the number of the bad payload in the run, so that the caller can admit the ones before it. 0.45 us for a payload that is
    one small batch, and more for one with properties or event times.
    """
    batches, counts, sequence_ids = list[bytes](), list[int](), list[int]()
    unpack = _ADMIT.unpack_from
    for position, payload in enumerate(payloads):
        try:
            length, checksum, count, sequence_id, publish_time_ms, metadata_length = unpack(payload)
            if length + 4 == len(payload) and count > 0 and length >= 44:
                # A copy of a small slice is cheaper than a view of it; of 128 KB it costs 8 us.
                rest = payload[12:] if length < 4096 else memoryview(payload)[12:]
                if xxh3_64_digest(rest) != checksum:
                    raise ChecksumMismatch("a batch does not match its checksum: it was damaged on its way")
                check_message_count(count)
                if metadata_length or publish_time_ms > MAX_TIME_MS:
                    _check_rules(payload)
                batches.append(payload)
                counts.append(count)
                sequence_ids.append(sequence_id)
            else:
                _admit_several(payload, batches, counts, sequence_ids)
        except (struct.error, MalformedFrame, ChecksumMismatch, InvalidArgument) as error:
            failure = error if not isinstance(error, struct.error) else MalformedFrame("a batch is cut short")
            failure.details["position"] = position
            raise failure from None
    return AdmittedGroups(batches, counts, sequence_ids)


def check_entry(entry: Entry, max_batch_bytes: int) -> None:
    """The same for an entry that somebody else than a broker made. Raises as `admit_groups`."""
    if entry.base_index or entry.base_offset:
        raise MalformedFrame("it is a slice of an entry, not a whole one")
    batches = [bytes(entry.batch(position)) for position in range(entry.batch_count)]
    admitted = admit_groups(batches)
    if (largest := max(map(len, batches))) > max_batch_bytes:
        raise InvalidArgument(f"a batch has {largest} bytes, and may have {max_batch_bytes}")
    counts = [end - start for start, end in pairwise((0, *entry.end_indexes))]
    if admitted.counts != counts:
        raise MalformedFrame("its table counts other messages than its batches")
    if max(entry.producers) >= len(entry.producer_names):
        raise MalformedFrame("its table names producers that it does not have")
    check_message_count(entry.message_count)
    checked_time_ms(entry.append_time_ms)


def _admit_several(payload: bytes, batches: list[bytes], counts: list[int], sequence_ids: list[int]) -> None:
    found: dict[int, BatchHeader] = {}
    offset = 0
    while offset < len(payload) or not found:
        found[offset] = header = decode_batch_header(payload, offset)
        verify_batch(payload, offset, header.size)
        check_message_count(header.message_count)
        _check_rules(payload[offset : offset + header.size])
        offset += header.size
    batches += [payload[start : start + header.size] for start, header in found.items()]
    counts += [header.message_count for header in found.values()]
    sequence_ids += [header.sequence_id for header in found.values()]


_decode_metadata = msgspec.msgpack.Decoder(dict[int, list[dict[str, str] | int | None]]).decode


def _check_rules(data: bytes) -> None:
    """What readers of any kind rely on: see `message_rules`. Raises InvalidArgument or MalformedFrame."""
    header = decode_batch_header(data)
    checked_time_ms(header.publish_time_ms)
    if not header.metadata_length or header.format != FORMAT_NATIVE:
        return
    column = memoryview(data)[header.size - header.metadata_length : header.size]
    codec = header.flags >> FLAG_COMPRESSION_SHIFT
    try:
        metadata = _decode_metadata(column if codec == Compression.NONE else decompress(codec, column))
    except UNDECODABLE as error:
        raise InvalidArgument(
            f"properties are maps of text to text and event times are numbers, but a batch has others: {error}"
        ) from None
    for number, values in metadata.items():
        if len(values) != header.message_count:
            raise MalformedFrame("the columns of a batch differ in length")
        times = [value for value in values if isinstance(value, int)]
        expected = 0 if number == META_PROPERTIES else len(values) - values.count(None)
        if len(times) != expected:
            raise InvalidArgument("properties are maps of text to text, and times are numbers")
        if number == META_EVENT_TIMES_MS and times:
            checked_time_ms(min(times))
            checked_time_ms(max(times))

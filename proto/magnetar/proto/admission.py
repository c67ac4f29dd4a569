"""Admission: what the broker looks at in a batch before it appends it.

Checksums, the table of a group, and what readers of any kind rely on (`message_rules`); values and keys stay as they are.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from operator import lt, or_
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64_digest

from .batch import (
    FLAG_COMPRESSION_SHIFT,
    FORMAT_NATIVE,
    META_EVENT_TIMES_MS,
    META_PROPERTIES,
    META_SEQUENCE_IDS,
    BatchHeader,
    decode_batch_header,
    verify_batch,
)
from .batch_extensions import (
    BATCH_HEADER_BYTES,
    DELAYED_HEADER_BYTES,
    UNDECODABLE,
    BatchExtensions,
    batch_extensions,
)
from .compression import Compression, decompress
from .entry import Entry
from .errors import ChecksumMismatch, InvalidArgument, MalformedFrame
from .ids import MAX_MESSAGES_PER_BATCH
from .message_rules import (
    MAX_SEQUENCE_ID,
    MAX_TIME_MS,
    check_message_count,
    checked_sequence_id,
    checked_time_ms,
)

_ADMIT = struct.Struct(">I8sBxHI4xQQ4xI")
assert _ADMIT.size == BATCH_HEADER_BYTES  # what is shorter than a header is refused by unpacking it
_PLAIN_SEQUENCE_IDS = (
    MAX_SEQUENCE_ID - MAX_MESSAGES_PER_BATCH
)  # nothing that begins here or before can be too high


class AdmittedGroups(NamedTuple):
    """What `admit_groups` found: batches in order, with message counts and first sequence ids as parallel lists."""

    batches: list[bytes]
    counts: list[int]
    sequence_ids: list[int]
    extensions: dict[int, BatchExtensions] | None = (
        None  # of the batches that have any, by position; None: none has
    )

    def part(self, start: int, end: int) -> AdmittedGroups:
        """The batches [start, end)."""
        extensions = self.extensions and {
            position - start: self.extensions[position]
            for position in range(start, end)
            if position in self.extensions
        }
        return AdmittedGroups(
            self.batches[start:end], self.counts[start:end], self.sequence_ids[start:end], extensions or None
        )

    @property
    def delayed_messages(self) -> int:
        """How many have a delivery time."""
        found = (self.extensions or {}).items()
        return sum(self.counts[position] for position, one in found if one.deliver_at_ms is not None)

    def last_sequence_id(self, position: int) -> int:
        """Of the batch at `position`."""
        if self.extensions is not None and (found := self.extensions.get(position)) is not None:
            if found.last_sequence_id is not None:
                return found.last_sequence_id
        return self.sequence_ids[position] + self.counts[position] - 1


def admit_groups(payloads: Sequence[bytes]) -> AdmittedGroups:
    """Verifies the SEND payloads of one run and splits them into batches, before the broker appends them.

    Raises ChecksumMismatch, MalformedFrame, or InvalidArgument for what breaks `message_rules`; its details hold "position",
    the number of the bad payload in the run, so that the caller can admit the ones before it. 0.45 us for a payload that is
    one small batch, and more for one with properties or event times.
    """
    batches, counts, sequence_ids = list[bytes](), list[int](), list[int]()
    extensions: dict[int, BatchExtensions] = {}
    # As a rule neighbours have the same delivery time and nothing else: the bytes of the one before, and what they say.
    known, of_known = b"", BatchExtensions()
    unpack = _ADMIT.unpack_from
    for position, payload in enumerate(payloads):
        try:
            length, checksum, form, header_length, count, sequence_id, publish_time_ms, metadata_length = (
                unpack(payload)
            )
            if length + 4 == len(payload) and 0 < count <= MAX_MESSAGES_PER_BATCH and form == FORMAT_NATIVE:
                # A copy of a small slice is cheaper than a view of it; of 128 KB it costs 8 us.
                rest = payload[12:] if length < 4096 else memoryview(payload)[12:]
                if xxh3_64_digest(rest) != checksum:
                    raise ChecksumMismatch("a batch does not match its checksum: it was damaged on its way")
                if metadata_length or publish_time_ms > MAX_TIME_MS or sequence_id > _PLAIN_SEQUENCE_IDS:
                    found = _check_rules(payload)
                    if found is not None:
                        extensions[len(batches)] = found
                elif header_length == DELAYED_HEADER_BYTES:
                    if (found_bytes := payload[BATCH_HEADER_BYTES:header_length]) != known:
                        of_known = _extensions(payload, header_length, count, has_ids=False)
                        known = found_bytes if of_known == BatchExtensions(of_known.deliver_at_ms) else b""
                    extensions[len(batches)] = of_known
                elif header_length != BATCH_HEADER_BYTES:
                    extensions[len(batches)] = _extensions(payload, header_length, count, has_ids=False)
                batches.append(payload)
                counts.append(count)
                sequence_ids.append(sequence_id)
            else:
                _admit_several(payload, batches, counts, sequence_ids, extensions)
        except (struct.error, MalformedFrame, ChecksumMismatch, InvalidArgument) as error:
            failure = error if not isinstance(error, struct.error) else MalformedFrame("a batch is cut short")
            failure.details["position"] = position
            raise failure from None
    return AdmittedGroups(batches, counts, sequence_ids, extensions or None)


def check_entry(entry: Entry, max_batch_bytes: int) -> None:
    """The same for an entry that somebody else than a broker made. Raises as `admit_groups`."""
    if entry.base_index or entry.base_offset:
        raise MalformedFrame("it is a slice of an entry, not a whole one")
    batches = [bytes(entry.batch(position)) for position in range(entry.batch_count)]
    admitted = admit_groups(batches)
    if (largest := max(map(len, batches))) > max_batch_bytes:
        raise InvalidArgument(f"a batch has {largest} bytes, and may have {max_batch_bytes}")
    counts = [end - start for start, end in pairwise((0, *entry.end_indexes))]
    if entry.flags != reduce(or_, (one.entry_flags for one in (admitted.extensions or {}).values()), 0):
        raise MalformedFrame("its flags are not those of its batches")
    if admitted.counts != counts:
        raise MalformedFrame("its table counts other messages than its batches")
    if max(entry.producers) >= len(entry.producer_names):
        raise MalformedFrame("its table names producers that it does not have")
    check_message_count(entry.message_count)
    checked_time_ms(entry.append_time_ms)


def _admit_several(
    payload: bytes,
    batches: list[bytes],
    counts: list[int],
    sequence_ids: list[int],
    extensions: dict[int, BatchExtensions],
) -> None:
    found: dict[int, BatchHeader] = {}
    offset = 0
    while offset < len(payload) or not found:
        found[offset] = header = decode_batch_header(payload, offset)
        verify_batch(payload, offset, header.size)
        check_message_count(header.message_count)
        extension = _check_rules(payload[offset : offset + header.size])
        if extension is not None:
            extensions[len(batches) + len(found) - 1] = extension
        offset += header.size
    batches += [payload[start : start + header.size] for start, header in found.items()]
    counts += [header.message_count for header in found.values()]
    sequence_ids += [header.sequence_id for header in found.values()]


_decode_metadata = msgspec.msgpack.Decoder(dict[int, list[dict[str, str] | int | None]]).decode


def _check_rules(data: bytes) -> BatchExtensions | None:
    """What readers of any kind rely on: see `message_rules`. Returns the extensions, if the batch has any.

    Raises InvalidArgument or MalformedFrame.
    """
    header = decode_batch_header(data)
    if header.format != FORMAT_NATIVE:
        raise InvalidArgument(
            f"a batch of format {header.format} is taken from who makes it, by a protocol of its own"
        )
    checked_time_ms(header.publish_time_ms)
    checked_sequence_id(header.sequence_id + header.message_count - 1)
    extensions = None
    if header.header_length != BATCH_HEADER_BYTES:
        extensions = _extensions(
            data, header.header_length, header.message_count, has_ids=header.metadata_length > 0
        )
    if header.metadata_length:
        _check_metadata(data, header, None if extensions is None else extensions.last_sequence_id)
    return extensions


def _extensions(data: bytes, header_length: int, message_count: int, *, has_ids: bool) -> BatchExtensions:
    """`has_ids`: the batch may have a sequence id for each message."""
    if not BATCH_HEADER_BYTES <= header_length <= len(data):
        raise MalformedFrame(f"the header of a batch of {len(data)} bytes cannot have {header_length}")
    extensions = batch_extensions(data, header_length)
    if extensions.chunk is not None and message_count != 1:
        raise InvalidArgument("a chunk is a batch of its own")
    if extensions.last_sequence_id is not None and not has_ids:
        raise InvalidArgument("a batch names its last sequence id, and not the others")
    return extensions


def _check_metadata(data: bytes, header: BatchHeader, last_sequence_id: int | None) -> None:
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
    sequence_ids = metadata.get(META_SEQUENCE_IDS)
    if (sequence_ids is None) != (last_sequence_id is None):
        raise InvalidArgument(
            "a batch has either all of its sequence ids and the last one in its header, or only the first"
        )
    if sequence_ids is not None and not (
        None not in sequence_ids
        and sequence_ids[0] == header.sequence_id
        and sequence_ids[-1] == last_sequence_id
        and all(map(lt, sequence_ids, sequence_ids[1:]))  # type: ignore[arg-type]
    ):
        raise InvalidArgument(
            "the sequence ids of a batch rise, from the one to the other that its header names"
        )

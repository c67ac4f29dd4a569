"""A delivery as MESSAGE frames, one for each batch of it.

of format 2, not hidden         the bytes that its producer sent, behind a command
of format 2, hidden in part     the same, with an ack set
native                          transcoded, in one slice or several, each with its own id
hidden as a whole, or of which a compaction left nothing, or that cannot be transcoded     nothing
a message that exceeds what clients take, as a native one may that was compressed          nothing
What cannot be transcoded is acknowledged as well where no native consumer can read it either.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from magnetar.proto.batch import FORMAT_PULSAR
from magnetar.proto.entry import Entry
from magnetar.proto.errors import FrameTooLarge, InvalidArgument, MagnetarError, MalformedFrame
from magnetar.proto.pulsar.frames import FRAME_OVERHEAD_BYTES, message_frame_heads
from magnetar.proto.pulsar.ids import INDEX_BITS, encode_ack_set
from magnetar.proto.pulsar.transcoding import to_pulsar
from magnetar.proto.ranges import Range, RangeSet

from ...cursors.core.acks import EntryKey
from ...dispatch.core.consumer import Delivery
from .ports import Piece
from .transcoded import FORMAT_AT, HEADER_LENGTH_AT, Transcoded

_log = logging.getLogger(__name__)

_LARGE_BYTES = 16 * 1024  # of which a view is cheaper than a copy
_COMMAND_BYTES, _ACK_SET_WORD_BYTES = 256, 11  # of a MESSAGE, at most


class Messages(NamedTuple):
    """What is to be written, and of each the index of its first message; where batches are cut; how much is not among it.

    `damaged`: messages of the delivery that no consumer can read.
    """

    pieces: list[Piece]
    firsts: Iterator[int]
    cuts: list[int]
    unsent: int
    damaged: list[Range]


def messages_of(
    delivery: Delivery,
    consumer_id: int,
    partition: int,
    epoch: int | None,
    transcoded: Transcoded,
    *,
    with_ack_sets: bool = True,
) -> Messages:
    """The frames of a delivery. 0.7 us for an unbatched message of format 2.

    `with_ack_sets` False: a batch that is hidden in part goes out in single messages, each with an id of its own.
    """
    _, _, ledger, entry_id, entry, first, last, redeliveries, hidden = delivery
    runs, partly = ([(first, last)], {}) if not hidden else shown(entry, first, last, hidden)
    data, ends, offsets = entry.data, entry.end_indexes, entry.end_offsets
    shift, base = entry.body - entry.base_offset, entry_id << INDEX_BITS
    sent: list[tuple[int, int]] = []  # packed entry and size
    bodies: list[Piece] = []  # what stands behind the command of each
    ack_sets: dict[int, list[int]] = {}  # of some, by their place in the two lists
    cuts: list[int] = []
    unsent = 0
    damaged: list[Range] = []
    for begin, stop in runs:
        start, _ = entry.batch_bounds(begin)
        index = entry.batch_start_index(begin)
        for position in range(begin, stop):
            end = offsets[position] + shift
            if (
                start < end < start + _LARGE_BYTES
                and data[start + FORMAT_AT] == FORMAT_PULSAR
                and not (partly and position in partly)
            ):
                at = start + (data[start + HEADER_LENGTH_AT] << 8 | data[start + HEADER_LENGTH_AT + 1])
                sent.append((base + index, end - at))
                bodies.append(data[at:end])
            else:
                acknowledged = partly.get(position, ())
                slices: Sequence[tuple[int, int, Piece]] = ()
                try:
                    slices = _slices((ledger, entry_id), entry, position, transcoded)
                    if acknowledged and not with_ack_sets:
                        slices = _in_parts(
                            slices, [(a - index, b - index) for a, b in acknowledged], entry, position
                        )
                except MagnetarError as error:  # rule 41: it costs nobody but who waits for this batch
                    _not_delivered(ledger, entry_id, index, error)
                    if isinstance(error, MalformedFrame):
                        damaged.append((index, ends[position] - 1))
                if not slices:
                    unsent += ends[position] - index - sum([b - a + 1 for a, b in acknowledged])
                for offset, count, body in slices:
                    at = index + offset
                    if offset:
                        cuts.append(at)
                    gone = [(max(a - at, 0), min(b - at, count - 1)) for a, b in acknowledged]
                    gone = [(a, b) for a, b in gone if a <= b]
                    words = encode_ack_set(gone, count) if gone else []
                    if gone and not words:
                        continue  # nothing is left of this slice
                    size = len(body) + _COMMAND_BYTES + _ACK_SET_WORD_BYTES * len(words)
                    if size > transcoded.max_message_bytes + FRAME_OVERHEAD_BYTES:  # rule 42
                        too_large = FrameTooLarge(
                            f"it has {len(body)} bytes, and at most {transcoded.max_message_bytes} are possible"
                        )
                        _not_delivered(ledger, entry_id, at, too_large)
                        unsent += count - sum([b - a + 1 for a, b in gone])
                        continue
                    if words:
                        ack_sets[len(sent)] = words
                    sent.append((base + at, len(body)))
                    bodies.append(body)
            start, index = end, ends[position]
    heads = message_frame_heads(consumer_id, ledger, sent, partition, redeliveries, (), epoch)
    for place, words in ack_sets.items():
        one = [sent[place]]
        heads[place : place + 1] = message_frame_heads(
            consumer_id, ledger, one, partition, redeliveries, words, epoch
        )
    pieces: list[Piece] = [b""] * (2 * len(heads))
    pieces[0::2], pieces[1::2] = heads, bodies
    return Messages(pieces, (packed - base for packed, _ in sent), cuts, unsent, damaged)


def _not_delivered(ledger: int, entry: int, index: int, error: MagnetarError) -> None:
    _log.warning("batch %d:%d:%d is not delivered to Pulsar's consumers: %s", ledger, entry, index, error)


def _slices(
    key: EntryKey, entry: Entry, position: int, transcoded: Transcoded
) -> Sequence[tuple[int, int, Piece]]:
    """A batch of any format as Pulsar's; none if there is nothing of it to be sent. Raises as `to_pulsar`."""
    start, end = entry.batch_bounds(position)
    if start == end:
        return ()
    if entry.data[start + FORMAT_AT] == FORMAT_PULSAR:
        at = start + int.from_bytes(entry.data[start + HEADER_LENGTH_AT : start + HEADER_LENGTH_AT + 2])
        count = entry.end_indexes[position] - entry.batch_start_index(position)
        return ((0, count, memoryview(entry.data)[at:end]),)
    return transcoded.slices(key, entry, position)


def _in_parts(
    slices: Sequence[tuple[int, int, Piece]], hidden: Sequence[Range], entry: Entry, position: int
) -> Sequence[tuple[int, int, Piece]]:
    """The slices of a batch, and each message by itself of those that are hidden in part.

    Of an encrypted batch, which only its consumers can open, they stay as they are.
    """
    gone = RangeSet(hidden)
    if not any(gone.within(at, at + count - 1) and gone.gaps(at, at + count - 1) for at, count, _ in slices):
        return slices
    try:
        singles = to_pulsar(entry.batch(position), entry.producer_names[entry.producers[position]], 0)
    except (MalformedFrame, InvalidArgument):
        return slices
    parts: list[tuple[int, int, Piece]] = []
    for one in slices:
        at, count, _ = one
        in_part = gone.within(at, at + count - 1) and gone.gaps(at, at + count - 1)
        parts += singles[at : at + count] if in_part else [one]
    return parts


def shown(
    entry: Entry, first: int, last: int, hidden: Sequence[Range]
) -> tuple[list[Range], dict[int, list[Range]]]:
    """Of batches [first, last): runs [begin, stop) of those that are not hidden as a whole, and what is hidden within one.

    `hidden`: sorted, disjoint, inclusive ranges of message indexes that do not touch each other.
    """
    runs: list[Range] = []
    partly: dict[int, list[Range]] = {}
    ends = entry.end_indexes
    position = first
    for begin, end in hidden:
        # Batches [left_out, following) are hidden as a whole.
        left_out = bisect_right(ends, begin)
        if begin > entry.batch_start_index(left_out):
            partly.setdefault(left_out, []).append((begin, min(end, ends[left_out] - 1)))
            left_out += 1
        following = min(bisect_right(ends, end + 1), last)
        if (
            following < last
            and max(begin, start := entry.batch_start_index(following)) <= end
            and following >= left_out
        ):
            partly.setdefault(following, []).append((start, end))
        if left_out < following:
            if position < left_out:
                runs.append((position, left_out))
            position = following
    if position < last:
        runs.append((position, last))
    return runs, partly

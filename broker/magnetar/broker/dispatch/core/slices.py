"""How much of an entry one delivery carries: contiguous batches, cut only at batch borders.

Permits count messages and bytes and may be overshot by one batch, since a batch is never cut. Small acknowledged gaps are
delivered along (the consumer hides them by the ack set): a frame costs more than a few hundred bytes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from magnetar.proto.entry import Entry

from ...cursors.core.ranges import Range

# Acknowledged bytes between two wanted ranges that are sent rather than cut out.
MAX_GAP_BYTES = 2048


class Cut(NamedTuple):
    """Batches [first_batch, last_batch) of an entry; `wanted` are the messages in them that count."""

    first_batch: int
    last_batch: int
    wanted: list[Range]
    messages: int  # in `wanted`
    size: int  # bytes of the batches
    next_index: int  # first message after the cut


def cut(entry: Entry, wanted: list[Range], max_messages: int, max_bytes: int) -> Cut:
    """The first delivery out of `wanted` (sorted, not empty): at most the limits, plus the rest of one batch."""
    end_indexes, end_offsets = entry.end_indexes, entry.end_offsets
    first = wanted[0][0]
    first_batch = bisect_right(end_indexes, first)
    start_offset = end_offsets[first_batch - 1] if first_batch else entry.base_offset
    # The batch in which the byte limit is reached is still sent.
    byte_limit = min(bisect_left(end_offsets, start_offset + max_bytes) + 1, len(end_offsets))
    byte_limit = max(byte_limit, first_batch + 1)
    taken: list[Range] = []
    messages, last_batch = 0, first_batch
    for start, end in wanted:
        batch = bisect_right(end_indexes, start)
        if batch >= byte_limit or messages >= max_messages:
            # A range that begins in the last batch of the cut must go along with it.
            if batch >= last_batch:
                break
        elif batch > last_batch and end_offsets[batch - 1] - end_offsets[last_batch - 1] > MAX_GAP_BYTES:
            break
        limit = byte_limit
        room = max(max_messages - messages, 1)
        if end - start >= room:
            limit = min(limit, bisect_right(end_indexes, start + room - 1) + 1)
        limit = max(limit, last_batch)
        stop = min(end, end_indexes[limit - 1] - 1)
        taken.append((start, stop))
        messages += stop - start + 1
        last_batch = max(last_batch, bisect_right(end_indexes, stop) + 1)
        if stop < end:
            break
    size = end_offsets[last_batch - 1] - start_offset
    return Cut(first_batch, last_batch, taken, messages, size, end_indexes[last_batch - 1])

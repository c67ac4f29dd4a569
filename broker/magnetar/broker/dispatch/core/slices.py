"""How much of an entry one delivery carries: contiguous batches, cut only at batch borders.

Permits count messages and bytes and may be overshot by one batch, since a batch is never cut. What lies between the messages
that count goes along, hidden by the ack set; a port leaves out the bytes of batches that are hidden as a whole.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from magnetar.proto.entry import Entry
from magnetar.proto.ranges import Range

# Batches [first, last) of an entry; the messages in them that count, how many they are; bytes of the batches; first message
# after the cut. A plain tuple, since one is made for every delivery.
Cut = tuple[int, int, list[Range], int, int, int]


def cut(entry: Entry, wanted: list[Range], max_messages: int, max_bytes: int) -> Cut:
    """The first delivery out of `wanted` (sorted, not empty): at most the limits, plus the rest of one batch."""
    end_indexes, end_offsets, base = entry.end_indexes, entry.end_offsets, entry.base_offset
    first_batch = last_batch = bisect_right(end_indexes, wanted[0][0])
    # As a rule everything goes: 0.5 us a range, 0.15 us if every message is a batch.
    messages = size = 0
    if len(wanted) > 1 and entry.batch_count == entry.message_count:
        shift = entry.base_index
        last_batch = wanted[-1][1] - shift + 1
        messages = sum([end - start + 1 for start, end in wanted])
        size = sum([end_offsets[end - shift] for _, end in wanted])
        size -= sum([end_offsets[start - shift - 1] for start, _ in wanted[1:]])
        size -= end_offsets[first_batch - 1] if first_batch else base
    for start, end in wanted if not messages else ():
        # A range may begin in the last batch of the one before, and end there.
        batch = max(bisect_right(end_indexes, start), last_batch)
        last_batch = max(bisect_right(end_indexes, end) + 1, last_batch)
        if last_batch > batch:
            size += end_offsets[last_batch - 1] - (end_offsets[batch - 1] if batch else base)
        messages += end - start + 1
    if messages <= max_messages and size <= max_bytes:
        return first_batch, last_batch, wanted, messages, size, end_indexes[last_batch - 1]
    taken: list[Range] = []
    messages = size = 0
    last_batch = first_batch
    for start, end in wanted:
        batch = bisect_right(end_indexes, start)
        if batch >= last_batch:
            if messages >= max_messages or size >= max_bytes:
                break
            last_batch = batch
        offset = end_offsets[last_batch - 1] if last_batch else base
        # The batch in which a limit is reached is still sent.
        limit = min(bisect_left(end_offsets, offset + max_bytes - size) + 1, len(end_offsets))
        room = max(max_messages - messages, 1)
        if end - start >= room:
            limit = min(limit, bisect_right(end_indexes, start + room - 1) + 1)
        limit = max(limit, batch + 1)
        stop = min(end, end_indexes[limit - 1] - 1)
        taken.append((start, stop))
        messages += stop - start + 1
        last_batch = max(last_batch, bisect_right(end_indexes, stop) + 1)
        size += end_offsets[last_batch - 1] - offset
        if stop < end:
            break
    return first_batch, last_batch, taken, messages, size, end_indexes[last_batch - 1]

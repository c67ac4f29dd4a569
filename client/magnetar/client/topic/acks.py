"""Acknowledgements and negative ones that are not sent yet: sans I/O, from flags and ids to rows.

An individual ack is one byte in its delivery; ranges are found when the acks are sent, by C searches over the flags.

>>> tracker = AckTracker()
>>> tracker.add_id(MessageId(7, 0, 3)); tracker.add_id(MessageId(7, 0, 4))
>>> tracker.take_rows()
[AckRow(ledger=7, entry=0, first_index=3, last_index=4)]
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from magnetar.proto.chunks import Key
from magnetar.proto.commands import AckRow
from magnetar.proto.ids import MessageId

from ..chunked_id import ChunkedMessageId
from ..messages import ACKED, GIVEN_BACK, QUEUED, UNACKED, Delivery, Message

# Twice what a broker lets one consumer hold unacknowledged; each costs about 200 bytes.
MAX_PENDING_NACKS = 100_000

_QUEUED, _UNACKED, _ACKED = bytes([QUEUED]), bytes([UNACKED]), bytes([ACKED])
_AS_QUEUED = bytes.maketrans(bytes([UNACKED, GIVEN_BACK]), _QUEUED * 2)
_QUEUED_RUN = re.compile(_QUEUED + b"+")
_UNACKED_RUN = re.compile(_UNACKED + b"+")


class AckTracker:
    """count: messages acknowledged since rows were taken last. cumulative: the last one of a cumulative ack, or None.

    cluster: acks of messages of another one come to nothing.
    """

    __slots__ = ("_deliveries", "_ids", "_rows", "cluster", "count", "cumulative")

    def __init__(self) -> None:
        self.cluster = 0
        self.count = 0
        self.cumulative: MessageId | None = None
        self._deliveries: list[Delivery] = []
        self._ids: list[MessageId] = []
        self._rows: list[AckRow] = []

    def __bool__(self) -> bool:
        return self.count > 0 or self.cumulative is not None

    def add(self, message: Message) -> None:
        """One message; nothing if its ack was sent before."""
        delivery = message.delivery
        flags = delivery.flags
        if flags[message.index] in (UNACKED, GIVEN_BACK):
            flags[message.index] = QUEUED
            if not delivery.queued:
                self.note(delivery)
        self.count += 1

    def note(self, delivery: Delivery) -> None:
        """The first flag of a delivery was set to QUEUED since rows were taken last."""
        delivery.queued = True
        self._deliveries.append(delivery)

    def add_range(self, delivery: Delivery, first: int, end: int) -> None:
        """Messages [first, end) of a delivery."""
        flags = delivery.flags
        part = flags[first:end]
        flags[first:end] = part.translate(_AS_QUEUED) if any(part) else _QUEUED * (end - first)
        if not delivery.queued:
            self.note(delivery)
        self.count += end - first

    def add_id(self, message_id: MessageId) -> None:
        """A message by its id."""
        self._ids.append(message_id)
        self.count += 1

    def add_rows(self, rows: list[AckRow]) -> None:
        """Whatever they name."""
        self._rows += rows
        self.count += len(rows)

    def add_cumulative(self, message_id: MessageId) -> None:
        """Everything up to a message, included."""
        if self.cumulative is None or message_id > self.cumulative:
            self.cumulative = message_id

    def take_rows(self) -> list[AckRow]:
        """Rows of the individual acks, which count as sent from now on."""
        rows, self._rows = self._rows, []
        for delivery in self._deliveries:
            delivery.queued = False
            if delivery.cluster == self.cluster:
                rows += _queued_rows(delivery)
        self._deliveries.clear()
        if self._ids:
            rows += rows_of_ids(self._ids)
            self._ids.clear()
        self.count = 0
        return rows

    def take_cumulative(self) -> AckRow | None:
        """The row of the cumulative ack."""
        last, self.cumulative = self.cumulative, None
        return None if last is None else AckRow(last.ledger, last.entry, 0, last.index)

    def clear(self) -> None:
        """Forgets everything, as if never acknowledged."""
        for delivery in self._deliveries:
            delivery.queued = False
            delivery.flags[:] = delivery.flags.replace(_QUEUED, _UNACKED)
        self._deliveries.clear()
        self._ids.clear()
        self._rows.clear()
        self.count = 0
        self.cumulative = None


def _queued_rows(delivery: Delivery) -> list[AckRow]:
    rows: list[AckRow] = []
    flags = delivery.flags
    for run in _QUEUED_RUN.finditer(bytes(flags)):
        start, end = run.span()
        flags[start:end] = _ACKED * (end - start)
        rows += delivery.rows(start, end)
    return rows


def rows_of_ids(ids: Iterable[MessageId]) -> list[AckRow]:
    """Ranges of consecutive ids; of a message in chunks, each chunk."""
    rows: list[AckRow] = []
    for one in sorted(ids):
        if isinstance(one, ChunkedMessageId):
            rows += one.chunks
            continue
        ledger, entry, index, _partition = one
        last = rows[-1] if rows else None
        if (
            last is not None
            and last[:2] == (ledger, entry)
            and last.first_index <= index <= last.last_index + 1
        ):
            rows[-1] = last._replace(last_index=max(index, last.last_index))
        else:
            rows.append(AckRow(ledger, entry, index, index))
    return rows


class NackTracker:
    """Messages to have redelivered, each at its own time; the last call counts for a message that is named again.

    It holds ids, and the flags of their deliveries to see what is acknowledged meanwhile; never the payloads. Of more than
    MAX_PENDING_NACKS those that are due first are due at once.
    """

    __slots__ = ("_heap", "_last", "_number")

    def __init__(self) -> None:
        # Due time, number of the call, flags, index in them, id, `counted`, and of which message in chunks that nobody has
        # seen. Without the number of `_last` it means nothing.
        self._heap: list[tuple[float, int, bytearray, int, MessageId, bool, Key | None]] = []
        self._last: dict[MessageId, int] = {}
        self._number = 0

    def __bool__(self) -> bool:
        return bool(self._last)

    def has_chunks_before(self, key: Key, place: tuple[int, int, int]) -> bool:
        """True if chunks of this message that nobody has seen as a whole, and that begin before a place, are among them."""
        return any(
            of == key and message_id[:3] < place and self._last.get(message_id) == number
            for _, number, _, _, message_id, _, of in self._heap
        )

    def __contains__(self, message_id: MessageId) -> bool:
        return message_id in self._last

    def add(self, message: Message, due: float, *, counted: bool = True) -> None:
        """`due`: loop time. `counted`: the redelivery count rises. Of what was given back, the next delivery is nacked."""
        if message.delivery.flags[message.index] == GIVEN_BACK:
            return
        message_id, last, heap = message.id, self._last, self._heap
        self._number += 1
        last[message_id] = self._number
        heappush(heap, (due, self._number, message.delivery.flags, message.index, message_id, counted, None))
        if len(heap) > 64 + 2 * len(last):
            self._heap = [row for row in heap if last.get(row[4]) == row[1]]
            heapify(self._heap)

    def add_rows(self, key: Key, rows: list[AckRow], due: float, flags: bytearray) -> None:
        """Chunks of a message that nobody has seen as a whole."""
        ledger, entry, index, _ = rows[0]
        message_id = ChunkedMessageId.of(MessageId(ledger, entry, index), rows)
        self._number += 1
        self._last[message_id] = self._number
        heappush(self._heap, (due, self._number, flags, 0, message_id, False, key))

    @property
    def next_due(self) -> float:
        """When the first of them is due, or earlier; only while there are any."""
        return self._heap[0][0]

    @property
    def overfull(self) -> bool:
        """True if the first of them cannot wait for its time."""
        return len(self._last) > MAX_PENDING_NACKS

    def take_due(self, now: float) -> tuple[list[AckRow], list[AckRow]]:
        """Rows of what is due, counted and not, without what was acknowledged meanwhile."""
        seen: list[MessageId] = []
        unseen: list[MessageId] = []
        heap, last = self._heap, self._last
        while heap and (heap[0][0] <= now or self.overfull):
            _, number, flags, index, message_id, counted, _ = heappop(heap)
            if last.get(message_id) == number:
                del last[message_id]
                if flags[index] == UNACKED:
                    flags[index] = GIVEN_BACK
                    (seen if counted else unseen).append(message_id)
        return rows_of_ids(seen), rows_of_ids(unseen)

    def clear(self) -> None:
        """Forgets everything: the broker redelivers, or the position moved."""
        self._heap.clear()
        self._last.clear()


class UnackedTracker:
    """What was handed out and is not acknowledged, to have it redelivered after a timeout.

    It holds a row for each part of a delivery that was handed out between two looks, and no payloads; rows that are
    acknowledged as a whole go when the next one comes, so in order it holds next to nothing.
    """

    __slots__ = ("_acked", "_noted", "_noted_end", "_rows", "timeout")

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout  # seconds
        # Due time (which never falls), flags, first and end in them, and the id of flag 0.
        self._rows: deque[tuple[float, bytearray, int, int, MessageId]] = deque()
        self._noted: bytearray | None = None  # flags of the delivery that was noted last
        self._noted_end = 0  # and how far
        # Everything up to this message was acknowledged, which the flags do not show.
        self._acked: MessageId | None = None

    def handed_out(self, delivery: Delivery, end: int, now: float) -> None:
        """Messages before `end` of the delivery were handed out; their time begins now, if it has not."""
        flags = delivery.flags
        first = self._noted_end if flags is self._noted else 0
        if end <= first:
            return
        self._noted, self._noted_end = flags, end
        rows = self._rows
        while rows and rows[0][1].find(UNACKED, self._first_unacked(*rows[0][2:]), rows[0][3]) < 0:
            rows.popleft()
        rows.append((now + self.timeout, flags, first, end, delivery.first_id))

    def take_due(self, now: float, nacks: NackTracker) -> list[AckRow]:
        """Rows of what is due and not acknowledged; what was nacked comes at the time that was asked for."""
        found: list[AckRow] = []
        rows = self._rows
        while rows and rows[0][0] <= now:
            _, flags, first, end, base = rows.popleft()
            for run in _UNACKED_RUN.finditer(bytes(flags[:end]), self._first_unacked(first, end, base)):
                ids = [
                    base._replace(index=base.index + number) if number else base
                    for number in range(*run.span())
                ]
                ids = [one for one in ids if one not in nacks]
                for one in ids:
                    flags[one.index - base.index] = GIVEN_BACK
                found += rows_of_ids(ids)
        return found

    def acked_through(self, last: MessageId) -> None:
        """Everything up to this message was acknowledged, handed out by now or noted as such later."""
        if self._acked is None or last > self._acked:
            self._acked = last

    def _first_unacked(self, first: int, end: int, base: MessageId) -> int:
        """The row of the messages [first, end) of a delivery."""
        last = self._acked
        if last is None:
            return first
        if last[:2] == base[:2]:
            return min(max(first, last.index + 1 - base.index), end)
        return end if last > base else first

    def clear(self) -> None:
        """Forgets everything: the broker redelivers, or the position moved."""
        self._rows.clear()
        self._noted = self._acked = None

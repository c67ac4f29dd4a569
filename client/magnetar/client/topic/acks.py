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

from magnetar.proto.commands import AckRow
from magnetar.proto.ids import MessageId

from ..messages import ACKED, QUEUED, UNACKED, Delivery, Message

# Twice what a broker lets one consumer hold unacknowledged; each costs about 200 bytes.
MAX_PENDING_NACKS = 100_000

_QUEUED, _UNACKED, _ACKED = bytes([QUEUED]), bytes([UNACKED]), bytes([ACKED])
_QUEUED_RUN = re.compile(_QUEUED + b"+")


class AckTracker:
    """count: messages acknowledged since rows were taken last. cumulative: the last one of a cumulative ack, or None."""

    __slots__ = ("_deliveries", "_ids", "count", "cumulative")

    def __init__(self) -> None:
        self.count = 0
        self.cumulative: MessageId | None = None
        self._deliveries: list[Delivery] = []
        self._ids: list[MessageId] = []

    def __bool__(self) -> bool:
        return self.count > 0 or self.cumulative is not None

    def add(self, message: Message) -> None:
        """One message; nothing if its ack was sent before."""
        delivery = message.delivery
        flags = delivery.flags
        if flags[message.index] == UNACKED:
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
        flags[first:end] = part.replace(_UNACKED, _QUEUED) if any(part) else _QUEUED * (end - first)
        if not delivery.queued:
            self.note(delivery)
        self.count += end - first

    def add_id(self, message_id: MessageId) -> None:
        """A message by its id."""
        self._ids.append(message_id)
        self.count += 1

    def add_cumulative(self, message_id: MessageId) -> None:
        """Everything up to a message, included."""
        if self.cumulative is None or message_id > self.cumulative:
            self.cumulative = message_id

    def take_rows(self) -> list[AckRow]:
        """Rows of the individual acks, which count as sent from now on."""
        rows: list[AckRow] = []
        for delivery in self._deliveries:
            delivery.queued = False
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
        self.count = 0
        self.cumulative = None


def _queued_rows(delivery: Delivery) -> list[AckRow]:
    rows: list[AckRow] = []
    flags, base = delivery.flags, delivery.base_index
    for run in _QUEUED_RUN.finditer(bytes(flags)):
        start, end = run.span()
        flags[start:end] = _ACKED * (end - start)
        rows.append(AckRow(delivery.ledger, delivery.entry_id, base + start, base + end - 1))
    return rows


def rows_of_ids(ids: Iterable[MessageId]) -> list[AckRow]:
    """Ranges of consecutive ids."""
    rows: list[AckRow] = []
    for ledger, entry, index, _partition in sorted(ids):
        last = rows[-1] if rows else None
        if last is not None and last[:2] == (ledger, entry) and index <= last.last_index + 1:
            rows[-1] = last._replace(last_index=max(index, last.last_index))
        else:
            rows.append(AckRow(ledger, entry, index, index))
    return rows


class NackTracker:
    """Messages to have redelivered after a delay, in the order of their due times (the delay is constant).

    It holds ids, and the flags of their deliveries to see what is acknowledged meanwhile; never the payloads. Of more than
    MAX_PENDING_NACKS the oldest are due at once.
    """

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending: deque[tuple[float, bytearray, int, MessageId]] = deque()

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add(self, message: Message, due: float) -> None:
        """`due`: loop time."""
        self._pending.append((due, message.delivery.flags, message.index, message.id))

    @property
    def next_due(self) -> float:
        """When the oldest is due."""
        return self._pending[0][0]

    @property
    def overfull(self) -> bool:
        """True if the oldest cannot wait for its time."""
        return len(self._pending) > MAX_PENDING_NACKS

    def take_due(self, now: float) -> list[AckRow]:
        """Rows of what is due, without what was acknowledged meanwhile."""
        ids: list[MessageId] = []
        pending = self._pending
        while pending and (pending[0][0] <= now or self.overfull):
            _, flags, index, message_id = pending.popleft()
            if flags[index] == UNACKED:
                ids.append(message_id)
        return rows_of_ids(ids)

    def clear(self) -> None:
        """Forgets everything: the broker redelivers, or the position moved."""
        self._pending.clear()

"""Messages as users see them, decoded lazily from deliveries.

A message is (value, delivery, index): 35 ns to make. A delivery is what one DELIVER frame carried, a slice of an entry;
ids, keys, properties and times stay in its bytes until somebody asks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from itertools import compress, count, repeat
from operator import not_
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar

import msgspec

from magnetar.proto.batch import (
    META_EVENT_TIMES_MS,
    META_PROPERTIES,
    META_SEQUENCE_IDS,
    BatchHeader,
    DecodedBatch,
    Key,
    decode_batch_header,
)
from magnetar.proto.commands import ACK_SET_ROW, AckRow, Deliver, decode_rows, encode_rows
from magnetar.proto.entry import Entry
from magnetar.proto.entry_messages import entry_keys, entry_values, without_values
from magnetar.proto.errors import InvalidArgument, MagnetarError
from magnetar.proto.ids import NO_PARTITION, MessageId, TopicName

from .options import Start

T = TypeVar("T")

# Flags of a delivery's messages.
UNACKED, QUEUED, ACKED, GIVEN_BACK = 0, 1, 2, 3


class Message(msgspec.Struct, gc=False, eq=False, weakref=False):
    """A received message. `value` is None for a tombstone."""

    value: bytes | None
    delivery: Delivery
    index: int

    @property
    def id(self) -> MessageId:
        """Position in the topic: ordered, hashable."""
        delivery = self.delivery
        return MessageId(
            delivery.ledger, delivery.entry_id, delivery.base_index + self.index, delivery.partition
        )

    @property
    def key(self) -> Key:
        """The key it was sent with, else None."""
        return self.delivery.key(self.index)

    @property
    def properties(self) -> Mapping[str, str]:
        """The properties it was sent with; empty if none."""
        return self.delivery.metadata(self.index, META_PROPERTIES) or {}

    @property
    def publish_time(self) -> int:
        """When the producer sent it: milliseconds since the epoch."""
        return self.delivery.header(self.index).publish_time_ms

    @property
    def event_time(self) -> int | None:
        """The event time it was sent with, in milliseconds since the epoch, else None."""
        time: int | None = self.delivery.metadata(self.index, META_EVENT_TIMES_MS)
        return time

    @property
    def redelivery_count(self) -> int:
        """How often it was delivered before and not acknowledged, as far as the broker knows."""
        return self.delivery.redelivery_count

    @property
    def topic(self) -> str:
        """Full name of its topic."""
        return self.delivery.topic

    @property
    def sequence_id(self) -> int:
        """Its number among the messages of its producer."""
        return self.delivery.sequence_id(self.index)

    @property
    def producer_name(self) -> str:
        """Name of the producer that sent it."""
        return self.delivery.producer_name(self.index)

    def __repr__(self) -> str:
        value = self.value
        shown = value if value is None or len(value) <= 40 else value[:40] + b"..."
        return f"<Message {self.id} {shown!r}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and self.id == other.id and self.topic == other.topic

    def __hash__(self) -> int:
        return hash(self.id)


class Pieces(Protocol):
    """A value that is still coming, to be read once."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    def close(self) -> None:
        """The rest is not wanted."""


class ChunkedMessage(Message, gc=False, eq=False, weakref=False):
    """A message that was stored in chunks. Its id is that of the first one."""

    @property
    def id(self) -> MessageId:
        """See Message."""
        return self.delivery.first_id


class StreamedMessage(ChunkedMessage, gc=False, eq=False, weakref=False):
    """A message that was handed out before all of its chunks had come: its value is read by `consumer.stream(message)`."""

    @property  # type: ignore[misc]
    def value(self) -> bytes | None:  # type: ignore[override]
        """Raises InvalidArgument."""
        raise InvalidArgument(
            f"message {self.id} is still coming: read it by `async for piece in consumer.stream(message)`, or subscribe "
            "without stream_chunks"
        )

    @property
    def pieces(self) -> Pieces:
        """What `stream` reads."""
        return self.delivery  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"<StreamedMessage {self.id}>"


SeekTarget = Start | Message | Callable[[str], Start | Message | None]
"""What `seek` takes."""


class MessageBatch(tuple[Message, ...]):
    """Messages that arrived and were decoded together, consecutive ones of one delivery: acknowledged as one."""

    __slots__ = ()


class Delivery:
    """What one DELIVER frame carried.

    flags: a byte a message, UNACKED, QUEUED (its ack is not sent yet), ACKED or GIVEN_BACK (it was asked for again, and
    comes in another delivery, with an ack_timeout of its own); messages that the broker named in the ack set are ACKED from
    the start, and cost no permits. permits, bytes: messages not in the ack set, and bytes of all batches, as the broker
    counts permits. cluster: see ConnectionPool.
    """

    __slots__ = (
        "__weakref__",
        "_batches",
        "_keys",
        "base_index",
        "bytes",
        "cluster",
        "count",
        "entry",
        "entry_id",
        "epoch",
        "flags",
        "ledger",
        "partition",
        "permits",
        "queued",
        "redelivery_count",
        "topic",
    )

    message_type: ClassVar[type[Message]] = Message

    def __init__(
        self, command: Deliver, payload: bytes, topic: str, cluster: int = 0, partition: int = NO_PARTITION
    ) -> None:
        """Reads the table, not the batches. Raises MalformedFrame."""
        slice_start = command.ack_set_rows * ACK_SET_ROW.size
        self.entry = entry = Entry(payload, slice_start)
        self.topic = topic
        self.cluster = cluster
        self.epoch = command.consumer_epoch
        self.ledger = command.ledger
        self.entry_id = command.entry
        self.partition = partition
        self.redelivery_count = command.redelivery_count
        self.base_index = entry.base_index
        self.count = entry.message_count
        self.bytes = len(payload) - entry.body
        self.flags = bytearray(entry.message_count)
        self.queued = False  # AckTracker holds it
        self._batches: dict[int, DecodedBatch] = {}
        self._keys: list[Key] | None = None
        if slice_start:
            self._mark_acked(decode_rows(ACK_SET_ROW, memoryview(payload)[:slice_start]))
        self.permits = self.flags.count(UNACKED)

    def _mark_acked(self, rows: Any) -> None:
        for first, last in rows:
            start, end = max(first - self.base_index, 0), min(last - self.base_index + 1, self.count)
            if start < end:
                self.flags[start:end] = bytes([ACKED]) * (end - start)

    @property
    def first_id(self) -> MessageId:
        """The id of message 0."""
        return MessageId(self.ledger, self.entry_id, self.base_index, self.partition)

    @property
    def last_id(self) -> MessageId:
        """The id of the last message."""
        return MessageId(self.ledger, self.entry_id, self.base_index + self.count - 1, self.partition)

    def rows(self, first: int, end: int) -> list[AckRow]:
        """What messages [first, end) are to the broker."""
        return [AckRow(self.ledger, self.entry_id, self.base_index + first, self.base_index + end - 1)]

    def copy_to(self, other: Delivery) -> None:
        """Makes another one, which is not initialized, the same."""
        for name in Delivery.__slots__:
            if name != "__weakref__":
                setattr(other, name, getattr(self, name))

    def part(self, first: int, last: int) -> Delivery:
        """Batches [first, last) of a delivery that is not opened, as one of their own."""
        part = object.__new__(Delivery)
        self.copy_to(part)
        part.entry = entry = Entry(b"".join(self.entry.slice(first, last)))
        start = entry.base_index - self.base_index
        part.base_index, part.count = entry.base_index, entry.message_count
        part.bytes = len(entry.data) - entry.body
        part.flags = self.flags[start : start + part.count]
        part.permits = part.flags.count(UNACKED)
        part._batches, part._keys = {}, None
        return part

    def values(self) -> list[bytes | None]:
        """All values, each batch verified. Raises ChecksumMismatch or MalformedFrame."""
        return self._decoded(lambda entry: entry_values(entry, self.flags))

    def _decoded(self, decode: Callable[[Entry], T]) -> T:
        try:
            return decode(self.entry)
        except MagnetarError as error:
            error.details.update(first_id=self.first_id, last_id=self.last_id)
            raise of_entry(error, self.ledger, self.entry_id, self.topic) from None

    def let_go_of_values(self) -> None:
        """The messages have them. Another thread may be reading something of them: what is replaced stays as it was."""
        self.entry, self._batches = without_values(self.entry), {}

    # --- of one message ----------------------------------------------------------------------------------------------

    def _place(self, index: int) -> tuple[int, int]:
        """Position of the batch of message `index`, and the message's number in the batch."""
        in_entry = self.base_index + index
        position = self.entry.batch_of(in_entry)
        return position, in_entry - self.entry.batch_start_index(position)

    def _batch(self, position: int) -> DecodedBatch:
        """For its metadata: the values live in the messages, and keys are decoded all at once."""
        batch = self._batches.get(position)
        if batch is None:
            entry = self.entry
            start, _ = entry.batch_bounds(position)
            batch = self._batches[position] = DecodedBatch(entry.data, start, verify=False)
        return batch

    def key(self, index: int) -> Key:
        """See Message.key. 100 ns once the first key was asked for, which decodes all of them."""
        if self._keys is None:
            self._keys = self._decoded(entry_keys)
        return self._keys[index]

    def metadata(self, index: int, column: int) -> Any:
        """Value of a metadata column, None if absent."""
        position, number = self._place(index)
        values = self._decoded(lambda _: self._batch(position).metadata or {}).get(column)
        return None if values is None else values[number]

    def header(self, index: int) -> BatchHeader:
        """Header of the message's batch."""
        entry, (position, _) = self.entry, self._place(index)
        return decode_batch_header(entry.data, entry.batch_bounds(position)[0])

    def sequence_id(self, index: int) -> int:
        """See Message.sequence_id."""
        own: int | None = self.metadata(index, META_SEQUENCE_IDS)
        if own is not None:
            return own
        return self.header(index).sequence_id + self._place(index)[1]

    def producer_name(self, index: int) -> str:
        """See Message.producer_name."""
        names: Sequence[str] = self.entry.producer_names
        return names[self.entry.producers[self._place(index)[0]]]


class Failure:
    """In place of a delivery that cannot be read, or of messages that were trimmed: whoever receives it gets the error."""

    permits = bytes = 0

    def __init__(self, epoch: int, error: MagnetarError) -> None:
        self.epoch = epoch
        self.raised = False
        self._error = error

    def values(self) -> NoReturn:
        """Raises the error."""
        self.raised = True
        raise self._error


def messages_of(delivery: Delivery | Failure) -> list[Message]:
    """Its messages, without those of the ack set. Raises what is wrong with a damaged delivery."""
    values = delivery.values()
    assert isinstance(delivery, Delivery)
    messages = map(delivery.message_type, values, repeat(delivery), count())
    flags = delivery.flags
    return list(compress(messages, map(not_, flags)) if any(flags) else messages)


def peeked_messages(entries: Iterable[Sequence[Any]], topic: str) -> list[Message]:
    """What PeekMessages answers. Raises what is wrong with a damaged delivery."""
    found: list[Message] = []
    for ledger, entry, redelivery_count, hidden, part in entries:
        command = Deliver(0, 0, 0, ledger, entry, -1, redelivery_count, len(hidden))
        payload = encode_rows(ACK_SET_ROW, hidden) + part
        found += messages_of(Delivery(command, payload, topic, partition=TopicName.parse(topic).partition))
    return found


def of_entry(error: MagnetarError, ledger: int, entry: int, topic: str) -> MagnetarError:
    """The error, which says in its text which entry it is about."""
    return type(error)(f"entry {entry} of ledger {ledger} in {topic}: {error.message}", **error.details)

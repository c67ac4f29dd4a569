"""What the clients of a cluster saw: events in one file per process, appended as they happen.

A message is named (producer, number); numbers count up from 0 in the order in which its producer sent them. A position is
(ledger, entry, index), as in a MessageId. All times are seconds of CLOCK_MONOTONIC, which the processes of a machine share.

The file holds events one after another: four bytes of length, then MessagePack.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

Name = tuple[str, int]
Position = tuple[int, int, int]

_LENGTH = struct.Struct(">I")


class Event(msgspec.Struct, frozen=True, array_like=True, tag=True, tag_field="event"):
    """Base of all events."""


class ProducerMade(Event, frozen=True):
    """Before it sends. Its message `number` has the key `key_of(number, keys)`."""

    producer: str
    topic: str
    keys: int  # 0: without keys
    batched: bool


class SubscriptionMade(Event, frozen=True):
    """Before anything is sent to its topic."""

    subscription: str
    topic: str
    type: str


class Sent(Event, frozen=True):
    """Handed to the client: the numbers `first` to `first + count - 1`."""

    at: float
    producer: str
    first: int
    count: int


class Confirmed(Event, frozen=True):
    """The receipts of consecutive messages that were sent together: where each is stored."""

    at: float
    sent_at: float
    producer: str
    first: int
    positions: tuple[Position, ...]


class StoredBefore(Event, frozen=True):
    """Receipts that say that these messages were stored by an earlier attempt, and not where."""

    at: float
    sent_at: float
    producer: str
    numbers: tuple[int, ...]


class SendFailed(Event, frozen=True):
    """It is not known whether this message is stored."""

    at: float
    producer: str
    number: int
    error: str


class Handed(msgspec.Struct, frozen=True, array_like=True):
    """A message as an application or a reader got it. `producer` "": its value cannot be read."""

    position: Position
    producer: str
    number: int
    key: str
    redelivery_count: int = 0

    @property
    def name(self) -> Name:
        """Of the message."""
        return self.producer, self.number


class ConsumerMade(Event, frozen=True):
    """Before it receives."""

    consumer: str
    subscription: str
    topic: str


class Received(Event, frozen=True):
    """An application took messages. `attachment` rises whenever the broker takes back what the consumer holds."""

    at: float
    consumer: str
    attachment: int
    messages: tuple[Handed, ...]


class AckReceipt(Event, frozen=True):
    """The receipt of an acknowledgement came. `attachment`: in which it was asked for and came; -1: not in one."""

    at: float
    asked_at: float
    consumer: str
    attachment: int
    positions: tuple[Position, ...]


class Nacked(Event, frozen=True):
    """An application gave messages back."""

    at: float
    consumer: str
    positions: tuple[Position, ...]


class Stored(Event, frozen=True):
    """A part of what a reader found in a topic after everything, in its order."""

    topic: str
    messages: tuple[Handed, ...]


AnyEvent = (
    ProducerMade
    | SubscriptionMade
    | ConsumerMade
    | Sent
    | Confirmed
    | StoredBefore
    | SendFailed
    | Received
    | AckReceipt
    | Nacked
    | Stored
)
_decoder = msgspec.msgpack.Decoder(AnyEvent)
_encoder = msgspec.msgpack.Encoder()


def key_of(number: int, keys: int) -> str:
    """The key of a message; empty without one."""
    return f"k{number % keys}" if keys else ""


def value_of(producer: str, number: int, key: str, size: int) -> bytes:
    """The bytes of a message, `size` of them if its name is not longer than that."""
    return f"{producer}/{number}/{key}/".encode().ljust(size, b".")


def handed(position: Position, value: bytes | None, key: str, redelivery_count: int = 0) -> Handed:
    """Reads `value_of`. A value that nobody sent, or a key that is not that of the value, has no producer."""
    try:
        producer, number, its_key, _ = (value or b"").decode().split("/", 3)
        if its_key == key:
            return Handed(position, producer, int(number), key, redelivery_count)
    except ValueError:  # UnicodeDecodeError is one
        pass
    return Handed(position, "", 0, key, redelivery_count)


class HistoryWriter:
    """Appends events to a file; they are in it after `close`, or all but the last ones if the process was killed."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = open(path, "wb", buffering=1 << 20)  # noqa: SIM115 - closed by `close`

    def add(self, event: AnyEvent) -> None:
        """One event."""
        data = _encoder.encode(event)
        self._file.write(_LENGTH.pack(len(data)))
        self._file.write(data)

    def close(self) -> None:
        """May be called again."""
        self._file.close()


def read_history(paths: Iterable[Path]) -> Iterator[AnyEvent]:
    """The events of these files, each file's in their order."""
    for path in paths:
        data = path.read_bytes()
        at = 0
        while at + _LENGTH.size <= len(data):
            (length,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size + length
            if at > len(data):
                return  # torn: the process was killed
            yield _decoder.decode(memoryview(data)[at - length : at])

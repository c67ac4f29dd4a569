"""Commands of both hops: the header of a frame is a msgpack array `[command number, request id, fields...]`.

Arrays only grow at the end: unknown trailing fields are ignored, absent ones take their default. A request id of 0 means
that no answer is wanted; answers carry the id of their request. Growing lists stand in the payload as fixed-size rows,
never in the header (WIRE.md draws them).

>>> decode_command(Flow(0, consumer_id=3, messages=100).encode())
Flow(request_id=0, consumer_id=3, messages=100, bytes=0)
"""

# ruff: noqa: RUF012  (msgspec copies mutable defaults; ruff sees that only where Struct itself is the base)

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from .bookie_identity import BookieIdentity
from .command import Command as Command
from .errors import (
    Action,
    FrameTooLarge,
    MagnetarError,
    MalformedFrame,
    TopicNotServed,
    UnknownCommand,
    error_from_wire,
)
from .topic_commands import *  # noqa: F403  (its commands are read under this name as well)

PROTOCOL_VERSION = 1
MIN_PROTOCOL_VERSION = 1

# An error may quote what the peer sent; its text must fit into a header all the same.
MAX_ERROR_CHARS = 8_000


def _fields_of(error: MagnetarError) -> tuple[int, int, str]:
    """Code, action and message of a frame that carries an error."""
    return error.code, int(error.action), error.message[:MAX_ERROR_CHARS]


# --- both hops -------------------------------------------------------------------------------------------------------


class Connect(Command, tag=1):
    """First frame of a connection. Payload: authentication data. `bookie`: whom a ledger client expects to meet."""

    protocol_version: int
    min_protocol_version: int
    features: list[str] = []
    max_frame_bytes: int = 0
    peer: str = ""
    auth_method: str = "none"
    bookie: BookieIdentity | None = None


class Connected(Command, tag=2):
    """Answer to Connect: what both peers will use. Payload: authentication data. `bookie`: who it is, if it is one."""

    protocol_version: int
    features: list[str] = []
    max_frame_bytes: int = 0
    max_message_bytes: int = 0
    peer: str = ""
    bookie: BookieIdentity | None = None


class AuthChallenge(Command, tag=3):
    """A further round of authentication, either way. Payload: authentication data."""

    auth_method: str = ""


class Ping(Command, tag=4):
    """Keep-alive, either way; answered by Pong."""


class Pong(Command, tag=5):
    """Answer to Ping."""


class Ok(Command, tag=6):
    """Success. `result` is what the request's docstring says; `in_payload`: it stands in the payload, as msgpack."""

    result: Any = None
    in_payload: bool = False


class Failed(Command, tag=7):
    """Failure of the request, or with request id 0 of the connection, which closes after it."""

    code: int = 1
    action: int = int(Action.GIVE_UP)
    message: str = ""
    length: int = 0  # of the frame that was too large

    def to_error(self) -> MagnetarError:
        """The error to raise."""
        error = error_from_wire(self.code, self.action, self.message)
        if self.length:
            error.details["length"] = self.length
        return error

    @classmethod
    def of(cls, request_id: int, error: MagnetarError) -> Failed:
        """The frame that carries `error`."""
        length = error.details.get("length", 0) if isinstance(error, FrameTooLarge) else 0
        return cls(request_id, *_fields_of(error), length)


# --- client to broker and back -------------------------------------------------------------------------------------


class Lookup(Command, tag=16):
    """Where is the topic served? Ok: {"url": str, "final": bool}; not final: ask there, with `authoritative`.

    `authoritative`: this broker was named by another one, and serves the topic if nobody else does. `unreachable`: the URL
    of an owner to which the client could not connect; the answer comes when the topic has another owner, or after a while.
    """

    topic: str
    authoritative: bool = False
    unreachable: str = ""


class Partitions(Command, tag=17):
    """How many partitions has the topic? Ok: {"partitions": int}, 0 if it is not partitioned.

    `create`: whoever asks is about to use it, which makes it with partitions if there is none and policies say so.
    """

    topic: str
    create: bool = False


class CreateProducer(Command, tag=18):
    """Ok: {"name": str, "epoch": int, "last_sequence_id": int (-1 if none known), "topic_epoch": int (-1: shared)}.

    With "wait_for_exclusive" it is answered when the producer is let in; SendDelayed tells whom it waits for.
    """

    producer_id: int
    topic: str
    name: str | None = None
    epoch: int = 0
    access_mode: str = "shared"
    properties: dict[str, str] = {}
    topic_epoch: int = -1  # that this producer was let in under before; -1: it was not


class Send(Command, tag=19):
    """A group: the payload is 1..m batches back to back. Constant per producer and epoch. Answered by Receipt rows."""

    producer_id: int
    epoch: int


class Receipt(Command, tag=20):
    """Durable groups of a producer. Payload: RECEIPT_ROW rows in sequence order."""

    producer_id: int
    epoch: int


class SendFailed(Command, tag=21):
    """The group that starts with `sequence_id`, and all after it in this epoch, were not stored."""

    producer_id: int
    epoch: int
    sequence_id: int
    code: int = 1
    action: int = int(Action.GIVE_UP)
    message: str = ""

    @classmethod
    def of(cls, producer_id: int, epoch: int, sequence_id: int, error: MagnetarError) -> SendFailed:
        """The frame that carries `error`."""
        return cls(0, producer_id, epoch, sequence_id, *_fields_of(error))


class CloseProducer(Command, tag=22):
    """Either way; from the broker (request id 0) with an error, which says whether to look the topic up again. Ok: null.

    `url`: where it moved to, if that is known; to be asked with an authoritative Lookup.
    """

    producer_id: int
    code: int = TopicNotServed.code
    action: int = int(Action.LOOK_UP)
    message: str = ""
    url: str = ""

    @classmethod
    def of(cls, producer_id: int, error: MagnetarError) -> CloseProducer:
        """The frame that carries `error`."""
        return cls(0, producer_id, *_fields_of(error), str(error.details.get("url", "")))


class Subscribe(Command, tag=23):
    """Ok: {"epoch": int}. `start`: see Seek. `durable` false makes a reader's cursor.

    `type`: exclusive, failover, shared or key_shared. `priority_level` (failover, shared): 0 is the highest. `hash_ranges`
    (key_shared, exclusive): [first, last] slots, both ends included, of the 65,536 that a key falls into: its hash modulo
    65,536, 1 in place of 0. None: the consumers share the slots evenly; what is in none of those of an exclusive one is
    acknowledged without it. `create` false: TopicNotFound if the topic does not exist, whatever the broker's settings say.
    `read_compacted` (exclusive, failover): of what was compacted only what is left. `properties`: at most 10,000 letters, of
    a subscription that is made for it.
    """

    consumer_id: int
    topic: str
    subscription: str
    type: str = "exclusive"
    start: tuple[str, Any] = ("latest", None)
    durable: bool = True
    name: str = ""
    epoch: int = 0
    properties: dict[str, str] = {}
    priority_level: int = 0
    hash_ranges: tuple[tuple[int, int], ...] = ()
    create: bool = True
    read_compacted: bool = False


class Flow(Command, tag=24):
    """Grants permits: messages and bytes, added to what is left."""

    consumer_id: int
    messages: int
    bytes: int = 0


class Deliver(Command, tag=25):
    """Batches of one entry. Payload: `ack_set_rows` ACK_SET_ROW rows, then an entry slice.

    `consumer_epoch` rises with every seek: a delivery of an older epoch is dropped by the client.
    """

    consumer_id: int
    consumer_epoch: int
    ledger: int
    entry: int
    partition: int = -1
    redelivery_count: int = 0
    ack_set_rows: int = 0


class Ack(Command, tag=26):
    """Payload: AckRow rows. `cumulative`: one row, everything up to its last message.

    With a request id, Ok (null) comes when the cursor's change is durable.
    """

    consumer_id: int
    cumulative: bool = False


class Redeliver(Command, tag=27):
    """Negative acknowledgement. Payload: AckRow rows; none: everything this consumer has not acknowledged.
    Ok: as Subscribe; without rows the consumer's epoch has risen, and what comes of an older one comes again.

    `counted` false: nobody has seen these messages, so that their redelivery counts stay as they are; without rows those
    rise of what was reported by HandedOut.
    """

    consumer_id: int
    counted: bool = True


class HandedOut(Command, tag=38):
    """A consumer with a dead-letter policy gives these messages to its program now. Payload: AckRow rows.

    If its connection is lost, their redelivery counts rise, and no others. `taken_back`: the program has not taken them.
    """

    consumer_id: int
    consumer_epoch: int
    taken_back: bool = False


class Unsubscribe(Command, tag=28):
    """Deletes the subscription. Ok: null."""

    consumer_id: int


class Seek(Command, tag=29):
    """Moves the cursor. Ok: {"epoch": int}; deliveries with a lower epoch are stale.

    `start` is ["earliest", null], ["latest", null], ["id", 24 bytes] (inclusive) or ["time", ms since the epoch].
    """

    consumer_id: int
    start: tuple[str, Any]


class CloseConsumer(Command, tag=30):
    """Either way, as CloseProducer."""

    consumer_id: int
    code: int = TopicNotServed.code
    action: int = int(Action.LOOK_UP)
    message: str = ""
    url: str = ""

    @classmethod
    def of(cls, consumer_id: int, error: MagnetarError) -> CloseConsumer:
        """The frame that carries `error`."""
        return cls(0, consumer_id, *_fields_of(error), str(error.details.get("url", "")))


class EndOfTopic(Command, tag=31):
    """From the broker: the topic is terminated, and nothing is left to be delivered to the consumer.

    `redelivers`: how many Redeliver commands with rows it had sent by then; what it gives back later comes first again.
    """

    consumer_id: int
    consumer_epoch: int
    redelivers: int = 0


class ActiveConsumer(Command, tag=32):
    """Tells a failover consumer that it is the active one now, or is not any more."""

    consumer_id: int
    active: bool = False


class LastMessageId(Command, tag=33):
    """Ok: the last confirmed message id of the consumer's topic as 24 bytes, or null if the topic is empty."""

    consumer_id: int


class UnfinishedMessage(Command, tag=39):
    """Asks whether the rest of a message in chunks can still come to this consumer.

    Ok: {"lost": bool, "end": 24 bytes or null}. `lost`: nothing before `until` is left to be delivered, or to be delivered
    again; with `held` nor held by another consumer. `end`: what is not stored before it never will be; null: the producer
    may still send more of the message.
    """

    consumer_id: int
    producer: str
    chunk_id: bytes
    until: bytes | None = None
    held: bool = False


class SendDelayed(Command, tag=36):
    """From the broker: what this producer sent waits, for this reason. It is stored later, or a SendFailed follows."""

    producer_id: int
    epoch: int
    code: int = 1
    action: int = int(Action.RETRY)
    message: str = ""

    @classmethod
    def of(cls, producer_id: int, epoch: int, error: MagnetarError) -> SendDelayed:
        """The frame that carries `error`."""
        return cls(0, producer_id, epoch, *_fields_of(error))


class HoldProducer(Command, tag=40):
    """From the broker: this producer is to write nothing more, for this reason; without one it goes on."""

    producer_id: int
    epoch: int
    reason: str = ""


class UnreadableEntry(Command, tag=37):
    """From the broker: this consumer waits for an entry that cannot be read. `lost`: no later attempt will find it."""

    consumer_id: int
    consumer_epoch: int
    ledger: int
    entry: int
    lost: bool = False
    message: str = ""


# --- ledger client to bookie and back --------------------------------------------------------------------------------


class AddEntry(Command, tag=96):
    """Payload: a ledger entry (40-byte header and payload). Answered by AddDone rows. `recovery` passes the fence.

    `deferred`: does not ask for a sync, and is answered twice, when the bookie has taken it and when it is durable.
    """

    recovery: bool = False
    deferred: bool = False


class AddDone(Command, tag=97):
    """Payload: ADD_DONE_ROW rows, one frame per journal sync. No rows: the bookie is alive, and adds wait for room.

    `accepted`: the rows are deferred adds that are in write cache and journal and may still be lost with the bookie.
    Each gets another row, in a frame without it, when it is durable or has failed.
    """

    accepted: bool = False


class ReadEntries(Command, tag=98):
    """Entries first..last, as many as fit in `max_bytes` but at least one, up to the first one that is not there.

    With a `cycle` above 1 only those whose id modulo `cycle` is a bit of `residues` (`stripe`); the others are skipped, and
    nothing is said of them. Ok: {"sizes": [int, ...], "last_add_confirmed": int}; payload: the entries back to back.
    EntryNotFound when `first`, which is of the stripe, is not there. `fence` fences the ledger first and answers once that
    is durable.
    """

    ledger_id: int
    first: int
    last: int
    max_bytes: int = 0
    fence: bool = False
    cycle: int = 1
    residues: int = 1


class ReadLastConfirmed(Command, tag=99):
    """Ok: {"last_add_confirmed": int, "last_entry": int}; LedgerNotFound if never written here and not fenced."""

    ledger_id: int
    fence: bool = False


class WriteLastConfirmed(Command, tag=100):
    """Explicit LAC of an idle writer. Ok: null."""

    ledger_id: int
    last_add_confirmed: int


class BookieInfo(Command, tag=101):
    """Ok: a map of identity, disks and load (WIRE.md)."""


class WaitLastConfirmed(Command, tag=102):
    """Long poll: answered once the last add confirmed is above the given one, or the ledger is fenced, or at the timeout.

    Ok: {"last_add_confirmed": int, "fenced": bool, "sizes": [int, ...]}; payload: at most `max_entries` confirmed entries
    after the given one. LedgerNotFound if deleted; a ledger never written here is waited for. `timeout_ms` 0: the longest.
    """

    ledger_id: int
    last_add_confirmed: int = -1
    timeout_ms: int = 0
    max_entries: int = 0
    max_bytes: int = 0


class ListLedgers(Command, tag=103):
    """Ledgers with an id above `after`. Ok: {"more": bool}; payload: LEDGER_ROW rows by id. The bookie bounds `count`."""

    after: int = -1
    count: int = 1000


class ListEntries(Command, tag=104):
    """Entries of a ledger from `first` on. Ok: {"next": int}; payload: ENTRY_RANGE_ROW rows by id.

    The rows say all that is stored below `next`, from which the next request goes on; -1: that was the last one.
    LedgerNotFound if the ledger is not known or is deleted.
    """

    ledger_id: int
    first: int = 0
    count: int = 1000


class ForceLedger(Command, tag=105):
    """Makes the ledger's deferred adds that came before it durable now; their own rows say when, and whether, they are.

    Ok: null, when all that this process has accepted are durable. It says nothing of those that an earlier process accepted.
    """

    ledger_id: int


class DeleteLedger(Command, tag=106):
    """The ledger's entries are not needed any more. Ok: null, once it is durable that they will never be served again."""

    ledger_id: int


COMMANDS: dict[int, type[Command]] = {}
for _cls in Command.__subclasses__():
    _number = _cls.__struct_config__.tag
    assert isinstance(_number, int)
    assert _number not in COMMANDS
    _cls.NUMBER = _number
    COMMANDS[_number] = _cls

_decoders = {number: msgspec.msgpack.Decoder(cls) for number, cls in COMMANDS.items()}


def decode_command(header: bytes) -> Command:
    """Raises UnknownCommand (details: "request_id", "number") or MalformedFrame."""
    number = peek_number(header)
    decoder = _decoders.get(number)
    if decoder is None:
        raise UnknownCommand(
            f"command {number} is not known here; this peer speaks protocol version {PROTOCOL_VERSION}",
            number=number,
            request_id=peek_request_id(header),
        )
    try:
        return decoder.decode(header)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MalformedFrame(
            f"the header of command {number} cannot be decoded: {error}", request_id=peek_request_id(header)
        ) from None


def peek_number(header: bytes) -> int:
    """The command number. Raises MalformedFrame if there is none."""
    fields = _fields(header)
    if fields and isinstance(fields[0], int):
        return fields[0]
    raise MalformedFrame("a frame header is not an array that starts with a command number")


def peek_request_id(header: bytes) -> int:
    """The request id, 0 if there is none to be found."""
    fields = _fields(header)
    # `type`, not isinstance: an answer that carries True as its id could not be decoded by anybody.
    return fields[1] if len(fields) > 1 and type(fields[1]) is int and fields[1] > 0 else 0


def _fields(header: bytes) -> list[Any]:
    try:
        fields = msgspec.msgpack.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise MalformedFrame("a frame header is not msgpack") from None
    return fields if isinstance(fields, list) else []


# --- rows in payloads ------------------------------------------------------------------------------------------------


class AckRow(NamedTuple):
    """Messages first_index..last_index of an entry, both included; u64 u64 u32 u32."""

    ledger: int
    entry: int
    first_index: int
    last_index: int


# Sequence id, message count, and the place of the first message: of DUPLICATE_ID if these were stored before.
RECEIPT_ROW = struct.Struct(">QIqqI")
ACK_ROW = struct.Struct(">QQII")  # AckRow
ACK_SET_ROW = struct.Struct(">II")  # first and last index in the stored entry of what is acknowledged already
ADD_DONE_ROW = struct.Struct(">QQI")  # ledger, entry, code: 0 is durable (or accepted), else an error
# What the callback of a deferred add gets when the add is accepted; no code on the wire.
ADD_ACCEPTED = -1
LEDGER_ROW = struct.Struct(">QIqq")  # ledger, flags, last entry, last add confirmed (-1 for none)
LEDGER_FENCED, LEDGER_DELETED = 1, 2  # flags of a LEDGER_ROW
ENTRY_RANGE_ROW = struct.Struct(">QQ")  # first and last entry, both included


def encode_rows(layout: struct.Struct, rows: Iterable[tuple[int, ...]]) -> bytes:
    """Rows back to back."""
    pack = layout.pack
    return b"".join([pack(*row) for row in rows])


def decode_rows(layout: struct.Struct, payload: bytes | memoryview) -> Iterator[tuple[Any, ...]]:
    """Inverse of `encode_rows`. Raises MalformedFrame unless the length is a multiple of the row."""
    if len(payload) % layout.size:
        raise MalformedFrame(f"a payload of {len(payload)} bytes is not made of rows of {layout.size}")
    return layout.iter_unpack(payload)

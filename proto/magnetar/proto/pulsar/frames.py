"""Pulsar's frames: `u32 total | u32 n | command of n bytes | rest`, big-endian; `total` counts all that follows it.

What is sent for each message is read and written here without protobuf. Commands of one producer or consumer differ in one
number: SENDs in the last seven bits of their sequence id, ids of an ACK (packed ones, `ids`) in the entry. So the first is
parsed, and what follows is compared with it: 0.3 us a SEND in a run, 0.9 us where four producers take turns, 0.3 us an
acknowledged id, in ACKs of one or of many. Protobuf takes 1.3 us for the command alone, of a SEND or an ACK of one id. A
frame alone costs 2.3 to 3.4 us. What is not in the usual form comes out as a `Frame`, for `commands.decode`.

>>> first, second = bytes.fromhex("0806320408021005"), bytes.fromhex("0806320408021006")
>>> FrameCutter().feed(encode_frame(first, b"one") + encode_frame(second, b"two"))
[Sends(producer_id=2, sequence_id=5, highest_sequence_id=0, payloads=[b'one', b'two'])]
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from magnetar.proto.errors import MalformedFrame
from magnetar.proto.frames import DEFAULT_MAX_MESSAGE_BYTES

from .metadata import varint

_PREFIX = struct.Struct(">II")
_PREFIX_BYTES = _PREFIX.size
FRAME_OVERHEAD_BYTES = 10 * 1024
# A peer that sends a frame in pieces of two bytes would otherwise make us hold twenty times its size.
_MAX_PARTS = 1024
_ALL_BITS = 2**64 - 1


class Frame(NamedTuple):
    """Any frame: its command, for `commands.decode`, and what follows it (only SEND and MESSAGE have that)."""

    command: bytes
    rest: bytes


@dataclass(slots=True)
class Sends:
    """SENDs of one producer whose sequence ids are consecutive, the first being `sequence_id`.

    With `highest_sequence_id` (0: the command has none) it is one SEND.
    """

    producer_id: int
    sequence_id: int
    highest_sequence_id: int
    payloads: list[bytes]  # what follows each command: checksum, metadata, message


@dataclass(slots=True)
class Acks:
    """Individual ACKs of one consumer without ack sets, transaction and request id."""

    consumer_id: int
    ids: list[tuple[int, int]]  # ledger, entry


Item = Frame | Sends | Acks


def encode_frame(command: bytes, rest: bytes = b"") -> bytes:
    """One whole frame."""
    return _PREFIX.pack(4 + len(command) + len(rest), len(command)) + command + rest


PING = encode_frame(b"\x08\x12\x92\x01\x00")
PONG = encode_frame(b"\x08\x13\x9a\x01\x00")

# Field by field in the order of their numbers, as all clients write them. No number has more than 63 bits; a SEND's count of
# messages, which the metadata has as well, no more than 28. Anything else is left to protobuf, which has rules for what
# repeats, overflows or is unknown.
_NUMBER = rb"([\x80-\xff]{0,8}[\0-\x7f])"
_WHOLE_NUMBER = re.compile(_NUMBER).fullmatch
_NUMBER_OR_NEGATIVE = rb"[\x80-\xff]{0,9}[\0-\x7f]"
_SEND_START = b"\x08\x06\x32"
_SEND = re.compile(
    rb"\x08\x06\x32[\0-\x7f]\x08%b\x10%b(?:\x18[\x80-\xff]{0,3}[\0-\x7f])?(?:\x30%b)?(?:\x38[\0\1])?"
    % (_NUMBER, _NUMBER, _NUMBER),
    re.DOTALL,
).fullmatch
_ACK_START = b"\x08\x0a\x52"
_ACK = re.compile(rb"\x08\x0a\x52%b\x08%b\x10\0" % (_NUMBER, _NUMBER), re.DOTALL).match
_MESSAGE_ID = re.compile(
    rb"\x1a([\0-\x7f])\x08%b\x10%b(?:\x18%b)?(?:\x20%b)?"
    % (_NUMBER, _NUMBER, _NUMBER_OR_NEGATIVE, _NUMBER_OR_NEGATIVE),
    re.DOTALL,
).match


def _number(varint: bytes) -> int:
    if len(varint) == 1:
        return varint[0]
    value = 0
    for byte in reversed(varint):
        value = value << 7 | byte & 127
    return value


_layout = lru_cache(256)(struct.Struct)


@dataclass(slots=True)
class _Like:
    """What the next SEND of a producer is like, from the size of its command on."""

    head: bytes  # before its sequence id
    next: int  # the lowest byte of that
    last: int  # of this byte, before the others change
    tail: bytes
    payloads: list[bytes]
    unpack_from: Callable[[bytes, int], tuple[Any, ...]]  # total, head, that byte, tail


@dataclass(slots=True)
class _Items:
    """The items of one `feed`. SENDs and ACKs may overtake those of other producers and consumers, but nothing else may."""

    found: list[Item] = field(default_factory=list)
    sends: dict[int, Sends] = field(default_factory=dict)
    acks: dict[int, Acks] = field(default_factory=dict)
    likes: dict[bytes, _Like] = field(
        default_factory=dict
    )  # by head; of each producer at most that in `heads`
    heads: dict[int, bytes] = field(default_factory=dict)

    def frame(self, command: bytes, rest: bytes) -> None:
        self.found.append(Frame(command, rest))
        if self.sends or self.acks:
            for runs in (self.sends, self.acks, self.likes, self.heads):
                runs.clear()

    def send(self, command: bytes, rest: bytes, more: bool) -> _Like | None:
        """What a following SEND of this producer is like, if there is `more`; None after one that begins no run."""
        match = _SEND(command)
        if match is None or command[3] != len(command) - 4:
            self.frame(command, rest)
            return None
        producer, sequence, highest = match.groups()
        producer_id, sequence_id = _number(producer), _number(sequence)
        highest_sequence_id = 0 if highest is None else _number(highest)
        run = self.sends.get(producer_id)
        if (
            run is None
            or highest_sequence_id
            or run.highest_sequence_id
            or sequence_id != run.sequence_id + len(run.payloads)
        ):
            run = self.sends[producer_id] = Sends(producer_id, sequence_id, highest_sequence_id, [])
            self.found.append(run)
        run.payloads.append(rest)
        self.likes.pop(self.heads.pop(producer_id, b""), None)
        if highest is not None or not more:
            return None
        at = match.start(2)
        head = len(command).to_bytes(4, "big") + command[:at]
        low, tail = command[at], command[at + 1 :]
        unpack_from = _layout(f">I{len(head)}sB{len(tail)}s").unpack_from
        like = self.likes[head] = _Like(head, low + 1, low | 127, tail, run.payloads, unpack_from)
        self.heads[producer_id] = head
        return like

    def ack(self, command: bytes, rest: bytes) -> tuple[list[tuple[int, int]], int, int]:
        """The ids of its consumer, and of an ACK of one id where in the command the entry begins and ends, else 0."""
        match = _ACK(command)
        if match is None or rest or _number(match[1]) != len(command) - match.end(1):
            self.frame(command, rest)
            return [], 0, 0
        ids, at, behind = _message_ids(command, match.end())
        if not ids:
            self.frame(command, rest)
            return [], 0, 0
        consumer_id = _number(match[2])
        run = self.acks.get(consumer_id)
        if run is None:
            run = self.acks[consumer_id] = Acks(consumer_id, [])
            self.found.append(run)
        run.ids += ids
        return (run.ids, at, behind) if len(ids) == 1 else (run.ids, 0, 0)


class FrameCutter:
    """Cuts a byte stream into frames, and runs of SENDs and ACKs. What it returns are copies: they pin no receive buffer.

    A bad frame ends the stream, since no border is known after it: `error` is set, `feed` returns what came before it
    and nothing afterwards, and the connection must be closed.
    """

    __slots__ = ("_missing", "_parts", "error", "max_frame_bytes")

    def __init__(self, max_frame_bytes: int = DEFAULT_MAX_MESSAGE_BYTES + FRAME_OVERHEAD_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes  # counted after the length field
        self._parts: list[bytes] = []
        # Bytes that the unfinished frame in _parts still lacks (at least; 1 while its prefix is incomplete).
        self._missing = 0
        self.error: MalformedFrame | None = None

    @property
    def pending_bytes(self) -> int:
        """Bytes of an unfinished frame that are held."""
        return sum(map(len, self._parts))

    def feed(self, data: bytes) -> list[Item]:
        """Returns what `data` completes; look at `error` after each call."""
        if self.error is not None:
            return []
        items = _Items()
        position = 0
        if self._parts:
            if len(data) < self._missing:
                self._parts.append(data)
                self._missing -= len(data)
                if len(self._parts) >= _MAX_PARTS:
                    self._parts = [b"".join(self._parts)]
                return []
            data, position = self._complete(data, items)
        self._cut(data, position, items)
        return items.found

    def _complete(self, data: bytes, items: _Items) -> tuple[bytes, int]:
        """Adds the unfinished frame, if its first piece has its command: what follows it is joined once. Where to go on."""
        parts, self._parts = self._parts, []
        first = parts[0]
        total, size = _PREFIX.unpack_from(first) if len(first) >= _PREFIX_BYTES else (0, 0)
        body = _PREFIX_BYTES + size
        if not total or len(first) < body:
            return b"".join((*parts, data)), 0
        command = first[_PREFIX_BYTES:body]
        taken = self._missing
        rest = b"".join((memoryview(first)[body:], *parts[1:], memoryview(data)[:taken]))
        start = command[:3]
        if start == _SEND_START:
            items.send(command, rest, False)
        elif start == _ACK_START:
            items.ack(command, rest)
        else:
            items.frame(command, rest)
        return data, taken

    def _cut(self, data: bytes, position: int, items: _Items) -> None:
        end, limit = len(data), self.max_frame_bytes
        unpack_from = _PREFIX.unpack_from
        while end - position >= _PREFIX_BYTES:
            total, size = unpack_from(data, position)
            if total > limit or size + 4 > total:
                self.error = self._bad_frame(total, size)
                return
            body = position + _PREFIX_BYTES + size
            following = position + 4 + total
            if following > end:
                break
            command = data[position + _PREFIX_BYTES : body]
            start = command[:3]
            if start == _SEND_START:
                like = items.send(command, data[body:following], end - following > _PREFIX_BYTES)
                position = following if like is None else self._like_send(data, following, like, items.likes)
            elif start == _ACK_START:
                ids, at, behind = items.ack(command, data[body:following])
                at, behind = position + _PREFIX_BYTES + at, position + _PREFIX_BYTES + behind
                position = _like_id(data, position, following, at, behind, ids)
            else:
                items.frame(command, data[body:following])
                position = following
        if position < end:
            self._parts = [data[position:] if position else data]
            held = end - position
            self._missing = 1 if held < _PREFIX_BYTES else unpack_from(data, position)[0] + 4 - held

    def _like_send(self, data: bytes, position: int, like: _Like | None, likes: dict[bytes, _Like]) -> int:
        """Adds the SENDs at `position` that are `like` but for the next sequence id, or like others; where they end."""
        end, most = len(data), self.max_frame_bytes
        while like is not None:
            head, tail, unpack_from, append = like.head, like.tail, like.unpack_from, like.payloads.append
            least = len(head) + len(tail) + 1
            body = 4 + least
            began = position
            for expected in range(like.next, like.last + 1):
                if end - position < body:
                    return position
                total, found_head, found, found_tail = unpack_from(data, position)
                following = position + 4 + total
                if found != expected or found_head != head or found_tail != tail:
                    break
                if total < least or total > most or following > end:
                    return position
                append(data[position + body : following])
                position = following
                like.next = expected + 1
            # Another producer's, or one that must be parsed.
            other = likes.get(data[position + 4 : position + 4 + len(head)])
            if other is like and position == began:
                return position
            like = other
        return position

    def _bad_frame(self, total: int, size: int) -> MalformedFrame:
        if total > self.max_frame_bytes:
            return MalformedFrame(
                f"a frame of {total} bytes exceeds the limit of {self.max_frame_bytes}; "
                "send smaller messages or raise max_message_bytes"
            )
        return MalformedFrame(f"a frame of {total} bytes cannot hold a command of {size} bytes")


def _message_ids(command: bytes, position: int) -> tuple[list[tuple[int, int]], int, int]:
    """The ids of an ACK from `position` on, none if there is anything else; and where the last entry's varint is."""
    ids: list[tuple[int, int]] = []
    at = behind = 0
    while position < len(command):
        match = _MESSAGE_ID(command, position)
        if match is None or match[1][0] != match.end() - match.end(1):
            return [], 0, 0
        ids.append((_number(match[2]), _number(match[3])))
        at, behind = match.span(3)
        position = _like_id(command, position, match.end(), at, behind, ids)
    return ids, at, behind


def _like_id(data: bytes, begin: int, position: int, at: int, behind: int, ids: list[tuple[int, int]]) -> int:
    """Adds the ids at `position` that are like the last one but for the entry; returns where they end.

    That one is in data[begin:position], a message id or the whole frame of an ACK, and its entry's varint in
    data[at:behind]: at least four bytes, of which three have the low 21 bits. All have one size, as `iter_unpack` needs.
    """
    size = position - begin
    repeats = (len(data) - position) // size
    if behind - at < 4 or not repeats:
        return position
    ledger = ids[-1][0]
    head, tail = data[begin:at], data[behind:position]
    bases: dict[bytes, int] = {}
    append = ids.append
    layout = _layout(f">{len(head)}sBBB{behind - at - 3}s{len(tail)}s")
    following = memoryview(data)[position : position + repeats * size]
    for found, low, middle, high, above, found_tail in layout.iter_unpack(following):
        if found != head or found_tail != tail or low & middle & high < 128:
            break
        base = bases.get(above)
        if base is None:
            if _WHOLE_NUMBER(above) is None:
                break
            # Each of the three bytes has its continuation bit.
            base = bases[above] = (_number(above) << 21) - 0x80 - (0x80 << 7) - (0x80 << 14)
        append((ledger, base + low + (middle << 7) + (high << 14)))
        position += size
    return position


# Frames out. Numbers that change from frame to frame are varints padded to ten bytes: Java, C++, Go and C# accept them, and
# frames of a run then differ in fixed places.

# The two low bytes of a padded varint, by the low 14 bits of the number.
_RUN = 1 << 14
_LOW = bytes(0x80 | number & 127 for number in range(128)) * 128
_MIDDLE = bytes(0x80 | number >> 7 for number in range(_RUN))


@lru_cache(4096)
def _padded_high(number: int) -> bytes:
    return bytes([number >> shift & 127 | 128 for shift in range(0, 42, 7)]) + bytes([number >> 42])


def _padded(number: int) -> bytes:
    """A varint of ten bytes; 0.4 us."""
    number &= _ALL_BITS
    low = number & 0x7F | (number & 0x3F80) << 1 | (number & 0x1FC000) << 2 | 0x808080
    return low.to_bytes(3, "little") + _padded_high(number >> 21)


def send_receipts(producer_id: int, rows: Iterable[tuple[int, int, int, int, int]]) -> bytes:
    """SEND_RECEIPTs: rows of sequence id, highest sequence id (0: the SEND had none), ledger, entry, count.

    A row with a count above 1 answers that many SENDs: sequence ids and entries rise by one each, and there is no highest
    sequence id. A ledger and an entry of -1 mean a duplicate; negative numbers are sent as 64 bits. 0.9 us a row, as much
    again for the first one of a producer and a ledger; 0.04 us a receipt of a long row.
    """
    frames: list[bytes] = []
    for sequence_id, highest_sequence_id, ledger, entry, count in rows:
        highest = b"\x20" + _padded(highest_sequence_id) if highest_sequence_id else b""
        start, middle = _receipt_parts(producer_id, ledger, len(highest))
        while count > 0:
            step = min(count, _RUN - (sequence_id & _RUN - 1), _RUN - (entry & _RUN - 1))
            frame = start + _padded(sequence_id) + middle + _padded(entry) + highest
            if step > 1:
                many = bytearray(frame * step)
                _count_up(many, len(start), len(frame), sequence_id, step)
                _count_up(many, len(start) + 10 + len(middle), len(frame), entry, step)
                frame = bytes(many)
            frames.append(frame)
            sequence_id, entry, count = sequence_id + step, entry + step, count - step
    return b"".join(frames)


@lru_cache(1024)
def _receipt_parts(producer_id: int, ledger: int, highest_bytes: int) -> tuple[bytes, bytes]:
    """Of a SEND_RECEIPT what stands before the sequence id, and what between that and the entry."""
    producer = b"\x08" + varint(producer_id) + b"\x10"
    message_id = b"\x08" + varint(ledger) + b"\x10"
    size = len(producer) + len(message_id) + highest_bytes + 22
    start = _PREFIX.pack(size + 8, size + 4) + bytes((8, 7, 0x3A, size)) + producer
    return start, bytes((0x1A, len(message_id) + 10)) + message_id


def _count_up(frames: bytearray, at: int, size: int, first: int, count: int) -> None:
    """Makes the padded varint at `at` of each frame one more than that of the frame before; bits 14 and up do not change."""
    low = first & _RUN - 1
    frames[at::size] = _LOW[low : low + count]
    frames[at + 1 :: size] = _MIDDLE[low : low + count]


def message_frame_heads(
    consumer_id: int,
    ledger: int,
    messages: Iterable[tuple[int, int]],
    partition: int,
    redelivery_count: int,
    ack_set: Sequence[int],
    epoch: int | None,
) -> list[bytes]:
    """MESSAGE frames but for their last bytes: for each entry, and size of what follows as it was sent (checksum and all).

    `partition` is -1 for a topic that is none, `epoch` None for a consumer without; `ack_set` has signed words of 64 bits.
    0.6 us, 2 more for the first ones of a consumer and a ledger, and 0.2 us for each message.
    """
    head = _message_head.__wrapped__ if ack_set else _message_head  # which is rarely the same twice
    command_bytes, start, behind, pack = head(
        consumer_id, ledger, partition, redelivery_count, tuple(ack_set), epoch
    )
    heads: list[bytes] = []
    high, end = -1, b""
    for entry, size in messages:
        if entry >> 21 != high:
            high = entry >> 21
            end = _padded_high(high) + behind
        low = entry & _RUN - 1
        heads.append(
            pack(4 + command_bytes + size, start, _LOW[low], _MIDDLE[low], entry >> 14 & 127 | 128, end)
        )
    return heads


@lru_cache(1024)
def _message_head(
    consumer_id: int,
    ledger: int,
    partition: int,
    redelivery_count: int,
    ack_set: Sequence[int],
    epoch: int | None,
) -> tuple[int, bytes, bytes, Callable[..., bytes]]:
    """Size of a MESSAGE's command; what stands before the entry, from that size on, and behind it; packs the whole."""
    before = b"\x08" + varint(ledger) + b"\x10"
    behind = b"" if partition < 0 else b"\x18" + varint(partition)
    start = b"\x08%b\x12%c%b" % (varint(consumer_id), len(before) + 10 + len(behind), before)
    if redelivery_count:
        behind += b"\x18" + varint(redelivery_count)
    for word in ack_set:
        behind += b"\x20" + varint(word)
    if epoch is not None:
        behind += b"\x28" + varint(epoch)
    start = b"\x08\x09\x4a" + varint(len(start) + 10 + len(behind)) + start
    command_bytes = len(start) + 10 + len(behind)
    start = command_bytes.to_bytes(4, "big") + start
    return command_bytes, start, behind, struct.Struct(f">I{len(start)}sBBB{7 + len(behind)}s").pack

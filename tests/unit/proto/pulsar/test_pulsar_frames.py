"""What frames.py reads and writes without protobuf is what protobuf reads and writes, however the stream is cut."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable

import pytest
from google.protobuf.message import Message
from hypothesis import example, given
from hypothesis import strategies as st

from magnetar.proto.errors import MalformedFrame
from magnetar.proto.pulsar.commands import decode, encode
from magnetar.proto.pulsar.crc import checksummed
from magnetar.proto.pulsar.frames import (
    FRAME_OVERHEAD_BYTES,
    PING,
    PONG,
    Acks,
    Frame,
    FrameCutter,
    Item,
    Sends,
    encode_frame,
    message_frame_heads,
    send_receipts,
)
from magnetar.proto.pulsar.wire_pb2 import (
    BaseCommand,
    CommandAck,
    CommandFlow,
    CommandMessage,
    CommandPing,
    CommandPong,
    CommandSend,
    CommandSendReceipt,
    MessageIdData,
)

Read = tuple[object, ...]

ids = st.integers(0, 2) | st.sampled_from([127, 128, 2**21, 2**63 - 1, 2**64 - 1]) | st.integers(0, 2**64 - 1)
entries = (
    st.integers(2**21, 2**21 + 3)
    | st.builds(lambda entry, index: (entry << 20) + index, st.integers(0, 5), st.integers(0, 300))
    | ids
)
# Near the ends of seven and fourteen bits, where a template ends.
sequences = st.integers(120, 132) | st.integers(16_380, 16_388) | ids


def maybe(strategy: st.SearchStrategy[int]) -> st.SearchStrategy[int | None]:
    return st.none() | strategy


@st.composite
def sends(draw: st.DrawFn) -> list[tuple[bytes, bytes]]:
    """SENDs of one producer, often with consecutive sequence ids."""
    producer, first = draw(ids), draw(sequences)
    optional = {
        "num_messages": draw(maybe(st.integers(-1, 1000))),
        "highest_sequence_id": draw(st.none() | sequences),
        "txnid_least_bits": draw(st.none() | st.none() | st.integers(0, 1)),
        "is_chunk": draw(st.none() | st.booleans()),
        "marker": draw(st.none() | st.none() | st.booleans()),
    }
    steps = draw(st.lists(st.sampled_from([1, 1, 1, 1, 0, 2]), max_size=9))
    frames = []
    for step in [0, *steps]:
        first = min(first + step, 2**64 - 1)
        command = CommandSend(producer_id=producer, sequence_id=first, **optional)  # type: ignore[arg-type]
        frames.append((encode(command)[8:], draw(st.binary(max_size=6))))
    return frames


@st.composite
def acks(draw: st.DrawFn) -> list[tuple[bytes, bytes]]:
    consumer, ledger = draw(ids), draw(ids)
    optional = {"partition": draw(maybe(st.integers(-1, 3))), "batch_index": draw(maybe(st.integers(-1, 3)))}
    kind = draw(st.sampled_from([CommandAck.INDIVIDUAL, CommandAck.INDIVIDUAL, CommandAck.CUMULATIVE]))
    request = draw(st.none() | st.none() | ids)
    frames = []
    some_entries = st.lists(entries, max_size=4) | st.lists(entries, min_size=1, max_size=1)
    for some in draw(st.lists(some_entries, max_size=8)):
        found = [MessageIdData(ledger_id=ledger, entry_id=entry, **optional) for entry in some]  # type: ignore[arg-type]
        command = CommandAck(consumer_id=consumer, ack_type=kind, message_id=found, request_id=request)
        frames.append((encode(command)[8:], b""))
    return frames


others = st.sampled_from(
    [
        [(PING[8:], b"")],
        [(encode(CommandFlow(consumer_id=1, message_permits=5))[8:], b"")],
        [(b"", b"")],
        [(b"?", b"!")],
    ]
)
streams = st.lists(sends() | acks() | others, max_size=6).map(
    lambda found: [frame for some in found for frame in some]
)


OTHERS = (b"", b"\x00", b"\x7f", b"\x80", b"\xff", b"\x01\x01")
PLAIN_SEND = {"producer_id", "sequence_id", "num_messages", "highest_sequence_id", "is_chunk"}
PLAIN_ID = {"ledger_id", "entry_id", "partition", "batch_index"}


def names(message: Message) -> set[str]:
    return {field.name for field, _ in message.ListFields()}


def read_by_protobuf(command: bytes, rest: bytes) -> list[Read]:
    """A frame as values whose first two fields say to whom they belong; ("frame", None) is between all others."""
    try:
        found = decode(command)
    except MalformedFrame:
        return [("frame", None, command, rest)]
    send, ack = found.send, found.ack
    if found.type == BaseCommand.SEND and names(send) <= PLAIN_SEND:
        numbers = send.sequence_id, send.highest_sequence_id
        return [("send", send.producer_id, *numbers, rest)]
    if found.type == BaseCommand.ACK and ack.ack_type == CommandAck.INDIVIDUAL and not rest:
        if names(ack) == {"consumer_id", "ack_type", "message_id"}:
            if all(names(one) <= PLAIN_ID for one in ack.message_id):
                return [("ack", ack.consumer_id, one.ledger_id, one.entry_id) for one in ack.message_id]
    return [("frame", None, command, rest)]


def read(items: Iterable[Item]) -> list[Read]:
    found: list[Read] = []
    for item in items:
        if isinstance(item, Sends):
            assert len(item.payloads) == 1 or not item.highest_sequence_id
            for number, rest in enumerate(item.payloads, item.sequence_id):
                found.append(("send", item.producer_id, number, item.highest_sequence_id, rest))
        elif isinstance(item, Acks):
            found += [("ack", item.consumer_id, ledger, entry) for ledger, entry in item.ids]
        else:
            # What no template covers, protobuf reads.
            found += read_by_protobuf(*item)
    return found


def cut(stream: bytes, sizes: list[int], cutter: FrameCutter) -> list[Item]:
    items: list[Item] = []
    position = turn = 0
    while position < len(stream):
        size = sizes[turn % len(sizes)]
        items += cutter.feed(stream[position : position + size])
        position, turn = position + size, turn + 1
    return items


def assert_same(found: list[Read], expected: list[Read]) -> None:
    """The order of frames that belong together, and of those that belong to nobody, is that of the stream."""
    assert sorted(map(repr, found)) == sorted(map(repr, expected))
    for owner in {one[:2] for one in expected}:
        mine = (owner, ("frame", None))
        assert [one for one in found if one[:2] in mine] == [one for one in expected if one[:2] in mine]


@given(streams, st.lists(st.integers(1, 60) | st.just(10_000), min_size=1))
def test_every_cut_gives_what_protobuf_reads(frames: list[tuple[bytes, bytes]], sizes: list[int]) -> None:
    cutter = FrameCutter(1000 + FRAME_OVERHEAD_BYTES)
    items = cut(b"".join(encode_frame(*frame) for frame in frames), sizes, cutter)
    assert_same(read(items), [one for frame in frames for one in read_by_protobuf(*frame)])
    assert cutter.error is None
    assert cutter.pending_bytes == 0


def send(sequence: int, producer: int = 300, **optional: int) -> tuple[bytes, bytes]:
    command = CommandSend(producer_id=producer, sequence_id=sequence, **optional)  # type: ignore[arg-type]
    return encode(command)[8:], b"message %d" % sequence


def ack(*entries: int, consumer: int = 4, **optional: int) -> tuple[bytes, bytes]:
    found = [MessageIdData(ledger_id=700, entry_id=entry, **optional) for entry in entries]  # type: ignore[arg-type]
    return encode(CommandAck(consumer_id=consumer, ack_type=CommandAck.INDIVIDUAL, message_id=found))[8:], b""


PACKED = 5 << 20
ALIKE = {
    "sends": [send(300), send(301), send(302)],
    "short sequence ids": [send(126), send(127), send(128), send(129)],
    "the last short sequence id": [send(127), send(0)],
    "counts of messages": [send(300, num_messages=2), send(301, num_messages=2), send(302, num_messages=3)],
    "a count that is implied": [send(300), send(301, num_messages=1), send(302), send(303), send(302)],
    "sent again": [send(300), send(301), send(300), send(301), send(301), send(302)],
    "batches": [send(300, highest_sequence_id=302), send(303, highest_sequence_id=305), send(306), send(307)],
    "several producers": [send(number, producer) for number in range(300, 304) for producer in (1, 2, 300)],
    "acks": [ack(PACKED), ack(PACKED + 1), ack(PACKED + 2**21 + 2)],
    "acks with partitions": [
        ack(PACKED, partition=-1, batch_index=3),
        ack(PACKED + 1, partition=-1, batch_index=3),
    ],
    "several consumers": [
        ack(PACKED + number, consumer=consumer) for number in range(3) for consumer in (1, 2)
    ],
    "acks of several": [ack(PACKED, PACKED + 1, PACKED + 2**21 + 2, 3), ack(PACKED, PACKED + 1)],
    "acks with batch indexes": [ack(PACKED, PACKED + 1, PACKED + 2, batch_index=3)],
}


@pytest.mark.parametrize("alike", ALIKE)
def test_frames_that_are_nearly_alike_are_told_apart(alike: str) -> None:
    """Each byte of each command is replaced, put in or taken out: taken for a SEND or an ACK is only what is one."""
    frames = ALIKE[alike]
    for number, (command, rest) in enumerate(frames):
        for at in range(len(command)):
            byte = command[at]
            for new in (
                bytes([byte]),
                *OTHERS,
                bytes([byte ^ 128]),
                bytes([byte + 1 & 255]),
                bytes([byte, byte]),
            ):
                changed = [
                    *frames[:number],
                    (command[:at] + new + command[at + 1 :], rest),
                    *frames[number + 1 :],
                ]
                found = read(FrameCutter().feed(b"".join(encode_frame(*frame) for frame in changed)))
                assert_same(found, [one for frame in changed for one in read_by_protobuf(*frame)])


@pytest.mark.parametrize("alike", ALIKE)
def test_frames_that_are_alike_may_be_cut_anywhere(alike: str) -> None:
    stream = b"".join(encode_frame(*frame) for frame in ALIKE[alike])
    expected = [one for frame in ALIKE[alike] for one in read_by_protobuf(*frame)]
    for at in range(1, len(stream)):
        assert_same(read(cut(stream, [at], FrameCutter())), expected)


@given(st.binary(max_size=60), st.lists(st.integers(1, 9), min_size=1))
@example(b"\x00\x00\x00\x04\x00\x00\x00\x00", [1])
def test_garbage_is_a_malformed_frame_or_none(data: bytes, sizes: list[int]) -> None:
    cutter = FrameCutter(100 + FRAME_OVERHEAD_BYTES)
    for item in cut(data, sizes, cutter):
        if isinstance(item, Frame):
            with contextlib.suppress(MalformedFrame):
                decode(item.command)
    assert cutter.error is None or isinstance(cutter.error, MalformedFrame)
    assert cutter.pending_bytes < 100 + FRAME_OVERHEAD_BYTES


def test_sends_and_acks_make_runs() -> None:
    count = 1000
    frames = [send(number + first, first) for number in range(count) for first in (1, 2)]
    frames += [ack(entry << 20) for entry in range(count)]
    frames += [(PING[8:], b""), send(count, 1), ack(*range(PACKED, PACKED + 5)), ack(PACKED)]
    found = FrameCutter().feed(b"".join(encode_frame(*frame) for frame in frames))
    assert found == [
        Sends(1, 1, 0, [b"message %d" % number for number in range(1, count + 1)]),
        Sends(2, 2, 0, [b"message %d" % number for number in range(2, count + 2)]),
        Acks(4, [(700, entry << 20) for entry in range(count)]),
        Frame(PING[8:], b""),
        Sends(1, count, 0, [b"message %d" % count]),
        Acks(4, [(700, entry) for entry in (*range(PACKED, PACKED + 5), PACKED)]),
    ]


def test_the_largest_frame_is_taken_and_nothing_after_a_larger_one() -> None:
    limit = 1000 + FRAME_OVERHEAD_BYTES
    command = encode(CommandSend(producer_id=1, sequence_id=1))[8:]
    rest = bytes(limit - 4 - len(command))
    cutter = FrameCutter(limit)
    small = encode_frame(command, b"small")
    assert read(cut(encode_frame(command, rest), [999], cutter)) == [("send", 1, 1, 0, rest)]
    assert len(read(cutter.feed(small + encode_frame(command, rest + b"!")))) == 1
    assert cutter.error is not None
    assert str(limit + 1) in cutter.error.message
    assert str(limit) in cutter.error.message
    assert cutter.feed(small) == []
    assert cutter.pending_bytes == 0


def test_a_frame_like_the_one_before_is_measured_too() -> None:
    """The second SEND differs from the first in its length alone, which is beyond the limit, or less than its command."""
    for total in (3, 1000 + FRAME_OVERHEAD_BYTES + 1):
        command, following = (encode(CommandSend(producer_id=1, sequence_id=number))[8:] for number in (1, 2))
        bad = struct.pack(">II", total, len(following)) + following + bytes(20_000)
        cutter = FrameCutter(1000 + FRAME_OVERHEAD_BYTES)
        assert len(read(cutter.feed(encode_frame(command, b"x") + bad))) == 1
        assert cutter.error is not None


def test_a_command_longer_than_its_frame_is_malformed() -> None:
    cutter = FrameCutter()
    assert cutter.feed(struct.pack(">II", 5, 2) + b"abcdef") == []
    assert cutter.error is not None
    assert "cannot hold a command of 2 bytes" in cutter.error.message


def test_a_length_bomb_is_refused_before_its_bytes_arrive() -> None:
    cutter = FrameCutter()
    cutter.feed(b"\xff\xff\xff\xff\x00\x00\x00\x01")
    assert cutter.error is not None
    assert cutter.pending_bytes == 0


def test_a_frame_in_single_bytes_costs_no_more_than_its_size() -> None:
    cutter = FrameCutter()
    frame = encode_frame(encode(CommandSend(producer_id=1, sequence_id=1))[8:], bytes(5000))
    for byte in frame[:-1]:
        assert cutter.feed(bytes([byte])) == []
    assert cutter.pending_bytes == len(frame) - 1
    assert len(cutter._parts) < 1025
    assert len(read(cutter.feed(frame[-1:]))) == 1


def frames_of(stream: bytes) -> list[BaseCommand]:
    found = FrameCutter().feed(stream)
    return [decode(item.command) for item in found if isinstance(item, Frame) and not item.rest]


signed_ids = ids | st.just(-1)
rows = st.one_of(
    st.tuples(ids, signed_ids, signed_ids, signed_ids, st.just(1)),
    st.tuples(
        st.integers(16_380, 16_390) | st.integers(0, 2**62),
        st.just(0),
        st.integers(0, 2**63 - 1),
        st.integers(2**21 - 5, 2**21 + 1) | st.integers(0, 2**62),
        st.integers(0, 9) | st.integers(0, 300),
    ),
)


@given(ids, st.lists(rows, max_size=4))
@example(1, [(3, 0, 5, 7, 40_000)])
def test_receipts_are_what_protobuf_reads(producer: int, rows: list[tuple[int, int, int, int, int]]) -> None:
    expected = [
        CommandSendReceipt(
            producer_id=producer,
            sequence_id=sequence + number,
            message_id=MessageIdData(ledger_id=ledger % 2**64, entry_id=(entry + number) % 2**64),
            highest_sequence_id=highest % 2**64 or None,
        )
        for sequence, highest, ledger, entry, count in rows
        for number in range(count)
    ]
    assert [found.send_receipt for found in frames_of(send_receipts(producer, rows))] == expected


@given(
    ids,
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**63 - 1),
    st.integers(-1, 1000),
    st.integers(0, 2**31),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20),
    st.none() | ids,
    st.binary(max_size=20),
)
def test_the_head_of_a_message_is_what_protobuf_reads(
    consumer: int,
    ledger: int,
    entry: int,
    partition: int,
    redeliveries: int,
    ack_set: list[int],
    epoch: int | None,
    rest: bytes,
) -> None:
    (head,) = message_frame_heads(
        consumer, ledger, [(entry, len(rest))], partition, redeliveries, ack_set, epoch
    )
    expected = CommandMessage(
        consumer_id=consumer,
        message_id=MessageIdData(
            ledger_id=ledger, entry_id=entry, partition=None if partition < 0 else partition
        ),
        redelivery_count=redeliveries or None,
        ack_set=ack_set,
        consumer_epoch=epoch,
    )
    (found,) = FrameCutter().feed(head + rest)
    assert isinstance(found, Frame)
    assert decode(found.command).message == expected
    assert found.rest == rest


@given(st.lists(st.tuples(entries.map(lambda entry: entry % 2**63), st.integers(0, 5_000_000)), max_size=9))
def test_heads_of_a_run_are_those_of_each(messages: list[tuple[int, int]]) -> None:
    found = message_frame_heads(3, 2**40, messages, 2, 1, (-5,), 7)
    assert found == [message_frame_heads(3, 2**40, [one], 2, 1, (-5,), 7)[0] for one in messages]


def test_ping_and_pong_are_what_protobuf_writes() -> None:
    assert encode(CommandPing()) == PING
    assert encode(CommandPong()) == PONG


@pytest.mark.parametrize("size", [0, 1, 170, 100_000])
def test_a_checksum_covers_all_that_follows_it(size: int) -> None:
    data = bytes(range(10)) + bytes(size)
    sent = checksummed(data)
    assert sent[6:] == data
    assert checksummed(sent) == sent

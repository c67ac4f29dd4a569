"""What frames.py reads and writes without protobuf is what protobuf reads and writes, however the stream is cut."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from magnetar.proto.errors import MalformedFrame
from magnetar.proto.pulsar.commands import decode, encode
from magnetar.proto.pulsar.crc import checksummed, verify_checksum
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
    message_frame_head,
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
    for some in draw(
        st.lists(st.lists(entries, max_size=2) | st.lists(entries, min_size=1, max_size=1), max_size=8)
    ):
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


def read_by_protobuf(command: bytes, rest: bytes) -> Read:
    """A frame as a value whose first two fields say to whom it belongs; ("frame", None) is between all others."""
    try:
        found = decode(command)
    except MalformedFrame:
        return "frame", None, command, rest
    if found.type == BaseCommand.SEND:
        send = found.send
        plain = (
            not send.HasField("txnid_least_bits")
            and not send.HasField("marker")
            and not send.HasField("message_id")
        )
        if plain and send.num_messages >= 0:
            return (
                "send",
                send.producer_id,
                send.sequence_id,
                send.highest_sequence_id,
                send.num_messages,
                rest,
            )
    if (
        found.type == BaseCommand.ACK
        and len(found.ack.message_id) == 1
        and found.ack.ack_type == CommandAck.INDIVIDUAL
    ):
        if not found.ack.HasField("request_id") and not found.ack.message_id[0].ack_set:
            one = found.ack.message_id[0]
            return "ack", found.ack.consumer_id, one.ledger_id, one.entry_id, rest
    return "frame", None, command, rest


def read(items: Iterable[Item]) -> list[Read]:
    found: list[Read] = []
    for item in items:
        if isinstance(item, Sends):
            assert len(item.payloads) == 1 or not item.highest_sequence_id
            for number, rest in enumerate(item.payloads, item.sequence_id):
                found.append(
                    ("send", item.producer_id, number, item.highest_sequence_id, item.num_messages, rest)
                )
        elif isinstance(item, Acks):
            found += [("ack", item.consumer_id, ledger, entry, b"") for ledger, entry in item.ids]
        else:
            # What no template covers, protobuf reads.
            found.append(read_by_protobuf(*item))
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
    cutter = FrameCutter(1000)
    items = cut(b"".join(encode_frame(*frame) for frame in frames), sizes, cutter)
    assert_same(read(items), [read_by_protobuf(*frame) for frame in frames])
    assert cutter.error is None
    assert cutter.pending_bytes == 0


@given(sends() | acks(), st.data())
def test_a_changed_command_is_read_as_protobuf_reads_it(
    frames: list[tuple[bytes, bytes]], data: st.DataObject
) -> None:
    """A byte of one command is replaced, put in or taken out: templates take for a SEND or an ACK only what is one."""
    changed = []
    for command, rest in frames:
        at = data.draw(st.integers(0, len(command) - 1))
        same = command[at : at + 1]
        new = data.draw(st.sampled_from([same, same, b"", b"\x00", b"\x7f", b"\x80", b"\xff", b"\x01\x01"]))
        changed.append((command[:at] + new + command[at + 1 :], rest))
    found = read(FrameCutter().feed(b"".join(encode_frame(*frame) for frame in changed)))
    assert_same(found, [read_by_protobuf(*frame) for frame in changed])


@given(st.binary(max_size=60), st.lists(st.integers(1, 9), min_size=1))
@example(b"\x00\x00\x00\x04\x00\x00\x00\x00", [1])
def test_garbage_is_a_malformed_frame_or_none(data: bytes, sizes: list[int]) -> None:
    cutter = FrameCutter(100)
    for item in cut(data, sizes, cutter):
        if isinstance(item, Frame):
            with contextlib.suppress(MalformedFrame):
                decode(item.command)
    assert cutter.error is None or isinstance(cutter.error, MalformedFrame)
    assert cutter.pending_bytes < 100 + FRAME_OVERHEAD_BYTES


def test_sends_and_acks_make_runs() -> None:
    def send(producer: int, sequence: int) -> bytes:
        return encode_frame(
            encode(CommandSend(producer_id=producer, sequence_id=sequence))[8:], b"%d" % sequence
        )

    def ack(entry: int) -> bytes:
        found = MessageIdData(ledger_id=9, entry_id=entry << 20)
        return encode(CommandAck(consumer_id=4, ack_type=CommandAck.INDIVIDUAL, message_id=[found]))

    count = 1000
    stream = b"".join(send(1, number) + send(2, number + 7) for number in range(count))
    stream += b"".join(map(ack, range(count)))
    found = FrameCutter().feed(stream + PING + send(1, count))
    assert found == [
        Sends(1, 0, 0, 1, [b"%d" % number for number in range(count)]),
        Sends(2, 7, 0, 1, [b"%d" % (number + 7) for number in range(count)]),
        Acks(4, [(9, entry << 20) for entry in range(count)]),
        Frame(PING[8:], b""),
        Sends(1, count, 0, 1, [b"%d" % count]),
    ]


def test_the_largest_frame_is_taken_and_nothing_after_a_larger_one() -> None:
    limit = 1000 + FRAME_OVERHEAD_BYTES
    command = encode(CommandSend(producer_id=1, sequence_id=1))[8:]
    rest = bytes(limit - 4 - len(command))
    cutter = FrameCutter(1000)
    small = encode_frame(command, b"small")
    assert read(cut(encode_frame(command, rest), [999], cutter)) == [("send", 1, 1, 0, 1, rest)]
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
        cutter = FrameCutter(1000)
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
    head = message_frame_head(consumer, ledger, entry, partition, redeliveries, ack_set, epoch, len(rest))
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
    assert found == [message_frame_head(3, 2**40, entry, 2, 1, (-5,), 7, size) for entry, size in messages]


def test_ping_and_pong_are_what_protobuf_writes() -> None:
    assert encode(CommandPing()) == PING
    assert encode(CommandPong()) == PONG


@pytest.mark.parametrize("size", [0, 1, 170, 100_000])
def test_a_checksum_covers_all_that_follows_it(size: int) -> None:
    data = bytes(range(10)) + bytes(size)
    sent = checksummed(data)
    assert sent[6:] == data
    assert checksummed(sent) == sent
    assert verify_checksum(sent)
    assert verify_checksum(data)
    assert not verify_checksum(sent[:-1] + b"\x01")
    assert not verify_checksum(sent[:6])
    assert not verify_checksum(sent[:3])

"""commands.py: what a real client sent is decoded field by field; what is no command is a MalformedFrame."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import EncodeError
from hypothesis import given
from hypothesis import strategies as st

from magnetar.proto.errors import MalformedFrame
from magnetar.proto.pulsar.commands import FIELDS, NO_REQUEST, decode, encode
from magnetar.proto.pulsar.crc import checksummed
from magnetar.proto.pulsar.frames import Acks, Frame, FrameCutter, Sends
from magnetar.proto.pulsar.wire_pb2 import (
    BaseCommand,
    CommandError,
    CommandSubscribe,
    CommandSuccess,
    MessageMetadata,
    ServerError,
)

GOLDEN = Path(__file__).parents[3] / "golden" / "pulsar" / "python-client-3.13.txt"
TOPIC = "persistent://public/default/golden"
RECORDED = [line.split() for line in GOLDEN.read_text().splitlines() if not line.startswith("#")]


def recorded(name: str) -> list[Any]:
    """The commands of this type that the client sent."""
    frames = [bytes.fromhex(frame) for kind, frame in RECORDED if kind == name]
    return [getattr(decode(frame[8 : 8 + int.from_bytes(frame[4:8])]), name) for frame in frames]


def test_what_a_client_sent_on_connecting() -> None:
    (connect,) = recorded("connect")
    assert connect.client_version == "Pulsar-CPP-v4.2.0"
    assert connect.protocol_version == 20
    assert connect.auth_method_name == "none"
    assert connect.feature_flags.supports_auth_refresh
    assert not connect.feature_flags.supports_topic_watchers
    assert {lookup.topic for lookup in recorded("lookup") + recorded("partitioned_metadata")} == {TOPIC}


def test_what_a_client_sent_to_open_producers_and_consumers() -> None:
    producer, batching = recorded("producer")
    assert (producer.topic, producer.producer_id, producer.producer_name) == (TOPIC, 0, "maker")
    assert producer.user_provided_producer_name
    assert batching.producer_id == 1
    shared, exclusive = recorded("subscribe")
    assert (shared.subscription, shared.sub_type) == ("sub", CommandSubscribe.SHARED)
    assert (exclusive.subscription, exclusive.sub_type) == ("ex", CommandSubscribe.EXCLUSIVE)
    assert exclusive.initial_position == CommandSubscribe.LATEST
    assert [flow.message_permits for flow in recorded("flow")] == [10, 5, 1000]
    assert recorded("seek")[0].message_id.ledger_id == NO_REQUEST


def test_what_a_client_sent_is_cut_into_runs() -> None:
    stream = b"".join(bytes.fromhex(frame) for _, frame in RECORDED)
    found = FrameCutter().feed(stream)
    first, batch = (item for item in found if isinstance(item, Sends))
    assert (first.producer_id, first.sequence_id) == (0, 0)
    assert [payload[-9:] for payload in first.payloads] == [b"message-%d" % number for number in range(4)]
    assert (batch.producer_id, batch.sequence_id) == (1, 0)
    assert all(checksummed(payload[6:]) == payload for payload in first.payloads + batch.payloads)
    individual = [item for item in found if isinstance(item, Acks)]
    assert [ack.consumer_id for ack in individual] == [0]
    assert sorted(individual[0].ids) == [(77, entry << 20) for entry in range(3, 8)]
    # The cumulative ACK is left to protobuf, as all others.
    others = [name for name, _ in RECORDED if name not in ("send", "ack")]
    others.insert(others.index("get_last_message_id") + 1, "ack")
    assert [FIELDS[decode(item.command).type] for item in found if isinstance(item, Frame)] == others


def test_metadata_of_what_a_client_sent() -> None:
    stream = bytes.fromhex(next(frame for kind, frame in RECORDED[::-1] if kind == "send"))
    (batch,) = FrameCutter().feed(stream)
    assert isinstance(batch, Sends)
    size = int.from_bytes(batch.payloads[0][6:10])
    metadata = MessageMetadata.FromString(batch.payloads[0][10 : 10 + size])
    assert (metadata.producer_name, metadata.sequence_id, metadata.num_messages_in_batch) == ("batcher", 0, 3)


@given(st.binary(max_size=80))
def test_anything_else_is_a_malformed_frame(data: bytes) -> None:
    for command in (data, *(bytes([8, kind]) + data for kind in (2, 6, 9, 10, 99))):
        with contextlib.suppress(MalformedFrame):
            assert decode(command).IsInitialized()


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (b"", "a command of 0 bytes has no type, or one that Magnetar does not know"),
        (b"\x08\x46\xb2\x04\x00", "a command of 5 bytes has no type, or one that Magnetar does not know"),
        (b"\x08\x17\xba\x01\x05\x0a\x01\xff\x10\x01", "magnetar.pulsar.CommandLookup.topic is not UTF-8"),
        (b"\x08\x06", "a command SEND lacks a field that it must have"),
        (b"\x08\x06\x32\x02\x08\x01", "a command SEND lacks a field that it must have"),
    ],
)
def test_errors_say_what_is_wrong(command: bytes, sentence: str) -> None:
    with pytest.raises(MalformedFrame, match=sentence):
        decode(command)


def test_each_type_has_a_field_of_its_number_and_a_message() -> None:
    fields = BaseCommand.DESCRIPTOR.fields_by_name
    assert {fields[name].number: name for name in FIELDS.values()} == FIELDS
    assert len(fields) == len(FIELDS) + 1


def test_an_answer_is_a_frame_of_its_type() -> None:
    error = CommandError(request_id=NO_REQUEST, error=ServerError.TopicNotFound, message="no such topic")
    (found,) = FrameCutter().feed(encode(error))
    assert isinstance(found, Frame)
    assert decode(found.command) == BaseCommand(type=BaseCommand.ERROR, error=error)
    with pytest.raises(EncodeError):
        encode(CommandSuccess())


@pytest.mark.real
def test_frames_are_cut_without_protobuf() -> None:
    code = "import sys, magnetar.proto.pulsar.frames, magnetar.proto.pulsar.crc; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "magnetar.proto.pulsar.frames" in loaded
    assert not [name for name in loaded if name.startswith("google.protobuf")]

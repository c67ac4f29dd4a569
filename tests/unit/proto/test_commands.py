"""Headers: round trips, growth at the end, reserved and unknown numbers, errors across the wire."""

from __future__ import annotations

import contextlib
import json
import random
import re
import struct
from pathlib import Path

import msgpack
import pytest

from magnetar.proto import commands as c
from magnetar.proto.errors import (
    ERRORS_BY_CODE,
    Action,
    FinalError,
    MagnetarError,
    MalformedFrame,
    RetryableError,
    TopicBusy,
    UnknownCommand,
    error_from_wire,
)
from magnetar.proto.ids import DUPLICATE_ID


def test_headers_are_arrays_that_start_with_number_and_request_id() -> None:
    for number, cls in c.COMMANDS.items():
        fields = [f for f in cls.__struct_fields__ if f not in cls.__struct_defaults__]
        assert fields[0] == "request_id", cls
        assert number == cls.NUMBER < 128
    assert msgpack.unpackb(c.Send(0, 5, 6).encode()) == [19, 0, 5, 6]


def test_unknown_trailing_fields_are_ignored_and_absent_ones_take_defaults() -> None:
    assert c.decode_command(msgpack.packb([24, 0, 3, 100, 7, "new", {}])) == c.Flow(0, 3, 100, 7)
    assert c.decode_command(msgpack.packb([24, 0, 3, 100])) == c.Flow(0, 3, 100, 0)


def test_unknown_commands_name_their_request() -> None:
    with pytest.raises(UnknownCommand) as caught:
        c.decode_command(msgpack.packb([120, 44, "x"]))
    assert caught.value.details == {"number": 120, "request_id": 44}


@pytest.mark.parametrize(
    "header", [b"", b"\xc1", b"\x90", b"\x01", msgpack.packb([19]), msgpack.packb([19, 0, "x", 1])]
)
def test_undecodable_headers_are_malformed(header: bytes) -> None:
    with pytest.raises(MalformedFrame):
        c.decode_command(header)


def test_random_headers_raise_nothing_but_our_errors() -> None:
    rng = random.Random(3)
    for _ in range(5000):
        header = bytearray(c.Subscribe(1, 2, "t", "s", start=("id", b"x" * 24)).encode())
        for _ in range(rng.randrange(1, 4)):
            header[rng.randrange(len(header))] = rng.randrange(256)
        with contextlib.suppress(MagnetarError):
            c.decode_command(bytes(header))


def test_errors_cross_the_wire_and_unknown_codes_keep_their_action() -> None:
    for code, cls in ERRORS_BY_CODE.items():
        sent = c.decode_command(c.Failed.of(9, cls("why")).encode())
        assert isinstance(sent, c.Failed)
        error = sent.to_error()
        assert (type(error), error.code, error.message, error.retryable) == (
            cls,
            code,
            "why",
            cls.action in (Action.RETRY, Action.LOOK_UP),
        )
    assert type(error_from_wire(9999, 1, "x")) is RetryableError
    assert type(error_from_wire(9999, 77, "x")) is FinalError
    assert TopicBusy().message == "The topic is being loaded, closed or deleted."


def test_error_codes_are_unique_and_drawn_in_wire_md() -> None:
    classes = [MagnetarError]
    for cls in classes:
        classes += cls.__subclasses__()
    assert len({cls.code for cls in classes}) == len(classes)
    wire = (Path(__file__).parents[3] / "WIRE.md").read_text()
    for cls in classes:
        if cls.__module__.startswith("magnetar."):
            assert f"| {cls.code} | {cls.__name__} | {cls.action.name.lower().replace('_', ' ')} |" in wire


def test_every_command_is_drawn_in_wire_md_with_its_fields_and_defaults() -> None:
    wire = (Path(__file__).parents[3] / "WIRE.md").read_text()
    for number, cls in c.COMMANDS.items():
        if cls in (c.Ping, c.Pong):  # drawn together
            assert cls.__name__ in wire
            continue
        fields, defaults = cls.__struct_fields__[1:], cls.__struct_defaults__
        required = len(fields) - len(defaults)
        example = cls(*[0] * (1 + required))
        drawn = [
            name if place < required else f"{name} = {json.dumps(getattr(example, name))}"
            for place, name in enumerate(fields)
        ]
        row = rf"\| {number} \| {cls.__name__} \| {re.escape(', '.join(drawn))}( \(either way\))?\s*\|"
        assert re.search(row, wire), drawn


def test_rows_are_whole() -> None:
    rows = [(1, 2, 3, 4), (5, 6, 7, 8)]
    assert list(c.decode_rows(c.ACK_ROW, c.encode_rows(c.ACK_ROW, rows))) == rows
    with pytest.raises(MalformedFrame):
        c.decode_rows(c.ACK_ROW, b"x" * 25)


def test_the_place_of_a_duplicate_is_no_place_in_bytes_either() -> None:
    row = c.encode_rows(c.RECEIPT_ROW, [(7, 2, *DUPLICATE_ID[:3])])
    assert row == struct.pack(">QIQQI", 7, 2, 2**64 - 1, 2**64 - 1, 0)
    assert list(c.decode_rows(c.RECEIPT_ROW, row)) == [(7, 2, *DUPLICATE_ID[:3])]

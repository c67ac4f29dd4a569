"""Metadata of Pulsar's messages: the protobuf runtime reads what we write, and we read what it writes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.proto.errors import MalformedFrame
from magnetar.proto.pulsar import wire_pb2 as wire
from magnetar.proto.pulsar.metadata import (
    MessageMetadata,
    SingleMessageMetadata,
    decode_message_metadata,
    decode_single_metadata,
    encode,
    raw_fields,
    read_varint,
    varint,
)

_TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
_KINDS: dict[str, st.SearchStrategy[Any]] = {
    "string": _TEXT,
    "bytes": st.binary(max_size=20),
    "uint64": st.integers(0, (1 << 64) - 1),
    "int64": st.integers(-(1 << 63), (1 << 63) - 1),
    "uint32": st.integers(0, (1 << 32) - 1),
    "int32": st.integers(-(1 << 31), (1 << 31) - 1),
    "bool": st.booleans(),
    "enum": st.integers(0, 4),
}
_NAMES = {3: "int64", 4: "uint64", 5: "int32", 8: "bool", 9: "string", 12: "bytes", 13: "uint32", 14: "enum"}


def _fields_of(message: type[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Some fields of a message, of the types that the protobuf runtime takes for them."""
    strategies = {
        field.name: _KINDS[_NAMES[field.type]]
        for field in getattr(wire, message.__name__).DESCRIPTOR.fields
        if not field.is_repeated and field.name in message._fields
    }
    properties = st.dictionaries(_TEXT, _TEXT, min_size=1, max_size=4)
    return st.fixed_dictionaries({}, optional={**strategies, "properties": properties})


def _made_by_protobuf(name: str, fields: dict[str, Any]) -> Any:
    plain = {field: value for field, value in fields.items() if field != "properties"}
    made = getattr(wire, name)(**plain)
    for key, value in fields.get("properties", {}).items():
        made.properties.add(key=key, value=value)
    return made


def _ours(message: type[Any], fields: dict[str, Any]) -> Any:
    """With what is text for protobuf and bytes for us."""
    keys = {"partition_key": fields["partition_key"].encode()} if "partition_key" in fields else {}
    return message(**{**fields, **keys})


@pytest.mark.parametrize("message", [MessageMetadata, SingleMessageMetadata])
@given(data=st.data())
def test_both_read_what_the_other_writes(message: type[Any], data: st.DataObject) -> None:
    fields = data.draw(_fields_of(message))
    ours, theirs = _ours(message, fields), _made_by_protobuf(message.__name__, fields)
    decode = decode_message_metadata if message is MessageMetadata else decode_single_metadata
    assert decode(theirs.SerializePartialToString()) == ours
    assert encode(ours) == theirs.SerializePartialToString()


def test_encryption_keys_are_kept_as_they_stand() -> None:
    theirs = wire.MessageMetadata(producer_name="p", sequence_id=1, publish_time=2)
    theirs.encryption_keys.add(key="k", value=b"secret")
    written = theirs.SerializeToString()
    ours = decode_message_metadata(written)
    assert ours.encryption_keys is not None
    assert len(ours.encryption_keys) == 1
    assert encode(ours) == written


def test_unknown_fields_are_passed_over_and_the_last_of_two_counts() -> None:
    written = b"".join(
        (
            b"\x08\x01", b"\x10\x05", varint(99 << 3 | 2), b"\x02xy", varint(98 << 3 | 1), bytes(8),
            varint(97 << 3 | 5), bytes(4), b"\x10\x07",
        )
    )  # fmt: skip
    assert decode_message_metadata(written) == MessageMetadata(sequence_id=7)


@given(st.integers(0, (1 << 64) - 1))
def test_numbers_of_any_size(number: int) -> None:
    written = varint(number)
    assert read_varint(written, 0) == (number, len(written))
    # Padded to ten bytes it is the same number.
    if len(written) < 10:
        padded = bytes([*(byte | 0x80 for byte in written), *[0x80] * (9 - len(written)), 0])
        assert read_varint(padded, 0) == (number, 10)


@pytest.mark.parametrize(
    "damaged", ["08", "0a05616263", "80", "0b", "0f", "0001", "ffffffffffffffffffff01", "4900", "4d00"]
)
def test_what_is_no_message_is_malformed(damaged: str) -> None:
    with pytest.raises(MalformedFrame):
        raw_fields(bytes.fromhex(damaged))


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_malformed(data: bytes) -> None:
    for decode in (decode_message_metadata, decode_single_metadata):
        with contextlib.suppress(MalformedFrame):
            decode(data)

"""Messages as Pulsar's producers send them: made and read by the protobuf runtime, which knows nothing of our code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google_crc32c import value as crc32c

from magnetar.proto.pulsar import wire_pb2 as wire


def single(value: bytes | None, properties: dict[str, str] | None = None, **fields: Any) -> bytes:
    """A message of a batch."""
    found = wire.SingleMessageMetadata(payload_size=len(value or b""), **fields)
    for key, text in (properties or {}).items():
        found.properties.add(key=key, value=text)
    if value is None:
        found.null_value = True
    metadata = found.SerializeToString()
    return len(metadata).to_bytes(4, "big") + bytes(metadata) + (value or b"")


def frame(
    payload: bytes, properties: dict[str, str] | None = None, *, checksum: bool = True, **fields: Any
) -> bytes:
    """What stands behind the command of a SEND."""
    given = {"producer_name": "p", "sequence_id": 0, "publish_time": 1_700_000_000_000, **fields}
    found = wire.MessageMetadata(**given)
    for key, text in (properties or {}).items():
        found.properties.add(key=key, value=text)
    metadata = found.SerializeToString()
    content = len(metadata).to_bytes(4, "big") + bytes(metadata) + payload
    return b"\x0e\x01" + crc32c(content).to_bytes(4, "big") + content if checksum else content


def batch(singles: Sequence[bytes], **fields: Any) -> bytes:
    """The same for a batch."""
    return frame(b"".join(singles), num_messages_in_batch=len(singles), **fields)


def read_frame(data: bytes) -> tuple[Any, list[tuple[Any, bytes]]]:
    """The metadata, and each message with its value; its own metadata is None if it is no batch. Nothing is compressed."""
    assert data[:2] == b"\x0e\x01"
    assert crc32c(data[6:]) == int.from_bytes(data[2:6], "big")
    end = 10 + int.from_bytes(data[6:10], "big")
    metadata = wire.MessageMetadata.FromString(data[10:end])
    if not metadata.HasField("num_messages_in_batch"):
        return metadata, [(None, data[end:])]
    found = []
    for _ in range(metadata.num_messages_in_batch):
        start = end + 4 + int.from_bytes(data[end : end + 4], "big")
        one = wire.SingleMessageMetadata.FromString(data[end + 4 : start])
        end = start + one.payload_size
        found.append((one, data[start:end]))
    assert end == len(data)
    return metadata, found


def encrypted(messages: int, **fields: Any) -> bytes:
    """A batch that only its producer and who has the key can open."""
    given = {"producer_name": "p", "sequence_id": 0, "publish_time": 1_700_000_000_000, **fields}
    made = wire.MessageMetadata(num_messages_in_batch=messages, **given)
    made.encryption_keys.add(key="k", value=b"v")
    metadata = bytes(made.SerializeToString())
    return len(metadata).to_bytes(4, "big") + metadata + b"who knows"

"""Messages as Pulsar's producers send them: made and read by the protobuf runtime, which knows nothing of our code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google_crc32c import value as crc32c

_OPTIONAL, _REQUIRED, _REPEATED = 1, 2, 3
_TYPES = {
    "int64": 3,
    "uint64": 4,
    "int32": 5,
    "bool": 8,
    "string": 9,
    "message": 11,
    "bytes": 12,
    "uint32": 13,
}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="magnetar_tests.proto", package="magnetar_tests", syntax="proto2"
    )

    def define(name: str, fields: str) -> None:
        message = file.message_type.add(name=name)
        for line in fields.split(","):
            number, kind, field_name, *label = line.split()
            field: Any = message.field.add(name=field_name, number=int(number))
            field.label = {"required": _REQUIRED, "repeated": _REPEATED}.get("".join(label), _OPTIONAL)
            field.type = _TYPES.get(kind, 11)
            if kind not in _TYPES:
                field.type_name = f".magnetar_tests.{kind}"

    define("KeyValue", "1 string key required, 2 string value required")
    define("EncryptionKeys", "1 string key required, 2 bytes value required, 3 KeyValue metadata repeated")
    define(
        "MessageMetadata",
        "1 string producer_name required, 2 uint64 sequence_id required, 3 uint64 publish_time required,"
        "4 KeyValue properties repeated, 5 string replicated_from, 6 string partition_key, 7 string replicate_to repeated,"
        "8 int32 compression, 9 uint32 uncompressed_size, 11 int32 num_messages_in_batch, 12 uint64 event_time,"
        "13 EncryptionKeys encryption_keys repeated, 14 string encryption_algo, 15 bytes encryption_param,"
        "16 bytes schema_version, 17 bool partition_key_b64_encoded, 18 bytes ordering_key, 19 int64 deliver_at_time,"
        "20 int32 marker_type, 22 uint64 txnid_least_bits, 23 uint64 txnid_most_bits, 24 uint64 highest_sequence_id,"
        "25 bool null_value, 26 string uuid, 27 int32 num_chunks_from_msg, 28 int32 total_chunk_msg_size,"
        "29 int32 chunk_id, 30 bool null_partition_key",
    )
    define(
        "SingleMessageMetadata",
        "1 KeyValue properties repeated, 2 string partition_key, 3 int32 payload_size required, 4 bool compacted_out,"
        "5 uint64 event_time, 6 bool partition_key_b64_encoded, 7 bytes ordering_key, 8 uint64 sequence_id,"
        "9 bool null_value, 10 bool null_partition_key",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [message.name for message in file.message_type]
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"magnetar_tests.{name}"))
        for name in names
    }


CLASSES = _classes()


def single(value: bytes | None, properties: dict[str, str] | None = None, **fields: Any) -> bytes:
    """A message of a batch."""
    found = CLASSES["SingleMessageMetadata"](payload_size=len(value or b""), **fields)
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
    found = CLASSES["MessageMetadata"](**given)
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
    metadata = CLASSES["MessageMetadata"].FromString(data[10:end])
    if not metadata.HasField("num_messages_in_batch"):
        return metadata, [(None, data[end:])]
    found = []
    for _ in range(metadata.num_messages_in_batch):
        start = end + 4 + int.from_bytes(data[end : end + 4], "big")
        one = CLASSES["SingleMessageMetadata"].FromString(data[end + 4 : start])
        end = start + one.payload_size
        found.append((one, data[start:end]))
    assert end == len(data)
    return metadata, found

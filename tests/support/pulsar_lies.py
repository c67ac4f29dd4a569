"""Messages whose metadata does not tell the truth, as a SEND of Pulsar's protocol carries them behind its command.

`REFUSED` are found out when they come. `STORED` are not: what is in a batch nobody opens before its consumer does.
"""

from __future__ import annotations

import zlib
from typing import Any

from magnetar.proto.pulsar.crc import checksummed
from magnetar.proto.pulsar.metadata import varint
from support.pulsar_messages import batch, encrypted, frame, single

_BEGIN = b"\x0a\x01p\x10\x00\x18\x01"  # producer, sequence id, publish time


def _raw(metadata: bytes, payload: bytes = b"") -> bytes:
    content = len(metadata).to_bytes(4, "big") + metadata + payload
    return checksummed(content)


def _sized(size: int) -> bytes:
    """A message of a batch that names this size, and has one byte."""
    metadata = b"\x18" + varint(size)
    return len(metadata).to_bytes(4, "big") + metadata + b"x"


def _chunk(index: int, chunks: int, size: int = 2, **fields: Any) -> bytes:
    return frame(
        b"x", uuid="u", chunk_id=index, num_chunks_from_msg=chunks, total_chunk_msg_size=size, **fields
    )


REFUSED = {
    "32,768 messages in no bytes": frame(b"", num_messages_in_batch=2**15),
    "2^31 - 1 messages": frame(b"", num_messages_in_batch=2**31 - 1),
    "no messages": frame(b"x", num_messages_in_batch=0),
    "-1 messages": frame(b"x", num_messages_in_batch=-1),
    "chunk 5 of 2": _chunk(5, 2),
    "chunk -1": _chunk(-1, 2),
    "2^31 - 1 chunks": _chunk(0, 2**31 - 1),
    "a chunk that is a batch": _chunk(0, 2, num_messages_in_batch=2),
    "a chunk of a message of -1 bytes": _chunk(0, 2, -1),
    "4 GiB in 3 bytes": frame(b"xyz", compression=1, uncompressed_size=2**32 - 1),
    "2 GiB in a batch": frame(b"xyz", compression=3, uncompressed_size=2**31, num_messages_in_batch=2),
    "published in year 584,556,019": frame(b"x", publish_time=2**64 - 1),
    "it happened then": frame(b"x", event_time=2**64 - 1),
    "to be delivered then": frame(b"x", deliver_at_time=2**63 - 1),
    "sequence id 2^64 - 1": frame(b"x", sequence_id=2**64 - 1),
    "highest sequence id 2^64 - 1": frame(b"x", highest_sequence_id=2**64 - 1),
    "a marker": frame(b"x", marker_type=1),
    "a message of a transaction": frame(b"x", txnid_least_bits=1, txnid_most_bits=1),
    "a schema version of 2,000 bytes": frame(b"x", schema_version=bytes(2000)),
    "no metadata": _raw(b""),
    "no bytes": b"",
    "a wrong checksum": frame(b"x")[:-1] + b"y",
    "a field without an end": _raw(_BEGIN + b"\xff" * 30),
    "a field that is longer than all": _raw(_BEGIN + b"\x22\xff\xff\xff\xff\x0f"),
    "a property that is longer than all": _raw(_BEGIN + b"\x22\x05\x0a\x7f"),
    "a group": _raw(_BEGIN + b"\x0b\x0c"),
    "metadata that is longer than the frame": b"\x00\x00\x10\x00x",
}
STORED = {
    "3 messages of which there is one": frame(single(b"a") + bytes(16), num_messages_in_batch=3),
    "1 message of which there are two": frame(single(b"a") + single(b"b"), num_messages_in_batch=1),
    "a value of 2 GiB": frame(_sized(2**31 - 1), num_messages_in_batch=1),
    "a value of -1 bytes": frame(_sized(2**64 - 1), num_messages_in_batch=1),
    "metadata of 4 GiB": frame(b"\xff" * 8, num_messages_in_batch=1),
    "a last chunk without the first": _chunk(1, 2),
    "chunks of more than their message": _chunk(0, 2, 0),
    "a chunk of 2 GiB": frame(b"x", uuid="v", chunk_id=0, num_chunks_from_msg=2, total_chunk_msg_size=2**31 - 1),
    "no LZ4": frame(b"xyz", compression=1, uncompressed_size=3),
    "no such compression": _raw(_BEGIN + b"\x40\x09", b"xyz"),
    "one megabyte in 1 kB": frame(zlib.compress(bytes(10**6)), compression=2, uncompressed_size=5),
    "too little of it": frame(zlib.compress(bytes(5)), compression=2, uncompressed_size=200),
    "a batch that is no LZ4": frame(b"xyz", compression=1, uncompressed_size=9, num_messages_in_batch=2),
    "32,768 messages, encrypted": encrypted(2**15),
    "to be delivered before all times": frame(b"x", deliver_at_time=-(2**63)),
    "a key that is not base64": frame(b"x", partition_key="@", partition_key_b64_encoded=True),
    "a name that is not UTF-8": _raw(b"\x0a\x01\xff\x10\x00\x18\x01", b"x"),
    "a uuid that is not UTF-8": _raw(_BEGIN + b"\xd2\x01\x01\xff\xd8\x01\x02\xe0\x01\x05\xe8\x01\x00", b"x"),
    "a property that is not UTF-8": _raw(_BEGIN + b"\x22\x06\x0a\x01\xff\x12\x01\xff", b"x"),
    "a property of nothing": _raw(_BEGIN + b"\x22\x00", b"x"),
    "a null value of one byte": frame(b"x", null_value=True),
    "a batch that is compacted away": batch([single(b"a", compacted_out=True)]),
}  # fmt: skip

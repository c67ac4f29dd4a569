"""What pulsar-client 3.13 for Python and Java's tools of 4.0.6 sent, with every codec, in batches, alone and in chunks.

recorded.json has `[name of the producer, base64 of what stood behind the command]` of each SEND, in order, as a throwaway
server took them that answered CONNECT, PARTITIONED_METADATA, LOOKUP, PRODUCER and SEND, with a max_message_size of 500.
"""

from __future__ import annotations

import base64
import random
from pathlib import Path

import msgspec
import pytest

from magnetar.proto.batch import META_EVENT_TIMES_MS, META_PROPERTIES, META_SEQUENCE_IDS, decode_batch
from magnetar.proto.batch_extensions import EXT_BATCH_OF_ONE, EXT_DELIVER_AT_MS
from magnetar.proto.chunks import Assembler
from magnetar.proto.pulsar.batch import admit_pulsar

_ROWS = msgspec.json.decode(
    (Path(__file__).parent / "recorded.json").read_bytes(), type=list[tuple[str, str]]
)
CODECS = ("none", "lz4", "zlib", "zstd", "snappy")


def _sent(name: str) -> list[bytes]:
    return [base64.b64decode(data) for one, data in _ROWS if one == name]


@pytest.mark.parametrize("codec", CODECS)
def test_a_batch(codec: str) -> None:
    (stored,) = admit_pulsar(_sent(f"batch-{codec}")).batches
    batch = decode_batch(stored)
    assert batch.values == [b"first " + codec.encode(), b"second", b""]
    assert batch.keys == ["k1", "k2", None]
    assert batch.metadata == {
        META_PROPERTIES: [{"a": "1"}, None, None],
        META_EVENT_TIMES_MS: [1_700_000_000_001, None, None],
    }


@pytest.mark.parametrize("codec", CODECS)
def test_a_message_alone(codec: str) -> None:
    admitted = admit_pulsar(_sent(f"single-{codec}"))
    assert (admitted.counts, admitted.sequence_ids) == ([1], [500])
    batch = decode_batch(admitted.batches[0])
    assert (batch.values, batch.keys) == ([b"alone " * 5], ["k1"])
    assert batch.metadata == {
        META_PROPERTIES: [{"a": "1", "b": "\u00fc"}],
        META_EVENT_TIMES_MS: [1_700_000_000_001],
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((f"chunked-{codec}", random.Random(1).randbytes(600) + bytes(300)) for codec in CODECS),
        ("java-chunked", None),
    ],
)
def test_a_message_in_chunks(name: str, value: bytes | None) -> None:
    admitted = admit_pulsar(_sent(name))
    chunks = Assembler[int](10, 1 << 20, 60.0)
    message = whole = None
    for position, extensions in (admitted.extensions or {}).items():
        assert extensions.chunk is not None
        (piece,) = decode_batch(admitted.batches[position]).values
        message = chunks.add("p", extensions.chunk, position, piece or b"", 0.0).message
        whole = extensions.whole
    assert message is not None
    assert message.finished
    assert whole is not None
    found = whole.value(b"".join(message.pieces), 1 << 20)
    assert found == value or (value is None and len(found) == 1200)


@pytest.mark.parametrize("codec", CODECS[1:])
def test_a_message_and_a_batch_of_java(codec: str) -> None:
    admitted = admit_pulsar(_sent(f"java-{codec}"))
    assert (admitted.counts, admitted.sequence_ids, admitted.last_sequence_id(1)) == ([1, 3], [0, 1], 3)
    for stored, count in zip(admitted.batches, admitted.counts, strict=True):
        batch = decode_batch(stored)
        assert [len(value or b"") for value in batch.values] == [20] * count
        assert batch.keys == ["0"] * count
        assert batch.metadata is None, "sequence ids count up"


def test_batches_by_key_have_sequence_ids_of_their_own() -> None:
    admitted = admit_pulsar(_sent("bykey"))
    batches = [decode_batch(one) for one in admitted.batches]
    assert [one.values for one in batches] == [[b"0", b"2"], [b"1", b"3"]]
    assert [(one.metadata or {})[META_SEQUENCE_IDS] for one in batches] == [[0, 2], [1, 3]]
    assert [admitted.last_sequence_id(position) for position in range(2)] == [0, 1]


def test_a_batch_of_one_and_a_delayed_message() -> None:
    first, second = (decode_batch(one) for one in admit_pulsar(_sent("one")).batches)
    assert (first.values, dict(first.extensions)) == ([b"batch of one"], {EXT_BATCH_OF_ONE: True})
    assert (second.values, dict(second.extensions)) == ([b"later"], {EXT_DELIVER_AT_MS: 4_000_000_000_000})

"""What stands in metadata: bytes that were written once are read for good."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from magnetar.broker.cursors.pointer import PointerRecord
from magnetar.broker.log.records import (
    Archive,
    AttachedQuery,
    CompactedLedger,
    LedgerInfo,
    NamespaceRecord,
    PublishedBatch,
    Segment,
    SegmentRecord,
    StagedRecord,
    TopicRecord,
)
from magnetar.proto.errors import DataDirectoryError
from magnetar.proto.policies import Policies

RECORD = bytes.fromhex(
    "de0014a6666f726d617401a76c656467657273929907050205640b0cc30499090a0000000000c209a87365676d656e747392930001039305"
    "0406ae7472696d6d65645f72616e67657391920405a861726368697665739292a966696c653a2f2f2f610292a873333a2f2f622f6303a774"
    "72696d6d656493010003aa6e6578745f696e6465780aaa637265617465645f6d7307a864656c6574696e67c2aa70726f7065727469657381"
    "a161a162a8617474616368656481a17194061463cf8000000000000000aa7075626c697368696e6781a17198071e6d0900c4103031323334"
    "3536373839616263646566c305ab7472696d6d65645f656e6493050302a8706f6c6963696573de0004ac726574656e74696f6e5f6d7300af7265"
    "74656e74696f6e5f627974657300ae6d6573736167655f74746c5f6d73cdea60b3737562736372697074696f6e5f74746c5f6d7381a17305"
    "b0706f6c69636965735f76657273696f6e03aa636f6d70616374696f6e96089307020001035a28aa636f6d70616374696e670bab746f7069"
    "635f65706f636804aa7465726d696e61746564c3ac6c6173745f6d65737361676593090807"
)
SEGMENT = bytes.fromhex("82a6666f726d617401a76c656467657273929907050205640b0cc30499090a0000000000c209")
NAMESPACE = bytes.fromhex("82a6666f726d617401a8706f6c6963696573de0001ac726574656e74696f6e5f6d73ff")
STAGED = bytes.fromhex(
    "84a6666f726d617401ab7472616e73616374696f6ea174aa637265617465645f6d7305a674746c5f6d73cdea60"
)

EVERYTHING = TopicRecord(
    ledgers=[LedgerInfo(7, 5, 2, 5, 100, 11, 12, True, 4), LedgerInfo(9, 10)],
    segments=[Segment(0, 1, 3), Segment(5, 4, 6)],
    trimmed_ranges=[(4, 5)],
    archives=[Archive("file:///a", 2), Archive("s3://b/c", 3)],
    trimmed=[1, 0, 3],
    next_index=10,
    created_ms=7,
    deleting=False,
    properties={"a": "b"},
    attached={"q": AttachedQuery(6, 20, 99, 1 << 63)},
    publishing={"q": PublishedBatch(7, 30, 109, 9, 0, b"0123456789abcdef", True, 5)},
    trimmed_end=(5, 3, 2),
    policies=Policies(retention_ms=0, retention_bytes=0, message_ttl_ms=60_000, subscription_ttl_ms={"s": 5}),
    policies_version=3,
    compaction=CompactedLedger(8, (7, 2, 0), 1, 3, 90, 40),
    compacting=11,
    topic_epoch=4,
    terminated=True,
    last_message=(9, 8, 7),
)


def test_the_head_of_a_ledger_list_with_all_there_can_be() -> None:
    assert EVERYTHING.encode() == RECORD
    assert TopicRecord.decode(RECORD, "path") == EVERYTHING
    assert [info.stored_id for info in EVERYTHING.ledgers] == [4, 9]


def test_a_namespace() -> None:
    assert NamespaceRecord(Policies(retention_ms=-1)).encode() == NAMESPACE
    assert NamespaceRecord.decode(NAMESPACE, "path").policies == Policies(retention_ms=-1)
    with pytest.raises(DataDirectoryError, match="metadata of path is damaged"):
        NamespaceRecord.decode(NAMESPACE[:-1], "path")


def test_a_segment_of_a_ledger_list() -> None:
    assert SegmentRecord(EVERYTHING.ledgers).encode() == SEGMENT
    assert SegmentRecord.decode(SEGMENT, "path").ledgers == EVERYTHING.ledgers


def test_an_empty_ledger_list() -> None:
    empty = TopicRecord.new(5)
    assert TopicRecord.decode(empty.encode(), "path") == empty
    empty.ledgers = [LedgerInfo(9, 0, stored_id=0)]  # the first ledger of all has the id 0
    assert TopicRecord.decode(empty.encode(), "path") == empty


@pytest.mark.parametrize(
    "key", ["ledgers", "segments", "trimmed_ranges", "archives", "attached", "publishing"]
)
@pytest.mark.parametrize("damaged", [None, [[]], [["a"]], [[1]], 5])
def test_a_damaged_ledger_list_is_refused(key: str, damaged: Any) -> None:
    fields = msgpack.unpackb(RECORD)
    for value in (fields | {key: damaged}, {name: fields[name] for name in fields if name != key}):
        with pytest.raises(DataDirectoryError, match="metadata of path is damaged"):
            TopicRecord.decode(msgpack.packb(value), "path")


@pytest.mark.parametrize("damaged", [[], ["a"], 5, [8, [7, 2], 1, 3, 90, 40]])
def test_a_damaged_pointer_to_a_compacted_ledger_is_refused(damaged: Any) -> None:
    fields = msgpack.unpackb(RECORD) | {"compaction": damaged}
    with pytest.raises(DataDirectoryError, match="metadata of path is damaged"):
        TopicRecord.decode(msgpack.packb(fields), "path")


def test_staged_nodes() -> None:
    assert StagedRecord("t", 5, 60_000).encode() == STAGED
    assert StagedRecord.decode(STAGED, "path") == StagedRecord("t", 5, 60_000)


@pytest.mark.parametrize("read", [TopicRecord, SegmentRecord, PointerRecord, StagedRecord])
def test_formats_of_later_releases_are_refused(read: type[TopicRecord]) -> None:
    for value in (RECORD.replace(b"format\x01", b"format\x09"), b"\x81\xa6format\x09", b"\x80", b"noise"):
        with pytest.raises(DataDirectoryError):
            read.decode(value, "path")


def test_a_cursor_knows_no_format_2() -> None:
    with pytest.raises(DataDirectoryError, match="upgrade"):
        PointerRecord.decode(b"\x81\xa6format\x02", "path")

"""What stands in metadata: bytes that were written once are read for good."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from magnetar.broker.log.records import (
    ArchivedLedger,
    AttachedQuery,
    CursorRecord,
    LedgerInfo,
    PublishedBatch,
    StagedRecord,
    TopicRecord,
)
from magnetar.proto.errors import DataDirectoryError

RECORD = bytes.fromhex(
    "8aa6666f726d617401a76c656467657273929907050205640b0cc30499090a0000000000c209a77472696d6d656493010003aa6e6578745f"
    "696e6465780aaa637265617465645f6d7307a864656c6574696e67c2aa70726f7065727469657381a161a162a861747461636865649195a1"
    "71061463cf8000000000000000a861726368697665649292a966696c653a2f2f2f61929901000203280506c30199020301010a0708c30092a873333a2f2f622f63"
    "9199030401010a0909c303aa7075626c697368696e679199a171071e6d0900c41030313233343536373839616263646566c305"
)
STAGED = bytes.fromhex("83a6666f726d617401ab7472616e73616374696f6ea174aa637265617465645f6d7305")

NEAR, FAR = "file:///a", "s3://b/c"
EVERYTHING = TopicRecord(
    [LedgerInfo(7, 5, 2, 5, 100, 11, 12, True, 4), LedgerInfo(9, 10)],
    [1, 0, 3],
    10,
    7,
    False,
    {"a": "b"},
    {"q": AttachedQuery(6, 20, 99, 1 << 63)},
    [
        ArchivedLedger(LedgerInfo(1, 0, 2, 3, 40, 5, 6, True), NEAR),
        ArchivedLedger(LedgerInfo(2, 3, 1, 1, 10, 7, 8, True, 0), NEAR),
        ArchivedLedger(LedgerInfo(3, 4, 1, 1, 10, 9, 9, True), FAR),
    ],
    {"q": PublishedBatch(7, 30, 109, 9, 0, b"0123456789abcdef", True, 5)},
)


def test_a_ledger_list_with_all_there_can_be() -> None:
    assert EVERYTHING.encode() == RECORD
    assert TopicRecord.decode(RECORD, "path") == EVERYTHING
    assert RECORD.count(NEAR.encode()) == 1, "a location stands once for all ledgers in a row that have it"
    assert [info.stored_id for info in EVERYTHING.ledgers] == [4, 9]


def test_an_empty_ledger_list() -> None:
    assert TopicRecord.decode(TopicRecord().encode(), "path") == TopicRecord()
    zero = TopicRecord([LedgerInfo(9, 0, stored_id=0)])  # the first ledger of all has the id 0
    assert TopicRecord.decode(zero.encode(), "path") == zero


@pytest.mark.parametrize("key", ["ledgers", "attached", "archived", "publishing"])
@pytest.mark.parametrize("damaged", [None, [[]], [["a"]], [[1]], 5])
def test_a_damaged_ledger_list_is_refused(key: str, damaged: Any) -> None:
    fields = msgpack.unpackb(RECORD)
    for value in (fields | {key: damaged}, {name: fields[name] for name in fields if name != key}):
        with pytest.raises(DataDirectoryError, match="metadata of path is damaged"):
            TopicRecord.decode(msgpack.packb(value), "path")


def test_staged_nodes() -> None:
    assert StagedRecord("t", 5).encode() == STAGED
    assert StagedRecord.decode(STAGED, "path") == StagedRecord("t", 5)


@pytest.mark.parametrize("read", [TopicRecord, CursorRecord, StagedRecord])
def test_formats_of_later_releases_are_refused(read: type[TopicRecord]) -> None:
    for value in (RECORD.replace(b"format\x01", b"format\x09"), b"\x81\xa6format\x09", b"\x80", b"noise"):
        with pytest.raises(DataDirectoryError):
            read.decode(value, "path")


def test_a_cursor_knows_no_format_2() -> None:
    with pytest.raises(DataDirectoryError, match="upgrade"):
        CursorRecord.decode(b"\x81\xa6format\x02", "path")

"""What stands in metadata: bytes that were written once are read for good."""

from __future__ import annotations

import pytest

from magnetar.broker.log.records import (
    FORMAT_ATTACHED,
    ArchivedLedger,
    AttachedQuery,
    CursorRecord,
    LedgerInfo,
    StagedRecord,
    TopicRecord,
    decode_map,
)
from magnetar.proto.errors import DataDirectoryError

# As the first release wrote it.
FORMAT_1 = bytes.fromhex(
    "87a6666f726d617401a76c656467657273929803000205640b0cc39809050000000000c2a77472696d6d65649101aa6e6578745f696e64657805"
    "aa637265617465645f6d7307a864656c6574696e67c2aa70726f7065727469657381a161a162"
)
FORMAT_2 = bytes.fromhex(
    "88a6666f726d617402a76c656467657273929803000205640b0cc39909050102080d0ec304a77472696d6d65649101aa6e6578745f696e646578"
    "07aa637265617465645f6d7307a864656c6574696e67c2aa70726f7065727469657381a161a162a861747461636865649194a171061463"
)
FORMAT_3 = bytes.fromhex(
    "88a6666f726d617403a76c656467657273919809050000000000c2a77472696d6d656493010003aa6e6578745f696e64657805aa6372656174"
    "65645f6d7307a864656c6574696e67c2aa70726f7065727469657380a861726368697665649292a966696c653a2f2f2f619298010002032805"
    "06c399020301010a0708c30092a873333a2f2f622f639198030401010a0909c3"
)
STAGED = bytes.fromhex("83a6666f726d617401ab7472616e73616374696f6ea174aa637265617465645f6d7305")

CLOSED = LedgerInfo(3, 0, 2, 5, 100, 11, 12, True)


def test_a_list_without_attached_ledgers_is_what_it_always_was() -> None:
    record = TopicRecord([CLOSED, LedgerInfo(9, 5)], [1], 5, 7, False, {"a": "b"})
    assert record.encode() == FORMAT_1
    read = TopicRecord.decode(FORMAT_1, "path")
    assert read == record
    assert [info.stored_id for info in read.ledgers] == [3, 9]


def test_attached_ledgers_and_queries_make_it_format_2() -> None:
    attached = LedgerInfo(9, 5, 1, 2, 8, 13, 14, True, 4)
    record = TopicRecord([CLOSED, attached], [1], 7, 7, False, {"a": "b"}, {"q": AttachedQuery(6, 20, 99)})
    assert record.encode() == FORMAT_2
    assert TopicRecord.decode(FORMAT_2, "path") == record
    # Either alone does; neither, once they are trimmed and forgotten, and older releases read it again.
    assert TopicRecord([attached]).encode()[:9].endswith(b"\x02")
    assert TopicRecord(attached={"q": AttachedQuery(6, 20, 99)}).encode()[:9].endswith(b"\x02")
    assert TopicRecord([CLOSED]).encode()[:9].endswith(b"\x01")
    # The first ledger of all has the id 0.
    zero = LedgerInfo(9, 0, stored_id=0)
    assert TopicRecord.decode(TopicRecord([zero]).encode(), "path").ledgers == [zero]


def test_archived_ledgers_make_it_format_3_and_name_a_location_once() -> None:
    near, far = "file:///a", "s3://b/c"
    archived = [
        ArchivedLedger(LedgerInfo(1, 0, 2, 3, 40, 5, 6, True), near),
        ArchivedLedger(LedgerInfo(2, 3, 1, 1, 10, 7, 8, True, 0), near),
        ArchivedLedger(LedgerInfo(3, 4, 1, 1, 10, 9, 9, True), far),
    ]
    record = TopicRecord([LedgerInfo(9, 5)], [1, 0, 3], 5, 7, archived=archived)
    assert record.encode() == FORMAT_3
    assert record.encode().count(near.encode()) == 1
    assert TopicRecord.decode(FORMAT_3, "path") == record
    # A release that knows the formats before it refuses the topic, rather than looking for its ledgers at the bookies.
    with pytest.raises(DataDirectoryError, match="has format 3, this version reads up to 2: upgrade it"):
        decode_map(FORMAT_3, "path", FORMAT_ATTACHED)
    # With what format 2 has, it is format 3 as well.
    both = TopicRecord(attached={"q": AttachedQuery(6, 20, 99)}, archived=archived[2:])
    assert both.encode()[:9].endswith(b"\x03")
    assert TopicRecord.decode(both.encode(), "path") == both


def test_staged_nodes() -> None:
    assert StagedRecord("t", 5).encode() == STAGED
    assert StagedRecord.decode(STAGED, "path") == StagedRecord("t", 5)


@pytest.mark.parametrize("read", [TopicRecord, CursorRecord, StagedRecord])
def test_formats_of_later_releases_are_refused(read: type[TopicRecord]) -> None:
    for value in (FORMAT_1.replace(b"format\x01", b"format\x09"), b"\x81\xa6format\x09", b"\x80", b"noise"):
        with pytest.raises(DataDirectoryError):
            read.decode(value, "path")


def test_a_cursor_knows_no_format_2() -> None:
    with pytest.raises(DataDirectoryError, match="upgrade"):
        CursorRecord.decode(b"\x81\xa6format\x02", "path")

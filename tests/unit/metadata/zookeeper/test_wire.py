"""ZooKeeper's records: ours beside aiozk's, which came first."""

from __future__ import annotations

import contextlib
import struct

import pytest
from aiozk import exc
from aiozk.protocol import (
    UNRESTRICTED_ACCESS,
    CheckVersionRequest,
    ConnectResponse,
    CreateRequest,
    DeleteRequest,
    ExistsRequest,
    GetChildrenRequest,
    GetDataRequest,
    SetDataRequest,
    SyncRequest,
    TransactionRequest,
    TransactionResponse,
    WatchEvent,
)
from aiozk.protocol.acl import AUTHED_UNRESTRICTED
from aiozk.protocol.stat import Stat
from hypothesis import given
from hypothesis import strategies as st

from magnetar.metadata.zookeeper import wire
from magnetar.metadata.zookeeper.wire import Request
from magnetar.proto.errors import MalformedFrame

paths = st.text(min_size=1).map(lambda name: f"/{name}").filter(lambda path: "\udfff" not in path)
values = st.binary(max_size=300)
versions = st.integers(-1, 2**31 - 1)
HEADER = struct.pack(">iqi", 7, 1234, 0)


def framed(request: Request) -> bytes:
    return wire.frame(7, request.opcode, request.record)


def as_aiozk_frames(record: bytes) -> bytes:
    return struct.pack(">i", len(record)) + record


@given(paths, values, versions)
def test_requests_are_those_of_aiozk(path: str, value: bytes, version: int) -> None:
    acl = [UNRESTRICTED_ACCESS]
    for ours, theirs in (
        (wire.get_data(path), GetDataRequest(path=path, watch=False)),
        (wire.exists(path), ExistsRequest(path=path, watch=False)),
        (wire.get_children(path), GetChildrenRequest(path=path, watch=False)),
        (wire.sync(path), SyncRequest(path=path)),
        (wire.create(path, value), CreateRequest(path=path, data=value, acl=acl, flags=0)),
        (wire.create(path, None), CreateRequest(path=path, data=None, acl=acl, flags=0)),
        (wire.create(path, value, ephemeral=True, private=True),
         CreateRequest(path=path, data=value, acl=[AUTHED_UNRESTRICTED], flags=1)),
        (wire.set_data(path, value, version), SetDataRequest(path=path, data=value, version=version)),
        (wire.delete(path, version), DeleteRequest(path=path, version=version)),
    ):  # fmt: skip
        assert framed(ours) == as_aiozk_frames(theirs.serialize(xid=7))
    theirs = TransactionRequest()
    theirs.add(CheckVersionRequest(path=path, version=version))
    theirs.add(SetDataRequest(path=path, data=value, version=version))
    ours = wire.multi([wire.check_version(path, version), wire.set_data(path, value, version)])
    assert framed(ours) == as_aiozk_frames(theirs.serialize(xid=7))


def record(part: object) -> bytes:
    """What aiozk would send as an answer."""
    fmt, data = part.render()  # type: ignore[attr-defined]
    return HEADER + struct.pack("!" + fmt, *data)


@given(st.none() | values, st.integers(0, 2**31 - 1), st.integers(0, 1000))
def test_nodes(value: bytes | None, version: int, children: int) -> None:
    stat = Stat(
        created_zxid=1, last_modified_zxid=2, created=3, modified=4, version=version, child_version=5, acl_version=6,
        ephemeral_owner=7, data_length=len(value or b""), num_children=children, last_modified_children=8,
    )  # fmt: skip
    data = struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value
    assert wire.decode_data(HEADER + data + record(stat)[16:]) == (value, version)
    assert wire.decode_stat(record(stat)) == (version, len(value or b""), children, 8)


@given(st.lists(st.text(max_size=20)))
def test_listings(names: list[str]) -> None:
    encoded = [name.encode() for name in names]
    data = struct.pack(">i", len(names)) + b"".join(struct.pack(">i", len(name)) + name for name in encoded)
    assert wire.decode_children(HEADER + data) == names


def test_the_errors_of_a_multi() -> None:
    def failed(code: int) -> bytes:
        return struct.pack(">i?ii", -1, False, code, code)

    end = struct.pack(">i?i", -1, True, -1)
    answer = failed(0) + failed(-101) + failed(-2) + end
    assert wire.decode_multi_errors(HEADER + answer) == [0, -101, -2]
    theirs = TransactionResponse.deserialize(failed(-101) + end)
    assert isinstance(theirs.responses[0], exc.NoNode)
    deleted = struct.pack(">i?i", 2, False, 0) + end
    assert wire.decode_multi_errors(HEADER + deleted) == []


def test_the_handshake() -> None:
    answer = ConnectResponse(protocol_version=0, timeout=4000, session_id=0x1234, password=b"p" * 16)
    data = record(answer)[16:]
    assert wire.decode_handshake(data + b"\0") == (0x1234, b"p" * 16, 4.0)
    assert wire.decode_handshake(struct.pack(">iiqi", 0, 0, 0x1234, 16) + bytes(17)).session_id == 0, (
        "expired"
    )
    assert wire.connect_frame(9, 4.0, 0, b"") == struct.pack(">iiqiqi", 45, 0, 9, 4000, 0, 16) + bytes(17)


def test_events() -> None:
    event = record(WatchEvent(type=1, state=3, path="/a/ü"))
    assert wire.decode_event(event) == "/a/ü"


@given(st.binary(max_size=200))
def test_no_bytes_surprise_the_decoders(data: bytes) -> None:
    for decode in (
        wire.decode_header, wire.decode_data, wire.decode_stat, wire.decode_children, wire.decode_multi_errors,
        wire.decode_event, wire.decode_handshake,
    ):  # fmt: skip
        with contextlib.suppress(MalformedFrame):
            decode(data)


def test_an_answer_that_is_cut_short() -> None:
    with pytest.raises(MalformedFrame):
        wire.decode_data(HEADER + struct.pack(">i", 1000) + b"short")
    with pytest.raises(MalformedFrame):
        wire.decode_children(HEADER + struct.pack(">ii", 3, 1))
    with pytest.raises(MalformedFrame):
        wire.decode_children(HEADER + struct.pack(">ii", 2**31 - 1, -4))

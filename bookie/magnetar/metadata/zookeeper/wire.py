"""ZooKeeper's records: bytes of requests, and what answers hold.

    frame:     i32 length | record
    request:   i32 xid | i32 opcode | record
    answer:    i32 xid | i64 zxid | i32 error | record, nothing if there is an error

Every integer is big-endian; strings and buffers stand behind an i32 length (-1: null).

The rare records (handshake, authentication, watch events and what has no fields worth a codec) are aiozk's. Those of
each read and write are here, in the same terms, because aiozk builds a struct format for every record: 20 us of CPU for
a `getData` and its answer beside 2 us here, and 1.7 us a name of a listing beside 0.2. The unit tests compare the bytes
with aiozk's.

Source: zookeeper-jute/src/main/resources/zookeeper.jute of ZooKeeper 3.9.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple

from aiozk.protocol import (
    AuthRequest,
    ConnectRequest,
    ConnectResponse,
    RemoveWatchesRequest,
    WatchEvent,
)

from magnetar.proto.errors import MalformedFrame

# Answers with these xids belong to no request in the queue.
XID_EVENT = -1
XID_PING = -2
XID_AUTH = -4
HEADER_BYTES = 16  # of an answer, before its record
ANY_VERSION = -1
_EPHEMERAL_FLAG = 1
_WATCH_RECURSIVE = 1  # AddWatchMode.PERSISTENT_RECURSIVE
_WATCH_ANY = 3  # WatcherType.Any
_DIGEST = "digest"

_FRAME_HEADER = struct.Struct(">iii")
_ANSWER_HEADER = struct.Struct(">iqi")
_I32 = struct.Struct(">i")
_VERSION_IN_STAT = 32
# Length of the value, number of children, zxid of the last change of them.
_SIZES_IN_STAT = struct.Struct(">iiq")
_SIZES_OFFSET = 52
_MULTI_HEADER = struct.Struct(">i?i")
_MULTI_END = _MULTI_HEADER.pack(-1, True, -1)


class Opcode(enum.IntEnum):
    """The requests that are used here."""

    CREATE = 1
    DELETE = 2
    EXISTS = 3
    GET_DATA = 4
    SET_DATA = 5
    GET_CHILDREN = 8
    SYNC = 9
    PING = 11
    CHECK = 13
    MULTI = 14
    REMOVE_WATCHES = 18
    ADD_WATCH = 106
    CLOSE_SESSION = -11


class ZooKeeperError(enum.IntEnum):
    """The error codes that are told apart here (KeeperException.Code)."""

    OK = 0
    RUNTIME_INCONSISTENCY = -2  # in a failed multi: an operation behind the one that failed
    UNIMPLEMENTED = -6
    NO_NODE = -101
    NO_AUTH = -102
    BAD_VERSION = -103
    NO_CHILDREN_FOR_EPHEMERALS = -108
    NODE_EXISTS = -110
    NOT_EMPTY = -111
    SESSION_EXPIRED = -112
    AUTH_FAILED = -115
    SESSION_MOVED = -118
    THROTTLED = -127


class Request(NamedTuple):
    """A request without its xid."""

    opcode: int
    record: bytes


class Data(NamedTuple):
    """A node. `value` is None for one that was made with null in place of a value."""

    value: bytes | None
    version: int


class Stat(NamedTuple):
    """What is known of a node without its value."""

    version: int
    value_bytes: int
    children: int
    children_zxid: int  # of the last child that was made or deleted


class Handshake(NamedTuple):
    """The server's answer to the first frame. A session id of 0: the session that was named has expired."""

    session_id: int
    password: bytes
    timeout_s: float


def _string(text: str) -> bytes:
    data = text.encode()
    return _I32.pack(len(data)) + data


# world:anyone may do everything; `auth` stands for whoever the connection authenticated as.
_OPEN_ACL = _I32.pack(1) + _I32.pack(31) + _string("world") + _string("anyone")
_CREATOR_ACL = _I32.pack(1) + _I32.pack(31) + _string("auth") + _string("")


def frame(xid: int, opcode: int, record: bytes) -> bytes:
    """A request as it is sent."""
    return _FRAME_HEADER.pack(len(record) + 8, xid, opcode) + record


def get_data(path: str) -> Request:
    """Answered by `decode_data`."""
    return Request(Opcode.GET_DATA, _string(path) + b"\0")


def exists(path: str) -> Request:
    """Answered by `decode_stat`."""
    return Request(Opcode.EXISTS, _string(path) + b"\0")


def get_children(path: str) -> Request:
    """Answered by `decode_children`."""
    return Request(Opcode.GET_CHILDREN, _string(path) + b"\0")


def sync(path: str) -> Request:
    """Brings the server up to what the leader had when it got this; the requests behind it see that."""
    return Request(Opcode.SYNC, _string(path))


def create(path: str, value: bytes | None, *, ephemeral: bool = False, private: bool = False) -> Request:
    """A value of None is null; `private`: only who made it may use it, which needs authentication."""
    data = _I32.pack(-1) if value is None else _I32.pack(len(value)) + value
    flags = _I32.pack(_EPHEMERAL_FLAG if ephemeral else 0)
    return Request(Opcode.CREATE, _string(path) + data + (_CREATOR_ACL if private else _OPEN_ACL) + flags)


def set_data(path: str, value: bytes, version: int) -> Request:
    """Raises the version by one."""
    return Request(Opcode.SET_DATA, _string(path) + _I32.pack(len(value)) + value + _I32.pack(version))


def delete(path: str, version: int) -> Request:
    """A node with children stays."""
    return Request(Opcode.DELETE, _string(path) + _I32.pack(version))


def check_version(path: str, version: int) -> Request:
    """For a multi only."""
    return Request(Opcode.CHECK, _string(path) + _I32.pack(version))


def multi(requests: Sequence[Request]) -> Request:
    """All or nothing. Answered by `decode_multi_errors`."""
    parts: list[bytes] = []
    for request in requests:
        parts += (_MULTI_HEADER.pack(request.opcode, False, -1), request.record)
    return Request(Opcode.MULTI, b"".join(parts) + _MULTI_END)


def add_watch(path: str) -> Request:
    """A persistent, recursive watch (ZooKeeper 3.6), which ends with the connection."""
    return Request(Opcode.ADD_WATCH, _string(path) + _I32.pack(_WATCH_RECURSIVE))


def remove_watches(path: str) -> Request:
    """All watches that this connection has on the path."""
    record: bytes = RemoveWatchesRequest(path=path, type=_WATCH_ANY).serialize()[4:]
    return Request(Opcode.REMOVE_WATCHES, record)


def connect_frame(last_zxid: int, timeout_s: float, session_id: int, password: bytes) -> bytes:
    """The first frame of a connection. A session id of 0 asks for a new session."""
    record: bytes = ConnectRequest(
        protocol_version=0, last_seen_zxid=last_zxid, timeout=round(timeout_s * 1000),
        session_id=session_id, password=password or bytes(16), read_only=False,
    ).serialize()  # fmt: skip
    return _I32.pack(len(record)) + record


def auth_frame(credentials: str) -> bytes:
    """Authenticates as `user:password` by the scheme `digest`."""
    record: bytes = AuthRequest(type=0, scheme=_DIGEST, auth=credentials).serialize(xid=XID_AUTH)
    return _I32.pack(len(record)) + record


def decode_handshake(data: bytes) -> Handshake:
    """Raises MalformedFrame: this is no ZooKeeper."""
    try:
        answer = ConnectResponse.deserialize(data)
    except (struct.error, UnicodeDecodeError) as error:
        raise MalformedFrame("the answer to the first frame is not ZooKeeper's") from error
    if answer.protocol_version != 0 or answer.password is None or answer.timeout < 0:
        raise MalformedFrame("the answer to the first frame is not ZooKeeper's")
    return Handshake(answer.session_id if answer.timeout else 0, answer.password, answer.timeout / 1000)


def decode_header(data: bytes) -> tuple[int, int, int]:
    """Xid, zxid and error of an answer."""
    try:
        return _ANSWER_HEADER.unpack_from(data)
    except struct.error as error:
        raise MalformedFrame(f"an answer of {len(data)} bytes has no header") from error


def decode_event(data: bytes) -> str:
    """The path of the node of which a watch reports a change."""
    try:
        event = WatchEvent.parse(data, HEADER_BYTES)[0]
    except (struct.error, UnicodeDecodeError) as error:
        raise MalformedFrame(f"a watch event cannot be decoded: {error}") from error
    path: str = event.path
    return path


def decode_data(data: bytes) -> Data:
    """Of the answer to `get_data`."""
    try:
        size = _I32.unpack_from(data, HEADER_BYTES)[0]
        start = HEADER_BYTES + 4
        end = start + max(size, 0)
        version = _I32.unpack_from(data, end + _VERSION_IN_STAT)[0]
    except struct.error as error:
        raise MalformedFrame(f"a node cannot be decoded: {error}") from error
    return Data(data[start:end] if size >= 0 else None, version)


def decode_stat(data: bytes) -> Stat:
    """Of the answer to `exists`."""
    try:
        version = _I32.unpack_from(data, HEADER_BYTES + _VERSION_IN_STAT)[0]
        return Stat(version, *_SIZES_IN_STAT.unpack_from(data, HEADER_BYTES + _SIZES_OFFSET))
    except struct.error as error:
        raise MalformedFrame(f"a node cannot be decoded: {error}") from error


def decode_children(data: bytes) -> list[str]:
    """Names of the answer to `get_children`, in no order."""
    names: list[str] = []
    unpack, total = _I32.unpack_from, len(data)
    try:
        (count,) = unpack(data, HEADER_BYTES)
        at = HEADER_BYTES + 4
        for _ in range(count):
            end = at + 4 + unpack(data, at)[0]
            if end < at + 4 or end > total:
                raise MalformedFrame(f"a name of {end - at - 4} bytes in a listing of {total}")
            names.append(data[at + 4 : end].decode())
            at = end
    except (struct.error, UnicodeDecodeError) as error:
        raise MalformedFrame(f"a listing cannot be decoded: {error}") from error
    return names


def decode_multi_errors(data: bytes) -> list[int]:
    """The error of each operation of a multi that failed; [] if it did not."""
    errors: list[int] = []
    at = HEADER_BYTES
    try:
        while True:
            kind, done, error = _MULTI_HEADER.unpack_from(data, at)
            if done or kind != -1:  # the first result of a multi that succeeded is no error
                return errors
            errors.append(error)
            at += _MULTI_HEADER.size + 4  # the error stands in the header and again in the record
    except struct.error as failure:
        raise MalformedFrame(f"the answer to a multi cannot be decoded: {failure}") from failure

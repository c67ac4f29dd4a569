"""A model of a ZooKeeper ensemble for the simulation: its protocol, sessions and tree, in virtual time.

    model = ModelZooKeeper(loop)
    url = model.start(servers=3)               # processes zk-1, zk-2, zk-3 of the simulation, each a host of its name
    loop.processes["zk-1"].pause(3)            # and whatever else the simulation does to processes and links

A server shows a write `lags[host]` seconds after it was done, but at once to the connection that did it or asks for a
sync; a watch event comes when the server shows the change. A session ends exactly its timeout after the receipt of its last
request, the earliest that a real one may.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from dataclasses import dataclass
from typing import Any

from aiozk.protocol import (
    CheckVersionRequest,
    ConnectRequest,
    CreateRequest,
    DeleteRequest,
    GetDataRequest,
    SetDataRequest,
    WatchEvent,
)
from aiozk.protocol.stat import Stat

from magnetar.metadata.zookeeper.wire import Opcode, ZooKeeperError
from support.sim import SimLoop

_CREATED, _DELETED, _CHANGED = 1, 2, 3
_MULTI_HEADER = struct.Struct(">i?i")
# Requests of which the model reads nothing but the path.
_PATH_ONLY = {Opcode.GET_DATA, Opcode.EXISTS, Opcode.GET_CHILDREN}


class Refused(Exception):
    """An error code."""

    def __init__(self, code: int) -> None:
        self.code = code


@dataclass
class Node:
    value: bytes | None
    version: int = 0
    owner: int = 0  # the session of an ephemeral


@dataclass
class Session:
    timeout_s: float
    heard_at: float
    door: Door | None = None
    ended: bool = False


class ModelZooKeeper:
    """See the module docstring."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.nodes: dict[str, Node] = {"/": Node(b"")}
        self.sessions: dict[int, Session] = {}
        self.zxid = 0  # of the newest state
        self.states: list[dict[str, Node]] = [self.nodes]  # by zxid
        self.lags: dict[str, float] = {}
        self.doors: dict[Door, None] = {}

    def start(self, servers: int = 3) -> str:
        """Its URL."""
        for number in range(1, servers + 1):
            process = self.loop.start_process(f"zk-{number}")
            process.spawn(self._serve(f"zk-{number}"))
        return "zk://" + ",".join(f"zk-{number}:2181" for number in range(1, servers + 1))

    async def _serve(self, host: str) -> None:
        await asyncio.get_running_loop().create_server(lambda: Door(self, host), host, 2181)

    # --- sessions ----------------------------------------------------------------------------------------------------

    def introduce(self, door: Door, session_id: int, timeout_s: float) -> int:
        """The session's id; 0 if it has ended."""
        if session_id == 0:
            session_id = len(self.sessions) + 1
            self.sessions[session_id] = Session(timeout_s, self.loop.now)
        session = self.sessions[session_id]
        if session.ended:
            return 0
        session.door = door
        self.touch(session_id)
        return session_id

    def touch(self, session_id: int) -> None:
        """A request of the session has arrived."""
        session = self.sessions[session_id]
        session.heard_at = self.loop.now
        due = session.heard_at + session.timeout_s
        self.loop.happens_at(due, lambda: self._look(session_id, due))

    def _look(self, session_id: int, due: float) -> None:
        session = self.sessions[session_id]
        if not session.ended and session.heard_at + session.timeout_s <= due:
            self.end(session_id)

    def end(self, session_id: int) -> None:
        """Its ephemerals vanish."""
        self.sessions[session_id].ended = True
        nodes = self._copy()
        events = [(path, _DELETED) for path, node in nodes.items() if node.owner == session_id]
        for path, _ in events:
            del nodes[path]
        self._done(nodes, events)

    # --- the tree ----------------------------------------------------------------------------------------------------

    def write(self, session_id: int, operations: list[tuple[int, Any]]) -> None:
        """All or nothing. Refused, with the place of the operation in `place`."""
        nodes = self._copy()
        events: list[tuple[str, int]] = []
        for place, (opcode, record) in enumerate(operations):
            try:
                events += self._apply(nodes, session_id, opcode, record)
            except Refused as refusal:
                refusal.place = place  # type: ignore[attr-defined]
                raise
        self._done(nodes, events)

    def _copy(self) -> dict[str, Node]:
        return {path: Node(node.value, node.version, node.owner) for path, node in self.nodes.items()}

    def _done(self, nodes: dict[str, Node], events: list[tuple[str, int]]) -> None:
        self.nodes = nodes
        self.states.append(nodes)
        self.zxid = zxid = len(self.states) - 1
        for door in list(self.doors):
            door.changed(zxid, events)
            lag_s = self.lags.get(door.host, 0.0)
            if lag_s:
                self.loop.happens_at(self.loop.now + lag_s, lambda door=door: door.advance(zxid))  # type: ignore[misc]
            else:
                door.advance(zxid)

    def _apply(
        self, nodes: dict[str, Node], session_id: int, opcode: int, record: Any
    ) -> list[tuple[str, int]]:
        path = record.path
        node = nodes.get(path)
        if opcode == Opcode.CREATE:
            parent = nodes.get(path.rpartition("/")[0] or "/")
            if node is not None:
                raise Refused(ZooKeeperError.NODE_EXISTS)
            if parent is None:
                raise Refused(ZooKeeperError.NO_NODE)
            if parent.owner:
                raise Refused(ZooKeeperError.NO_CHILDREN_FOR_EPHEMERALS)
            nodes[path] = Node(record.data, owner=session_id if record.flags & 1 else 0)
            return [(path, _CREATED)]
        if node is None:
            raise Refused(ZooKeeperError.NO_NODE)
        if record.version not in (-1, node.version):
            raise Refused(ZooKeeperError.BAD_VERSION)
        if opcode == Opcode.DELETE:
            if children(nodes, path):
                raise Refused(ZooKeeperError.NOT_EMPTY)
            del nodes[path]
            return [(path, _DELETED)]
        if opcode == Opcode.SET_DATA:
            node.value, node.version = record.data, node.version + 1
            return [(path, _CHANGED)]
        return []


class Door(asyncio.Protocol):
    """A connection, on the server's side."""

    def __init__(self, model: ModelZooKeeper, host: str) -> None:
        self.host = host
        self._model = model
        self._zxid = model.zxid  # of the state that it shows
        self._watched: dict[str, None] = {}
        self._events: list[tuple[int, str, int]] = []  # of states that it does not show yet
        self._transport: Any = None
        self._buffer = b""
        self._session_id = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._model.doors[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._model.doors.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "big")
            if len(self._buffer) < 4 + size:
                return
            frame, self._buffer = self._buffer[4 : 4 + size], self._buffer[4 + size :]
            self._handle(frame)

    def changed(self, zxid: int, events: list[tuple[str, int]]) -> None:
        """There is another state."""
        self._events += [(zxid, path, kind) for path, kind in events]

    def advance(self, zxid: int) -> None:
        """Shows that state, unless it shows a newer one."""
        self._zxid = max(self._zxid, zxid)
        while self._events and self._events[0][0] <= self._zxid:
            _, path, kind = self._events.pop(0)
            if any(
                path == watched or path.startswith(watched.rstrip("/") + "/") for watched in self._watched
            ):
                self._answer(-1, b"".join(_render(WatchEvent(type=kind, state=3, path=path))), 0)

    def _handle(self, frame: bytes) -> None:
        model = self._model
        if not self._session_id:
            asked = ConnectRequest.parse(frame, 0)[0]
            timeout_s = asked.timeout / 1000
            self.advance(asked.last_seen_zxid)  # a real server that is behind refuses
            self._session_id = model.introduce(self, asked.session_id, timeout_s)
            granted = asked.timeout if self._session_id else 0
            self._send(struct.pack(">iiqi", 0, granted, self._session_id, 16) + bytes(17))
            return
        session = model.sessions[self._session_id]
        if session.ended or session.door is not self:
            self._transport.close()
            return
        model.touch(self._session_id)
        xid, opcode = struct.unpack_from(">ii", frame)
        try:
            answer = self._request(opcode, frame)
        except Refused as refusal:
            self._answer(xid, b"", refusal.code)
        else:
            self._answer(xid, answer, 0)

    def _request(self, opcode: int, frame: bytes) -> bytes:
        model = self._model
        if opcode in (Opcode.PING, Opcode.REMOVE_WATCHES):
            return b""
        if opcode == Opcode.SYNC:
            self.advance(model.zxid)
            return b""
        if opcode == Opcode.CLOSE_SESSION:
            model.end(self._session_id)
            return b""
        if opcode == Opcode.MULTI:
            return self._multi(frame)
        if opcode == Opcode.ADD_WATCH:
            size = int.from_bytes(frame[8:12], "big")
            self._watched[frame[12 : 12 + size].decode()] = None
            return b""
        if opcode in _PATH_ONLY:
            return self._read(opcode, GetDataRequest.parse(frame, 8)[0].path)
        record = _RECORDS[opcode].parse(frame, 8)[0]
        self._write([(opcode, record)])
        return b""

    def _write(self, operations: list[tuple[int, Any]]) -> None:
        try:
            self._model.write(self._session_id, operations)
        finally:
            # A write that is refused goes through the same log as the others, so the server shows what is before it.
            self.advance(self._model.zxid)

    def _read(self, opcode: int, path: str) -> bytes:
        nodes = self._model.states[self._zxid]
        node = nodes.get(path)
        if node is None:
            raise Refused(ZooKeeperError.NO_NODE)
        names = children(nodes, path)
        if opcode == Opcode.GET_CHILDREN:
            encoded = [name.encode() for name in names]
            return struct.pack(">i", len(names)) + b"".join(
                struct.pack(">i", len(name)) + name for name in encoded
            )
        stat = Stat(**{name: 0 for name, _ in Stat.parts} | {
            "version": node.version, "data_length": len(node.value or b""), "num_children": len(names),
            "last_modified_children": zlib.crc32("/".join(names).encode()),  # another one for another list
        })  # fmt: skip
        rendered = b"".join(_render(stat))
        if opcode == Opcode.EXISTS:
            return rendered
        value = node.value
        return (struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value) + rendered

    def _multi(self, frame: bytes) -> bytes:
        operations: list[tuple[int, Any]] = []
        at = 8
        while True:
            opcode, done, _ = _MULTI_HEADER.unpack_from(frame, at)
            at += _MULTI_HEADER.size
            if done:
                break
            record, at = _RECORDS[opcode].parse(frame, at)
            operations.append((opcode, record))
        end = _MULTI_HEADER.pack(-1, True, -1)
        try:
            self._write(operations)
        except Refused as refusal:
            place: int = refusal.place  # type: ignore[attr-defined]
            codes = [0] * place + [refusal.code] + [-2] * (len(operations) - place - 1)
            return (
                b"".join(_MULTI_HEADER.pack(-1, False, code) + struct.pack(">i", code) for code in codes)
                + end
            )
        # The client looks no further than the first result of a multi that succeeded.
        return _MULTI_HEADER.pack(int(Opcode.CHECK), False, 0) + end

    def _answer(self, xid: int, record: bytes, error: int) -> None:
        self._send(struct.pack(">iqi", xid, self._zxid, error) + record)

    def _send(self, record: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(struct.pack(">i", len(record)) + record)


_RECORDS: dict[int, Any] = {
    Opcode.CREATE: CreateRequest,
    Opcode.DELETE: DeleteRequest,
    Opcode.SET_DATA: SetDataRequest,
    Opcode.CHECK: CheckVersionRequest,
}


def children(nodes: dict[str, Node], path: str) -> list[str]:
    """Names below."""
    stem = path.rstrip("/") + "/"
    below = (node[len(stem) :] for node in nodes if node.startswith(stem))
    return [name for name in below if name and "/" not in name]


def _render(part: Any) -> list[bytes]:
    fmt, data = part.render()
    return [struct.pack("!" + fmt, *data)]

"""Entries of a cursor ledger (FORMATS.md): a snapshot, then deltas."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from magnetar.proto.errors import DataDirectoryError

from .core.acks import AckState, Position, Snapshot, Topology

_KIND_SNAPSHOT = b"\x01"
_KIND_DELTA = b"\x02"
_MARK = struct.Struct(">QQI")
_ROW = struct.Struct(">QQIII")  # ledger, entry, first, last, message count of the entry

AckRowWithCount = tuple[int, int, int, int, int]


def encode_delta(mark_delete: Position, rows: list[AckRowWithCount]) -> bytes:
    """One entry of a cursor ledger: where the mark-delete position is, and what is acknowledged beyond it."""
    pack = _ROW.pack
    return b"".join([_KIND_DELTA, _MARK.pack(*mark_delete), *[pack(*row) for row in rows]])


def encode_snapshot(state: AckState) -> bytes:
    """One entry of a cursor ledger that makes all before it superfluous."""
    return _KIND_SNAPSHOT + msgspec.msgpack.encode(state.snapshot())


def replay(state: AckState, topology: Topology, payload: bytes) -> AckState:
    """Applies one entry of a cursor ledger. Raises DataDirectoryError."""
    kind = payload[:1]
    try:
        if kind == _KIND_SNAPSHOT:
            return AckState.restore(topology, msgspec.msgpack.decode(payload[1:], type=Snapshot))
        if kind == _KIND_DELTA:
            for row in _ROW.iter_unpack(payload[1 + _MARK.size :]):
                state.ack(*row)
            state.move_to(_MARK.unpack_from(payload, 1))
            return state
    except (struct.error, msgspec.MsgspecError) as error:
        raise DataDirectoryError(f"an entry of a cursor ledger is damaged: {error!r}") from error
    raise DataDirectoryError(f"an entry of a cursor ledger is of unknown kind {kind!r}")


def describe(payload: bytes) -> dict[str, Any]:
    """What an entry of a cursor ledger says, for people: `kind` and `content`. Raises DataDirectoryError."""
    kind = payload[:1]
    try:
        if kind == _KIND_SNAPSHOT:
            snapshot = msgspec.msgpack.decode(payload[1:], type=Snapshot)
            return {"kind": "cursor snapshot", "content": msgspec.to_builtins(snapshot)}
        if kind == _KIND_DELTA:
            rows = [list(row) for row in _ROW.iter_unpack(payload[1 + _MARK.size :])]
            mark_delete = list(_MARK.unpack_from(payload, 1))
            return {"kind": "cursor delta", "content": {"mark_delete": mark_delete, "rows": rows}}
    except (struct.error, msgspec.MsgspecError) as error:
        raise DataDirectoryError(f"an entry of a cursor ledger is damaged: {error!r}") from error
    raise DataDirectoryError(f"an entry of a cursor ledger is of unknown kind {kind!r}")

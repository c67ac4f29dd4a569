"""Entries of a cursor ledger (FORMATS.md): a snapshot, then deltas of acknowledgements and of redelivery counts."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from magnetar.proto.errors import DataDirectoryError

from .core.acks import AckState, Position, Snapshot, Topology
from .core.redeliveries import RedeliveryCounts, RedeliveryRow

_KIND_SNAPSHOT = b"\x01"
_KIND_DELTA = b"\x02"
_KIND_REDELIVERIES = b"\x03"
_COUNT = struct.Struct(">I")
_MARK = struct.Struct(">QQI")
_ROW = struct.Struct(">QQIII")  # ledger, entry, first, last, message count of the entry

AckRowWithCount = tuple[int, int, int, int, int]


def encode_delta(mark_delete: Position, rows: list[AckRowWithCount]) -> bytes:
    """One entry of a cursor ledger: where the mark-delete position is, and what is acknowledged beyond it."""
    pack = _ROW.pack
    return b"".join([_KIND_DELTA, _MARK.pack(*mark_delete), *[pack(*row) for row in rows]])


def encode_redeliveries(rows: list[RedeliveryRow], rewinds: list[Position]) -> bytes:
    """One entry of a cursor ledger: redelivery counts that changed, and all read positions from which it went back."""
    parts = [_KIND_REDELIVERIES, _COUNT.pack(len(rewinds)), *[_MARK.pack(*position) for position in rewinds]]
    return b"".join(parts + [_ROW.pack(*row) for row in rows])


def _decode_redeliveries(payload: bytes) -> tuple[list[RedeliveryRow], list[Position]]:
    (count,) = _COUNT.unpack_from(payload, 1)
    rows = 1 + _COUNT.size + count * _MARK.size
    if len(payload) < rows:
        raise struct.error(f"{count} read positions do not fit into {len(payload)} bytes")
    rewinds = list(_MARK.iter_unpack(payload[1 + _COUNT.size : rows]))
    return list(_ROW.iter_unpack(payload[rows:])), rewinds


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """One entry of a cursor ledger that makes all before it superfluous."""
    return _KIND_SNAPSHOT + msgspec.msgpack.encode(snapshot)


def replay(state: AckState, counts: RedeliveryCounts, topology: Topology, payload: bytes) -> AckState:
    """Applies one entry of a cursor ledger; `counts` is changed in place. Raises DataDirectoryError."""
    kind = payload[:1]
    try:
        if kind == _KIND_SNAPSHOT:
            snapshot = msgspec.msgpack.decode(payload[1:], type=Snapshot)
            counts.restore(snapshot.redeliveries, snapshot.rewinds)
            return AckState.restore(topology, snapshot)
        if kind == _KIND_DELTA:
            for row in _ROW.iter_unpack(payload[1 + _MARK.size :]):
                state.ack(*row)
            state.move_to(_MARK.unpack_from(payload, 1))
            return state
        if kind == _KIND_REDELIVERIES:
            rows, counts.rewinds = _decode_redeliveries(payload)
            for row in rows:
                counts.set_row(row)
            counts.clear_changes()
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
        if kind == _KIND_REDELIVERIES:
            counted, rewinds = _decode_redeliveries(payload)
            content = {"rewinds": [list(one) for one in rewinds], "rows": [list(row) for row in counted]}
            return {"kind": "cursor redeliveries", "content": content}
    except (struct.error, msgspec.MsgspecError) as error:
        raise DataDirectoryError(f"an entry of a cursor ledger is damaged: {error!r}") from error
    raise DataDirectoryError(f"an entry of a cursor ledger is of unknown kind {kind!r}")

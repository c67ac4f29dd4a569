"""What clients say: names that they choose (of leases, transactions, queries), and payloads of rows."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from magnetar.proto.errors import InvalidArgument

MAX_NAME_CHARS = 255
R = TypeVar("R", bound=tuple[Any, ...])


def check_text(what: str, name: str) -> str:
    """Returns `name`, or raises InvalidArgument."""
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise InvalidArgument(
            f"not a name for a {what}: {name[:40]!r} (want 1 to {MAX_NAME_CHARS} printable characters)"
        )
    return name


def decode_rows(what: str, payload: bytes, row: type[R], most: int) -> list[R]:
    """The payload of a request: a msgpack array of at most so many rows. Raises InvalidArgument."""
    try:
        rows = msgspec.msgpack.decode(payload, type=list[row])  # type: ignore[valid-type]
    except msgspec.MsgspecError as error:
        fields = ", ".join(row._fields)  # type: ignore[attr-defined]
        raise InvalidArgument(f"{what}: not a msgpack array of [{fields}]: {error}") from None
    if len(rows) > most:
        raise InvalidArgument(f"{what}: {len(rows)} rows; at most {most} at once")
    return rows

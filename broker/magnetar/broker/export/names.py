"""Texts that clients choose: leases, transactions, queries."""

from __future__ import annotations

from magnetar.proto.errors import InvalidArgument

MAX_NAME_CHARS = 255


def check_text(what: str, name: str) -> str:
    """Returns `name`, or raises InvalidArgument."""
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise InvalidArgument(
            f"not a name for a {what}: {name[:40]!r} (want 1 to {MAX_NAME_CHARS} printable characters)"
        )
    return name

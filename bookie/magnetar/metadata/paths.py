"""Paths in the metadata store that several rooms know."""

from __future__ import annotations

__all__ = ["LEDGERS_PATH", "ledger_of_name", "ledger_path"]

LEDGERS_PATH = "/ledgers"
_NAME_DIGITS = 20


def ledger_path(ledger_id: int) -> str:
    """The node of a ledger's metadata."""
    return f"{LEDGERS_PATH}/{ledger_id:0{_NAME_DIGITS}d}"


def ledger_of_name(name: str) -> int | None:
    """The ledger of a name below LEDGERS_PATH; None if no release so far made such a name."""
    return int(name) if len(name) == _NAME_DIGITS and name.isascii() and name.isdigit() else None

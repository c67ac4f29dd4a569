"""Paths in the metadata store that several rooms know."""

from __future__ import annotations

__all__ = ["COOKIES_PATH", "INSTANCE_PATH", "LEDGERS_PATH", "cookie_path", "ledger_of_name", "ledger_path"]

LEDGERS_PATH = "/ledgers"
# A cluster is what shares one metadata store: its instance, 64 random bits, is made once.
INSTANCE_PATH = "/instance"
COOKIES_PATH = "/cookies"
_NAME_DIGITS = 20


def ledger_path(ledger_id: int) -> str:
    """The node of a ledger's metadata."""
    return f"{LEDGERS_PATH}/{ledger_id:0{_NAME_DIGITS}d}"


def ledger_of_name(name: str) -> int | None:
    """The ledger of a name below LEDGERS_PATH; None if no release so far made such a name."""
    return int(name) if len(name) == _NAME_DIGITS and name.isascii() and name.isdigit() else None


def cookie_path(bookie_id: str) -> str:
    """The node that knows which data directory a bookie has."""
    return f"{COOKIES_PATH}/{bookie_id}"

"""Paths in the metadata store that several rooms know."""

from __future__ import annotations

__all__ = ["COOKIES_PATH", "INSTANCE_PATH", "cookie_path"]

# A cluster is what shares one metadata store: its instance, 64 random bits, is made once.
INSTANCE_PATH = "/instance"
COOKIES_PATH = "/cookies"


def cookie_path(bookie_id: str) -> str:
    """The node that knows which data directory a bookie has."""
    return f"{COOKIES_PATH}/{bookie_id}"

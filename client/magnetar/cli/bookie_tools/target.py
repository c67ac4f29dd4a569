"""Which bookie an operator's command is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Target(NamedTuple):
    """The options by which the daemon was started, or (`bookie`) "host:port" where it answers HTTP."""

    data: str | None = None
    config: str | None = None
    assignments: Sequence[str] | None = None
    bookie: str | None = None

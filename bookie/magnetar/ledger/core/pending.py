"""One outstanding add."""

from __future__ import annotations

from typing import Any


class PendingAdd:
    """An entry on its way. A plain slotted class: one is made per entry."""

    __slots__ = ("acked", "context", "entry", "length")

    def __init__(self, entry: bytes, length: int, context: Any) -> None:
        self.entry = entry  # as stored: header and payload; the same object for every bookie
        self.length = length  # payload bytes of the ledger up to and with this entry
        self.context = context  # what the shell gave to `append`: the confirm callback
        self.acked = 0  # bits: positions of the ensemble that stored it; only ever bits of its write set

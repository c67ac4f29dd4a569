"""Bookies of an ensemble that refuse adds because they have too much to do, and that have no replacement."""

from __future__ import annotations

from collections.abc import Iterator

from .events import PendingAdd
from .metadata import Bookies


class BusyBookies:
    """What they refused since the last pause, by position; sent to them again as long as it is not confirmed."""

    def __init__(self) -> None:
        self.refused: dict[int, dict[int, None]] = {}  # position -> entry ids, in the order of their refusal
        self.under_replicated = 0  # adds that were refused, and confirmed without them

    def refuse(self, position: int, entry_id: int) -> bool:
        """One more. False if this position is known to be busy: what to do about it was decided."""
        first = position not in self.refused
        self.refused.setdefault(position, {})[entry_id] = None
        return first

    def take(
        self, last_add_confirmed: int, pending: Iterator[PendingAdd], bookies: Bookies
    ) -> list[tuple[int, str, list[tuple[int, bytes]]]]:
        """The pause is over: (position, bookie, adds to send again). `pending` begins after `last_add_confirmed`."""
        entries = dict(enumerate(pending, last_add_confirmed + 1))
        again = []
        for position, refused in self.refused.items():
            left = [entry_id for entry_id in refused if entry_id in entries]
            self.under_replicated += len(refused) - len(left)
            adds = [(e, entries[e].entry) for e in left if not entries[e].acked & 1 << position]
            if adds:
                again.append((position, bookies[position], adds))
        self.refused.clear()
        return again

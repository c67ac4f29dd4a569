"""Messages that may end their consumers, where no redelivery is counted (rule 54).

A consumer without a dead-letter policy reports nothing that it hands out, so a lost connection counts nothing. Its program
was most likely at the first message that it had not acknowledged. One of which this is said again and again is named:

    connection lost --its first message is X--> losses of X + 1
    X acknowledged, or no loss of X within WINDOW_MS --> forgotten

For example X ends the program of a shared subscription: the next consumer has it first, and is lost as well.
"""

from __future__ import annotations

from ...cursors.core.acks import Position
from .entry_source import Acks

WINDOW_MS = 600_000
_MAX_REMEMBERED = 100  # messages; the one whose last loss is the oldest makes room


class LostConsumers:
    """Losses by the message that was first; times are those of the caller."""

    def __init__(self) -> None:
        # How many, and when the last one was; in that order.
        self._losses: dict[Position, tuple[int, int]] = {}

    def lost(self, first: Position, now_ms: int) -> None:
        """A connection was lost."""
        count, last_ms = self._losses.pop(first, (0, now_ms))
        self._losses[first] = (1 if now_ms - last_ms > WINDOW_MS else count + 1, now_ms)
        if len(self._losses) > _MAX_REMEMBERED:
            del self._losses[next(iter(self._losses))]

    def worst(self, acks: Acks, now_ms: int) -> tuple[int, Position]:
        """The message of most losses, and how many; 0: there is none that is not acknowledged."""
        worst = (0, (0, 0, 0))
        for position, (count, last_ms) in list(self._losses.items()):
            ledger, entry, index = position
            if now_ms - last_ms > WINDOW_MS or not acks.unacked(ledger, entry, index, index):
                del self._losses[position]
            elif count > worst[0]:
                worst = (count, position)
        return worst

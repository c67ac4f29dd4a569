"""Permits of a consumer, sans I/O.

Permits count messages that the ack set does not name, and bytes of batches. What the client may hold is the *window*;
granted again, in halves of the window, is what was taken from the queue. Unless receiver_queue_messages is set the window
grows, twofold up to 64 times, whenever the user finds the queue empty although the broker had spent all permits: then the
round trip of a FLOW is what the user waits for. It shrinks again when the queue stays full. `receiver_queue_bytes` bounds
it all, and the client's `QueueBudget` the bytes of all its windows together.
"""

from __future__ import annotations

from ..queue_budget import GUARANTEED_BYTES, QueueBudget

DEFAULT_WINDOW = 1000
LARGEST_GROWTH = 64
# The window halves after as many grants in a row during which the queue was never found empty.
QUIET_GRANTS = 16


class Window:
    """`granted` and `granted_bytes`: what the broker may still send; negative after an overshoot."""

    __slots__ = (
        "_asked",
        "_base",
        "_budget",
        "_charged",
        "_grows",
        "_quiet",
        "_spent",
        "bytes_limit",
        "granted",
        "granted_bytes",
        "messages_limit",
        "paused",
    )

    def __init__(self, messages: int | None, bytes_limit: int, budget: QueueBudget) -> None:
        self._budget = budget
        self._charged = 0  # of `budget.used`: this window's part
        self._asked = messages or DEFAULT_WINDOW, bytes_limit
        self.messages_limit = self._base = messages or DEFAULT_WINDOW
        self.bytes_limit = bytes_limit
        self._grows = messages is None
        self._quiet = 0
        self._spent = False  # the broker had (almost) no permits left when it was granted some last
        self.granted = 0
        self.granted_bytes = 0
        self.paused = False  # nothing is granted

    @property
    def has_permits(self) -> bool:
        """The broker may send something."""
        return self.granted > 0 and self.granted_bytes > 0

    def reset(self) -> None:
        """A new subscription at the broker has no permits."""
        self.granted = self.granted_bytes = 0

    def share(self, parts: int) -> None:
        """This is one of so many windows that share what was asked for."""
        messages, bytes_limit = self._asked
        self.messages_limit = self._base = max(messages // parts, 1)
        self.bytes_limit = max(bytes_limit // parts, 1)

    def received(self, messages: int, size: int) -> None:
        """A delivery spent permits."""
        self.granted -= messages
        self.granted_bytes -= size

    def grant(self, queued: int, queued_bytes: int) -> tuple[int, int] | None:
        """Messages and bytes to grant now, given what waits in the queue; None if it is too early."""
        self.charge(queued_bytes)
        if self.paused:
            return None
        available = self._charged + self._budget.limit - self._budget.used
        bytes_limit = min(self.bytes_limit, max(available, GUARANTEED_BYTES))
        messages = self.messages_limit - queued - self.granted
        size = bytes_limit - queued_bytes - self.granted_bytes
        if messages * 2 < self.messages_limit and size * 2 < bytes_limit:
            return None
        messages, size = max(messages, 0), max(size, 0)
        if not messages and not size:
            return None
        self._spent = self.granted * 4 <= self.messages_limit
        self._quiet += 1
        if self._quiet >= QUIET_GRANTS and self.messages_limit > self._base:
            self.messages_limit = max(self.messages_limit // 2, self._base)
            self._quiet = 0
        self.granted += messages
        self.granted_bytes += size
        self.charge(queued_bytes)
        return messages, size

    def charge(self, queued_bytes: int) -> None:
        """To be called when the queue or what was granted has changed: its part of the budget is what it has now."""
        held = max(self.granted_bytes, 0) + queued_bytes
        self._budget.used += held - self._charged
        self._charged = held

    def found_empty(self) -> None:
        """The user waits for a message."""
        self._quiet = 0
        if self._spent and self._grows and self.messages_limit < self._base * LARGEST_GROWTH:
            self.messages_limit *= 2
            self._spent = False

"""Backpressure of one connection, whichever protocol is spoken on it.

in     a publish that fills its topic's or the broker's budget stops reading from the connection; the budget's waker starts
       it again
out    delivery stops while the connection is not writable; then it goes on, beginning with another consumer each time
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..resources.budget import ByteBudget
from ..service.results import ConsumerOpened

_PUBLISH_REASON = "publish"


class Pausable(Protocol):
    """A connection."""

    @property
    def writable(self) -> bool:
        """False between high and low water."""

    def pause_reading(self, reason: str) -> None:
        """Until every reason is withdrawn."""

    def resume_reading(self, reason: str) -> None:
        """Withdraws a reason."""


class Backpressure:
    """See the module docstring."""

    def __init__(self, link: Pausable) -> None:
        self._link = link
        self._budgets: dict[int, ByteBudget] = {}  # that this connection waits for
        # Of the consumers in their order: whose turn it is when the connection is writable again.
        self._resume_at = 0
        self._closed = False

    def wait_for(self, budget: ByteBudget) -> None:
        """Stops reading until `budget` has room; its waker is `_has_room`."""
        if not self._closed and id(budget) not in self._budgets:
            self._budgets[id(budget)] = budget
            self._link.pause_reading(_PUBLISH_REASON)
            # One key a budget: two topics of this connection may both have to wait for the broker's.
            budget.wait((self, budget), lambda: self._has_room(budget))

    def _has_room(self, budget: ByteBudget) -> None:
        del self._budgets[id(budget)]
        if budget.full:  # its parent, or again
            self.wait_for(budget)
        elif not self._budgets:
            self._link.resume_reading(_PUBLISH_REASON)

    def writing_resumed(self, consumers: Sequence[ConsumerOpened]) -> None:
        """Delivery goes on with the consumer that the last call did not come to, so that each has its share."""
        first = self._resume_at % max(len(consumers), 1)
        for number, opened in enumerate([*consumers[first:], *consumers[:first]], first + 1):
            opened.subscription.writable(opened.consumer)
            if not self._link.writable:
                self._resume_at = number
                break

    def close(self) -> None:
        """The connection is gone."""
        self._closed = True
        for budget in self._budgets.values():
            budget.forget((self, budget))
        self._budgets.clear()

"""Defects of exclusive producers, for the scenario `exclusive`."""

from __future__ import annotations

from typing import Any

from magnetar.broker.topics.core.producers import NOT_ALONE, Producers
from magnetar.broker.topics.topic import Topic
from sim.defects.registry import exclusive_defect

producers: Any = Producers
topic: Any = Topic


@exclusive_defect
def epoch_is_not_durable() -> None:
    """An exclusive producer is let in under an epoch that the next owner of the topic knows nothing of."""

    async def only_in_memory(self: Any) -> int:
        self.producers.topic_epoch += 1
        return int(self.producers.topic_epoch)

    topic._store_epoch = only_in_memory


@exclusive_defect
def whoever_had_it_has_it_again() -> None:
    """Who comes back is let in under the epoch that it had, though another one was let in meanwhile."""
    access = producers._access

    def trusting(self: Any, claim: Any, now: float) -> Any:
        known, self.topic_epoch = self.topic_epoch, max(claim.topic_epoch, NOT_ALONE)
        try:
            return access(self, claim, now)
        finally:
            self.topic_epoch = known

    producers._access = trusting


@exclusive_defect
def fenced_producer_goes_on() -> None:
    """Who fences others is let in, and they learn nothing of it."""

    def fence(self: Any, sessions: Any, claims: Any, by: Any) -> None:
        self._entering = by
        for session in sessions:
            self._by_name.pop(session.name)

    producers._fence = fence

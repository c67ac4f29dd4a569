"""Defects of policies, for the scenario `once_policies`."""

from __future__ import annotations

from typing import Any

from magnetar.broker.topics.limits import TopicLimits
from magnetar.broker.topics.retention import Holder, Retention
from sim.defects.registry import policies_defect

limits: Any = TopicLimits
retention: Any = Retention


@policies_defect
def held_producers_never_go_on() -> None:
    """What held them has passed, or is removed, and nobody tells them."""
    limits._go_on = lambda self: None


@policies_defect
def retention_without_a_limit_keeps_nothing() -> None:
    """What its subscriptions have acknowledged is trimmed as if there were no retention."""
    retention._retained = lambda self, policies: Holder(self._ledgers.end, "")


@policies_defect
def a_rate_that_is_removed_stays() -> None:
    """A topic's limits are made of its policies when they are first known, and never again."""
    changed = limits.policies_changed

    def once(self: Any, subscriptions: Any) -> bool:
        return self.publish is None and bool(changed(self, subscriptions))

    limits.policies_changed = once

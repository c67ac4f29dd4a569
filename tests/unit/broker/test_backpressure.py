"""Backpressure of a connection: whom it reads from no more, and whose turn it is when it can be written to again."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

from magnetar.broker.listeners.backpressure import Backpressure
from magnetar.broker.resources.budget import ByteBudget


class Link:
    """A connection that takes `room` deliveries."""

    def __init__(self) -> None:
        self.room = 1 << 30
        self.reasons: set[str] = set()

    @property
    def writable(self) -> bool:
        """As long as there is room."""
        return self.room > 0

    def pause_reading(self, reason: str) -> None:
        """Notes it."""
        self.reasons.add(reason)

    def resume_reading(self, reason: str) -> None:
        """Withdraws it."""
        self.reasons.remove(reason)


def test_rule_44_nothing_is_read_until_every_budget_has_room() -> None:
    link, broker = Link(), ByteBudget(1000)
    one, other = ByteBudget(100, broker), ByteBudget(100, broker)
    backpressure = Backpressure(link)
    for budget in (one, other, one):
        budget.charge(100)
        backpressure.wait_for(budget)
    assert link.reasons == {"publish"}
    one.release(200)
    assert link.reasons == {"publish"}
    other.release(100)
    assert link.reasons == set()


def test_rule_44_room_in_a_topic_is_none_while_the_broker_has_none() -> None:
    link, broker = Link(), ByteBudget(200)
    one = ByteBudget(100, broker)
    backpressure = Backpressure(link)
    one.charge(100)
    broker.charge(100)
    backpressure.wait_for(one)
    one.release(60)
    broker.charge(60)  # somebody else's
    one.release(40)
    broker.charge(40)
    assert link.reasons == {"publish"}
    broker.release(200)
    assert link.reasons == set()


def test_rule_40_a_connection_that_is_gone_waits_for_nothing() -> None:
    link, budget = Link(), ByteBudget(100)
    backpressure = Backpressure(link)
    budget.charge(100)
    backpressure.wait_for(budget)
    backpressure.close()
    backpressure.wait_for(budget)  # by what its last read had
    assert budget.waiting == 0
    there = weakref.ref(backpressure)
    del backpressure
    gc.collect()
    assert there() is None


def test_each_consumer_has_its_turn_when_the_connection_takes_little() -> None:
    link = Link()
    backpressure = Backpressure(link)
    served: list[str] = []

    def deliver(consumer: str) -> None:
        served.append(consumer)
        link.room -= 1

    consumers: Any = [
        SimpleNamespace(subscription=SimpleNamespace(writable=deliver), consumer=one) for one in "abc"
    ]
    for _ in range(3):
        link.room = 2
        backpressure.writing_resumed(consumers)
    assert served == list("abcabc")
    link.room = 10
    backpressure.writing_resumed(consumers)
    backpressure.writing_resumed([])
    assert sorted(served[6:]) == list("abc")

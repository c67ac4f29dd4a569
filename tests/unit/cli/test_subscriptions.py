"""What the tables of subscriptions say of whoever is blocked, and of whom they wait for."""

from typing import Any, cast

import pytest

from magnetar.cli.commands.subscriptions import subscriptions_stats, table_of_subscriptions
from magnetar.cli.terminal.tables import Table

CONSUMER: dict[str, Any] = {
    "name": "ann", "active": True, "blocked_on_unacked_messages": False, "draining_slots": 0, "priority_level": 0,
    "permits": 1, "unacked_messages": 0, "delivered_messages": 0,
}  # fmt: skip


class Service:
    """A client whose topics have one subscription, with this consumer."""

    def __init__(self, consumer: dict[str, Any]) -> None:
        self.admin = self
        self._consumer = consumer

    async def topic_stats(self, topic: str) -> dict[str, Any]:
        found = {"mark_delete": None, "recovered_from": None, "consumers": [self._consumer]}
        return {"subscriptions": {"s": found}}


@pytest.mark.parametrize(
    ("changed", "state"),
    [
        ({}, ""),
        ({"active": False}, "waits for its place"),
        (
            {"blocked_on_unacked_messages": True, "draining_slots": 1200},
            "blocked: too many unacknowledged messages; others wait for 1,200 key slots that it holds",
        ),
    ],
)
async def test_the_state_of_a_consumer(changed: dict[str, Any], state: str) -> None:
    answer = await subscriptions_stats(cast(Any, Service({**CONSUMER, **changed})), "t", "s")
    _, consumers = answer.shown
    assert isinstance(consumers, Table)
    [row] = consumers.rows
    assert row[-1] == state


def blocked(**found: Any) -> str:
    """What the table says of a subscription."""
    [row] = table_of_subscriptions({"s": {"type": "shared", **found}}).rows
    return row[-1]


def test_what_blocks_a_subscription() -> None:
    assert blocked(consumers=[CONSUMER]) == ""
    consumers = [
        {**CONSUMER, "blocked_on_unacked_messages": True},
        {**CONSUMER, "name": "bob", "draining_slots": 7},
    ]
    assert (
        blocked(consumers=consumers, blocked_on_unacked_messages=True, unreadable_entries=[{}])
        == "unreadable entries, too many unacknowledged, ann: unacknowledged, keys wait for bob"
    )

"""What the tables of subscriptions say of whoever is blocked, and of whom they wait for."""

from typing import Any

from magnetar.cli.commands.subscriptions import _blocked, _state

CONSUMER: dict[str, Any] = {
    "name": "ann", "active": True, "blocked_on_unacked_messages": False, "draining_slots": 0,
}  # fmt: skip


def test_the_state_of_a_consumer() -> None:
    assert _state(CONSUMER) == ""
    assert _state({**CONSUMER, "active": False}) == "waits for its place"
    assert _state({**CONSUMER, "blocked_on_unacked_messages": True, "draining_slots": 1200}) == (
        "blocked: too many unacknowledged messages; others wait for 1,200 key slots that it holds"
    )


def test_what_blocks_a_subscription() -> None:
    assert _blocked({"consumers": [CONSUMER]}) == ""
    assert (
        _blocked(
            {
                "consumers": [
                    {**CONSUMER, "blocked_on_unacked_messages": True},
                    {**CONSUMER, "name": "bob", "draining_slots": 7},
                ],
                "blocked_on_unacked_messages": True,
                "unreadable_entries": [{}],
            }
        )
        == "unreadable entries, too many unacknowledged, ann: unacknowledged, keys wait for bob"
    )

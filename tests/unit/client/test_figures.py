"""Figures of a partitioned topic are those of its partitions together."""

from __future__ import annotations

from typing import Any

from magnetar.client.figures import compactions, together
from magnetar.proto import commands as c
from support.broker_kit import FakeClient, running_broker


def stats(number: int, **changed: Any) -> dict[str, Any]:
    """Of one partition, as a broker answers."""
    consumer = {"name": "c", "active": number == 1, "priority_level": 5, "unacked_messages": number}
    subscription = {
        "type": "shared", "durable": True, "epoch": 3, "mark_delete": [7, number, 0], "recovered_from": None,
        "backlog_messages": 2, "unreadable_entries": [], "consumers": [consumer],
    }  # fmt: skip
    compaction = {
        "state": "never",
        "error": "",
        "horizon": None,
        "compacted_ms": 0,
        "backlog_bytes": 5,
        "damaged": False,
    }
    return {
        "topic": f"persistent://public/default/orders-partition-{number}", "state": "writing", "messages_in": number,
        "bytes_in": 10 * number, "stored_messages": 3, "next_index": 9, "archive_locations": ["file:///a"],
        "trimmed_until": [1, 2, 3], "retained_by": "", "open_ledger": None, "degraded": number == 1,
        "producers": [{"name": "p", "epoch": number}], "ledgers": [], "subscriptions": {"billing": subscription},
        "unavailable_subscriptions": {}, "compaction": compaction, **changed,
    }  # fmt: skip


def test_figures_of_partitions_together() -> None:
    partitions = [stats(1), stats(2, subscriptions={}), stats(3)]
    found = together("orders", partitions)
    assert found["topic"] == "orders"
    assert found["partitions"] == partitions
    assert (found["messages_in"], found["bytes_in"], found["stored_messages"]) == (6, 60, 9)
    assert (
        not {"state", "next_index", "ledgers", "retained_by", "trimmed_until", "open_ledger"} & found.keys()
    )
    assert found["degraded"] is True
    assert found["producers"] == [{"name": "p"}]
    assert found["archive_locations"] == ["file:///a"]
    billing = found["subscriptions"]["billing"]
    assert (billing["type"], billing["durable"], billing["backlog_messages"]) == ("shared", True, 4)
    (consumer,) = billing["consumers"]
    assert consumer["name"] == "c"
    assert (consumer["active"], consumer["priority_level"], consumer["unacked_messages"]) == (True, 5, 4)
    assert found["compaction"]["state"] == "never"
    assert found["compaction"]["backlog_bytes"] == 15


async def test_nothing_is_said_of_the_whole_that_is_of_one_log() -> None:
    """A new figure of the broker is summed unless it is named in `figures`: it may be one that cannot be."""
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.consumer()
        found = together("orders", [await client.ask(c.TopicStats, "orders")] * 2)
    for part in (found, *found["subscriptions"].values()):
        for name, value in part.items():
            assert name == "partitions" or not (
                isinstance(value, list) and value and isinstance(value[0], int)
            ), name
    assert not {"state", "next_index", "ledgers", "retained_by"} & found.keys()


def test_compactions_together_say_what_is_worst() -> None:
    done = {
        "state": "done",
        "error": "",
        "compacted_ms": 5,
        "horizon": [1, 0, 0],
        "messages_read": 1,
        "damaged": False,
    }
    failed = {**done, "state": "failed", "error": "no bookie", "compacted_ms": 3}
    found = compactions([done, failed, {**failed, "error": ""}])
    assert found == {
        "state": "failed",
        "error": "no bookie",
        "compacted_ms": 5,
        "messages_read": 3,
        "damaged": False,
    }
    assert compactions([done, {**done, "state": "running"}])["state"] == "running"

"""`magnetar doctor` and `magnetar top`: what is seen only beside the others, and what people read."""

from __future__ import annotations

from typing import Any, cast

import pytest

from magnetar.cli.commands import diagnosis
from magnetar.cli.commands.diagnosis import _of_the_cluster, _shown, _tables


def broker(ahead_s: float = 0.0, **settings: Any) -> dict[str, Any]:
    return {"ahead_s": ahead_s, "topics": 1, "settings": {"ack_quorum": 2, **settings}, "findings": []}


def causes(found: dict[str, Any], failed: dict[str, str]) -> list[str]:
    return [f"{row['subject']}: {row['cause']}" for row in _of_the_cluster(found, failed)]


def test_brokers_that_are_alike_have_nothing_wrong() -> None:
    assert causes({"b1": broker(0.4), "b2": broker(-0.4)}, {}) == []


def test_clocks_settings_and_silent_brokers_are_compared() -> None:
    found = {"b1": broker(), "b2": broker(-90.0), "b3": broker(ack_quorum=1)}
    assert causes(found, {"b4": "connection refused"}) == [
        "broker b4: it is registered and does not answer: connection refused",
        "broker b2: its clock is 90 s behind this machine's",
        "settings of the brokers: broker.ack_quorum is 2 at b1, 2 at b2, 1 at b3",
    ]


async def test_what_a_broker_says_of_itself_and_its_health_to_all_is_shown_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def finding(subject: str) -> dict[str, str]:
        return {
            "severity": "warning",
            "subject": subject,
            "cause": "few copies",
            "consequence": "",
            "cure": "",
        }

    found = {"b1": broker(), "b2": broker()}
    found["b1"]["findings"] = [finding("broker b1, topics"), finding("topics")]
    found["b2"]["findings"] = [finding("broker b1, topics"), finding("repair")]

    async def of_each(*_: Any) -> Any:
        return found, {}

    monkeypatch.setattr(diagnosis, "of_each", of_each)
    answer = await diagnosis.doctor(cast(Any, None))
    assert [row["subject"] for row in answer.value["findings"]] == ["broker b1, topics", "repair"]


def test_a_finding_as_people_read_it() -> None:
    row = {
        "severity": "critical",
        "subject": "bookie b",
        "cause": "it is full",
        "consequence": "it stops",
        "cure": "free space",
    }
    assert _shown([row]) == "CRITICAL  bookie b\n  it is full\n  so:  it stops\n  do:  free space\n"
    other = {**row, "subject": "bookie c"}
    assert _shown([row, other]).count("so:") == 1


def test_the_tables_of_top() -> None:
    topic = {
        "topic": "persistent://public/default/orders", "message_rate_in": 1234.5, "byte_rate_in": 2_500_000.0,
        "message_rate_out": 0.5, "byte_rate_out": 0.0, "stored_bytes": 999, "producers": 1, "consumers": 0,
    }  # fmt: skip
    waiting = {
        "topic": "persistent://a/b/c", "subscription": "s", "backlog_messages": 5000, "oldest_ms": 36_000,
        "message_rate_out": 0.0, "acknowledge_rate": 0.0, "slowest_consumer": "x", "unacked_messages": 4000,
    }  # fmt: skip
    seen = {
        "brokers": [{**topic, "topic": "", "broker": "b1", "topics": 1, "connections": 2}],
        "failed": {"b2": "silent"},
        "topics": [topic],
        "subscriptions": [waiting],
        "bookies": [
            {
                "name": "k",
                "address": "h:1",
                "writable": False,
                "reason": "read-only: full",
                "free_bytes": 0,
                "zone": "",
            }
        ],
    }
    brokers, topics, subscriptions, bookies = _tables(seen)
    assert [row[0] for row in brokers.rows] == ["b1", "b2"]
    assert next(iter(topics.rows)) == ("orders", "1,234", "0.5", "2.5 MB", "0 B", "999 B", "1", "0")
    assert next(iter(subscriptions.rows)) == ("s", "a/b/c", "5,000", "36 s", "0", "0", "x (4,000)")
    assert next(iter(bookies.rows))[2] == "read-only: full"

"""Policies in Pulsar's JSON: what a real Pulsar takes is taken, and shown again as it was given."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.proto.errors import InvalidArgument
from magnetar.proto.policies import Policies
from magnetar.proto.policy_shapes import SHAPES, Shape, whole_of
from magnetar.proto.policy_table import BY_POLICY, DESCRIBED

# As recorded from a real Pulsar 4.0: what was set, and shown after that.
RECORDED: list[tuple[str, Any]] = [
    ("retention", {"retentionTimeInMinutes": 180, "retentionSizeInMB": 10240}),
    ("retention", {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}),
    ("messageTTL", 120),
    (
        "backlogQuota.destination_storage",
        {"limit": 10485760, "limitSize": 10485760, "limitTime": -1, "policy": "producer_request_hold"},
    ),
    (
        "backlogQuota.message_age",
        {"limit": -1, "limitSize": -1, "limitTime": 3600, "policy": "consumer_backlog_eviction"},
    ),
    (
        "persistence",
        {
            "bookkeeperEnsemble": 1,
            "bookkeeperWriteQuorum": 1,
            "bookkeeperAckQuorum": 1,
            "managedLedgerMaxMarkDeleteRate": 0.0,
        },
    ),
    ("publishRate", {"publishThrottlingRateInMsg": 1000, "publishThrottlingRateInByte": 1000000}),
    (
        "subscriptionDispatchRate",
        {
            "dispatchThrottlingRateInMsg": 300,
            "dispatchThrottlingRateInByte": -1,
            "relativeToPublishRate": False,
            "ratePeriodInSecond": 2,
        },
    ),
    ("subscribeRate", {"subscribeThrottlingRatePerConsumer": 5, "ratePeriodInSecond": 60}),
    ("deduplication", False),
    ("deduplicationSnapshotInterval", 500),
    ("delayedDelivery", {"tickTime": 2000, "active": True, "maxDeliveryDelayInMillis": 3600000}),
    (
        "inactiveTopicPolicies",
        {
            "inactiveTopicDeleteMode": "delete_when_no_subscriptions",
            "maxInactiveDurationSeconds": 3600,
            "deleteWhileInactive": True,
        },
    ),
    (
        "autoTopicCreation",
        {"allowAutoTopicCreation": True, "topicType": "partitioned", "defaultNumPartitions": 3},
    ),
    ("subscriptionTypesEnabled", ["Exclusive", "Key_Shared"]),
    ("subscriptionExpirationTime", 30),
    ("schemaCompatibilityStrategy", "BACKWARD"),
    ("offloadThreshold", 1073741824),
    ("offloadThresholdInSeconds", -1),
    ("offloadDeletionLagMs", 86400000),
    ("replication", ["standalone"]),
    ("persistence/bookieAffinity", {"bookkeeperAffinityGroupPrimary": "default"}),
]


@pytest.mark.parametrize(("name", "json"), RECORDED)
def test_what_pulsar_takes_is_taken_and_shown_again(name: str, json: Any) -> None:
    changes = SHAPES[name].read(json)
    policies = msgspec.convert(changes, Policies).check()
    assert SHAPES[name].show(policies.value) == json
    assert set(SHAPES[name].read(None).values()) == {None}


def test_what_is_not_given_is_shown_as_none() -> None:
    assert SHAPES["publishRate"].show({"publish_rate_messages": 5}.get) == {
        "publishThrottlingRateInMsg": 5,
        "publishThrottlingRateInByte": -1,
    }
    assert SHAPES["retention"].show({"retention_bytes": 1}.get) == {
        "retentionTimeInMinutes": -1,
        "retentionSizeInMB": 1,  # rounded up: 0 would mean that nothing is kept
    }
    assert SHAPES["backlogQuota.destination_storage"].read({"limit": 5, "policy": "producer_exception"}) == {
        "backlog_quota_bytes": 5,
        "backlog_quota_action": "refuse",
    }
    set_ones = Policies(message_ttl_ms=5_000, publish_rate_messages=5, backlog_quota_bytes=7)
    whole = whole_of(set_ones, "here")
    assert whole["message_ttl_in_seconds"] == 5
    assert whole["publishMaxMessageRate"] == {
        "here": {"publishThrottlingRateInMsg": 5, "publishThrottlingRateInByte": -1}
    }
    assert whole["backlog_quota_map"]["destination_storage"]["limit"] == 7
    assert "max_producers_per_topic" not in whole


def _values(policy: str) -> st.SearchStrategy[Any]:
    """That Pulsar can say as well."""
    row, kind = BY_POLICY[policy], Policies.__annotations__[policy]
    if kind.startswith("list"):
        return st.lists(st.sampled_from([*row.words] or ["a", "b"]), max_size=3)
    if kind.startswith("bool"):
        return st.booleans()
    if kind.startswith("float"):
        return st.floats(0, 100)
    if kind.startswith("str"):
        return st.sampled_from([*row.words.values()] or ["a"])
    least = max(row.least, 0)
    numbers = st.integers(least, 1 << 20).map(lambda number: number * row.scale)
    return numbers | st.just(-1) if row.least < 0 else numbers


@given(st.data(), st.sampled_from(sorted(SHAPES)))
def test_policies_come_back_from_pulsars_json(data: st.DataObject, name: str) -> None:
    shape: Shape = SHAPES[name]
    values = {policy: data.draw(_values(policy), policy) for policy in shape.keys.values()}
    assert shape.read(shape.show(values.get)) == values


@pytest.mark.parametrize(
    ("name", "json", "text"),
    [
        ("retention", 5, "retention is 5; want an object of retentionTimeInMinutes, retentionSizeInMB"),
        ("retention", {"time": 5}, "retention has no 'time'; it has retentionTimeInMinutes, retentionSizeInMB"),
        ("retention", {"retentionTimeInMinutes": 1, "retentionSizeInMB": 0}, "contradict each other"),
        ("messageTTL", -7, "message_ttl_ms is -7; want 0"),
        ("backlogQuota.message_age", {"policy": "never"}, "is 'never'; want hold or refuse or drop"),
        ("subscriptionTypesEnabled", ["Any"], "subscription_types is 'Any'; want exclusive or shared"),
    ],
)  # fmt: skip
def test_what_is_not_so_is_refused(name: str, json: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        msgspec.convert(SHAPES[name].read(json), Policies).check()


def test_the_table_and_the_fields_are_the_same() -> None:
    assert set(BY_POLICY) == set(Policies.__struct_fields__)
    assert len({row.option for row in DESCRIBED}) == len(DESCRIBED)
    assert {policy for shape in SHAPES.values() for policy in shape.keys.values()} == {
        policy for row in DESCRIBED if row.pulsar for policy in row.policies
    }

"""What an operator can lay down, and the errors for what cannot be."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from magnetar.proto.errors import InvalidArgument
from magnetar.proto.policies import Policies, decode_changes


@pytest.mark.parametrize(
    ("fields", "retention"),
    [
        ({}, None),
        ({"retention_ms": 5}, (5, -1)),
        ({"retention_bytes": 5}, (-1, 5)),
        ({"retention_ms": 0, "retention_bytes": 0}, (0, 0)),
        ({"retention_ms": -1, "retention_bytes": -1}, (-1, -1)),
        ({"message_ttl_ms": 0, "subscription_ttl_ms": {"a": 0, "b": 5}}, None),
    ],
)
def test_what_is_possible(fields: dict[str, Any], retention: tuple[int, int] | None) -> None:
    policies = Policies().changed(decode_changes(msgspec.msgpack.encode(fields)))
    assert policies == Policies(**fields)
    assert policies.retention == retention
    assert msgspec.to_builtins(policies) == fields, "what is not set is not stored"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"retention_ms": -2}, "retention_ms is -2; want 0 or more, or -1 for no limit"),
        ({"retention_bytes": 1 << 53}, "retention_bytes is 9007199254740992; want"),
        ({"retention_ms": 0}, "retention_ms=0 and retention_bytes=-1 contradict each other: 0 keeps nothing. Set both to 0"),
        ({"retention_ms": 5, "retention_bytes": 0}, "contradict each other"),
        ({"message_ttl_ms": -1}, r"message_ttl_ms is -1; want 0 \(infinite\) or more"),
        ({"subscription_ttl_ms": {"a": -1}}, "subscription_ttl_ms of 'a' is -1; want 0"),
        ({"subscription_ttl_ms": {"a b": 1}}, "not a subscription name: 'a b'"),
        ({"subscription_ttl_ms": {str(n): 1 for n in range(201)}}, "201 subscriptions have a .*; at most 200"),
        ({"retention": 5}, "'retention' is no policy; there are retention_ms, retention_bytes, message_ttl_ms, subscr"),
        ({"retention_ms": "3d"}, r"the policies are not as they should be: .*\$.retention_ms"),
        ({"retention_ms": True}, "the policies are not as they should be"),
        (["retention_ms"], "the policies are not as they should be"),
    ],
)  # fmt: skip
def test_what_is_refused(fields: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        Policies().changed(decode_changes(msgspec.msgpack.encode(fields)))


def test_bytes_that_are_no_map_are_refused() -> None:
    for payload in (b"", b"\xc1", b"\x81\xa1\xff\x01"):
        with pytest.raises(InvalidArgument, match="not as they should be"):
            decode_changes(payload)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"ensemble_size": 3}, "belong together, and write_quorum and ack_quorum are missing; set all three, as 3, 3 and 2"),
        ({"ensemble_size": 3, "write_quorum": 3}, "and ack_quorum is missing"),
        ({"ensemble_size": 3, "write_quorum": 2, "ack_quorum": 3}, "ack_quorum=3 do not fit: .* lower ack_quorum to 2"),
        ({"ensemble_size": 2, "write_quorum": 3, "ack_quorum": 2}, "lower write_quorum to 2 or raise ensemble_size"),
        ({"ensemble_size": 2, "write_quorum": 2, "ack_quorum": 0}, "ack_quorum must be at least 1"),
        ({"ensemble_size": 65, "write_quorum": 2, "ack_quorum": 2}, "ensemble_size can be 64 at most"),
        ({"minimum_write_quorum": -1}, r"minimum_write_quorum is -1; want 0 \(off\) or more"),
        ({"minimum_write_quorum": 65}, "minimum_write_quorum is 65; want"),
        (
            {"ensemble_size": 3, "write_quorum": 2, "ack_quorum": 2, "minimum_write_quorum": 3},
            r"minimum_write_quorum is 3; want .* at most 2, .*\(write_quorum=2 is how many copies there are\)",
        ),
        ({"flush": "never"}, "flush is 'never'; want sync or async"),
        ({"flush": 1}, "the policies are not as they should be"),
    ],
)  # fmt: skip
def test_durability_that_cannot_be_is_refused(fields: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        Policies().changed(decode_changes(msgspec.msgpack.encode(fields)))


def test_durability_as_it_is_stored() -> None:
    fields = {
        "ensemble_size": 3,
        "write_quorum": 3,
        "ack_quorum": 2,
        "minimum_write_quorum": 2,
        "flush": "async",
    }
    policies = Policies().changed(decode_changes(msgspec.msgpack.encode(fields)))
    assert policies.quorums == (3, 3, 2)
    assert msgspec.to_builtins(policies) == fields
    assert Policies().quorums is None

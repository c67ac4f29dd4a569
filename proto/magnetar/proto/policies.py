"""What an operator lays down for a topic or a namespace: how long messages are kept, and how long they wait to be consumed.

A policy that is not set at one level is that of the next one: topic, namespace, then the settings of the broker. One field
is a policy, but for retention, whose two limits belong together: where one of them is set, the other one is that of the
same level, and no limit if it is not set.

>>> Policies(retention_ms=3_600_000).check().retention
(3600000, -1)
>>> Policies().retention is None
True
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from .errors import InvalidArgument
from .ids import check_subscription_name

__all__ = ["UNLIMITED", "Policies", "PolicyInForce", "check_retention", "decode_policies"]

UNLIMITED = -1
# A topic stores them beside its list of ledgers, which is written with every ledger.
MAX_SUBSCRIPTION_TTLS = 200
_MOST = 1 << 53  # what every client can count to


class Policies(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """None: not set at this level."""

    # Of what every durable subscription has acknowledged: a ledger is deleted once it is older, or once the topic has so
    # many bytes without it. UNLIMITED: this limit deletes nothing. Both 0: nothing is kept for its own sake.
    retention_ms: int | None = None
    retention_bytes: int | None = None
    # What waits longer counts as acknowledged. 0: messages wait for ever.
    message_ttl_ms: int | None = None
    subscription_ttl_ms: dict[str, int] = {}  # by name; these come before message_ttl_ms

    @property
    def retention(self) -> tuple[int, int] | None:
        """Milliseconds and bytes as they count together; None: not set."""
        if self.retention_ms is None and self.retention_bytes is None:
            return None
        return (
            UNLIMITED if self.retention_ms is None else self.retention_ms,
            UNLIMITED if self.retention_bytes is None else self.retention_bytes,
        )

    def check(self) -> Policies:
        """Returns itself, or raises InvalidArgument."""
        if self.retention is not None:
            check_retention(*self.retention)
        if len(self.subscription_ttl_ms) > MAX_SUBSCRIPTION_TTLS:
            raise InvalidArgument(
                f"{len(self.subscription_ttl_ms)} subscriptions have a TTL of their own; at most {MAX_SUBSCRIPTION_TTLS}: "
                "give the others message_ttl_ms"
            )
        times = {
            f"subscription_ttl_ms of {name!r}": ttl_ms for name, ttl_ms in self.subscription_ttl_ms.items()
        }
        if self.message_ttl_ms is not None:
            times["message_ttl_ms"] = self.message_ttl_ms
        for name, ttl_ms in times.items():
            if not 0 <= ttl_ms < _MOST:
                raise InvalidArgument(
                    f"{name} is {ttl_ms}; want milliseconds, or 0 for messages that wait for ever"
                )
        for name in self.subscription_ttl_ms:
            check_subscription_name(name)
        return self


def check_retention(retention_ms: int, retention_bytes: int) -> None:
    """Raises InvalidArgument."""
    for name, value in (("retention_ms", retention_ms), ("retention_bytes", retention_bytes)):
        if not UNLIMITED <= value < _MOST:
            raise InvalidArgument(f"{name} is {value}; want 0 or more, or {UNLIMITED} for no limit")
    if (retention_ms == 0) != (retention_bytes == 0):
        raise InvalidArgument(
            f"retention_ms={retention_ms} and retention_bytes={retention_bytes} contradict each other: 0 keeps nothing. Set "
            f"both to 0, or the one that shall not limit to {UNLIMITED}"
        )


class PolicyInForce(NamedTuple):
    """What holds for a topic or a namespace in the end, and whose policy that is."""

    policy: str  # a field of Policies
    subscription: str  # that it is for; "": all that have none of their own
    value: int
    source: str  # "topic", "namespace" or "broker"


def decode_policies(payload: bytes) -> Policies:
    """From a msgpack map. Raises InvalidArgument, also for a policy that is not known: it would not be heeded."""
    try:
        fields = msgspec.msgpack.decode(payload, type=dict[str, object])
        unknown = fields.keys() - set(Policies.__struct_fields__)
        if unknown:
            raise InvalidArgument(
                f"{sorted(unknown)[0]!r} is no policy; there are {', '.join(Policies.__struct_fields__)}"
            )
        return msgspec.convert(fields, Policies).check()
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the policies are not as they should be: {error}") from None

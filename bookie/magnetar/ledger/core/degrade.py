"""What is written when there are fewer bookies than an ensemble needs: opt-in, `minimum_write_quorum` (0: never).

RocketMQ's minimum of in-sync replicas, in terms of ledgers: with 3/3/2 and a minimum of 2, two bookies that are left
take ledgers 2/2/2; with one that is left nothing is written. Never more copies than asked for, never fewer than the minimum.

>>> smaller = degraded_striping(Striping(3, 3, 2), writable=2, minimum_write_quorum=2)
>>> (smaller.ensemble_size, smaller.write_quorum, smaller.ack_quorum)
(2, 2, 2)
>>> degraded_striping(Striping(3, 3, 2), writable=1, minimum_write_quorum=2) is None
True
"""

from __future__ import annotations

from magnetar.proto.errors import InvalidSetting

from .quorum import Striping

# The key in a ledger's properties; its value says what was asked for: "E/Qw/Qa".
DEGRADED_PROPERTY = "degraded_from"


def degraded_striping(full: Striping, writable: int, minimum_write_quorum: int) -> Striping | None:
    """The striping of a new ledger over the bookies that are left; None if `full` can be had, or nothing may be written.

    E is what is there. Qw stays as it is where E allows it (a cluster that lost one of five writes no fourth copy), else it
    is E. Qa is at most Qw: with the minimum as the least Qw, never below min(Qa, minimum).
    """
    minimum = min(minimum_write_quorum, full.write_quorum)
    if not 0 < minimum <= writable < full.ensemble_size:
        return None
    write_quorum = min(full.write_quorum, writable)
    return Striping(writable, write_quorum, min(full.ack_quorum, write_quorum))


def describe(striping: Striping) -> str:
    """The value of `DEGRADED_PROPERTY`."""
    return f"{striping.ensemble_size}/{striping.write_quorum}/{striping.ack_quorum}"


def asked_for(value: str) -> Striping | None:
    """Inverse of `describe`; None for anything else (a property is text that anybody may have written)."""
    parts = value.split("/")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) < 4 for part in parts):
        return None
    size, write_quorum, ack_quorum = (int(part) for part in parts)
    try:
        return Striping(size, write_quorum, ack_quorum)
    except InvalidSetting:
        return None

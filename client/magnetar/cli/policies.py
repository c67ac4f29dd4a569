"""`magnetar topics policies` and `magnetar namespaces policies`: options as people write them, and what is in force."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import to_builtins

from magnetar.client import connect
from magnetar.proto.policies import FLUSHES, UNLIMITED
from magnetar.runtime.quantities import format_duration, format_size, parse_size

from .session import EXIT_USAGE, fail, milliseconds, named_values, print_json
from .tables import print_table

INHERIT = "inherit"  # the policy is not set here any more
INFINITE = "infinite"
OFF = "off"
ANY = "any"
_NAMES = {
    "retention_ms": "retention",
    "retention_bytes": "retention size",
    "message_ttl_ms": "ttl",
    "subscription_ttl_ms": "ttl of subscription ",
    "ensemble_size": "ensemble size",
    "write_quorum": "write quorum",
    "ack_quorum": "ack quorum",
    "minimum_write_quorum": "minimum write quorum",
    "flush": "flush",
    "bookie_group": "bookie group",
    "broker_group": "broker group",
    "broker_zone": "broker zone",
}
_PLAIN = ("ensemble_size", "write_quorum", "ack_quorum")


def changed_by(
    retention: str | None,
    retention_size: str | None,
    ttl: str | None,
    subscription_ttls: Sequence[str],
    durability: str | None = None,
    minimum_write_quorum: str | None = None,
    flush: str | None = None,
    bookie_group: str | None = None,
    broker_group: str | None = None,
    broker_zone: str | None = None,
) -> dict[str, Any]:
    """Policies that the options set; ends the command with a line that names a wrong one."""
    changed: dict[str, Any] = {}
    if durability is not None:
        changed |= _quorums(durability)
    if minimum_write_quorum is not None:
        changed["minimum_write_quorum"] = _copies("--minimum-write-quorum", minimum_write_quorum)
    if flush is not None:
        changed["flush"] = _flush(flush)
    places = {"bookie_group": bookie_group, "broker_group": broker_group, "broker_zone": broker_zone}
    for policy, value in places.items():
        if value is not None:
            word = value.strip()
            changed[policy] = None if word == INHERIT else "" if word == ANY else word
    if retention is not None:
        changed["retention_ms"] = _duration("--retention", retention, UNLIMITED)
    if retention_size is not None:
        changed["retention_bytes"] = _size("--retention-size", retention_size)
    if ttl is not None:
        changed["message_ttl_ms"] = _duration("--ttl", ttl, 0)
    if subscription_ttls:
        changed["subscription_ttl_ms"] = {
            name: _duration("--subscription-ttl", text, 0)
            for name, text in named_values("--subscription-ttl", subscription_ttls, "audit=10m").items()
        }
    return changed


def _duration(option: str, text: str, infinite: int) -> int | None:
    word = text.strip().lower()
    return None if word == INHERIT else infinite if word == INFINITE else milliseconds(option, text)


def _size(option: str, text: str) -> int | None:
    word = text.strip().lower()
    if word in (INHERIT, INFINITE):
        return None if word == INHERIT else UNLIMITED
    try:
        return parse_size(text)
    except ValueError:
        fail(f"{option} is {text!r}; want a size, as 500MB or 10GiB, {INFINITE} or {INHERIT}", EXIT_USAGE)


def _quorums(text: str) -> dict[str, int | None]:
    names = ("ensemble_size", "write_quorum", "ack_quorum")
    if text.strip().lower() == INHERIT:
        return dict.fromkeys(names)
    parts = [part.strip() for part in text.split("/")]
    if len(parts) != len(names) or not all(part.isascii() and part.isdigit() for part in parts):
        fail(
            f"--durability is {text!r}; want ensemble size, write quorum and ack quorum, as 3/3/2, or {INHERIT}",
            EXIT_USAGE,
        )
    return {name: int(part) for name, part in zip(names, parts, strict=True)}


def _copies(option: str, text: str) -> int | None:
    word = text.strip().lower()
    if word in (INHERIT, OFF):
        return None if word == INHERIT else 0
    if not word.isascii() or not word.isdigit():
        fail(f"{option} is {text!r}; want a number of copies, {OFF} or {INHERIT}", EXIT_USAGE)
    return int(word)


def _flush(text: str) -> str | None:
    word = text.strip().lower()
    if word not in (*FLUSHES, INHERIT):
        fail(f"--flush is {text!r}; want {', '.join(FLUSHES)} or {INHERIT}", EXIT_USAGE)
    return None if word == INHERIT else word


async def update(url: str, topic: str, namespace: str, changed: dict[str, Any], *, as_json: bool) -> None:
    """Changes policies, if any are given, and shows what is in force. `topic` "": of the namespace."""
    async with connect(url) as client:
        if topic:
            found = await client.update_topic_policies(topic, changed)
        else:
            found = await client.update_namespace_policies(namespace, changed)
    if as_json:
        rows = [row._asdict() for row in found.in_force]
        print_json({"policies": to_builtins(found.policies), "version": found.version, "in_force": rows})
        return
    rows_of_text = [
        (_NAMES[row.policy] + row.subscription, _text(row.policy, row.value), row.source)
        for row in found.in_force
    ]
    print_table("", ("policy", "in force", "set for"), rows_of_text)


def _text(policy: str, value: int | str) -> str:
    if policy in ("bookie_group", "broker_group", "broker_zone"):
        return str(value) or ANY
    if isinstance(value, str) or policy in _PLAIN:
        return str(value)
    if value == UNLIMITED:
        return "no limit"
    if value == 0:
        return "off"
    if policy == "minimum_write_quorum":
        return str(value)
    return _size_text(value) if policy == "retention_bytes" else format_duration(value)


def _size_text(count: int) -> str:
    """As people give it: 10GB is not a whole number of any binary unit above the KiB."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB")):
        if count % 1000**power == 0:
            return f"{count // 1000**power}{unit}"
    return format_size(count)

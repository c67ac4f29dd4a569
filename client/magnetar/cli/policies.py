"""`magnetar topics policies` and `magnetar namespaces policies`: options as people write them, and what is in force."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import to_builtins

from magnetar.client import connect
from magnetar.proto.policies import UNLIMITED
from magnetar.runtime.quantities import format_duration, format_size, parse_size

from .session import EXIT_USAGE, fail, milliseconds, named_values, print_json
from .tables import print_table

INHERIT = "inherit"  # the policy is not set here any more
INFINITE = "infinite"
_NAMES = {
    "retention_ms": "retention",
    "retention_bytes": "retention size",
    "message_ttl_ms": "ttl",
    "subscription_ttl_ms": "ttl of subscription ",
}


def changed_by(
    retention: str | None, retention_size: str | None, ttl: str | None, subscription_ttls: Sequence[str]
) -> dict[str, Any]:
    """Policies that the options set; ends the command with a line that names a wrong one."""
    changed: dict[str, Any] = {}
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


def _text(policy: str, value: int) -> str:
    if value == UNLIMITED:
        return "no limit"
    if value == 0:
        return "off"
    return _size_text(value) if policy == "retention_bytes" else format_duration(value)


def _size_text(count: int) -> str:
    """As people give it: 10GB is not a whole number of any binary unit above the KiB."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB")):
        if count % 1000**power == 0:
            return f"{count // 1000**power}{unit}"
    return format_size(count)

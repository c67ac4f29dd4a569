"""`magnetar topics policies`, of namespaces and of brokers as well: options as people write them, and what is in force.

Which options there are, and how they are written, `magnetar.proto.policy_table` says.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magnetar.proto.policy_table import BY_POLICY, DESCRIBED, Described
from magnetar.runtime.quantities import format_duration, format_size, parse_size

from ..terminal.command import Answer, command, with_options
from ..terminal.session import EXIT_USAGE, fail, milliseconds, named_values
from ..terminal.tables import Table

if TYPE_CHECKING:
    from magnetar.client import Client, FoundPolicies

    Update = Callable[[Client, dict[str, Any]], Awaitable[FoundPolicies]]

INHERIT = "inherit"  # the policy is not set here any more
NONE = "none"
NAMESPACE_POLICIES = tuple(row for row in DESCRIBED if "namespace" in row.levels)
TOPIC_POLICIES = tuple(row for row in DESCRIBED if "topic" in row.levels)
BROKER_POLICIES = tuple(row for row in DESCRIBED if "broker" in row.levels)


def parameter(row: Described) -> str:
    """The name of the parameter that the option becomes in a command's function."""
    return row.option.replace("-", "_")


def changes(row: Described, text: str) -> dict[str, Any]:
    """Values by policy, None where it is not set here any more; a wrong text ends the command with one line."""
    if row.by_subscription:
        named = named_values(f"--{row.option}", [text], "audit=10m")
        return {row.policies[0]: {name: _value(row, value) for name, value in named.items()}}
    value = _value(row, text)
    if len(row.policies) == 1 or value is None:
        return dict.fromkeys(row.policies, value)
    return dict(zip(row.policies, value, strict=True))


def _value(row: Described, text: str) -> Any:
    text, option = text.strip(), f"--{row.option}"
    if text.lower() == INHERIT:
        return None
    words = {word.lower(): value for word, value in row.words.items()}
    if text.lower() in words and row.unit != "words":
        return words[text.lower()]
    if row.unit == "time":
        return milliseconds(option, text)
    try:
        return _read(row, text)
    except ValueError:
        wanted = {"size": "a size, as 500MB or 10GiB", "count": "a number", "real": "a number, as 0.1"}.get(
            row.unit
        )
        if len(row.policies) > 1:
            wanted = f"{_and(row.policies)}, as 3/3/2"
        choices = ", ".join(filter(None, (wanted, *row.words)))
        fail(f"{option} is {text!r}; want {choices} or {INHERIT}", EXIT_USAGE)


def _read(row: Described, text: str) -> Any:
    """Raises ValueError."""
    if row.unit == "name":
        return text
    if row.unit == "real":
        return float(text)
    if row.unit in ("words", "names"):
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if row.unit == "words" and not row.words.keys() >= set(parts):
            raise ValueError
        return parts
    if row.unit == "size":
        return parse_size(text)
    parts = [part.strip() for part in text.split("/")]
    if len(parts) != len(row.policies) or not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError
    return [int(part) for part in parts] if len(parts) > 1 else int(parts[0])


def _and(policies: Sequence[str]) -> str:
    *names, last = (policy.replace("_", " ") for policy in policies)
    return f"{', '.join(names)} and {last}"


def changed_by(given: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """All `changes` together."""
    changed: dict[str, Any] = {}
    for policy, value in [item for changes in given for item in changes.items()]:
        changed[policy] = changed.get(policy, {}) | value if isinstance(value, dict) else value
    return changed


def add_policies(app: typer.Typer, rows: Sequence[Described], subject: Callable[..., Update]) -> None:
    """The command `policies` of `app`: changes policies of its `subject`, if any are given, and shows what is in force."""

    async def policies(client: Client, **values: Any) -> Answer:
        from msgspec import to_builtins

        given = [values.pop(parameter(row)) or [] for row in rows]
        changed = changed_by(one for some in given for one in (some if isinstance(some, list) else [some]))
        found = await subject(**values)(client, changed)
        in_force = [row._asdict() for row in found.in_force]
        value = {"policies": to_builtins(found.policies), "version": found.version, "in_force": in_force}
        return Answer(value, [_table(in_force)])

    options = {
        "client": (Any, inspect.Parameter.empty),
        **{parameter(row): (_hint(row), None) for row in rows},
    }
    command(app, "policies")(with_options(policies, subject, options))


def _hint(row: Described) -> Any:
    option = typer.Option(
        f"--{row.option}",
        help=row.help,
        metavar=row.metavar,
        show_default=False,
        parser=partial(changes, row),
    )
    return Annotated[(list[Any] if row.by_subscription else Any) | None, option]


def _table(in_force: list[dict[str, Any]]) -> Table:
    """Without the many that nobody has set."""
    rows = [
        (_label(row["policy"], row["subscription"]), shown(row["policy"], row["value"]), row["source"])
        for row in in_force
        if row["source"] != "broker" or not _is_default(row["policy"], row["value"])
    ]
    return Table("", ("policy", "in force", "set for"), rows)


def _is_default(policy: str, value: Any) -> bool:
    row = BY_POLICY.get(policy)
    return row is not None and value == row.default


def _label(policy: str, subscription: str) -> str:
    if subscription:
        return f"ttl of subscription {subscription}"
    row = BY_POLICY.get(policy)
    return (row.option.replace("-", " ") if row and len(row.policies) == 1 else policy).replace("_", " ")


def shown(policy: str, value: Any) -> str:
    """A value for people."""
    row = BY_POLICY.get(policy)
    if isinstance(value, list):
        return ",".join(value) or NONE
    if row is None:  # a newer broker may have policies that are not known here
        return str(value)
    for word, known in row.words.items():
        if known == value:
            return word
    if isinstance(value, str | float):
        return str(value)
    if not value:
        return "0"
    if row.unit == "size":
        return _size_text(value)
    return format_duration(value) if row.unit == "time" else str(value)


def _size_text(count: int) -> str:
    """As people give it: 10GB is not a whole number of any binary unit above the KiB."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB")):
        if count % 1000**power == 0:
            return f"{count // 1000**power}{unit}"
    return format_size(count)

"""`magnetar topics policies` and `magnetar namespaces policies`: options as people write them, and what is in force.

An option is a row of a table: its help, the policies that it sets, and how its text is read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from magnetar.proto.policies import FLUSHES, UNLIMITED
from magnetar.runtime.quantities import format_duration, format_size, parse_size

from ..terminal.asking import Ask, asks
from ..terminal.options import with_options
from ..terminal.session import EXIT_USAGE, fail, milliseconds, named_values
from ..terminal.tables import print_table

if TYPE_CHECKING:
    from magnetar.client import Client, FoundPolicies

    Update = Callable[[Client, dict[str, Any]], Awaitable[FoundPolicies]]
else:
    Update = Callable  # typer evaluates the annotations of commands

__all__ = ["NAMESPACE_POLICIES", "TOPIC_POLICIES", "PolicyOption", "Update", "add_policies", "changed_by"]

INHERIT = "inherit"  # the policy is not set here any more
INFINITE = "infinite"
OFF = "off"
ANY = "any"
_PLACES = ("bookie_group", "broker_group", "broker_zone")
_QUORUMS = ("ensemble_size", "write_quorum", "ack_quorum")
_NAMES = {
    "retention_ms": "retention",
    "retention_bytes": "retention size",
    "message_ttl_ms": "ttl",
    "subscription_ttl_ms": "ttl of subscription ",
}


class PolicyOption(NamedTuple):
    """`read` makes the value of the policy of the option and its text, None for `inherit`; or values by policies."""

    option: str
    policy: str  # "": several
    read: Callable[[str, Any], Any]
    metavar: str
    help: str

    @property
    def parameter(self) -> str:
        """The name of the parameter that the option becomes in a command's function."""
        return self.option.strip("-").replace("-", "_")


def changed_by(options: Mapping[PolicyOption, Any]) -> dict[str, Any]:
    """Policies that the options set; ends the command with a line that names a wrong one."""
    changed: dict[str, Any] = {}
    for row, given in options.items():
        if given is not None:
            value = row.read(row.option, given)
            changed |= {row.policy: value} if row.policy else value
    return changed


def add_policies(app: typer.Typer, rows: tuple[PolicyOption, ...], command: Callable[..., Update]) -> None:
    """The command `policies` of `app`: changes policies, if any are given, and shows what is in force."""

    def policies(**values: Any) -> Ask:
        changed = changed_by({row: values.pop(row.parameter) for row in rows})
        update = command(**values)

        async def call(client: Client) -> dict[str, Any]:
            from msgspec import to_builtins

            found = await update(client, changed)
            in_force = [row._asdict() for row in found.in_force]
            return {"policies": to_builtins(found.policies), "version": found.version, "in_force": in_force}

        return Ask(call, _show)

    options = {row.parameter: (_hint(row), None) for row in rows}
    asks(app, "policies")(with_options(policies, command, **options))


def _hint(row: PolicyOption) -> Any:
    kind = list[str] if row.read is _ttls else str
    option = typer.Option(row.option, help=row.help, metavar=row.metavar, show_default=False)
    return Annotated[kind | None, option]


def _show(found: dict[str, Any]) -> None:
    rows = [
        (
            _NAMES.get(row["policy"], row["policy"].replace("_", " ")) + row["subscription"],
            _text(row["policy"], row["value"]),
            row["source"],
        )
        for row in found["in_force"]
    ]
    print_table("", ("policy", "in force", "set for"), rows)


# --- texts of options --------------------------------------------------------------------------------------------------


def _retention(option: str, text: str) -> int | None:
    word = text.strip().lower()
    return None if word == INHERIT else UNLIMITED if word == INFINITE else milliseconds(option, text)


def _ttl(option: str, text: str) -> int | None:
    word = text.strip().lower()
    return None if word == INHERIT else 0 if word == INFINITE else milliseconds(option, text)


def _ttls(option: str, texts: list[str]) -> dict[str, int | None]:
    return {name: _ttl(option, text) for name, text in named_values(option, texts, "audit=10m").items()}


def _size(option: str, text: str) -> int | None:
    word = text.strip().lower()
    if word in (INHERIT, INFINITE):
        return None if word == INHERIT else UNLIMITED
    try:
        return parse_size(text)
    except ValueError:
        fail(f"{option} is {text!r}; want a size, as 500MB or 10GiB, {INFINITE} or {INHERIT}", EXIT_USAGE)


def _quorums(option: str, text: str) -> dict[str, int | None]:
    if text.strip().lower() == INHERIT:
        return dict.fromkeys(_QUORUMS)
    parts = [part.strip() for part in text.split("/")]
    if len(parts) != len(_QUORUMS) or not all(part.isascii() and part.isdigit() for part in parts):
        fail(
            f"{option} is {text!r}; want ensemble size, write quorum and ack quorum, as 3/3/2, or {INHERIT}",
            EXIT_USAGE,
        )
    return {name: int(part) for name, part in zip(_QUORUMS, parts, strict=True)}


def _copies(option: str, text: str) -> int | None:
    word = text.strip().lower()
    if word in (INHERIT, OFF):
        return None if word == INHERIT else 0
    if not word.isascii() or not word.isdigit():
        fail(f"{option} is {text!r}; want a number of copies, {OFF} or {INHERIT}", EXIT_USAGE)
    return int(word)


def _flush(option: str, text: str) -> str | None:
    word = text.strip().lower()
    if word not in (*FLUSHES, INHERIT):
        fail(f"{option} is {text!r}; want {', '.join(FLUSHES)} or {INHERIT}", EXIT_USAGE)
    return None if word == INHERIT else word


def _place(option: str, text: str) -> str | None:
    word = text.strip()
    return None if word == INHERIT else "" if word == ANY else word


TOPIC_POLICIES = (
    PolicyOption(
        "--retention", "retention_ms", _retention, "TIME",
        "How long acknowledged messages are kept: 12h, 3d, infinite; 0 keeps none. inherit: as on the next level.",
    ),
    PolicyOption(
        "--retention-size", "retention_bytes", _size, "SIZE",
        "Up to which size of a topic they are kept: 500MB, 10GB, infinite, inherit.",
    ),
    PolicyOption(
        "--ttl", "message_ttl_ms", _ttl, "TIME",
        "How long messages wait to be acknowledged; then they count as acknowledged: 1h, 7d, infinite, inherit.",
    ),
    PolicyOption(
        "--subscription-ttl", "subscription_ttl_ms", _ttls, "NAME=TIME",
        "The same for one subscription; may be repeated.",
    ),
    PolicyOption(
        "--durability", "", _quorums, "E/QW/QA",
        "Ensemble size, write quorum and ack quorum of new ledgers: 3/3/2, or inherit.",
    ),
    PolicyOption(
        "--minimum-write-quorum", "minimum_write_quorum", _copies, "COPIES",
        "With too few bookies write fewer copies, so many at least: 2, off, inherit.",
    ),
    PolicyOption(
        "--flush", "flush", _flush, "WHEN",
        "Acknowledge what is on disk (sync) or in the memory of ack-quorum bookies (async): sync, async, inherit.",
    ),
    PolicyOption(
        "--bookie-group", "bookie_group", _place, "GROUP",
        "Write to the bookies of a group only (fast), or before others (preferred:fast): also any, inherit.",
    ),
)  # fmt: skip
NAMESPACE_POLICIES = (
    *TOPIC_POLICIES,
    PolicyOption(
        "--broker-group", "broker_group", _place, "GROUP",
        "Serve topics by the brokers of a group only (fast), or before others (preferred:fast): also any, inherit.",
    ),
    PolicyOption(
        "--broker-zone", "broker_zone", _place, "ZONE",
        "Serve topics by brokers of this zone before others: also any, inherit.",
    ),
)  # fmt: skip


# --- values for people -------------------------------------------------------------------------------------------------


def _text(policy: str, value: int | str) -> str:
    if policy in _PLACES:
        return str(value) or ANY
    if isinstance(value, str) or policy in _QUORUMS:
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

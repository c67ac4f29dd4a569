"""`magnetar topics policies` and `magnetar namespaces policies`: options as people write them, and what is in force.

An option is a row of a table: its help, the policies that it sets, and how its text is read.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from magnetar.proto.policies import FLUSHES, UNLIMITED
from magnetar.runtime.quantities import format_duration, format_size, parse_size

from ..terminal.command import Answer, command, with_options
from ..terminal.session import EXIT_USAGE, fail, milliseconds, named_values
from ..terminal.tables import Table

if TYPE_CHECKING:
    from magnetar.client import Client, FoundPolicies

    Update = Callable[[Client, dict[str, Any]], Awaitable[FoundPolicies]]

__all__ = ["NAMESPACE_POLICIES", "TOPIC_POLICIES", "PolicyOption", "add_policies", "changed_by"]

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
    """How an option sets policies: `words` have values of their own, as `inherit` has; `read` takes all other texts."""

    option: str
    policies: tuple[str, ...]
    read: Callable[[str, str], Any]  # of the option and its text; a sequence where there are several policies
    words: dict[str, Any]
    metavar: str
    help: str
    repeated: bool = False  # as NAME=TEXT

    @property
    def parameter(self) -> str:
        """The name of the parameter that the option becomes in a command's function."""
        return self.option.strip("-").replace("-", "_")

    def changes(self, text: str) -> dict[str, Any]:
        """Values by policy, None where it is not set here any more; a wrong text ends the command with one line."""
        if self.repeated:
            named = named_values(self.option, [text], "audit=10m")
            return {self.policies[0]: {name: self._value(value) for name, value in named.items()}}
        value = self._value(text)
        if value is None or len(self.policies) == 1:
            return dict.fromkeys(self.policies, value)
        return dict(zip(self.policies, value, strict=True))

    def _value(self, text: str) -> Any:
        word = text.strip().lower()
        if word == INHERIT:
            return None
        return self.words[word] if word in self.words else self.read(self.option, text.strip())


def changed_by(given: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """All `changes` together."""
    changed: dict[str, Any] = {}
    for policy, value in [item for changes in given for item in changes.items()]:
        changed[policy] = changed.get(policy, {}) | value if isinstance(value, dict) else value
    return changed


def add_policies(app: typer.Typer, rows: tuple[PolicyOption, ...], subject: Callable[..., Update]) -> None:
    """The command `policies` of `app`: changes policies of its `subject`, if any are given, and shows what is in force."""

    async def policies(client: Client, **values: Any) -> Answer:
        from msgspec import to_builtins

        given = [values.pop(row.parameter) or [] for row in rows]
        changed = changed_by(one for some in given for one in (some if isinstance(some, list) else [some]))
        found = await subject(**values)(client, changed)
        in_force = [row._asdict() for row in found.in_force]
        value = {"policies": to_builtins(found.policies), "version": found.version, "in_force": in_force}
        return Answer(value, [_table(in_force)])

    options = {
        "client": (Any, inspect.Parameter.empty),
        **{row.parameter: (_hint(row), None) for row in rows},
    }
    command(app, "policies")(with_options(policies, subject, options))


def _hint(row: PolicyOption) -> Any:
    option = typer.Option(
        row.option, help=row.help, metavar=row.metavar, show_default=False, parser=row.changes
    )
    return Annotated[(list[Any] if row.repeated else Any) | None, option]


def _table(in_force: list[dict[str, Any]]) -> Table:
    rows = [
        (
            _NAMES.get(row["policy"], row["policy"].replace("_", " ")) + row["subscription"],
            _text(row["policy"], row["value"]),
            row["source"],
        )
        for row in in_force
    ]
    return Table("", ("policy", "in force", "set for"), rows)


# --- texts of options --------------------------------------------------------------------------------------------------


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError:
        fail(f"{option} is {text!r}; want a size, as 500MB or 10GiB, {INFINITE} or {INHERIT}", EXIT_USAGE)


def _quorums(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split("/")]
    if len(parts) != len(_QUORUMS) or not all(part.isascii() and part.isdigit() for part in parts):
        fail(
            f"{option} is {text!r}; want ensemble size, write quorum and ack quorum, as 3/3/2, or {INHERIT}",
            EXIT_USAGE,
        )
    return [int(part) for part in parts]


def _copies(option: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        fail(f"{option} is {text!r}; want a number of copies, {OFF} or {INHERIT}", EXIT_USAGE)
    return int(text)


def _no_flush(option: str, text: str) -> str:
    fail(f"{option} is {text!r}; want {', '.join(FLUSHES)} or {INHERIT}", EXIT_USAGE)


def _place(option: str, text: str) -> str:
    return text


TOPIC_POLICIES = (
    PolicyOption(
        "--retention", ("retention_ms",), milliseconds, {INFINITE: UNLIMITED}, "TIME",
        "How long acknowledged messages are kept: 12h, 3d, infinite; 0 keeps none. inherit: as on the next level.",
    ),
    PolicyOption(
        "--retention-size", ("retention_bytes",), _size, {INFINITE: UNLIMITED}, "SIZE",
        "Up to which size of a topic they are kept: 500MB, 10GB, infinite, inherit.",
    ),
    PolicyOption(
        "--ttl", ("message_ttl_ms",), milliseconds, {INFINITE: 0}, "TIME",
        "How long messages wait to be acknowledged; then they count as acknowledged: 1h, 7d, infinite, inherit.",
    ),
    PolicyOption(
        "--subscription-ttl", ("subscription_ttl_ms",), milliseconds, {INFINITE: 0}, "NAME=TIME",
        "The same for one subscription; may be repeated.", repeated=True,
    ),
    PolicyOption(
        "--durability", _QUORUMS, _quorums, {}, "E/QW/QA",
        "Ensemble size, write quorum and ack quorum of new ledgers: 3/3/2, or inherit.",
    ),
    PolicyOption(
        "--minimum-write-quorum", ("minimum_write_quorum",), _copies, {OFF: 0}, "COPIES",
        "With too few bookies write fewer copies, so many at least: 2, off, inherit.",
    ),
    PolicyOption(
        "--flush", ("flush",), _no_flush, {word: word for word in FLUSHES}, "WHEN",
        "Acknowledge what is on disk (sync) or in the memory of ack-quorum bookies (async): sync, async, inherit.",
    ),
    PolicyOption(
        "--bookie-group", ("bookie_group",), _place, {ANY: ""}, "GROUP",
        "Write to the bookies of a group only (fast), or before others (preferred:fast): also any, inherit.",
    ),
)  # fmt: skip
NAMESPACE_POLICIES = (
    *TOPIC_POLICIES,
    PolicyOption(
        "--broker-group", ("broker_group",), _place, {ANY: ""}, "GROUP",
        "Serve topics by the brokers of a group only (fast), or before others (preferred:fast): also any, inherit.",
    ),
    PolicyOption(
        "--broker-zone", ("broker_zone",), _place, {ANY: ""}, "ZONE",
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

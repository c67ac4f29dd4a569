"""The table of docs/policies.md, made of the table of policies. `python -m support.policy_page` writes it into the page."""

from __future__ import annotations

from pathlib import Path

from magnetar.cli.commands.policies import shown
from magnetar.proto.policy_shapes import SHAPES
from magnetar.proto.policy_table import DESCRIBED, Described

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"
BEGIN = "| policy | option | without it | for | Pulsar | |\n|---|---|---|---|---|---|\n"
_PATHS = {policy: shape for shape in SHAPES.values() for policy in shape.keys.values()}


def table() -> str:
    """All rows."""
    return BEGIN + "".join(map(_row, DESCRIBED))


def _row(row: Described) -> str:
    names = ", ".join(f"`{policy}`" for policy in row.policies)
    default = "/".join(_default(row, policy) for policy in row.policies)
    levels = ", ".join(row.levels)
    text = row.help.removesuffix(" inherit: as on the next level.") + (
        " *Stored only.*" if row.stored else ""
    )
    return f"| {names} | `--{row.option} {row.metavar}` | {default} | {levels} | {_pulsar(row)} | {text} |\n"


def _default(row: Described, policy: str) -> str:
    return "" if row.by_subscription else shown(policy, row.default)


def _pulsar(row: Described) -> str:
    shape = _PATHS.get(row.policies[0])
    if shape is None:
        return f"`{row.dynamic}`" if row.dynamic else ""
    names = [shape.segment] if shape.topic == shape.segment else [shape.segment, shape.topic]
    return ", ".join(f"`{name}`" for name in names)


def page_with(table: str, page: str) -> str:
    """The page with another table."""
    before, _, rest = page.partition(BEGIN)
    return before + table + rest[rest.index("\n\n") + 1 if rest.startswith("|") else 0 :]


if __name__ == "__main__":
    PAGE.write_text(page_with(table(), PAGE.read_text()))

"""What programs saw of a real Pulsar, as `golden/*.json` keep it, and what differs at another service.

One file a client: `made` says how, `scenarios` has of each what `runner` printed, `seen` or `unsupported`. What is the same
as with the first client is not written again: `{"as": "pulsar-client-3.13.0"}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).with_name("golden")
FIRST = "pulsar-client-3.13.0"

Row = dict[str, Any]
Rows = dict[str, Row]  # by scenario


def read(client: str) -> Rows:
    """What a client saw."""
    rows: Rows = json.loads((_FOLDER / f"{client}.json").read_text("utf-8"))["scenarios"]
    return {name: read(row["as"])[name] if "as" in row else row for name, row in rows.items()}


def write(client: str, made: Mapping[str, Any], rows: Rows) -> None:
    """A file with a line for each scenario."""
    first = {} if client == FIRST else read(FIRST)
    kept = {name: {"as": FIRST} if row == first.get(name) else row for name, row in sorted(rows.items())}
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(row, ensure_ascii=False)}" for name, row in kept.items()
    )
    text = f'{{"made": {json.dumps(made, indent=1)},\n"scenarios": {{\n{lines}\n}}}}\n'
    (_FOLDER / f"{client}.json").write_text(text, "utf-8")


def compared(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """What differs between two rows, in words."""
    if "seen" in wanted and "seen" in found:
        return differences(wanted["seen"], found["seen"])
    return [] if wanted == found else [f" {_words(found)}, not {_words(wanted)}"]


def _words(row: Mapping[str, Any]) -> str:
    ((what, text),) = row.items()
    return f"{what} {text}"


def differences(wanted: Any, found: Any, path: str = "") -> list[str]:
    """In words, with where it is.

    >>> differences({"a": [1, 2], "b": 3}, {"a": [1, 4]})
    ['.a[1] is 4, not 2', '.b is missing']
    """
    if isinstance(wanted, dict) and isinstance(found, dict):
        both = [
            one
            for name in wanted
            if name in found
            for one in differences(wanted[name], found[name], f"{path}.{name}")
        ]
        missing = [f"{path}.{name} is missing" for name in wanted if name not in found]
        return (
            both
            + missing
            + [f"{path}.{name} is more: {found[name]!r}" for name in found if name not in wanted]
        )
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        return [
            one
            for at, both in enumerate(zip(wanted, found, strict=True))
            for one in differences(*both, f"{path}[{at}]")
        ]
    return [] if wanted == found else [f"{path} is {found!r}, not {wanted!r}"]

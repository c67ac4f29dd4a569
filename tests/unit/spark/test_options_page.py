"""docs/spark-options.md has every option with its default, every column with its type, and nothing that does not exist."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from magnetar.spark.options import READ_OPTIONS, WRITE_OPTIONS, ReadOptions, WriteOptions
from magnetar.spark.schema import COLUMNS

PAGE = Path(__file__).parents[3] / "docs" / "spark-options.md"
SAID = {"service_url": "magnetar://127.0.0.1:7650", "topic": "orders"}


def rows(title: str) -> list[list[str]]:
    """Cells of the tables in a section."""
    _, _, rest = PAGE.read_text().partition(f"\n## {title}\n")
    section = rest.partition("\n## ")[0]
    return [re.split(r" *\| *", line.strip("| ")) for line in section.splitlines() if line.startswith("| `")]


def names(cells: Iterable[str]) -> list[str]:
    return [name for cell in cells for name in re.findall(r"`([^`]*)`", cell)]


def test_every_option_of_reading() -> None:
    documented = names(row[0] for row in rows("Reading"))
    assert sorted(documented) == sorted(READ_OPTIONS)


def test_every_option_of_writing() -> None:
    documented = names(row[0] for row in rows("Writing"))
    assert sorted(name.lower() for name in documented) == sorted(WRITE_OPTIONS)


@pytest.mark.parametrize(("title", "options"), [("Reading", ReadOptions), ("Writing", WriteOptions)])
def test_defaults(title: str, options: type[ReadOptions | WriteOptions]) -> None:
    documented = {
        name: default
        for row in rows(title)
        for name, default in zip(names(row[:1]), names(row[1:2]), strict=False)
    }
    assert len(documented) >= 4
    for name, default in documented.items():
        assert options.parse({**SAID, name: default}) == options.parse(SAID), name


def test_every_column() -> None:
    documented = {name: row[1] for row in rows("Columns of a topic") for name in names(row[:1])}
    assert documented == {name: column[0].simpleString() for name, column in COLUMNS.items()}

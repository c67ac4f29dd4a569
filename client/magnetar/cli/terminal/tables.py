"""Tables of figures on standard output, for people. Rich is imported only then."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

_TABLE_ROWS = 2000
_PLAIN_WIDTH = 200


def text(value: Any) -> str:
    """Whole numbers with separators: 1,234,567."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


class Table(NamedTuple):
    """What `print_table` prints.

    `right`: columns that are aligned to the right. Columns without any name make a table without a header; a column in which
    no row has anything is left out. `lines`: between columns.
    """

    title: str
    columns: Sequence[str]
    rows: Iterable[Sequence[str]]
    right: Sequence[int] = ()
    lines: bool = True


def figures(stats: Mapping[str, Any], title: str = "") -> Table:
    """Those that are a number or a word, as a table of two columns."""
    rows = [
        (name.replace("_", " "), text(value))
        for name, value in stats.items()
        if value is not None and not isinstance(value, list | dict)
    ]
    return Table(title, ("", ""), rows, right=(1,))


def show(*shown: str | Table) -> None:
    """Prints texts and tables."""
    for one in shown:
        print(one) if isinstance(one, str) else print_table(*one)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Sequence[int] = (),
    lines: bool = True,
) -> int:
    """A `Table`; a long one in several, as it comes, since rich measures every cell first. Returns the number of rows."""
    count = 0
    left = iter(rows)
    while (some := list(islice(left, _TABLE_ROWS))) or not count:
        _print(Table(title, columns, some, right, lines))
        count += len(some)
        if len(some) < _TABLE_ROWS:
            break
    return count


def rich_table(shown: Table) -> Any:
    """As rich draws it; all rows are in memory."""
    from rich.box import HEAVY_HEAD, SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    rows = list(shown.rows)
    table = RichTable(
        title=Text(shown.title) if shown.title else None,  # never markup: names are others' text
        title_justify="left",
        show_header=any(shown.columns),
        box=HEAVY_HEAD if shown.lines else SIMPLE_HEAD,
    )
    columns = [number for number in range(len(shown.columns)) if not rows or any(row[number] for row in rows)]
    for number in columns:
        justify: Any = "right" if number in shown.right else "left"
        table.add_column(Text(shown.columns[number]), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*[Text(row[number]) for number in columns])
    return table


def _print(shown: Table) -> None:
    from rich.console import Console

    # A file has no width to keep to, and paths and addresses are long.
    Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH).print(rich_table(shown))

"""Tables of figures on standard output, for people. Rich is imported only then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def text(value: Any) -> str:
    """Whole numbers with separators: 1,234,567."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def counted(count: int, one: str, more: str) -> str:
    """`1 entry`, `2 entries`."""
    return f"{count:,} {one if count == 1 else more}"


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()
) -> None:
    """`right`: columns that are aligned to the right. Columns without any name make a table without a header."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", show_header=any(columns))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)


__all__ = ["counted", "print_table", "text"]

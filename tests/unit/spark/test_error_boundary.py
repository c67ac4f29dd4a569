"""Errors whose text says it all reach Spark without our frames; the others with all of them."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

import pytest
from pyspark.sql.types import StructType

from magnetar.proto.errors import ConnectionLost, EntryDamaged, InvalidArgument, MagnetarError, TopicNotFound
from magnetar.spark.data_source import MagnetarDataSource
from magnetar.spark.error_boundary import short_errors


def deep(error: Exception) -> None:
    """Raises it a frame further down, from something else."""
    try:
        raise OSError("what the system said")
    except OSError as cause:
        raise error from cause


@short_errors("ask", "read")
class Asked:
    """Like a reader."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.closed = False

    def ask(self, limit: int) -> int:
        """Answers the limit."""
        if self.error is not None:
            deep(self.error)
        return limit

    def read(self) -> Iterator[int]:
        """Yields a row, then fails if it is to."""
        try:
            yield 1
            if self.error is not None:
                deep(self.error)
            yield 2
        finally:
            self.closed = True


def shown(error: Exception, *, rows: bool) -> str:
    """The traceback as Spark quotes it."""
    asked = Asked(error)
    try:
        list(asked.read()) if rows else asked.ask(limit=1)
    except Exception:
        return traceback.format_exc()
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(
    "error", [InvalidArgument("mend it"), TopicNotFound("gone"), ConnectionLost("no service")]
)
def test_a_plain_error_is_shown_without_the_way_it_came(error: MagnetarError, rows: bool) -> None:
    lines = shown(error, rows=rows).strip().splitlines()
    assert lines[-1] == f"magnetar.proto.errors.{type(error).__name__}: {error.message}"
    assert not any("in deep" in line or "what the system said" in line for line in lines)
    assert len(lines) <= 10


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("error", [EntryDamaged("3:4"), ValueError("a bug")])
def test_damage_and_bugs_keep_their_tracebacks(error: Exception, rows: bool) -> None:
    text = shown(error, rows=rows)
    assert "in deep" in text
    assert "what the system said" in text


def test_what_goes_well_goes_through() -> None:
    asked = Asked(None)
    assert asked.ask(limit=3) == 3
    assert list(asked.read()) == [1, 2]


def test_rows_that_nobody_wants_any_more_are_closed() -> None:
    asked = Asked(None)
    rows = asked.read()
    next(rows)
    rows.close()  # type: ignore[attr-defined]
    assert asked.closed


def test_the_data_source_is_behind_its_door() -> None:
    with pytest.raises(InvalidArgument) as error:
        MagnetarDataSource({"path": "orders"}).reader(StructType())
    assert "service_url" in error.value.message
    assert len(traceback.extract_tb(error.value.__traceback__)) <= 3

"""Filters become ranges: never narrower than what they let through, and as narrow as whole entries allow."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from magnetar.proto.ids import MessageId
from magnetar.spark.plan import Range

try:
    from pyspark.sql.datasource import (
        EqualTo,
        Filter,
        GreaterThan,
        GreaterThanOrEqual,
        IsNotNull,
        LessThan,
        LessThanOrEqual,
    )
except ImportError:
    pytest.skip("PySpark 4.0 hands no filters down", allow_module_level=True)

from magnetar.spark.filters import range_of_filters

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def at(microseconds: int) -> datetime:
    return EPOCH + timedelta(microseconds=microseconds)


@pytest.mark.parametrize(
    ("kind", "holds"),
    [
        (GreaterThan, lambda value, bound: value > bound),
        (GreaterThanOrEqual, lambda value, bound: value >= bound),
        (LessThan, lambda value, bound: value < bound),
        (LessThanOrEqual, lambda value, bound: value <= bound),
        (EqualTo, lambda value, bound: value == bound),
    ],
)
def test_a_range_holds_what_its_filter_holds(kind: Any, holds: Any) -> None:
    for bound in (0, 5, 999, 1000, 1001, 7000):
        times = range_of_filters([kind(("append_time",), at(bound))])
        for ms in range(10):
            assert (times.from_append_ms <= ms < times.before_append_ms) == holds(ms * 1000, bound), (
                bound,
                ms,
            )
    offsets = range_of_filters([kind(("offset",), 7)])
    for offset in range(15):
        assert (offsets.from_offset <= offset < offsets.before_offset) == holds(offset, 7)
    ids = range_of_filters([kind(("message_id",), MessageId(3, 2, 1).to_bytes())])
    for place in ((2, 9, 9), (3, 1, 9), (3, 2, 0), (3, 2, 1), (3, 2, 2), (3, 3, 0), (4, 0, 0)):
        assert (ids.from_position <= place < ids.before_position) == holds(place, (3, 2, 1))


def test_filters_narrow_each_other_and_others_leave_everything() -> None:
    filters: list[Filter] = [
        GreaterThan(("offset",), 4),
        LessThan(("offset",), 9),
        IsNotNull(("offset",)),
        EqualTo(("key",), b"k"),
        GreaterThan(("properties", "offset"), 7),
        EqualTo(("message_id",), b"short"),
    ]
    assert range_of_filters(filters) == Range(from_offset=5, before_offset=9)

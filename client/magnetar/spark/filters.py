"""Filters that Spark hands down, as ranges of a topic: ledgers and entries outside are never read.

Only `offset`, `append_time` and `message_id` say where in a topic something stands. Every filter is also given back to
Spark to apply, which costs little and leaves nothing to this module's exactness but the skipping.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual

from magnetar.proto.errors import InvalidArgument
from magnetar.proto.ids import MAX_MESSAGES_PER_ENTRY, MessageId

from .plan import Position, Range


def range_of_filters(filters: Iterable[Filter]) -> Range:
    """What all of them leave; those that say nothing about a place leave everything."""
    wanted = Range()
    for one in filters:
        if isinstance(one, EqualTo):
            wanted = wanted.narrowed(_bounds(one.attribute, one.value, low=True, inclusive=True))
            wanted = wanted.narrowed(_bounds(one.attribute, one.value, low=False, inclusive=True))
        elif isinstance(one, (GreaterThan, GreaterThanOrEqual)):
            inclusive = isinstance(one, GreaterThanOrEqual)
            wanted = wanted.narrowed(_bounds(one.attribute, one.value, low=True, inclusive=inclusive))
        elif isinstance(one, (LessThan, LessThanOrEqual)):
            inclusive = isinstance(one, LessThanOrEqual)
            wanted = wanted.narrowed(_bounds(one.attribute, one.value, low=False, inclusive=inclusive))
    return wanted


def _bounds(attribute: tuple[str, ...], value: Any, *, low: bool, inclusive: bool) -> Range:
    """`low`: at or past the value; else before it. Exclusive lower and inclusive upper bounds lie one step further."""
    step = int(low != inclusive)
    if attribute == ("offset",) and isinstance(value, int):
        return Range(from_offset=value + step) if low else Range(before_offset=value + step)
    if attribute == ("append_time",) and isinstance(value, datetime):
        time_us = _microseconds(value)
        # Entries have whole milliseconds: the first one at or past the bound.
        time_ms = -(-(time_us + step) // 1000)
        return Range(from_append_ms=time_ms) if low else Range(before_append_ms=time_ms)
    if attribute == ("message_id",) and isinstance(value, (bytes, bytearray)):
        try:
            message_id = MessageId.from_bytes(bytes(value))
        except InvalidArgument:
            return Range()
        position: Position = (
            message_id.ledger,
            message_id.entry,
            min(message_id.index, MAX_MESSAGES_PER_ENTRY) + step,
        )
        return Range(from_position=position) if low else Range(before_position=position)
    return Range()


def _microseconds(time: datetime) -> int:
    """Since the epoch; a time without zone is one of the session's, which Spark gives as this process's local time."""
    moment = time.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    return (moment.days * 86_400 + moment.seconds) * 1_000_000 + moment.microseconds

"""Exclusive: one consumer gets everything, in order."""

from __future__ import annotations

from typing import ClassVar

from magnetar.proto.entry import Entry

from ....cursors.core.ranges import Range
from ..consumer import Consumer
from .protocol import Choice


class ExclusiveSelector:
    """See `Selector`."""

    individual_acks: ClassVar[bool] = False
    several: ClassVar[bool] = False
    active: Consumer | None = None  # it has no others beside it to know of
    next_due_ms: int | None = None

    __slots__ = ("_consumer",)

    def __init__(self) -> None:
        self._consumer: Consumer | None = None

    def added(self, consumer: Consumer, now_ms: int) -> bool:
        assert self._consumer is None
        self._consumer = consumer
        return False

    def left(self, consumer: Consumer) -> bool:
        """See `Selector`: the next consumer starts at the mark-delete position."""
        assert self._consumer is consumer
        self._consumer = None
        return True

    def timer_due(self, now_ms: int) -> bool:
        return False

    def changed(self, consumer: Consumer) -> None:
        """See `Selector`: `ready` looks at the one consumer each time."""

    @property
    def ready(self) -> bool:
        consumer = self._consumer
        return consumer is not None and consumer.ready

    def choose(self, entry: Entry, wanted: list[Range]) -> Choice:
        consumer = self._consumer
        assert consumer is not None
        return consumer, wanted, consumer.available_permits

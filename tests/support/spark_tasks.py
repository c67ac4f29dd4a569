"""Spark's tasks without Spark: what jobs hand to a SparkContext runs one after another, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class LocalContext:
    """The part of a SparkContext that the jobs use."""

    defaultParallelism = 2  # noqa: N815

    def parallelize(self, items: Sequence[Any], tasks: int) -> LocalTasks:
        """See SparkContext."""
        assert tasks > 0
        return LocalTasks(items)


class LocalTasks:
    """The part of an RDD that the jobs use."""

    def __init__(self, items: Sequence[Any], work: Callable[[Any], Any] = lambda item: item) -> None:
        self._items = items
        self._work = work

    def map(self, work: Callable[[Any], Any]) -> LocalTasks:
        """See RDD."""
        return LocalTasks(self._items, work)

    def collect(self) -> list[Any]:
        """See RDD."""
        return [self._work(item) for item in self._items]


class LocalSession:
    """The part of a SparkSession that the jobs use."""

    sparkContext = LocalContext()  # noqa: N815


__all__ = ["LocalSession"]

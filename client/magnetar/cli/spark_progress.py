"""What a Spark job is doing, on standard error while a person watches: tasks that are done, or rows of a stream.

Spark is asked a few times a second on a thread with a connection of its own.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REFRESH_S: Final = 0.3


class SparkWatch:
    """A line with a bar; nothing unless standard error is a terminal."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._progress: Any = None
        self._task: Any = None
        self._ended = threading.Event()
        # Tasks of every stage seen: Spark forgets stages that are done.
        self._stages: dict[int, tuple[int, int]] = {}

    def say(self, what: str) -> None:
        """What the command does now."""
        if self._progress is not None:
            self._progress.update(self._task, description=what)

    @contextlib.contextmanager
    def shown(self) -> Iterator[SparkWatch]:
        """Shows the line while the body runs."""
        if not self._shown:
            yield self
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True, emoji=False), transient=True) as progress:
            self._progress = progress
            self._task = progress.add_task("", total=None, detail="")
            try:
                yield self
            finally:
                self._progress = None

    @contextlib.contextmanager
    def following(self, spark: SparkSession) -> Iterator[None]:
        """The tasks of what the body runs are counted."""
        if self._progress is None:
            yield
            return
        thread = threading.Thread(target=self._follow, args=(spark,), name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(REFRESH_S * 4)

    def _follow(self, spark: SparkSession) -> None:
        tracker = spark.sparkContext.statusTracker()
        while not self._ended.wait(REFRESH_S):
            with contextlib.suppress(Exception):  # Spark stops: the body tells why
                for job in tracker.getActiveJobsIds():
                    detail = tracker.getJobInfo(job)
                    for number in detail.stageIds if detail is not None else ():
                        stage = tracker.getStageInfo(number)
                        if stage is not None:
                            self._stages[number] = (stage.numCompletedTasks, stage.numTasks)
            progress = self._progress
            if progress is None:
                return
            if self._stages:
                done, tasks = (sum(column) for column in zip(*self._stages.values(), strict=True))
                progress.update(self._task, completed=done, total=tasks, detail=f"{done}/{tasks} tasks")

    def figures(self, detail: str) -> None:
        """Of a stream, which has no end to count towards."""
        if self._progress is not None:
            self._progress.update(self._task, total=None, detail=detail)


__all__ = ["SparkWatch"]

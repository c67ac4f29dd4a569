"""Progress of long work: a bar on standard error when a person watches, nothing otherwise.

Rich is imported only then.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

REFRESH_S = 0.1


class ProgressMeter:
    """Counts what is done; `total` None means that the end is not known.

    >>> with ProgressMeter("sent", total=2, quiet=True) as watch:
    ...     watch.advance(2)
    >>> watch.done
    2
    """

    def __init__(self, label: str, *, total: int | None, unit: str = "messages", quiet: bool = False) -> None:
        self.done = 0
        self.began = time.perf_counter()
        self._label = label
        self._total = total
        self._unit = unit
        self._shown_at = 0.0
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._quiet = quiet or not sys.stderr.isatty()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self.began

    def advance(self, count: int) -> None:
        """Cheap: the terminal is touched ten times a second at most."""
        self.done += count
        if self._progress is not None and (now := time.perf_counter()) - self._shown_at > REFRESH_S:
            self._shown_at = now
            self._show()

    def _show(self) -> None:
        assert self._progress is not None
        assert self._task is not None
        rate = self.done / max(self.seconds, 1e-9)
        self._progress.update(self._task, completed=self.done, rate=f"{rate:,.0f} {self._unit}/s")
        self._progress.refresh()

    def __enter__(self) -> ProgressMeter:
        if not self._quiet:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            columns = [
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}", markup=False),
            ]
            self._progress = Progress(
                *columns, console=Console(stderr=True, emoji=False), auto_refresh=False, transient=True
            )
            self._task = self._progress.add_task(self._label, total=self._total, rate="")
            self._progress.start()
        self.began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._show()
            self._progress.stop()

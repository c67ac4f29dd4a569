"""How the demo shows its progress: four bars on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

FIGURES = ("produced", "confirmed", "tailed", "worked")


class Rate(ProgressColumn):
    """Messages per second over the last seconds."""

    def render(self, task: Task) -> Text:
        """The text of one bar."""
        speed = task.speed
        return Text(f"{speed:>7,.0f}/s" if speed else "        ", style="cyan")


class Bars:
    """For a terminal."""

    interval_s = 0.1

    def __init__(self, console: Console, count: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            Rate(),
            console=console,
        )
        self._tasks = {name: self._progress.add_task(name, total=count) for name in FIGURES}

    def show(self, figures: Mapping[str, int]) -> None:
        """Moves the bars."""
        for name, task in self._tasks.items():
            self._progress.update(task, completed=figures[name])

    def say(self, text: str) -> None:
        """A line above the bars."""
        self._progress.console.print(text, style="bold yellow")

    def __enter__(self) -> None:
        self._progress.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class Lines:
    """For a file or a pipe."""

    interval_s = 2.0

    def __init__(self, console: Console, count: int) -> None:
        self._console = console
        self._count = count
        self._began = time.monotonic()

    def show(self, figures: Mapping[str, int]) -> None:
        """One line."""
        parts = [f"{name} {figures[name]:>7,}" for name in FIGURES]
        self._console.print(
            f"{time.monotonic() - self._began:5.1f} s  {'  '.join(parts)}  of {self._count:,}"
        )

    def say(self, text: str) -> None:
        """A line of its own."""
        self._console.print(f"{time.monotonic() - self._began:5.1f} s  {text}")

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

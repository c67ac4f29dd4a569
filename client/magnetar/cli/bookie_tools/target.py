"""Which bookie an operator's command is for: the options that say so, and how it is opened."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ..terminal.command import Source, command
from ..terminal.progress import ProgressMeter
from ..terminal.session import EXIT_USAGE, fail
from ..terminal.tables import Table
from ..wiring.settings import SettingSources, service_settings

if TYPE_CHECKING:
    from magnetar.bookie.offline.stopped import StoppedBookie
    from magnetar.bookie.settings import BookieSettings

    from .tools import Tool

Data = Annotated[
    str | None,
    typer.Option(
        "--data", help="Data directory, as the daemon was given it; ./data by default.", metavar="DIR"
    ),
]
Config = Annotated[
    str | None,
    typer.Option("--config", help="The daemon's settings in TOML; also MAGNETAR_CONFIG.", metavar="FILE"),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="As the daemon takes it; may be repeated.", metavar="SECTION.NAME=VALUE"),
]
Running = Annotated[
    str | None,
    typer.Option(
        "--bookie",
        help="Ask the bookie that answers HTTP there, in place of --data.",
        metavar="HOST:PORT",
    ),
]
# Panels of the help page.
LOOK = "Look at a bookie, running or stopped"
CHANGE = "Change a bookie"

JsonLines = Annotated[bool, typer.Option("--json", help="JSON lines on standard output, for scripts.")]


class Target(NamedTuple):
    """The options by which the daemon was started, or (`bookie`) "host:port" where it answers HTTP."""

    data: str | None = None
    config: str | None = None
    assignments: Sequence[str] | None = None
    bookie: str | None = None

    def settings(self) -> BookieSettings:
        """What the daemon would use with the same flags, file and environment. InvalidSetting."""
        sources = SettingSources.of_options(self.data, self.config, self.assignments)
        return service_settings(sources, "bookie").bookie

    def any(self) -> AbstractAsyncContextManager[Tool]:
        """What answers for the bookie, whether it runs or not. MagnetarError."""
        from .tools import open_tool

        if self.bookie is not None and self.data is not None:
            fail("--bookie and --data exclude each other", EXIT_USAGE)
        _blocks_the_loop()
        return open_tool(self.settings(), self.bookie)

    async def stopped(self) -> StoppedBookie:
        """For a command that needs the bookie stopped. MagnetarError."""
        from magnetar.bookie.offline.stopped import StoppedBookie
        from magnetar.runtime.files import OsFiles

        _blocks_the_loop()
        return await StoppedBookie.open(self.settings(), OsFiles())


def _blocks_the_loop() -> None:
    """The work does, which has nothing else to do: signals must not wait for its next turn."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _source(**options: tuple[Any, Any]) -> Source:
    where: dict[str, tuple[Any, Any]] = {
        "data": (Data, None),
        "config": (Config, None),
        "assignments": (Set, None),
    }
    return Source({**options, **where}, lambda **given: nullcontext(Target(**given)))


# A command on a bookie, running or stopped; and one on a stopped bookie only. They get a `target`.
tool = partial(command, source=_source(bookie=(Running, None)))
stopped_tool = partial(command, source=_source())


class Meter:
    """The `progress` that the work reports bytes to: a bar a label, on standard error, when a person watches."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._watch: ProgressMeter | None = None
        self._label = ""

    def __call__(self, label: str, done: int, total: int) -> None:
        """`done` of `total` bytes of `label`, so far."""
        if self._watch is None or label != self._label:
            self.close()
            self._label = label
            self._watch = ProgressMeter(label, total=total, unit="B", quiet=self._quiet)
            self._watch.__enter__()
        self._watch.advance(done - self._watch.done)

    def close(self) -> None:
        """Takes the bar away."""
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
            self._watch = None

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def number(value: int) -> str:
    """With separators; nothing for -1, which stands for none."""
    return "" if value < 0 else f"{value:,}"


table = partial(Table, lines=False)


def figures(*rows: tuple[str, str]) -> Table:
    """A table of two columns, of the rows that have a value."""
    return table("", ("", ""), [row for row in rows if row[1]])

"""How an operator's command begins and ends: the settings, the bookie, stopped or running, one line for one failure."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from magnetar.bookie.cookie import read_cookie
from magnetar.bookie.layout import DataLayout
from magnetar.bookie.offline.stopped import StoppedBookie
from magnetar.bookie.settings import BookieSettings
from magnetar.proto.errors import DataDirectoryError, InvalidSetting, MagnetarError
from magnetar.runtime.files import Files, OsFiles

from ..terminal import tables
from ..terminal.progress import ProgressMeter
from ..terminal.session import EXIT_CONFIG, EXIT_USAGE, fail, run
from ..wiring.bookie_address import read_http_address
from ..wiring.settings import SettingSources, service_settings
from .running import RunningTool, StoppedTool, Tool
from .target import Target


def bookie_settings(target: Target) -> BookieSettings:
    """What the daemon would use with the same flags, file and environment. Ends the process when they are wrong."""
    try:
        sources = SettingSources.of_options(target.data, target.config, target.assignments)
        return service_settings(sources, "bookie").bookie
    except InvalidSetting as error:
        fail(error.message, EXIT_CONFIG)


def with_stopped(
    target: Target, work: Callable[[StoppedBookie], int | Coroutine[Any, Any, int] | None]
) -> None:
    """Opens the stopped bookie, works, and ends with the exit code that `work` returns or awaits."""
    settings = bookie_settings(target)

    async def main() -> int | None:
        with await StoppedBookie.open(settings, OsFiles()) as bookie:
            code = work(bookie)
            return await code if isinstance(code, Coroutine) else code

    _run(main())


def with_tool(target: Target, work: Callable[[Tool], int | None]) -> None:
    """Asks the running bookie of the target, or opens the stopped one; ends with the exit code that `work` returns."""
    if target.bookie is not None and target.data is not None:
        fail("--bookie and --data exclude each other", EXIT_USAGE)
    settings = bookie_settings(target)

    async def main() -> int | None:
        if target.bookie is not None:
            return work(RunningTool(target.bookie))
        files = OsFiles()
        try:
            bookie = await StoppedBookie.open(settings, files)
        except DataDirectoryError as error:
            if not error.details.get("locked"):
                raise
            return work(_running(files, DataLayout.of(settings), error))
        with bookie:
            return work(StoppedTool(bookie))

    _run(main())


def with_running(target: Target, work: Callable[[RunningTool], int | None]) -> None:
    """Like `with_tool`; for a stopped bookie it ends the process with what to do instead."""

    def ask(tool: Tool) -> int | None:
        if isinstance(tool, StoppedTool):
            fail(
                f"the bookie in {tool.root} is stopped, and only a running one lists its ledgers and reads their entries: "
                "start it, or see what `magnetar bookie entrylog dump` and `magnetar bookie journal dump` show"
            )
        return work(tool)

    with_tool(target, ask)


def _running(files: Files, layout: DataLayout, locked: DataDirectoryError) -> RunningTool:
    """The bookie that runs on this directory, if it is certain that it is the one. Raises DataDirectoryError."""
    address = read_http_address(files, layout)
    if not address:
        raise locked
    tool = RunningTool(address)
    cookie = read_cookie(files, layout)
    try:
        answered = tool.info()
    except MagnetarError as error:
        raise DataDirectoryError(
            f"{locked.message}. It could not be asked either ({error.message}): it starts, stops or hangs, or is another "
            "command"
        ) from error
    if cookie is None or answered["instance"] != f"{cookie.instance:016x}":
        raise DataDirectoryError(
            f"{locked.message}. At http://{address}, where a bookie ran on it before, answers bookie "
            f"{answered['bookie_id']} now"
        )
    return tool


def _run(main: Coroutine[Any, Any, int | None]) -> None:
    async def interruptible() -> None:
        # The work blocks the loop, which has nothing else to do; Ctrl-C must not wait for its next turn.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = await main
        sys.stdout.flush()
        if code:
            raise SystemExit(code)

    run(interruptible())


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


print_table = partial(tables.print_table, lines=False)

"""The answers of a bookie to an operator: rows, which are the objects of --json, from one that runs or from a stopped one.

A running bookie is asked over HTTP (WIRE.md), a stopped one's files are read. Both answer the same questions, but for
`ledgers` and `read`, which only a running one does. Errors are MagnetarError.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from magnetar.bookie.cookie import read_cookie
from magnetar.bookie.disk_space import clear_read_only, read_only_reason, set_read_only
from magnetar.bookie.layout import DataLayout
from magnetar.bookie.offline.entry_logs import find_log, walk_entry_log
from magnetar.bookie.offline.identity import describe, describe_cookie
from magnetar.bookie.offline.journals import no_progress, walk_journals
from magnetar.bookie.offline.stopped import StoppedBookie
from magnetar.bookie.offline.verify import verify
from magnetar.bookie.settings import BookieSettings
from magnetar.proto.errors import DataDirectoryError, MagnetarError, ServiceNotReady, error_from_wire
from magnetar.runtime.files import Files, OsFiles

from ..terminal.session import fail

Row = dict[str, Any]
Progress = Callable[[str, int, int], None]
# Between two lines of an answer: a cold disk, a large ledger.
_TIMEOUT_S = 60.0
_WANTED = "--bookie takes the http:// address of a bookie's or standalone's ready line"


class StoppedTool:
    """Answers from the files of a stopped bookie."""

    running = False

    def __init__(self, bookie: StoppedBookie) -> None:
        self._bookie = bookie

    def rows(self, question: str, progress: Progress = no_progress, **arguments: Any) -> Iterator[Row]:
        """`progress` is told of what has been read. Ends the command for what only a running bookie answers."""
        if question in ("ledgers", "read"):
            fail(
                f"the bookie in {self._bookie.layout.root} is stopped, and only a running one lists its ledgers and "
                "reads their entries: start it, or see what `magnetar bookie entrylog dump` and `magnetar bookie journal "
                "dump` show"
            )
        return _ANSWERS[question](self._bookie, progress, **arguments)

    def row(self, question: str, progress: Progress = no_progress, **arguments: Any) -> Row:
        """The only one."""
        return next(self.rows(question, progress, **arguments))


def _convert_to_read_only(bookie: StoppedBookie, _: Progress, *, undo: bool, reason: str) -> Iterator[Row]:
    """Sets the operator's marker, or clears it."""
    files, layout = bookie.files, bookie.layout
    bookie_id = bookie.cookie.bookie_id  # nothing is written into what is not a bookie's directory
    if undo:
        clear_read_only(files, layout)
    else:
        set_read_only(files, layout, reason)
    why = read_only_reason(files, layout)
    yield {"bookie_id": bookie_id, "read_only": bool(why), "read_only_reason": why}


_ANSWERS: dict[str, Callable[..., Iterator[Row]]] = {
    "info": lambda bookie, _: iter([describe(bookie, running=False)]),
    "cookie": lambda bookie, _: iter([describe_cookie(bookie, bookie.cookie)]),
    "journal": lambda bookie, progress, **which: walk_journals(bookie, **which, progress=progress),
    "entrylog": lambda bookie, progress, log: walk_entry_log(
        bookie, find_log(bookie, log), progress=progress
    ),
    "verify": lambda bookie, progress: iter([verify(bookie, progress).row()]),
    "convert-to-read-only": _convert_to_read_only,
}


class RunningTool:
    """Answers over HTTP. `address` is "host:port" of the daemon's HTTP server, or its URL."""

    running = True

    def __init__(self, address: str) -> None:
        self._address = address.removeprefix("http://").rstrip("/")
        # The operator's proxies lead elsewhere.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def rows(self, question: str, progress: Progress = no_progress, **arguments: Any) -> Iterator[Row]:
        """As they come. ServiceNotReady: nobody answers there, or it is no bookie; else the bookie's error."""
        given = {name: value for name, value in arguments.items() if value is not None and value is not False}
        url = f"http://{self._address}/bookie/{question}?{urllib.parse.urlencode(given)}"
        method = "POST" if question == "convert-to-read-only" else "GET"
        try:
            with self._open(urllib.request.Request(url, method=method), timeout=_TIMEOUT_S) as answer:
                for line in answer:
                    fields: Row = json.loads(line)
                    if "error" in fields:
                        raise _error(fields)
                    yield fields
        except urllib.error.HTTPError as error:
            if error.code != 400:
                raise ServiceNotReady(
                    f"what answers at http://{self._address} is no bookie (status {error.code}); {_WANTED}"
                ) from None
            raise _error(json.loads(error.read())) from None
        except MagnetarError:  # some are an OSError or a ValueError, too
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise ServiceNotReady(
                f"no bookie answers at http://{self._address}: {reason}; {_WANTED}"
            ) from None

    def row(self, question: str, progress: Progress = no_progress, **arguments: Any) -> Row:
        """The only one."""
        return next(self.rows(question, progress, **arguments))


Tool = StoppedTool | RunningTool


def _error(fields: Row) -> MagnetarError:
    return error_from_wire(int(fields["code"]), 0, str(fields["error"]))


@asynccontextmanager
async def open_tool(settings: BookieSettings, address: str | None) -> AsyncIterator[Tool]:
    """Of the bookie that answers HTTP at the address; without one of that of the data directory, whether it runs or not."""
    files = OsFiles()
    if address is not None:
        yield RunningTool(address)
        return
    try:
        bookie = await StoppedBookie.open(settings, files)
    except DataDirectoryError as error:
        if not error.details.get("locked"):
            raise
        yield _running(files, DataLayout.of(settings), error)
        return
    with bookie:
        yield StoppedTool(bookie)


def _running(files: Files, layout: DataLayout, locked: DataDirectoryError) -> RunningTool:
    """The bookie that runs on this directory, if it is certain that it is the one. Raises DataDirectoryError."""
    if not files.exists(layout.http_address):
        raise locked
    address = files.read(layout.http_address).decode(errors="replace").strip()
    tool = RunningTool(address)
    cookie = read_cookie(files, layout)
    try:
        answered = tool.row("info")
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

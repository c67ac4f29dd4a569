"""A running bookie as the operator's commands see it: they ask it over HTTP (WIRE.md), and get what the offline tools find.

What it alone answers is what its ledgers and entries are.

`StoppedTool` answers the other questions with the same objects, which are those of --json. Errors are MagnetarError.
"""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from magnetar.bookie.disk_space import clear_read_only, read_only_reason, set_read_only
from magnetar.bookie.listing import LedgerSummary
from magnetar.bookie.offline.entry_logs import StoredEntry, find_log, walk_entry_log
from magnetar.bookie.offline.identity import describe, describe_cookie
from magnetar.bookie.offline.journals import walk_journals
from magnetar.bookie.offline.stopped import StoppedBookie
from magnetar.bookie.offline.verify import verify
from magnetar.proto.errors import MagnetarError, ServiceNotReady, error_from_wire

Row = dict[str, Any]
Progress = Callable[[str, int, int], None]
# Between two lines of an answer: a cold disk, a large ledger.
_TIMEOUT_S = 60.0


class StoppedTool:
    """From the files of a stopped bookie."""

    running = False

    def __init__(self, bookie: StoppedBookie) -> None:
        self._bookie = bookie
        self.root = bookie.layout.root

    def info(self) -> Row:
        """As `offline.describe`."""
        return describe(self._bookie, running=False)

    def cookie(self) -> Row:
        """As `offline.describe_cookie`."""
        return describe_cookie(self._bookie, self._bookie.cookie)

    def journal(self, journal: int | None, file: str, from_mark: bool, progress: Progress) -> Iterator[Row]:
        """As `offline.walk_journals`."""
        return walk_journals(self._bookie, journal=journal, file=file, from_mark=from_mark, progress=progress)

    def entry_log(self, log: str, progress: Progress) -> Iterator[Row]:
        """As `offline.walk_entry_log`."""
        return walk_entry_log(self._bookie, find_log(self._bookie, log), progress=progress)

    def verify(self, progress: Progress) -> Row:
        """As `offline.verify`."""
        return verify(self._bookie, progress).row()

    def convert_to_read_only(self, reason: str, *, undo: bool) -> Row:
        """Sets the operator's marker, or clears it: "bookie_id", "read_only", "read_only_reason"."""
        files, layout = self._bookie.files, self._bookie.layout
        bookie_id = self._bookie.cookie.bookie_id  # nothing is written into what is not a bookie's directory
        if undo:
            clear_read_only(files, layout)
        else:
            set_read_only(files, layout, reason)
        why = read_only_reason(files, layout)
        return {"bookie_id": bookie_id, "read_only": bool(why), "read_only_reason": why}


class RunningTool:
    """Over HTTP. `address` is "host:port" of the daemon's HTTP server, or its URL."""

    running = True

    def __init__(self, address: str) -> None:
        self.address = address.removeprefix("http://").rstrip("/")
        # The operator's proxies lead elsewhere.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def info(self) -> Row:
        return next(self._ask("info"))

    def cookie(self) -> Row:
        return next(self._ask("cookie"))

    def ledgers(self, ledger: int | None) -> Iterator[LedgerSummary]:
        """All ledgers, or this one. "In journals" is what is in memory."""
        return (LedgerSummary(**fields) for fields in self._ask("ledgers", ledger=ledger))

    def entries(self, ledger: int, first: int, last: int | None) -> Iterator[StoredEntry]:
        """Those of `first` to `last` (None: the end) that are here; a damaged one is returned as such."""
        for fields in self._ask("read", ledger=ledger, first=first, last=last):
            yield StoredEntry(**fields | {"data": base64.b64decode(fields["data"])})

    def journal(self, journal: int | None, file: str, from_mark: bool, progress: Progress) -> Iterator[Row]:
        return self._ask("journal", journal=journal, file=file, from_mark=from_mark or None)

    def entry_log(self, log: str, progress: Progress) -> Iterator[Row]:
        return self._ask("entrylog", log=log)

    def verify(self, progress: Progress) -> Row:
        """What the scrub has verified so far."""
        return next(self._ask("verify"))

    def convert_to_read_only(self, reason: str, *, undo: bool) -> Row:
        return next(self._ask("convert-to-read-only", method="POST", undo=undo or None, reason=reason))

    def _ask(self, command: str, *, method: str = "GET", **arguments: Any) -> Iterator[Row]:
        """The objects of the answer. ServiceNotReady: nobody answers there, or it is no bookie; else the bookie's error."""
        query = urllib.parse.urlencode(
            {name: value for name, value in arguments.items() if value is not None}
        )
        request = urllib.request.Request(f"http://{self.address}/bookie/{command}?{query}", method=method)
        try:
            with self._open(request, timeout=_TIMEOUT_S) as answer:
                for line in answer:
                    fields: Row = json.loads(line)
                    if "error" in fields:
                        raise _error(fields)
                    yield fields
        except urllib.error.HTTPError as error:
            if error.code != 400:
                raise ServiceNotReady(
                    f"what answers at http://{self.address} is no bookie (status {error.code}); {_WANTED}"
                ) from None
            raise _error(json.loads(error.read())) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise ServiceNotReady(
                f"no bookie answers at http://{self.address}: {reason}; {_WANTED}"
            ) from None


_WANTED = "--bookie takes the http:// address of a bookie's or standalone's ready line"


def _error(fields: Row) -> MagnetarError:
    return error_from_wire(int(fields["code"]), 0, str(fields["error"]))


# What both answer alike.
Tool = StoppedTool | RunningTool

"""Watches the space of every directory: read-only before a disk is full, and writable again by itself (rule 12).

A full ledger directory takes nothing more while another one does; the bookie is read-only when none is left, or when a
journal, the index or the data directory itself has no space, or when its operator said so:

    DATA/read-only      UTF-8 text: the reason. The existence of the file counts, not its content; it survives restarts

A read-only bookie still takes the entries that recoveries write again (rule 39): those are few, and without them topics of a
broker that died on a full disk could not even be read. They need `disk_recovery_bytes` in every directory. As much is in
the file `reserve` below the data directory, which is given back when less is free, and made again when there is room. An
eighth of it is kept for the next starts, which write a few files before they serve anything: each takes half of what there
is.

    WRITABLE ──no space──> RECOVERIES ONLY ──less than disk_recovery_bytes──> `reserve` is given back ──> RECOVERIES ONLY
       ^                          │                                                   └──that is used up──> READS ONLY
       └───────space again────────┴─────────────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from contextlib import closing
from typing import NamedTuple

from magnetar.proto.errors import StorageFailed
from magnetar.runtime.files import Files

from .disk_forecast import DiskForecast
from .entry_log.entry_logs import EntryLogs
from .entry_log.ledger_directory import DirectoryState
from .layout import DataLayout
from .settings import BookieSettings

_MAX_REASON_BYTES = 4096
_NO_REASON = "an operator converted this bookie to read-only"


def marker_path(layout: DataLayout) -> str:
    """The path of the marker."""
    return os.path.join(layout.root, "read-only")


def read_only_reason(files: Files, layout: DataLayout) -> str:
    """Why the bookie is read-only by its operator's will; empty: it is not."""
    path = marker_path(layout)
    if not files.exists(path):
        return ""
    with closing(files.open(path, read_only=True)) as file:
        text = file.read_at(0, _MAX_REASON_BYTES)
    return " ".join(text.decode(errors="replace").split()) or _NO_REASON


def set_read_only(files: Files, layout: DataLayout, reason: str) -> None:
    """Durable when it returns."""
    text = (" ".join(reason.split()) or _NO_REASON).encode()[:_MAX_REASON_BYTES]
    files.write_atomically(marker_path(layout), text + b"\n")


def clear_read_only(files: Files, layout: DataLayout) -> None:
    """Durable when it returns. Fine if there is no marker."""
    files.delete(marker_path(layout))
    files.sync_directory(layout.root)


_log = logging.getLogger(__name__)

_RESERVE = "reserve"
_START_SHARE = 8
# Of the reserve, at each look at the disks: 1 ms of the loop.
_RESERVE_STEP_BYTES = 2 << 20


def give_back_reserve(files: Files, layout: DataLayout, size: int, *, keep: int | None = None) -> None:
    """All but `keep` bytes (None: half) of the file `reserve`, when less than its `size` is free."""
    path = os.path.join(layout.root, _RESERVE)
    if files.exists(path) and (not size or files.free_bytes(layout.root)[0] < size):
        with contextlib.closing(files.open(path)) as file:
            held = file.size()
            left = held // 2 if keep is None and size else keep or 0
            if held > left:
                file.truncate(left)
                _log.warning("%s: %d bytes are given back to a full disk", path, held - left)


class WatchedDirectory(NamedTuple):
    """A directory as it was seen last. `role`: "journal", "ledgers", "index" or "data"; sizes in bytes."""

    path: str
    role: str
    state: DirectoryState
    free_bytes: int
    total_bytes: int
    nearly_full: bool
    device: int  # which file system; see `Files.device`


class DiskSpace:
    """Logs each change once. `note_pressed` is called with the ledger directories that are nearly full or worse."""

    def __init__(
        self,
        files: Files,
        layout: DataLayout,
        settings: BookieSettings,
        logs: EntryLogs,
        note_pressed: Callable[[list[int]], None],
    ) -> None:
        self._files = files
        self._layout = layout
        self._settings = settings
        self._logs = logs
        self._note_pressed = note_pressed
        self.directories: list[WatchedDirectory] = []
        self.forecast = DiskForecast()
        # Why the bookie is read-only; "" if it is not.
        self.reason = ""
        # While it is read-only: whether the entries of recoveries are taken.
        self.takes_recoveries = True
        self._said: dict[str, DirectoryState | bool] = {}

    def full_in_s(self, seen: WatchedDirectory) -> float | None:
        """When the bookie will be read-only because of this directory, at the pace of the last hour."""
        settings = self._settings
        limit = max(settings.disk_minimum_free_bytes, (1 - settings.disk_read_only_ratio) * seen.total_bytes)
        return self.forecast.full_in_s(seen.path, int(limit))

    def check(self, now: float, *, full: bool = False) -> str:
        """Checks all directories; returns why nothing more may be written, "" if it may. `now` in seconds of the loop.

        `full`: a flush found no space, whatever the numbers say. Raises StorageFailed when a disk of a journal or the index
        cannot even be asked; a ledger directory has failed then, which raises if it was the last one.
        """
        layout = self._layout
        ledgers = [self._check_ledger_directory(number) for number in range(len(layout.ledgers))]
        self._note_pressed(
            [
                number
                for number, seen in enumerate(ledgers)
                if seen.nearly_full or seen.state is DirectoryState.FULL
            ]
        )
        others = [self._seen(path, "journal") for path in layout.journals]
        others.append(self._seen(layout.root, "data"))
        if self._files.exists(layout.index):  # one in memory has no directory
            others.append(self._seen(layout.index, "index"))
        self.directories = others + ledgers
        for seen in self.directories:
            self._log_change(seen)
            self.forecast.seen(seen.path, now, seen.free_bytes)
        self._decide(ledgers, others, full)
        return self.reason

    def _decide(self, ledgers: list[WatchedDirectory], others: list[WatchedDirectory], full: bool) -> None:
        reason = read_only_reason(self._files, self._layout)
        space = ""
        short = [seen for seen in others if seen.state is DirectoryState.FULL]
        if not short and all(seen.state is not DirectoryState.WRITABLE for seen in ledgers):
            short = ledgers
        if short:
            space = f"no space in {', '.join(seen.path for seen in short)}{self._too_small(short)}"
        elif full:
            space = "a flush found no space"
        if space:
            reason = f"{space}: reads and fencing go on (disk_read_only_ratio, disk_minimum_free_bytes)"
        self._keep_reserve(bool(space))
        self.takes_recoveries = not space or (not full and self._has_room_for_recoveries(others, ledgers))
        if reason and not self.reason:
            _log.error("read-only: %s", reason)
        elif self.reason and not reason:
            _log.warning("writable again: %s", self.reason)
        self.reason = reason

    def _too_small(self, short: list[WatchedDirectory]) -> str:
        minimum = self._settings.disk_minimum_free_bytes
        if any(0 < seen.total_bytes < 4 * minimum for seen in short):
            return f" (the disk is small: it is never writable unless disk_minimum_free_bytes={minimum} are free)"
        return ""

    def _has_room_for_recoveries(
        self, others: list[WatchedDirectory], ledgers: list[WatchedDirectory]
    ) -> bool:
        """Everywhere else, and in one ledger directory at least; the reserve may just have been given back."""
        needed = self._settings.disk_recovery_bytes

        def free_bytes(seen: WatchedDirectory) -> int:
            return self._files.free_bytes(seen.path)[0]

        works = [seen for seen in ledgers if seen.state is not DirectoryState.FAILED]
        return (
            needed > 0
            and all(free_bytes(seen) >= needed for seen in others)
            and any(free_bytes(seen) >= needed for seen in works)
        )

    def _keep_reserve(self, no_space: bool) -> None:
        """Makes the file `reserve` when there is room for it, and gives it back when there is none for recoveries."""
        size = self._settings.disk_recovery_bytes
        path = os.path.join(self._layout.root, _RESERVE)
        free = self._files.free_bytes(self._layout.root)[0]
        if no_space or not size:
            give_back_reserve(self._files, self._layout, size, keep=size // _START_SHARE)
        elif free > 4 * size + self._settings.disk_minimum_free_bytes:
            with contextlib.closing(self._files.open(path, create=True)) as file:
                if (made := file.size()) < size:
                    file.zero_fill(made, min(_RESERVE_STEP_BYTES, size - made))

    def _check_ledger_directory(self, number: int) -> WatchedDirectory:
        path = self._layout.ledgers[number]
        if self._logs.directory_states[number] is not DirectoryState.FAILED:
            try:
                seen = self._seen(path, "ledgers")
            except StorageFailed as error:
                self._logs.fail_directory(number, error)
            else:
                self._logs.set_full(number, seen.state is DirectoryState.FULL)
                return seen
        return WatchedDirectory(path, "ledgers", DirectoryState.FAILED, 0, 0, False, -1)

    def _seen(self, path: str, role: str) -> WatchedDirectory:
        settings = self._settings
        free, total = self._files.free_bytes(path)
        used = 1 - free / total if total else 0.0
        is_full = used > settings.disk_read_only_ratio or free < settings.disk_minimum_free_bytes
        state = DirectoryState.FULL if is_full else DirectoryState.WRITABLE
        nearly = is_full or used > settings.disk_warn_ratio
        return WatchedDirectory(path, role, state, free, total, nearly, self._files.device(path))

    def _log_change(self, seen: WatchedDirectory) -> None:
        now = seen.state if seen.state is not DirectoryState.WRITABLE else seen.nearly_full
        if now == self._said.get(seen.path, False):
            return
        self._said[seen.path] = now
        percent = 100 * (1 - seen.free_bytes / seen.total_bytes) if seen.total_bytes else 0.0
        if seen.state is DirectoryState.FULL:
            _log.error("%s is %.1f%% full: %d bytes free", seen.path, percent, seen.free_bytes)
        elif seen.state is DirectoryState.WRITABLE:
            text = "%s is %.1f%% full" if seen.nearly_full else "%s has space again, %.1f%% full"
            _log.warning(text, seen.path, percent)

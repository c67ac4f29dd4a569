"""Watches the space on the disk: read-only before it is full, and writable again by itself (rule 12)."""

from __future__ import annotations

import logging

from magnetar.runtime.files import Files

from .settings import BookieSettings

__all__ = ["DiskSpace"]

_log = logging.getLogger(__name__)


class DiskSpace:
    """Says each change once."""

    def __init__(self, files: Files, directory: str, settings: BookieSettings) -> None:
        self._files = files
        self._directory = directory
        self._settings = settings
        self._read_only = False
        self._nearly_full = False

    def look(self, *, full: bool = False) -> bool:
        """True if nothing more may be written. `full`: something found the disk full already."""
        settings = self._settings
        free, total = self._files.free_bytes(self._directory)
        used = 1 - free / total if total else 0.0
        read_only = full or used > settings.disk_read_only_ratio or free < settings.disk_minimum_free_bytes
        nearly_full = used > settings.disk_warn_ratio
        if read_only and not self._read_only:
            _log.error(
                "%s is %.1f%% full (%d bytes free): read-only until there is space; reads and fencing go on "
                "(disk_read_only_ratio, disk_minimum_free_bytes)",
                self._directory,
                used * 100,
                free,
            )
        elif self._read_only and not read_only:
            _log.warning("%s has space again: writable", self._directory)
        elif nearly_full and not self._nearly_full:
            _log.warning("%s is %.1f%% full", self._directory, used * 100)
        self._read_only, self._nearly_full = read_only, nearly_full
        return read_only

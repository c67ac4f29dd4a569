"""A stopped bookie's directories, locked while they are inspected."""

from __future__ import annotations

import os
from types import TracebackType
from typing import NamedTuple, Protocol

from magnetar.proto.errors import DataDirectoryError, MagnetarError
from magnetar.runtime.files import FileLock, Files, file_size, wait_for_lock

from ..cookie import Cookie, decode_cookie
from ..index import LocationIndex, RocksLocationIndex
from ..index.locations import REBUILD
from ..layout import DataLayout
from ..settings import BookieSettings

# Helpers of a daemon that was killed end within some milliseconds.
_WAIT_FOR_HELPERS_S = 0.25


class LogFile(NamedTuple):
    """An entry log."""

    log_id: int
    path: str
    bytes: int


class BookieData(Protocol):
    """What the tools read: the data of a stopped bookie, or of a running one that answers for itself (`shell`)."""

    settings: BookieSettings
    files: Files
    layout: DataLayout

    @property
    def cookie(self) -> Cookie:
        """Whose data it is. DataDirectoryError when the cookie is missing or damaged."""
        ...

    @property
    def index(self) -> LocationIndex:
        """DataDirectoryError when it is missing, damaged or another bookie's."""
        ...

    def logs(self) -> list[LogFile]:
        """Every entry log, by id."""
        ...


class StoppedBookie:
    """Takes the bookie's lock, so that none can start meanwhile, and reads. Made by `open`; close it."""

    def __init__(self, settings: BookieSettings, files: Files, layout: DataLayout, lock: FileLock) -> None:
        """For `open`."""
        self.settings = settings
        self.files = files
        self.layout = layout
        self._lock = lock
        self._cookie: Cookie | None = None
        self._index: RocksLocationIndex | None = None
        self._logs: list[LogFile] | None = None
        self._paths: dict[int, str] | None = None

    @classmethod
    async def open(cls, settings: BookieSettings, files: Files) -> StoppedBookie:
        """Raises DataDirectoryError: not a bookie's directory, or its bookie runs."""
        layout = DataLayout.of(settings)
        if not files.exists(layout.root):
            parent = os.path.dirname(layout.root)
            if files.exists(os.path.join(parent, "mark")):  # --data named the bookie's own part of it
                hint = f"did you mean --data {os.path.dirname(parent) or '.'}?"
            else:
                hint = "--data takes what the daemon was given"
            raise DataDirectoryError(f"{layout.root} does not exist; {hint}", path=layout.root)
        names = (layout.cookie, layout.mark, layout.index, *layout.journals, *layout.ledgers)
        if not any(map(files.exists, names)):
            raise DataDirectoryError(
                f"{layout.root} is not the data directory of a bookie; --data takes what the daemon was given",
                path=layout.root,
            )
        lock = await lock_stopped(files, layout)
        return cls(settings, files, layout, lock)

    @property
    def cookie(self) -> Cookie:
        """Whose directory it is. DataDirectoryError when the cookie is missing or damaged."""
        if self._cookie is None:
            path = self.layout.cookie
            if not self.files.exists(path):
                raise DataDirectoryError(
                    f"{self.layout.root} holds data but no cookie; restore {path}", path=path
                )
            self._cookie = decode_cookie(self.files.read(path), path)
        return self._cookie

    @property
    def index(self) -> RocksLocationIndex:
        """Opened on first use. DataDirectoryError when it is missing, damaged or another bookie's."""
        if self._index is None:
            index = RocksLocationIndex.open_read_only(self.layout.index)
            try:
                index.check_guard()
                instance = index.instance()
                if instance is not None and instance != self.cookie.instance:
                    raise DataDirectoryError(
                        f"the index {self.layout.index} belongs to another bookie; {REBUILD}",
                        path=self.layout.index,
                    )
            except BaseException:
                index.close()
                raise
            self._index = index
        return self._index

    def ledger_directories(self) -> list[str]:
        """Those of the settings, and those that only the cookie names: inspection must not depend on complete settings."""
        try:
            known = [row.name for row in self.cookie.ledger_directories if not row.lost]
        except MagnetarError:
            known = []
        return list(dict.fromkeys([*self.layout.ledgers, *map(self.layout.directory, known)]))

    def logs(self) -> list[LogFile]:
        """Every entry log of the ledger directories that are there, by id. One that is in two of them comes twice."""
        if self._logs is None:
            found: list[LogFile] = []
            for directory in self.ledger_directories():
                for name in self.files.list(directory) if self.files.exists(directory) else []:
                    log_id = self.layout.entry_log_id(name)
                    if log_id is not None:
                        path = os.path.join(directory, name)
                        found.append(LogFile(log_id, path, file_size(self.files, path)))
            self._logs = sorted(found)
        return self._logs

    def log_path(self, log_id: int) -> str | None:
        """Where a log is; None: there is none."""
        if self._paths is None:
            self._paths = {log.log_id: log.path for log in self.logs()}
        return self._paths.get(log_id)

    def close_index(self) -> None:
        """The next use opens it again."""
        if self._index is not None:
            self._index.close()
            self._index = None

    def close(self) -> None:
        """Closes everything and releases the lock. May be called twice."""
        self.close_index()
        self._lock.release()

    def __enter__(self) -> StoppedBookie:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def lock_stopped(files: Files, layout: DataLayout) -> FileLock:
    """Takes the bookie's lock; DataDirectoryError says which process has it."""
    try:
        return await wait_for_lock(files, layout.lock, _WAIT_FOR_HELPERS_S)
    except DataDirectoryError as error:
        if not error.details.get("locked"):
            raise
        holder = error.details.get("holder")
        process = f"process {holder}" if holder else "another process"
        cure = f"kill {holder}, then try again" if holder else "stop it, then try again"
        raise DataDirectoryError(
            f"the bookie in {layout.root} is in use by {process}; this command needs it stopped: {cure}",
            path=layout.root,
            locked=True,
            holder=holder,
        ) from None

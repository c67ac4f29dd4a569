"""Names of a simulated disk: what programs see, what is durable, and the changes in between.

A change of a directory (create, rename, delete, mkdir) is durable after `sync` of that directory. At a power loss each
pending change survives or not; in 50% of the cases a prefix survives, as a journalling file system would, else any
subset, as POSIX allows.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

from support.sim.inode import PAGE_BYTES, Inode


@dataclass
class Change:
    """A pending change. `inode` is what the name stands for after it; `source` the old name of a rename."""

    kind: str
    path: str
    inode: Inode | None = None
    source: str = ""


class Namespace:
    """Paths are absolute."""

    def __init__(self) -> None:
        self._files: dict[str, Inode] = {}
        self._directories: dict[str, None] = {"/": None}
        self._durable_files: dict[str, Inode] = {}
        self._durable_directories: dict[str, None] = {"/": None}
        self._pending: list[Change] = []

    def file(self, path: str) -> Inode | None:
        """None if there is no such file."""
        return self._files.get(path)

    def is_directory(self, path: str) -> bool:
        """Whether it is one."""
        return path in self._directories

    def exists(self, path: str) -> bool:
        """A file or a directory."""
        return path in self._files or path in self._directories

    def names(self, directory: str) -> list[str]:
        """Names in it, sorted."""
        prefix = directory.rstrip("/") + "/"
        paths = [*self._files, *self._directories]
        names = [path[len(prefix) :] for path in paths if path.startswith(prefix)]
        return sorted(name for name in names if name and "/" not in name)

    def paths(self) -> list[str]:
        """Of all files, sorted."""
        return sorted(self._files)

    def inodes(self) -> list[Inode]:
        """All files, in the order of their names."""
        return [self._files[path] for path in self.paths()]

    def pages(self) -> int:
        """That all files take. Asked for with every write that makes one longer, so Inode.pages is written out."""
        return sum([(inode.size + PAGE_BYTES - 1) // PAGE_BYTES for inode in self._files.values()])

    def create(self, path: str) -> Inode:
        """A new empty file."""
        inode = Inode()
        self._change(Change("create", path, inode))
        return inode

    def make_directory(self, path: str) -> None:
        """A new directory."""
        self._change(Change("mkdir", path))

    def rename(self, source: str, target: str) -> None:
        """Replaces the target."""
        self._change(Change("rename", target, self._files[source], source))

    def delete(self, path: str) -> None:
        """A file."""
        self._change(Change("delete", path))

    def sync(self, directory: str) -> None:
        """The names of this directory are durable."""
        survivors: list[Change] = []
        for change in self._pending:
            if os.path.dirname(change.path) == directory:
                _apply(change, self._durable_files, self._durable_directories)
            else:
                survivors.append(change)
        self._pending = survivors

    def lose_power(self, rng: random.Random) -> int:
        """Decides what survives a power loss; returns the number of changes that did not."""
        pending, self._pending = self._pending, []
        if rng.random() < 0.5:
            survivors = pending[: rng.randint(0, len(pending))]
        else:
            survivors = [change for change in pending if rng.random() < 0.5]
        for change in survivors:
            _apply(change, self._durable_files, self._durable_directories)
        # A directory whose own name was lost takes what is in it along.
        for path in sorted(self._durable_directories):
            if path != "/" and os.path.dirname(path) not in self._durable_directories:
                del self._durable_directories[path]
        for path in sorted(self._durable_files):
            if os.path.dirname(path) not in self._durable_directories:
                del self._durable_files[path]
        self._files = dict(self._durable_files)
        self._directories = dict(self._durable_directories)
        return len(pending) - len(survivors)

    def _change(self, change: Change) -> None:
        _apply(change, self._files, self._directories)
        self._pending.append(change)


def _apply(change: Change, files: dict[str, Inode], directories: dict[str, None]) -> None:
    match change.kind:
        case "create":
            assert change.inode is not None
            files[change.path] = change.inode
        case "mkdir":
            directories[change.path] = None
        case "delete":
            files.pop(change.path, None)
        case "rename":
            assert change.inode is not None
            # By inode: if the creation of the source was lost, a rename that survives still names the file.
            files[change.path] = change.inode
            if change.source != change.path and files.get(change.source) is change.inode:
                del files[change.source]
        case _:
            raise AssertionError(change.kind)

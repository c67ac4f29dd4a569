"""Folders that a job is going to write, looked at before it starts. Those of this machine: of others Spark will tell."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

from magnetar.proto.errors import InvalidArgument


def check_new_folder(option: str, path: str) -> None:
    """The local folder can be made. InvalidArgument, which names the option."""
    local = local_path(path)
    if local is None:
        return
    if os.path.lexists(local):
        raise InvalidArgument(f"{option} {path} is there already; name a new folder, or remove that one")
    check_writable(option, path)


def check_writable(option: str, path: str) -> None:
    """What lies below the path can be written, or made. InvalidArgument, which names the option."""
    found = local_path(path)
    if found is None:
        return
    while not os.path.lexists(found):
        found = os.path.dirname(found)
    if not os.path.isdir(found):
        raise InvalidArgument(f"{option} {path}: {found} is no folder; name another path")
    if not os.access(found, os.W_OK | os.X_OK):
        raise InvalidArgument(f"{option} {path}: {found} cannot be written; allow it, or name another path")


def local_path(path: str) -> str | None:
    """Absolute path of what lies on this machine; None of another file system."""
    if path.startswith("file:"):
        return os.path.abspath(unquote(urlsplit(path).path))
    return None if "://" in path else os.path.abspath(path)

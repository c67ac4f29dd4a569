"""The operator's read-only marker: a file that survives restarts, until the operator takes it away (FORMATS.md).

    DATA/read-only      UTF-8 text: the reason. The existence of the file counts, not its content

A bookie that finds it takes no adds; reads, fencing and recovery adds go on, as on a full disk (rule 12).
"""

from __future__ import annotations

import os
from contextlib import closing

from magnetar.runtime.files import Files

from .layout import DataLayout

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

"""Making the index of a stopped bookie anew (`index/rebuild`), once it is clear that this is a bookie's directory."""

from __future__ import annotations

from magnetar.proto.errors import DataDirectoryError

from ..index import RocksLocationIndex
from ..index.rebuild import RebuildReport, rebuild_index
from .index_view import remove_empty_directory
from .journals import Progress, no_progress
from .stopped import StoppedBookie

__all__ = ["rebuild"]


async def rebuild(
    bookie: StoppedBookie, *, dry_run: bool = False, progress: Progress = no_progress
) -> RebuildReport:
    """Reads every entry log; the new index is in place and durable when it returns, the old one put aside.

    Refused with DataDirectoryError when a ledger directory is missing: its entries would be said not to exist.
    StorageFailed, DiskFull: the old index is where it was. With `dry_run` nothing has changed.
    """
    missing = [path for path in bookie.layout.ledgers if not bookie.files.exists(path)]
    if missing:
        raise DataDirectoryError(
            f"{missing[0]} is missing: an index without its logs would say that their entries do not exist; restore it "
            "(is its disk mounted?), or declare it lost (magnetar bookie cookie --lost-directory)",
            path=missing[0],
        )
    instance = bookie.cookie.instance
    logs = bookie.logs()
    total = sum(log.bytes for log in logs)
    bookie.close_index()
    try:
        return await rebuild_index(
            bookie.files,
            bookie.layout.index,
            {log.log_id: log.path for log in logs},
            instance,
            open_index=RocksLocationIndex,
            dry_run=dry_run,
            progress=lambda report: progress("entry logs", report.bytes, total),
        )
    finally:
        if dry_run:
            remove_empty_directory(bookie.layout.index + ".rebuilding")

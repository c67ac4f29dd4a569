"""Rebuilds the index of a stopped bookie (`index/rebuild`), after a check that the directories are this bookie's."""

from __future__ import annotations

from magnetar.proto.errors import DataDirectoryError, MagnetarError

from ..index import ALL_LEDGERS, LocationIndex, RocksLocationIndex
from ..index.rebuild import RebuildReport, rebuild_index
from .identity import check_identity
from .index_view import remove_empty_directory
from .journals import Progress, no_progress
from .stopped import StoppedBookie

__all__ = ["rebuild"]


async def rebuild(
    bookie: StoppedBookie, *, dry_run: bool = False, progress: Progress = no_progress
) -> RebuildReport:
    """Reads every entry log; the new index is in place and durable when it returns, the old one put aside.

    Refused with DataDirectoryError when a start would refuse the directories (an empty or wrong disk, say): what they should
    hold would be said not to exist. StorageFailed, DiskFull: the old index is where it was. With `dry_run` nothing changes.
    """
    problem = check_identity(bookie)
    if problem:
        raise DataDirectoryError(
            f"an index without all of its logs would say that their entries do not exist: {problem}",
            path=bookie.layout.root,
        )
    # A directory was declared lost: only the old index knows what was in it.
    logs_lost = bookie.cookie.lost_logs
    lost = logs_lost and not _is_readable(bookie)

    def open_index(path: str) -> LocationIndex:
        index = RocksLocationIndex(path)
        if lost:
            index.set_incomplete(ALL_LEDGERS)
        return index

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
            open_index=open_index,
            logs_lost=logs_lost,
            dry_run=dry_run,
            progress=lambda report: progress("entry logs", report.bytes, total),
        )
    finally:
        if dry_run:
            remove_empty_directory(bookie.layout.index + ".rebuilding")


def _is_readable(bookie: StoppedBookie) -> bool:
    try:
        return bookie.index.incomplete_below() != ALL_LEDGERS
    except MagnetarError:
        return False

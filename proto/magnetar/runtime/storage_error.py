"""What an error of the operating system means for stored data."""

from __future__ import annotations

import errno

from magnetar.proto.errors import DataDirectoryError, DiskFull, MagnetarError, StorageFailed

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_OPERATOR = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)


def storage_error(error: OSError, doing: str, path: str) -> MagnetarError:
    """DiskFull, DataDirectoryError (an operator must act) or StorageFailed; details hold "path" and "errno"."""
    reason = error.strerror or str(error)
    if error.errno in _NO_SPACE:
        return DiskFull(
            f"no space left while {doing} {path}: {reason}; free some space", path=path, errno=error.errno
        )
    if error.errno in _OPERATOR:
        return DataDirectoryError(f"{doing} {path} failed: {reason}", path=path, errno=error.errno)
    return StorageFailed(f"{doing} {path} failed: {reason}", path=path, errno=error.errno)

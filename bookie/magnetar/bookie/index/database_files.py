"""The files of RocksDB as bytes: each table (SST) is hashed when it is first seen, and compared from then on.

RocksDB verifies a block when it reads it, which for a filter or a rarely used table may be never; and a table is never
changed after it was written. A MANIFEST only grows, so its hashed part must stay the same. CURRENT must name a MANIFEST.
"""

from __future__ import annotations

import xxhash

from magnetar.runtime.files import Files

_CURRENT = "CURRENT"


def database_file_names(files: Files, directory: str) -> list[str]:
    """Names of the files in `directory` to verify, sorted; empty if there is no such directory."""
    if not files.exists(directory):
        return []
    return [
        name
        for name in files.list(directory)
        if name.endswith(".sst") or name.startswith("MANIFEST-") or name == _CURRENT
    ]


class DatabaseFileCheck:
    """Compares one file of `size` bytes, which are all given to `take`, in order, with what was known of it.

    `known`: how many bytes it had when it was last hashed, and their xxh3-64; None: it was not seen before.
    """

    def __init__(self, name: str, size: int, known: tuple[int, int] | None) -> None:
        self._name = name
        self._size = size
        self._length = size if known is None else known[0]
        self._checksum = None if known is None else known[1]
        self._digest = xxhash.xxh3_64()
        self._taken = 0
        # Of the first `_length` bytes, once they were taken.
        self._found: int | None = None
        self._begin = b""

    def take(self, data: bytes) -> None:
        """The next bytes."""
        left = self._length - self._taken
        if self._found is None and len(data) >= left:
            first = self._digest.copy()
            first.update(data[:left])
            self._found = first.intdigest()
        self._digest.update(data)
        self._taken += len(data)
        self._begin = self._begin or data

    def fault(self, names: list[str]) -> str:
        """What is wrong with the file, beside which `names` are in its directory; "" if nothing is."""
        if self._name == _CURRENT:
            name, newline = self._begin[:-1].decode("ascii", "replace"), self._begin[-1:]
            good = newline == b"\n" and name.startswith("MANIFEST-") and name in names
            return "" if good else "it does not name a MANIFEST"
        if self._size < self._length:
            return f"it has {self._size} bytes and had {self._length}"
        if self._checksum is not None and self._found != self._checksum:
            return "its bytes have changed since they were written"
        return ""

    @property
    def compared(self) -> bool:
        """False for a file that was only read, since nothing was known of it."""
        return self._checksum is not None or self._name == _CURRENT

    @property
    def seen(self) -> tuple[int, int] | None:
        """What the next check compares with; None for CURRENT, which changes."""
        return None if self._name == _CURRENT else (self._size, self._digest.intdigest())

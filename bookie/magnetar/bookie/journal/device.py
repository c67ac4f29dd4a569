"""The seam between the journal and what makes its bytes durable.

A device takes a stream of bytes that is numbered from `offset` on, and says up to which offset they are durable. It knows
nothing of records. What arrives while a sync is running is the next group, and a group starts at a multiple of
`GROUP_ALIGNMENT` in the current file (`file_position` says how far the file is used). What is appended as deferred waits for
the next bytes that are not, or for `sync`.

The journal owns the files: it prepares them and says where in the stream the next one begins (`roll`). Everything before
that point is synced before the next file is touched (rule 5 depends on it).

A failed write or sync is never tried again (rule 4): `on_failure` is called once, and nothing becomes durable any more. The
exception is a write (never a sync) that finds the disk full: it waits, `full` is true meanwhile, and `on_space` is called at
both changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from magnetar.proto.errors import MagnetarError

from ..metrics import Histogram

_GROUP_BOUNDS = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)


class JournalDevice(Protocol):
    """One journal directory's device. Callbacks come from the loop, never from inside a call of the device."""

    on_durable: Callable[[int], None]
    on_failure: Callable[[MagnetarError], None]
    on_space: Callable[[], None]
    full: bool  # what was appended waits for space on the disk
    sync_seconds: Histogram  # of each sync
    group_bytes: Histogram  # made durable by each sync

    @property
    def end_offset(self) -> int:
        """Offset after the last byte appended."""
        ...

    @property
    def durable_offset(self) -> int:
        """Everything below is durable. Never falls, never passes `end_offset`."""
        ...

    @property
    def requested_offset(self) -> int:
        """Everything below is durable or on its way there; what follows up to `end_offset` is deferred."""
        ...

    @property
    def file_position(self) -> int:
        """Bytes of the current file that are used by what is durable, padding included."""
        ...

    @property
    def free_bytes(self) -> int:
        """What `append` takes before something has to become durable."""
        ...

    async def start(self, sequence: int, offset: int) -> None:
        """Begins with an existing file at `offset` of the stream. Raises StorageFailed."""
        ...

    def append(self, header: bytes, payload: bytes) -> None:
        """Adds both parts; needs `free_bytes` for them. Goes to the disk at the end of this turn of the loop."""
        ...

    def append_deferred(self, header: bytes, payload: bytes) -> None:
        """The same, but does not go to the disk before something else does, or before `sync`."""
        ...

    def sync(self) -> None:
        """Sends what was deferred to the disk at the end of this turn of the loop; nothing if all is on its way."""
        ...

    def roll(self, sequence: int) -> None:
        """What is appended from now on goes to the start of file `sequence`, which must exist."""
        ...

    async def close(self, *, wait: bool = True) -> None:
        """Waits until everything appended is durable (unless the device failed, or `wait` is False), closes the file."""
        ...


def ignore_durable(offset: int) -> None:
    """The callback until the journal sets its own."""


def ignore_failure(error: MagnetarError) -> None:
    """The callback until the owner sets its own."""


def ignore_space() -> None:
    """The callback until the journal sets its own."""


class StreamOffsets:
    """The part that all devices share: the offsets of the stream, and how much of it may wait for the disk.

    Invariant: `_durable` <= `_end` <= `_durable` + `_capacity`.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.on_durable: Callable[[int], None] = ignore_durable
        self.on_failure: Callable[[MagnetarError], None] = ignore_failure
        self.on_space: Callable[[], None] = ignore_space
        self.full = False
        self.sync_seconds = Histogram()
        self.group_bytes = Histogram(_GROUP_BOUNDS)
        self._capacity = capacity_bytes
        self._end = self._durable = 0
        self._position = 0  # in the current file

    @property
    def end_offset(self) -> int:
        return self._end

    @property
    def durable_offset(self) -> int:
        return self._durable

    @property
    def file_position(self) -> int:
        return self._position

    @property
    def free_bytes(self) -> int:
        return self._capacity - (self._end - self._durable)

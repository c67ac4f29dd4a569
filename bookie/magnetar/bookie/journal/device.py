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

from abc import ABC, abstractmethod
from collections.abc import Callable

from magnetar.proto.errors import MagnetarError

from ..metrics import Histogram

_GROUP_BOUNDS = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)


def ignore(*_: object) -> None:
    """The callback until its owner sets its own."""


class JournalDevice(ABC):
    """One journal directory's device. Callbacks come from the loop, never from inside a call of the device.

    Invariant: `durable_offset` <= `end_offset` <= `durable_offset` + `capacity_bytes`.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """`capacity_bytes`: how much of the stream may wait for the disk."""
        self.on_durable: Callable[[int], None] = ignore
        self.on_failure: Callable[[MagnetarError], None] = ignore
        self.on_space: Callable[[], None] = ignore
        self.full = False  # what was appended waits for space on the disk
        self.sync_seconds = Histogram()  # of each sync
        self.group_bytes = Histogram(_GROUP_BOUNDS)  # made durable by each sync
        self._capacity = capacity_bytes
        self._end = self._durable = 0
        self._position = 0  # in the current file

    @property
    def end_offset(self) -> int:
        """Offset after the last byte appended."""
        return self._end

    @property
    def durable_offset(self) -> int:
        """Everything below is durable. Never falls."""
        return self._durable

    @property
    @abstractmethod
    def requested_offset(self) -> int:
        """Everything below is durable or on its way there; what follows up to `end_offset` is deferred."""

    @property
    def file_position(self) -> int:
        """Bytes of the current file that are used by what is durable, padding included."""
        return self._position

    @property
    def free_bytes(self) -> int:
        """What `append` takes before something has to become durable."""
        return self._capacity - (self._end - self._durable)

    @abstractmethod
    async def start(self, sequence: int, offset: int) -> None:
        """Begins with an existing file at `offset` of the stream. Raises StorageFailed."""

    @abstractmethod
    def append(self, header: bytes, payload: bytes) -> None:
        """Adds both parts; needs `free_bytes` for them. Goes to the disk at the end of this turn of the loop."""

    @abstractmethod
    def append_deferred(self, header: bytes, payload: bytes) -> None:
        """The same, but does not go to the disk before something else does, or before `sync`."""

    @abstractmethod
    def sync(self) -> None:
        """Sends what was deferred to the disk at the end of this turn of the loop; nothing if all is on its way."""

    @abstractmethod
    def roll(self, sequence: int) -> None:
        """What is appended from now on goes to the start of file `sequence`, which must exist."""

    @abstractmethod
    async def close(self, *, wait: bool = True) -> None:
        """Waits until everything appended is durable (unless the device failed, or `wait` is False), closes the file."""

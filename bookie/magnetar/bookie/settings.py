"""Settings of the storage daemon: frozen data; components (files, clock, index) are injected apart from them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from magnetar.proto.errors import InvalidSetting

__all__ = ["BookieSettings"]

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


@dataclass(frozen=True, slots=True)
class BookieSettings:
    """Sizes in bytes, times in seconds. Raises InvalidSetting when the values contradict each other."""

    data_directory: str
    # Names this bookie to others; "" takes the id that the cookie keeps.
    bookie_id: str = ""
    # False acknowledges what is only buffered: a power failure loses acknowledged entries. Unsafe.
    journal_sync_data: bool = True
    # Each journal file is zero-filled to this size in the background before it is used, and recycled afterwards; it is
    # left when it is full and the next one is ready. Others use 2 GB; with recycling, small files cost nothing and
    # are ready sooner. The first one gets an eighth, so that a first start does not wait.
    journal_file_bytes: int = 64 * MIB
    # Old files kept for reuse, in bytes.
    journal_spare_bytes: int = 256 * MIB
    # Ring shared with the journal writer: bounds one group, and what is in flight to the disk.
    journal_ring_bytes: int = 32 * MIB
    # Both halves together, and the read cache: 25% of a memory budget of 256 MiB each.
    write_cache_bytes: int = 64 * MIB
    read_cache_bytes: int = 64 * MIB
    read_ahead_entries: int = 100
    # Read and verified in one slice of the loop: 2 MiB take about 1 ms.
    read_ahead_bytes: int = 2 * MIB
    entry_log_bytes: int = GIB
    max_entry_bytes: int = 5 * MIB + 64 * KIB
    checkpoint_interval_s: float = 10.0
    # How long an add waits for room in the write cache before it is answered "too many requests".
    add_backpressure_timeout_s: float = 10.0
    # How long a start waits for the helpers of a killed predecessor to let go of the directory.
    lock_timeout_s: float = 10.0
    disk_warn_ratio: float = 0.90
    disk_read_only_ratio: float = 0.95
    # Read-only below this as well, whatever the ratio says: a flush of the write cache must always find room.
    disk_minimum_free_bytes: int = 192 * MIB
    disk_check_interval_s: float = 2.0

    def __post_init__(self) -> None:
        if not self.data_directory:
            raise InvalidSetting("data_directory is empty; name the directory that holds the bookie's data")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value < 0:
                raise InvalidSetting(f"{field.name} is {value}; it cannot be negative")
        if self.write_cache_bytes < 2 * self.max_entry_bytes:
            raise InvalidSetting(
                f"write_cache_bytes is {self.write_cache_bytes}; each of its halves must hold one entry of "
                f"max_entry_bytes, so set it to {2 * self.max_entry_bytes} or more"
            )
        if self.journal_ring_bytes < self.max_entry_bytes + MIB:
            raise InvalidSetting(
                f"journal_ring_bytes is {self.journal_ring_bytes}; it must exceed max_entry_bytes by 1 MiB"
            )
        if not 0 < self.disk_warn_ratio <= self.disk_read_only_ratio <= 1:
            raise InvalidSetting(
                "disk_warn_ratio and disk_read_only_ratio must satisfy 0 < warn <= read-only <= 1"
            )

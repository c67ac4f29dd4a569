"""Settings of the storage daemon: frozen data; components (files, clock, index) are injected apart from them."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

from magnetar.proto.errors import InvalidArgument, InvalidSetting
from magnetar.proto.ids import require_plain_name
from magnetar.proto.policies import PlacementGroup

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
# What an entry log takes (FORMATS.md): a record that claims to be longer is damaged, and is not read to find out.
MAX_RECORD_BYTES = 256 * MIB
# Nothing would work, or a task would never rest.
_ABOVE_ZERO = (
    "max_entry_bytes",
    "journal_file_bytes",
    "entry_log_bytes",
    "checkpoint_interval_s",
    "disk_check_interval_s",
    "journal_deferred_sync_s",
    "journal_stall_s",
)


@dataclass(frozen=True, slots=True)
class BookieSettings:
    """Sizes in bytes, times in seconds. Raises InvalidSetting when the values contradict each other."""

    data_directory: str
    # Directories for journals (one writer process and one ring each, () = DATA/journal), entry logs (() = DATA/ledgers) and
    # the index ("" = DATA/index), so that they can be on disks of their own. Relative paths start at the working directory.
    # Journal directories can be added and removed between starts; a ledger directory can be added, and removed once it is
    # empty.
    journal_directories: tuple[str, ...] = ()
    ledger_directories: tuple[str, ...] = ()
    index_directory: str = ""
    # The id of this bookie; "": the id in its cookie.
    bookie_id: str = ""
    # False acknowledges what is only buffered: a power failure loses acknowledged entries. Unsafe.
    journal_sync_data: bool = True
    # Entries of ledgers with deferred sync are synced after this time at the latest. A force of their writer, or another
    # record of the journal, syncs them earlier.
    journal_deferred_sync_s: float = 1.0
    # Each journal file is zero-filled to this size in the background before it is used, and recycled afterwards; it is
    # left when it is full and the next one is ready. BookKeeper's files have 2 GB; with recycling, small files cost
    # nothing and are ready sooner. A first start only waits for 1/8 of its first file.
    journal_file_bytes: int = 64 * MIB
    # Bytes of released files that stay for reuse.
    journal_spare_bytes: int = 256 * MIB
    # Ring shared with the journal writer: bounds one group, and what is in flight to the disk.
    journal_ring_bytes: int = 32 * MIB
    # When adds have waited for this time and nothing has become durable, /health reports that the journal hangs.
    journal_stall_s: float = 2.0
    # Both memtables together, and the read cache: each 25% of a memory budget of 256 MiB.
    write_cache_bytes: int = 64 * MIB
    read_cache_bytes: int = 64 * MIB
    read_ahead_entries: int = 100
    # Read and verified in one slice of the loop: 2 MiB take about 1 ms.
    read_ahead_bytes: int = 2 * MIB
    entry_log_bytes: int = GIB
    max_entry_bytes: int = 13 * MIB  # messages are smaller; a batch of Spark's may be an entry of 12 MiB
    checkpoint_interval_s: float = 10.0
    # How long an add waits for room in the write cache before it is answered "too many requests".
    add_backpressure_timeout_s: float = 10.0
    # Bounds of the number of waiting long polls, and of their time.
    max_long_polls: int = 4096
    long_poll_timeout_s: float = 30.0
    # Memory for reads from entry logs; further reads wait, in order.
    read_budget_bytes: int = 64 * MIB
    # A stop gives up waiting for a hanging disk after this time; the next start replays the journal.
    close_timeout_s: float = 30.0
    # How long a start waits for the helpers of a killed predecessor to release the directory.
    lock_timeout_s: float = 10.0
    disk_warn_ratio: float = 0.90
    disk_read_only_ratio: float = 0.95
    # Read-only below this as well, whatever the ratio says: a flush of the write cache must always find room.
    disk_minimum_free_bytes: int = 192 * MIB
    # A read-only bookie goes on taking the entries of recoveries while this much is free; as much is in a file that is given
    # back when it is not, so that topics of a dead broker can be loaded and trimmed on a full disk (rule 39). 0: neither.
    disk_recovery_bytes: int = 32 * MIB
    disk_check_interval_s: float = 1.0

    # Garbage collection: ledgers that metadata no longer lists are deleted, then logs without live ledgers; what is mostly
    # garbage is compacted. An interval or a threshold of 0 turns that part off; a collection by request still runs.
    gc_interval_s: float = 900.0
    # A round deletes at most this part of all ledgers (10 in any case): a metadata store that lost some does not cost all.
    gc_max_deleted_ratio: float = 0.1
    # Logs with a smaller part of live bytes are compacted, at the interval that follows.
    minor_compaction_threshold: float = 0.2
    minor_compaction_interval_s: float = 3600.0
    major_compaction_threshold: float = 0.5
    major_compaction_interval_s: float = 86400.0
    # Read at most this fast; 0: as fast as it goes.
    compaction_bytes_per_s: int = 32 * MIB
    # How long a deleted ledger is remembered, so that no stale writer brings it back (rule 7).
    tombstone_retention_s: float = 7 * 86400.0

    # Entries here that metadata gives to other bookies by now (a repair copied them) are dropped at this interval; 0: never.
    leftover_interval_s: float = 86400.0

    # Scrub: every byte of closed entry logs and of the index is read from the disk and verified once in this time, no faster
    # than the bound. 0: damage is only found when it is read.
    scrub_interval_s: float = 86400.0
    scrub_bytes_per_s: int = 64 * MIB

    # The location of this bookie: machines that fail together. Placement spreads the copies of an entry over racks or zones
    # ([ledger] placement); "" counts for no rack, and for no zone.
    rack: str = ""
    zone: str = ""
    # Namespaces can be confined to the bookies of a group (the policy bookie_group). "": it belongs to none.
    group: str = ""

    def __post_init__(self) -> None:
        if not self.data_directory:
            raise InvalidSetting("data_directory is empty; name the directory that holds the bookie's data")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value < 0:
                raise InvalidSetting(f"{field.name} is {value}; it cannot be negative")
        for name in _ABOVE_ZERO:
            if not getattr(self, name):
                raise InvalidSetting(f"{name} is 0; it must be above 0")
        if self.max_entry_bytes > MAX_RECORD_BYTES:
            raise InvalidSetting(
                f"max_entry_bytes is {self.max_entry_bytes}; a record of an entry log takes {MAX_RECORD_BYTES} at most"
            )
        if self.write_cache_bytes < 2 * self.max_entry_bytes:
            raise InvalidSetting(
                f"write_cache_bytes is {self.write_cache_bytes}; each of its halves must hold one entry of "
                f"max_entry_bytes, so set it to {2 * self.max_entry_bytes} or more"
            )
        if self.journal_ring_bytes < self.max_entry_bytes + MIB:
            raise InvalidSetting(
                f"journal_ring_bytes is {self.journal_ring_bytes}; it must exceed max_entry_bytes by 1 MiB"
            )
        for name in ("bookie_id", "rack", "zone"):
            require_plain_name(name, getattr(self, name))
        try:
            plain = PlacementGroup.parse(self.group).name == self.group
        except InvalidArgument:
            plain = False
        if not plain:
            raise InvalidSetting(
                f"group is {self.group!r:.300}; it must be a name of letters, digits, '-', '_' and '.', or empty for none"
            )
        self._check_directories()
        self._check_compaction()
        if not 0 < self.disk_warn_ratio <= self.disk_read_only_ratio <= 1:
            raise InvalidSetting(
                "disk_warn_ratio and disk_read_only_ratio must satisfy 0 < warn <= read-only <= 1"
            )

    def _check_compaction(self) -> None:
        if not 0 <= self.gc_max_deleted_ratio <= 1:
            raise InvalidSetting(
                f"gc_max_deleted_ratio is {self.gc_max_deleted_ratio}; it is the part of all ledgers that one round of "
                "garbage collection may delete, from 0 to 1 (no bound)"
            )
        minor, major = self.minor_compaction_threshold, self.major_compaction_threshold
        if minor >= 1 or major >= 1:
            raise InvalidSetting(
                f"minor_compaction_threshold {minor} and major_compaction_threshold {major} must be below 1: "
                "copying a log without garbage frees nothing"
            )
        if minor and major and minor > major:
            raise InvalidSetting(
                f"minor_compaction_threshold is {minor}; it cannot exceed major_compaction_threshold, {major}"
            )

    def _check_directories(self) -> None:
        seen: dict[str, str] = {os.path.abspath(self.data_directory): "data_directory"}
        for name in ("journal_directories", "ledger_directories"):
            for directory in getattr(self, name):
                if not directory:
                    raise InvalidSetting(f"{name} holds an empty path; name each directory")
                path = os.path.abspath(directory)
                if path in seen:
                    raise InvalidSetting(
                        f"{directory} is in {seen[path]} and in {name}; each needs a directory of its own"
                    )
                seen[path] = name
        if self.index_directory and os.path.abspath(self.index_directory) in seen:
            raise InvalidSetting("index_directory is another directory too; give it one of its own")

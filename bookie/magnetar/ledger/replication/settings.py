"""Settings of self-repair."""

from __future__ import annotations

from dataclasses import dataclass

from magnetar.ledger.settings import MAX_WAIT_S, check_waits
from magnetar.proto.errors import InvalidSetting


@dataclass(frozen=True, slots=True)
class RepairSettings:
    """Frozen data; InvalidSetting for values that do not fit."""

    # A bookie that vanished counts as lost after this time; a second one that vanishes meanwhile ends the wait of both
    # (rule 22). 30 s: a restart with its replay takes less. BookKeeper's default of 0 copies all ledgers of a bookie that
    # is only being upgraded; a long delay leaves one copy less for as long.
    lost_bookie_delay_s: float = 30.0
    # An open ledger whose last ensemble lost a bookie is fenced and closed after this time: its writer replaces the
    # bookie within an add timeout if it lives.
    open_ledger_grace_s: float = 30.0
    # Every ledger's record is compared with the registered bookies and with the placement policy this often.
    full_check_interval_s: float = 7 * 86400.0
    # Entries that this process copies, all ledgers together. With four bookies on two cores and one disk a writer's p99
    # about doubles at 10 MB/s (measured); with a disk and cores for each bookie more is possible.
    copy_bytes_per_s: int = 10 * 1024 * 1024
    # Of one ledger: entries on their way to their new bookies.
    copy_bytes_in_flight: int = 4 * 1024 * 1024
    # Ledgers that this process repairs at a time.
    concurrent_ledgers: int = 2
    # A ledger that could not be repaired is tried again after this time, which doubles up to the maximum.
    retry_backoff_s: float = 5.0
    retry_backoff_max_s: float = 300.0
    # The queue is looked at this often, and whenever the metadata store reports a change.
    queue_interval_s: float = 10.0
    # A process that is silent for so long loses its locks, and its auditor's office, to others.
    session_timeout_s: float = 10.0
    # Whether this process contends for the auditor's office, and whether it takes ledgers from the queue.
    auditor: bool = True
    workers: bool = True

    def __post_init__(self) -> None:
        check_waits(
            self,
            above_zero=("full_check_interval_s", "retry_backoff_s", "queue_interval_s", "session_timeout_s"),
            or_zero=("lost_bookie_delay_s", "open_ledger_grace_s"),
        )
        if not self.retry_backoff_s <= self.retry_backoff_max_s <= MAX_WAIT_S:
            raise InvalidSetting(
                f"retry_backoff_max_s={self.retry_backoff_max_s} must not be below retry_backoff_s="
                f"{self.retry_backoff_s}: it is where the doubling of that ends"
            )
        for name, least in (
            ("copy_bytes_per_s", 1024),
            ("copy_bytes_in_flight", 64 * 1024),
            ("concurrent_ledgers", 1),
        ):
            if getattr(self, name) < least:
                raise InvalidSetting(f"{name}={getattr(self, name)} must be at least {least}")

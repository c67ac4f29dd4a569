"""Settings of the ledger client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from magnetar.proto.errors import InvalidSetting
from magnetar.proto.quorums import MAX_ENSEMBLE_SIZE

from .core.quorum import check_quorums

PLACEMENTS = ("random", "rack", "zone")
MAX_WAIT_S = 366 * 86400.0  # a longer time is a mistake, and timers take neither infinity nor NaN


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """Defaults for new ledgers, and how long to wait. Raises InvalidSetting when made with values that do not fit."""

    ensemble_size: int = 3
    write_quorum: int = 2
    ack_quorum: int = 2
    add_timeout_s: float = 5.0  # a bookie that is silent for so long has failed (rule 21)
    read_timeout_s: float = 5.0
    # A read that has not been answered for so long is asked of another replica as well; 0: only after read_timeout_s.
    speculative_read_s: float = 2.0
    # Of this process. Reads ask bookies of this zone first ([bookie] zone); "": all are alike.
    zone: str = ""
    metadata_timeout_s: float = 10.0  # of one read or write of ledger metadata
    connect_timeout_s: float = 3.0
    reconnect_backoff_s: float = 0.1  # after the first failure; doubles up to the maximum
    reconnect_backoff_max_s: float = 5.0
    # An idle writer writes its last-add-confirmed to its bookies after this time (explicit LAC, rule 19); 0: never.
    explicit_lac_interval_s: float = 0.2
    explicit_lac_backoff_max_s: float = 30.0  # while a bookie does not take it
    # A bookie that failed is asked last for reads for so long, and chosen last for new ledgers until it is back.
    suspect_bookie_s: float = 10.0
    # Bytes of adds outstanding at one bookie over TCP, for all ledgers. Further adds are refused (TooManyRequests): a
    # writer replaces the bookie; without another one it goes on where Qa < Qw (LedgerWriter.under_replicated).
    max_outstanding_bytes: int = 256 * 1024 * 1024

    # Deferred sync: entries that were answered and are not durable stay in the writer's memory. At 50% of it the writer
    # forces by itself; at all of it appends are answered as earlier ones become durable.
    max_unforced_bytes: int = 32 * 1024 * 1024

    # Where new ledgers and replacements go: "random"; "rack" and "zone" spread each write set over what the bookies give as
    # theirs ([bookie] rack, zone), over so many racks at least, over all zones.
    placement: str = "random"
    placement_minimum_racks: int = 2
    placement_minimum_zones: int = 2
    # Refuse an ensemble that cannot be spread like this (NotEnoughBookies), instead of coming as near as possible.
    placement_strict: bool = False
    # Prefer bookies in proportion to their free bytes; above so many times the median more space counts for nothing.
    placement_weighted: bool = False
    placement_max_weight_ratio: float = 3.0
    # Bookies of a list are asked how they are: this often while they answer, every second at most while they do not.
    bookie_info_interval_s: float = 10.0
    # Bookies without metadata get deletions that they have missed this often, until they confirm.
    deletion_retry_s: float = 10.0
    # A bookie that failed so often (0: never) in the window is out of placement for a while. TooManyRequests does not count.
    quarantine_errors: int = 5
    quarantine_window_s: float = 60.0
    quarantine_s: float = 1800.0
    # With fewer writable bookies than ensemble_size, new ledgers go to those that are left if they are so many at
    # least, with fewer copies each; 0: they are refused. Full ledgers again as soon as there are bookies for them. For a
    # ledger with fewer copies than this the minimum is all of them.
    minimum_write_quorum: int = 0

    def __post_init__(self) -> None:
        check_quorums(self.ensemble_size, self.write_quorum, self.ack_quorum)
        check_waits(
            self,
            above_zero=(
                "add_timeout_s",
                "read_timeout_s",
                "metadata_timeout_s",
                "connect_timeout_s",
                "reconnect_backoff_s",
                "bookie_info_interval_s",
                "deletion_retry_s",
                "quarantine_window_s",
                "quarantine_s",
            ),
            or_zero=(
                "speculative_read_s",
                "explicit_lac_interval_s",
                "explicit_lac_backoff_max_s",
                "suspect_bookie_s",
            ),
        )
        if self.reconnect_backoff_max_s < self.reconnect_backoff_s:
            raise InvalidSetting(
                f"reconnect_backoff_max_s={self.reconnect_backoff_max_s} must not be below "
                f"reconnect_backoff_s={self.reconnect_backoff_s}: it is where the doubling of that ends"
            )
        if self.max_outstanding_bytes < 1024 * 1024:
            raise InvalidSetting(
                f"max_outstanding_bytes={self.max_outstanding_bytes} must be at least 1 MiB, or an entry may not fit"
            )
        if self.max_unforced_bytes < 64 * 1024:
            raise InvalidSetting(f"max_unforced_bytes={self.max_unforced_bytes} must be at least 64 KiB")
        self._check_placement()

    def _check_placement(self) -> None:
        if self.placement not in PLACEMENTS:
            raise InvalidSetting(
                f"placement={self.placement!r} is not known; it can be {', '.join(PLACEMENTS[:-1])} or {PLACEMENTS[-1]}"
            )
        if self.placement_strict and self.placement == "random":
            raise InvalidSetting(
                "placement_strict=true refuses what is not spread over racks or zones, and placement=random knows neither; "
                "set placement to rack or zone"
            )
        for name in ("placement_minimum_racks", "placement_minimum_zones"):
            if getattr(self, name) < 1:
                raise InvalidSetting(f"{name}={getattr(self, name)} must be at least 1")
        if not self.placement_max_weight_ratio >= 1:
            raise InvalidSetting(
                f"placement_max_weight_ratio={self.placement_max_weight_ratio} must be at least 1: it is how many times the "
                "median the free space of a bookie may count"
            )
        if self.quarantine_errors < 0:
            raise InvalidSetting(
                f"quarantine_errors={self.quarantine_errors} must not be negative (0: never)"
            )
        if not 0 <= self.minimum_write_quorum <= MAX_ENSEMBLE_SIZE:
            raise InvalidSetting(
                f"minimum_write_quorum={self.minimum_write_quorum} must be 0 (off) or a number of bookies, at most "
                f"{MAX_ENSEMBLE_SIZE}"
            )


def check_waits(settings: Any, above_zero: Sequence[str], or_zero: Sequence[str]) -> None:
    """InvalidSetting unless these fields of a dataclass are seconds that a timer takes; the error names the default."""
    defaults = {field.name: field.default for field in fields(settings)}
    for name in (*above_zero, *or_zero):
        seconds = getattr(settings, name)
        if not 0 <= seconds <= MAX_WAIT_S or (not seconds and name in above_zero):
            limits = "above 0 seconds and" if name in above_zero else "0 or more seconds,"
            raise InvalidSetting(
                f"{name}={seconds} must be {limits} at most a year, e.g. {name}={defaults[name]:g}"
            )

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
    """Defaults for new ledgers, timeouts, placement. Raises InvalidSetting when made with values that are not allowed."""

    ensemble_size: int = 3
    write_quorum: int = 2
    ack_quorum: int = 2
    add_timeout_s: float = 5.0  # a bookie that is silent for so long has failed (rule 21)
    read_timeout_s: float = 5.0
    # A read that has not been answered for so long is asked of another replica as well; 0: only after read_timeout_s.
    speculative_read_s: float = 2.0
    # The zone of this process: reads ask bookies of the same zone ([bookie] zone) first. "": no bookie is preferred.
    zone: str = ""
    metadata_timeout_s: float = 10.0  # of one read or write of ledger metadata
    connect_timeout_s: float = 3.0
    reconnect_backoff_s: float = 0.1  # after the first failure; doubles up to the maximum
    reconnect_backoff_max_s: float = 5.0
    # An idle writer writes its last-add-confirmed to its bookies after this time (explicit LAC, rule 19); 0: never.
    explicit_lac_interval_s: float = 0.2
    explicit_lac_backoff_max_s: float = 30.0  # the interval doubles while a bookie refuses it
    # For so long after a failure a bookie is asked last for reads and chosen last for ensembles, unless it is back earlier.
    suspect_bookie_s: float = 10.0
    # Bytes of adds outstanding at one bookie over TCP, for all ledgers. Further adds are refused (TooManyRequests): a
    # writer replaces the bookie; without another one it goes on where Qa < Qw (LedgerWriter.under_replicated).
    max_outstanding_bytes: int = 256 * 1024 * 1024

    # Deferred sync: entries that were answered and are not durable yet stay in the writer's memory, at most so many bytes.
    # At 50% the writer forces by itself; at 100% it answers further appends only as earlier ones become durable.
    max_unforced_bytes: int = 32 * 1024 * 1024

    # How bookies are chosen for new ledgers and as replacements: "random"; "rack" and "zone" spread each write set over the
    # racks or zones that the bookies name ([bookie] rack, zone): over so many racks at least, over as many zones as can be.
    placement: str = "random"
    placement_minimum_racks: int = 2
    placement_minimum_zones: int = 2
    # Refuse an ensemble that cannot be spread like this (NotEnoughBookies), instead of coming as near as possible.
    placement_strict: bool = False
    # Prefer bookies in proportion to their free bytes, of which at most so many times the median count.
    placement_weighted: bool = False
    placement_max_weight_ratio: float = 3.0
    # Bookies of a static list are asked for their state this often; at least once a second while they do not answer.
    bookie_info_interval_s: float = 10.0
    # Bookies without access to the metadata are sent deletions that they have missed this often, until they confirm them.
    deletion_retry_s: float = 10.0
    # A bookie that failed so often (0: off) within the window is quarantined: for `quarantine_s` placement chooses it only
    # if there are too few others. TooManyRequests is not such a failure.
    quarantine_errors: int = 5
    quarantine_window_s: float = 60.0
    quarantine_s: float = 1800.0
    # With fewer writable bookies than ensemble_size, new ledgers are made on those that there are, with fewer copies if need
    # be, as long as there are at least so many (or as many as the write quorum, if that is less). 0: they are refused.
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
    """Raises InvalidSetting unless these fields of a dataclass are seconds that timers accept; the error has the default."""
    defaults = {field.name: field.default for field in fields(settings)}
    for name in (*above_zero, *or_zero):
        seconds = getattr(settings, name)
        if not 0 <= seconds <= MAX_WAIT_S or (not seconds and name in above_zero):
            limits = "above 0 seconds and" if name in above_zero else "0 or more seconds,"
            raise InvalidSetting(
                f"{name}={seconds} must be {limits} at most a year, e.g. {name}={defaults[name]:g}"
            )

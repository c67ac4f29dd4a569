"""Settings of the ledger client."""

from __future__ import annotations

from dataclasses import dataclass

from magnetar.proto.errors import InvalidSetting

from .core.quorum import check_quorums


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """Defaults for new ledgers, and how long to wait. Raises InvalidSetting when made with values that do not fit."""

    ensemble_size: int = 3
    write_quorum: int = 2
    ack_quorum: int = 2
    add_timeout_s: float = 5.0  # a bookie that is silent for so long has failed (rule 21)
    read_timeout_s: float = 5.0
    connect_timeout_s: float = 3.0
    reconnect_backoff_s: float = 0.1  # after the first failure; doubles up to the maximum
    reconnect_backoff_max_s: float = 5.0
    # An idle writer tells its last-add-confirmed so long after the last confirmation (rule 19); 0: never.
    explicit_lac_interval_s: float = 0.2
    explicit_lac_backoff_max_s: float = 30.0  # while a bookie does not take it
    suspect_bookie_s: float = 10.0  # a bookie that failed a read is asked last for so long
    # Adds that one bookie may have outstanding over TCP; a slow one counts as failed beyond that (it would cost
    # unbounded memory when Qa < Qw, since nobody waits for it).
    max_outstanding_bytes: int = 256 * 1024 * 1024

    def __post_init__(self) -> None:
        check_quorums(self.ensemble_size, self.write_quorum, self.ack_quorum)
        for name in ("add_timeout_s", "read_timeout_s", "connect_timeout_s", "reconnect_backoff_s"):
            if not getattr(self, name) > 0:
                raise InvalidSetting(f"{name}={getattr(self, name)} must be above 0 seconds")
        if self.reconnect_backoff_max_s < self.reconnect_backoff_s:
            raise InvalidSetting(
                f"reconnect_backoff_max_s={self.reconnect_backoff_max_s} must not be below "
                f"reconnect_backoff_s={self.reconnect_backoff_s}"
            )
        for name in ("explicit_lac_interval_s", "explicit_lac_backoff_max_s", "suspect_bookie_s"):
            if getattr(self, name) < 0:
                raise InvalidSetting(f"{name}={getattr(self, name)} must not be negative")
        if self.max_outstanding_bytes < 1024 * 1024:
            raise InvalidSetting(f"max_outstanding_bytes={self.max_outstanding_bytes} must be at least 1 MiB")

"""KEEP_LEDGERS: leases that keep a topic's ledgers from being trimmed while somebody reads them at the bookies.

    HELD --renewed--> HELD;  HELD --its time is over, or released--> gone

A lease pins like a cursor: everything from its ledger on. Leases live in memory. Whoever takes a topic over does not know
those of the former owner, so it trims nothing for as long as the longest of them could last; who lives has renewed by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from magnetar.proto.errors import InvalidArgument, TooManyRequests

from ..settings import BrokerSettings
from .names import check_text


@dataclass(slots=True)
class Lease:
    """One holder's."""

    first: int  # position id of the first ledger that is kept; -1: all
    expires_at: float  # loop time, seconds


class Leases:
    """The leases on the ledgers of one topic. `now`: loop time in seconds."""

    def __init__(self, settings: BrokerSettings, now: Callable[[], float]) -> None:
        self._settings = settings
        self._now = now
        self._leases: dict[str, Lease] = {}
        self._all_known_at = now()

    def count(self) -> int:
        """Those that are held."""
        self._expire()
        return len(self._leases)

    def taken_over(self) -> None:
        """Leases of a former owner may be held: nothing is trimmed until they must have been renewed here."""
        self._all_known_at = self._now() + self._settings.max_lease_ms / 1000

    def keep(self, name: str, ttl_ms: int, first: int) -> tuple[int, int]:
        """Makes, renews or moves a lease; `first` -1: as it is, or all. Returns the ms granted and its first ledger.

        Raises TooManyRequests.
        """
        check_text("lease", name)
        if ttl_ms <= 0:
            raise InvalidArgument(f"a lease of {ttl_ms} ms is not possible")
        self._expire()
        lease = self._leases.get(name)
        if lease is None and len(self._leases) >= self._settings.max_leases:
            raise TooManyRequests(
                f"{len(self._leases)} leases of this topic are held already; end some, or raise the broker's max_leases"
            )
        granted = min(ttl_ms, self._settings.max_lease_ms)
        if first < 0 and lease is not None:
            first = lease.first
        self._leases[name] = Lease(first, self._now() + granted / 1000)
        return granted, first

    def holds(self, name: str, first: int) -> bool:
        """True if this lease is held and keeps all from `first` on (-1: it stays where it is)."""
        self._expire()
        lease = self._leases.get(name)
        return lease is not None and (first < 0 or lease.first <= first)

    def release(self, name: str) -> None:
        """Ends a lease; fine if it is not held."""
        self._leases.pop(name, None)

    def lowest(self, besides: str = "") -> Lease | None:
        """The lease that keeps most, leaving out that of a name; None if there is no other."""
        self._expire()
        held = [lease for name, lease in self._leases.items() if name != besides]
        return min(held, key=lambda lease: lease.first, default=None)

    def left_s(self, lease: Lease) -> float:
        """How long it lasts unless it is renewed, in seconds."""
        return max(0.0, lease.expires_at - self._now())

    @property
    def all_known_in_s(self) -> float:
        """Until every lease that is held is known here, in seconds; 0: it is."""
        return max(0.0, self._all_known_at - self._now())

    def _expire(self) -> None:
        now = self._now()
        for name in [name for name, lease in self._leases.items() if lease.expires_at <= now]:
            del self._leases[name]

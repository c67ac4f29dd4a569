"""The ledger that a topic is written to: how it was asked for, when it is left for the next one, how it is closed.

A ledger is left at `max_ledger_age_ms`; and when `max_ledger_entries` or `max_ledger_bytes` are reached, but not before
`min_ledger_age_ms`, unless it holds HARD_LEDGER_LIMIT times as much. Each ledger costs metadata for as long as it exists, so
a fast publisher makes few large ones; a trickle makes one every four hours.

It is left, too, for one that suits better: bookies are back for more copies, one of its bookies is drained, or policies have
changed. Not at once, because what outdates one ledger outdates thousands: each topic has its own moment within
`ledger_change_spread_ms`. It is noticed with the next entry (bookies), with the change (policies), or in the next round of
maintenance at the latest.

    SUITS --noticed--> LEAVING --own moment--> left, or SUITS again if that has changed back meanwhile
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from zlib import crc32

from magnetar.proto.errors import LedgerFenced, MagnetarError

from ..resources.stores import Ledgers, Writer
from ..settings import HARD_LEDGER_LIMIT, BrokerSettings
from .durability import Durability, Flusher
from .records import LedgerInfo

_log = logging.getLogger(__name__)

EntryDone = Callable[["OpenLedger", int, bytes | None, MagnetarError | None], None]


def own_moment(name: str, spread_ms: int) -> float:
    """Seconds, less than the spread: of thousands of topics or cursors each has its own, and always the same.

    >>> 0 <= own_moment("persistent://public/default/orders", 30_000) < 30
    True
    """
    return crc32(name.encode()) % max(spread_ms, 1) / 1000


class OpenLedger:
    """A ledger that one topic is written to. `live` False: it was left, and what it still reports is ignored (rule 24)."""

    __slots__ = (
        "_done",
        "_recovering",
        "durability",
        "flusher",
        "info",
        "leaving",
        "live",
        "next_message",
        "opened_at",
        "writer",
    )

    def __init__(
        self,
        writer: Writer,
        info: LedgerInfo,
        durability: Durability,
        flusher: Flusher,
        opened_at: float,
        done: EntryDone,
    ) -> None:
        self._done = done
        self._recovering = False
        self.writer = writer
        self.info = info
        self.durability = durability  # that it was asked for with; `writer.metadata` has what it is
        self.flusher = flusher
        # Of the loop's clock, in seconds: a wall clock that was wrong must not roll it over.
        self.opened_at = opened_at
        self.leaving = False  # its end is set, because another ledger would suit better
        self.live = True
        self.next_message = 0  # index in the ledger of the next message appended

    @property
    def degraded(self) -> bool:
        """It has fewer bookies or copies than it was asked for, as its metadata says."""
        wanted = self.durability
        return self.writer.metadata.sizes != (wanted.ensemble_size, wanted.write_quorum, wanted.ack_quorum)

    def is_due(self, settings: BrokerSettings, pending: int, now: float) -> bool:
        """True if it is full or old; `pending`: entries that are not confirmed. `now`: loop time in seconds."""
        entries, size = self.info.entries + pending, self.writer.length
        age_ms = (now - self.opened_at) * 1000
        full = max(entries / settings.max_ledger_entries, size / settings.max_ledger_bytes)
        return (
            age_ms >= settings.max_ledger_age_ms
            or (full >= 1 and age_ms >= settings.min_ledger_age_ms)
            or full >= HARD_LEDGER_LIMIT
        )

    def suits(self, durability: Callable[[], Durability]) -> bool:
        """False if one that were made now would be better; `durability` of that one."""
        try:
            return not self.writer.replaceable and self.durability == durability()
        except MagnetarError:  # the policies are not known now
            return True

    def confirmed(self, entry_id: int, entry: bytes, error: MagnetarError | None) -> None:
        """`ConfirmCallback` of every append."""
        if self.live:
            self._done(self, entry_id, entry, error)

    async def close(self, ledgers: Ledgers) -> int:
        """Closes the ledger and returns its last entry. LedgerFenced: another owner did, or is about to.

        What its writer cannot close is recovered, the way a new owner would do it, in later attempts as well: that fences
        the writer, which would then take this very recovery for another owner's.
        """
        self.flusher.end()
        if not self._recovering:
            try:
                await self.writer.close()
                return self.writer.last_add_confirmed
            except LedgerFenced:
                raise
            except MagnetarError as error:
                _log.warning("ledger %d is closed by recovery: %s", self.info.ledger_id, error)
                self._recovering = True
        return (await ledgers.open(self.info.stored_id, recover=True)).last_add_confirmed

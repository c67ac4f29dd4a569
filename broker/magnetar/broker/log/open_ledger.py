"""The parts of a managed ledger: its states, what the topic hears of it, the open ledger."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from magnetar.proto.entry import Entry
from magnetar.proto.errors import LedgerFenced, MagnetarError
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES, decode_ledger_entry_header

from ..resources.stores import Ledgers, Reads, Writer
from .durability import Durability
from .records import LedgerInfo

_log = logging.getLogger(__name__)

T = TypeVar("T")
EntryDone = Callable[["OpenLedger", int, bytes | None, MagnetarError | None], None]


class State(enum.Enum):
    """See `managed_ledger`."""

    IDLE = "idle"
    ROLLING = "rolling"
    WRITING = "writing"
    FENCED = "fenced"
    CLOSED = "closed"


class LedgerEvents(NamedTuple, Generic[T]):
    """What the topic hears. `confirmed` gets (ledger, entry, stored bytes or None, what was given to `append`)."""

    confirmed: Callable[[int, int, bytes | None, T], None]
    # With flush=async, before `confirmed`: (ledger, entry, what was given to `append`). Another ledger may confirm it.
    accepted: Callable[[int, int, T], None]
    ready: Callable[[], None]  # appending is possible (again)
    rolled: Callable[[], None]  # the ledger list changed
    fenced: Callable[[MagnetarError], None]
    delayed: Callable[[MagnetarError], None]  # what is pending waits for the next ledger, and why


async def measure(info: LedgerInfo, reader: Reads, last: int) -> None:
    """What a ledger holds, from its first and last entry."""
    if last >= 0:
        data = (await reader.read(last, last))[0]
        entry = Entry(data, LEDGER_ENTRY_HEADER_BYTES)
        info.size = decode_ledger_entry_header(data).length
        info.messages = entry.first_index + entry.message_count
        info.last_append_ms = entry.append_time_ms
        data = (await reader.read(0, 0))[0]
        info.first_append_ms = Entry(data, LEDGER_ENTRY_HEADER_BYTES).append_time_ms


class OpenLedger:
    """The open ledger. `live` False: it was left, and whatever it still reports is ignored (rule 24)."""

    __slots__ = (
        "_done",
        "_recovering",
        "durability",
        "info",
        "leaving",
        "live",
        "next_message",
        "opened_at",
        "writer",
    )

    def __init__(
        self, writer: Writer, info: LedgerInfo, durability: Durability, opened_at: float, done: EntryDone
    ) -> None:
        self._done = done
        self._recovering = False
        self.writer = writer
        self.info = info
        self.durability = durability  # that it was asked for with; `writer.metadata` has what it is
        self.opened_at = (
            opened_at  # of the loop's clock, in seconds: a wall clock that was wrong must not roll it over
        )
        self.leaving = False  # its end is set, because another ledger would suit better
        self.live = True
        self.next_message = 0  # index in the ledger of the next message appended

    @property
    def degraded(self) -> bool:
        """It has fewer bookies or copies than it was asked for, as its metadata says."""
        wanted = self.durability
        return self.writer.metadata.sizes != (wanted.ensemble_size, wanted.write_quorum, wanted.ack_quorum)

    def confirmed(self, entry_id: int, entry: bytes, error: MagnetarError | None) -> None:
        """`ConfirmCallback` of every append."""
        if self.live:
            self._done(self, entry_id, entry, error)

    async def close(self, ledgers: Ledgers) -> int:
        """Closes the ledger and returns its last entry. LedgerFenced: another owner did, or is about to.

        What its writer cannot close is recovered, the way a new owner would do it, in later attempts as well: that fences
        the writer, which would then take this very recovery for another owner's.
        """
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

"""How a ledger client reaches bookies: one interface over TCP and the bookie of the same process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from magnetar.proto.commands import (
    ENTRY_RANGE_ROW,
    LEDGER_DELETED,
    LEDGER_FENCED,
    LEDGER_ROW,
    BookieInfo,
    Command,
    DeleteLedger,
    ListEntries,
    ListLedgers,
    ReadEntries,
    ReadLastConfirmed,
    WaitLastConfirmed,
    WriteLastConfirmed,
    decode_rows,
)
from magnetar.proto.errors import MalformedFrame
from magnetar.proto.stripe import EVERY_ENTRY, Stripe

from .core.outstanding_adds import AddCallback


class ReadResult(NamedTuple):
    """Whole ledger entries from `first` on without a gap (in the stripe asked for), digests not verified; at least one."""

    entries: list[bytes]
    last_add_confirmed: int  # the highest that this bookie has heard of


class LastConfirmed(NamedTuple):
    """What one bookie knows of a ledger's end; -1 for none."""

    last_add_confirmed: int
    last_entry: int


class LongPollAnswer(NamedTuple):
    """What a long poll came back with. Nothing new at its timeout; `entries` follow the LAC that was asked with."""

    last_add_confirmed: int
    fenced: bool
    entries: list[bytes]  # whole, digests not verified


class ListedLedger(NamedTuple):
    """A ledger of one bookie; -1 for none."""

    ledger_id: int
    fenced: bool
    deleted: bool
    last_entry: int
    last_add_confirmed: int


class LedgerPage(NamedTuple):
    """Ledgers by id. `more`: ask again after the last one."""

    ledgers: list[ListedLedger]
    more: bool


class EntryPage(NamedTuple):
    """Ranges (first, last), both included. `following`: where to go on, -1 after the last page."""

    ranges: list[tuple[int, int]]
    following: int


class Answer(NamedTuple):
    """What a bookie answers to a command: its result, and the entries or rows that come with it."""

    result: Any
    parts: Sequence[bytes] = ()

    def fields(self, bookie: str, *names: str) -> list[Any]:
        """These fields of the result. MalformedFrame if they are not there."""
        try:
            return [self.result[name] for name in names]
        except (TypeError, KeyError):
            raise self.misfit(bookie) from None

    def misfit(self, bookie: str) -> MalformedFrame:
        """The error of an answer that is none to what was asked."""
        size = sum(map(len, self.parts))
        return MalformedFrame(
            f"bookie {bookie} answered with {size} bytes that do not fit {self.result!r:.100}"
        )


class BookieTransport(Protocol):
    """Access to bookies by their ids.

    No call calls back from within; entries are whole ledger entries and are not copied. What a transport does by itself is
    to add, and to `ask`; each request is put into a command, and its answer taken apart, here.
    """

    def add(
        self,
        bookie: str,
        entry: bytes,
        ledger_id: int,
        entry_id: int,
        *,
        recovery: bool,
        done: AddCallback,
        deferred: bool = False,
    ) -> None:
        """Stores an entry. `done` comes once, at the latest after the add timeout, in a later turn of the loop.

        For a deferred add it comes with ADD_ACCEPTED first, as soon as the bookie has it, durably or not, and then has no
        time limit until the ledger is forced.
        """
        ...

    def force(self, bookie: str, ledger_id: int) -> None:
        """Asks for a sync of the ledger's deferred adds at this bookie; `done` of each add says when it is durable."""
        ...

    def reset_backoff(self, bookie: str) -> None:
        """The bookie is about to be written to: the next call tries to reach it, however recently that failed."""
        ...

    async def ask(self, bookie: str, command: Command, longer_s: float = 0.0) -> Answer:
        """What the bookie answers, within the read timeout and `longer_s`; entries one by one, rows in one piece.

        BookieUnavailable, RequestTimeout, ConnectionLost, and what the bookie answers with.
        """
        ...

    async def read(
        self,
        bookie: str,
        ledger_id: int,
        first: int,
        last: int,
        *,
        max_bytes: int = 0,
        fence: bool = False,
        stripe: Stripe = EVERY_ENTRY,
    ) -> ReadResult:
        """Entries first..last, as many as fit in `max_bytes` (0: in a frame). EntryNotFound if `first` is not there.

        Only those of the `stripe`, which has `first`; an answer that ends early denies nothing. With
        `fence` the ledger is fenced, durably, before the answer, whatever that is. LedgerNotFound, BookieUnavailable,
        RequestTimeout, ConnectionLost, UnknownLedgerState, EntryDamaged.
        """
        answer = await self.ask(bookie, ReadEntries(0, ledger_id, first, last, max_bytes, fence, *stripe))
        if not answer.parts:
            raise answer.misfit(bookie)
        return ReadResult(list(answer.parts), *answer.fields(bookie, "last_add_confirmed"))

    async def read_last_confirmed(self, bookie: str, ledger_id: int, *, fence: bool = False) -> LastConfirmed:
        """The end of the ledger as this bookie knows it; fences as `read` does. LedgerNotFound: it knows nothing."""
        answer = await self.ask(bookie, ReadLastConfirmed(0, ledger_id, fence))
        return LastConfirmed(*answer.fields(bookie, "last_add_confirmed", "last_entry"))

    async def write_last_confirmed(self, bookie: str, ledger_id: int, last_add_confirmed: int) -> None:
        """Writes an idle writer's LAC (explicit LAC)."""
        await self.ask(bookie, WriteLastConfirmed(0, ledger_id, last_add_confirmed))

    async def wait_last_confirmed(
        self,
        bookie: str,
        ledger_id: int,
        last_add_confirmed: int,
        *,
        timeout_s: float,
        max_entries: int = 0,
        max_bytes: int = 0,
    ) -> LongPollAnswer:
        """Long poll: comes back once the bookie's LAC is above the given one, the ledger is fenced, or after `timeout_s`.

        With it come up to `max_entries` confirmed entries after the given LAC, if this bookie has them. A bookie may wait
        for a shorter time than it is asked to. LedgerNotFound if deleted, TooManyRequests, and as `read`.
        """
        milliseconds = max(1, round(timeout_s * 1000))
        command = WaitLastConfirmed(0, ledger_id, last_add_confirmed, milliseconds, max_entries, max_bytes)
        answer = await self.ask(bookie, command, timeout_s)
        confirmed, fenced = answer.fields(bookie, "last_add_confirmed", "fenced")
        return LongPollAnswer(confirmed, fenced, list(answer.parts))

    async def delete_ledger(self, bookie: str, ledger_id: int) -> None:
        """The bookie may drop the ledger's entries, and never serves them again. Only after the metadata is deleted."""
        await self.ask(bookie, DeleteLedger(0, ledger_id))

    async def list_ledgers(self, bookie: str, *, after: int = -1, count: int = 1000) -> LedgerPage:
        """The ledgers with ids above `after` that the bookie stores."""
        answer = await self.ask(bookie, ListLedgers(0, after, count))
        ledgers = [
            ListedLedger(
                ledger_id,
                bool(flags & LEDGER_FENCED),
                bool(flags & LEDGER_DELETED),
                last_entry,
                confirmed,
            )
            for rows in answer.parts
            for ledger_id, flags, last_entry, confirmed in decode_rows(LEDGER_ROW, rows)
        ]
        return LedgerPage(ledgers, *answer.fields(bookie, "more"))

    async def list_entries(
        self, bookie: str, ledger_id: int, *, first: int = 0, count: int = 1000
    ) -> EntryPage:
        """Which entries the bookie stores of a ledger, from `first` on. LedgerNotFound."""
        answer = await self.ask(bookie, ListEntries(0, ledger_id, first, count))
        ranges = [(begin, end) for rows in answer.parts for begin, end in decode_rows(ENTRY_RANGE_ROW, rows)]
        return EntryPage(ranges, *answer.fields(bookie, "next"))

    async def info(self, bookie: str) -> dict[str, Any]:
        """Identity, disks and load: the map of BookieInfo in WIRE.md. Tries to reach it, however recently that failed."""
        answer = await self.ask(bookie, BookieInfo(0))
        if not isinstance(answer.result, dict):
            raise answer.misfit(bookie)
        return answer.result

    async def close(self) -> None:
        """Drops the connections; outstanding adds and reads fail with ConnectionLost."""
        ...

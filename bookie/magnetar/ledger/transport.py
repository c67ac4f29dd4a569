"""How a ledger client reaches bookies: one interface over TCP and the bookie of the same process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

# bookie, ledger id, entry id, code: 0 when the entry is durable there, else a code of proto.errors.
AddCallback = Callable[[str, int, int, int], None]


class ReadResult(NamedTuple):
    """Whole ledger entries from `first` on without a gap, digests not verified; at least one."""

    entries: list[bytes]
    last_add_confirmed: int  # the highest that this bookie has heard of


class LastConfirmed(NamedTuple):
    """What one bookie knows of a ledger's end; -1 for none."""

    last_add_confirmed: int
    last_entry: int


class BookieTransport(Protocol):
    """Bookies by id. Nothing calls back from within a call; entries are whole ledger entries and are not copied."""

    def add(
        self, bookie: str, entry: bytes, ledger_id: int, entry_id: int, *, recovery: bool, done: AddCallback
    ) -> None:
        """Stores an entry. `done` comes once, at the latest after the add timeout, in a later turn of the loop."""
        ...

    async def read(
        self, bookie: str, ledger_id: int, first: int, last: int, *, max_bytes: int = 0, fence: bool = False
    ) -> ReadResult:
        """Entries first..last, as many as fit in `max_bytes` (0: in a frame). EntryNotFound if `first` is not there.

        With `fence` the ledger is fenced, durably, before the answer, whatever that is. LedgerNotFound,
        BookieUnavailable, RequestTimeout, ConnectionLost, UnknownLedgerState, EntryDamaged.
        """
        ...

    async def read_last_confirmed(self, bookie: str, ledger_id: int, *, fence: bool = False) -> LastConfirmed:
        """The bookie's knowledge of the ledger's end; fences as `read` does. LedgerNotFound: nothing known."""
        ...

    async def write_last_confirmed(self, bookie: str, ledger_id: int, last_add_confirmed: int) -> None:
        """Tells an idle writer's LAC."""
        ...

    async def info(self, bookie: str) -> dict[str, Any]:
        """`bookie_id`, `free_bytes`, `total_bytes`, `read_only`."""
        ...

    async def close(self) -> None:
        """Drops the connections; outstanding adds and reads fail with ConnectionLost."""
        ...

"""What the broker needs of the ledger client, as narrow interfaces that the real classes satisfy.

Topics, cursors and the registry are written against these, so that their tests can hand in models.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.ledger.core.quorum import Striping
from magnetar.proto.bookie_identity import BookieIdentity
from magnetar.proto.errors import LedgerNotFound, MagnetarError

_log = logging.getLogger(__name__)

ConfirmCallback = Callable[[int, bytes, MagnetarError | None], None]


class Reads(Protocol):
    """Either handle of a ledger."""

    async def read(self, first: int, last: int, *, max_bytes: int = 0) -> list[bytes]:
        """Verified ledger entries from `first` on: at least one, else as many as fit in `max_bytes`."""


class Reader(Reads, Protocol):
    """`magnetar.ledger.LedgerReader`."""

    @property
    def last_add_confirmed(self) -> int:
        """The last entry that may be read; final if the ledger was opened with recovery."""


class Writer(Reads, Protocol):
    """`magnetar.ledger.LedgerWriter`."""

    @property
    def ledger_id(self) -> int:
        """The ledger that this handle, and no other, appends to."""

    @property
    def last_add_confirmed(self) -> int:
        """The last entry that is durable together with all before it; -1 if none is."""

    @property
    def length(self) -> int:
        """Payload bytes appended."""

    @property
    def replaceable(self) -> bool:
        """A better ledger could be made now: with all bookies asked for, or without those that are drained. Cheap."""

    @property
    def metadata(self) -> LedgerMetadata:
        """With its sizes, which may be smaller than asked for, and the bookies that it is on now."""

    async def force(self) -> None:
        """All that was appended before is durable when this returns."""

    def append(self, payload: bytes, confirmed: ConfirmCallback) -> int:
        """Returns the entry id at once; `confirmed` comes in entry order, never from inside this call."""

    async def close(self) -> Any:
        """The ledger is closed, its end fixed in metadata, when this returns."""

    def detach(self) -> None:
        """Leaves the ledger open and forgets it: somebody else writes it."""


class Ledgers(Protocol):
    """`magnetar.ledger.LedgerClient`."""

    async def create(
        self,
        *,
        ensemble_size: int,
        write_quorum: int,
        ack_quorum: int,
        minimum_write_quorum: int,
        properties: dict[str, str],
        ledger_id: int | None = None,
        explicit_lac: bool = True,
        accepted: Callable[[int], None] | None = None,
        bookie_group: str = "",
    ) -> Writer:
        """A new ledger, recorded in metadata when this returns; `ledger_id`: from `next_id`, written down before.

        Without `explicit_lac` only this process learns at once of the last entry: it reads the tail of its own ledgers.
        With `accepted` entries are synced later, or by `Writer.force`; it gets the last entry that ack_quorum bookies have
        in memory, before `confirmed` comes.
        """

    def check_placement(self, striping: Striping, minimum_write_quorum: int, bookie_group: str) -> None:
        """Raises NotEnoughBookies, unless `create` could make it once all bookies that are known take entries."""

    async def next_id(self, count: int = 1) -> int:
        """An id that no ledger had or will have, but for `create`; ids rise. The first of `count` in a row."""

    async def open(self, ledger_id: int, *, recover: bool) -> Reader:
        """A handle to read with. `recover` fences the ledger, finds its end and closes it first."""

    async def delete(self, ledger_id: int) -> None:
        """The ledger is deleted from metadata when this returns."""

    def suspects(self) -> Sequence[str]:
        """Bookies that failed a moment ago."""

    def figures(self) -> Mapping[str, int]:
        """Bookies that can be written to, those in quarantine and the like, for /metrics."""


class Bookies(Protocol):
    """The part of `magnetar.ledger.BookieDirectory` that clients learn of; answers from memory."""

    def writable(self) -> Sequence[str]:
        """Ids of the bookies that take new entries."""

    def refusals(self) -> Mapping[str, str]:
        """Why each of the others takes none."""

    def free_bytes(self, bookie: str) -> int:
        """Its free space; 0 if it is not known."""

    def address(self, bookie: str) -> tuple[str, int]:
        """Where it listens. Raises BookieUnavailable if nobody knows."""

    def labels(self, bookie: str) -> tuple[str, str, str]:
        """Its rack, zone and group; "" is none, or not known."""

    def identity(self, bookie: str) -> BookieIdentity:
        """Who it is, as this process has verified it."""


async def delete_ledgers(ledgers: Ledgers, ids: list[int], owner: str) -> None:
    """Deletes ledgers and takes their ids out of the list; those that cannot be deleted yet stay in it, with a warning."""
    for ledger_id in list(ids):
        await asyncio.sleep(0)  # a metadata store on this machine takes no turns of its own
        try:
            await ledgers.delete(ledger_id)
        except LedgerNotFound:
            pass
        except MagnetarError as error:
            _log.warning("%s: ledger %d is not deleted yet: %s", owner, ledger_id, error)
            continue
        ids.remove(ledger_id)

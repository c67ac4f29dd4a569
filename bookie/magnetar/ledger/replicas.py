"""The replicas of entries, and how one good copy is read when bookies are slow, silent or damaged.

When a replica fails, the next one is asked at once. A replica that is silent for `speculative_read_s` is not given up: the
next one is asked as well, the first good answer counts, and the other requests are then cancelled. Bookies that failed or
were slow are asked last (`health`); among the others those of the client's own zone come first. A range that no single
bookie stores completely is read from several at once: see `striped_read`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from magnetar.proto.errors import (
    BookieUnavailable,
    ConnectionLost,
    EntryDamaged,
    EntryNotFound,
    MagnetarError,
    RequestTimeout,
)
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES, verify_ledger_entry
from magnetar.proto.stripe import EVERY_ENTRY, Stripe
from magnetar.runtime.tasks import awaited, end_all

from .components import LedgerComponents
from .core.metadata import LedgerMetadata
from .striped_read import StripedRead

_log = logging.getLogger(__name__)

T = TypeVar("T")

# The bookie gave no answer, so nothing is known of the entry.
SILENT = (BookieUnavailable, ConnectionLost, RequestTimeout)


async def first_good(
    bookies: Sequence[str],
    ask: Callable[[str], Coroutine[Any, Any, T]],
    slow_s: float,
    slow: Callable[[str], None],
    errors: list[MagnetarError],
) -> T | None:
    """The first answer that is not a MagnetarError. If there is none: None, and `errors` has what each bookie failed with.

    The bookies are asked in this order: the next one when one has failed, or when the last one has not answered for `slow_s`
    (0: no limit). `slow` is called with each bookie that was too slow.
    """
    loop = asyncio.get_running_loop()
    running: dict[asyncio.Future[T], str] = {}
    try:
        for number, bookie in enumerate(bookies, 1):
            running[awaited(ask(bookie))] = bookie
            patience = loop.time() + slow_s if slow_s and number < len(bookies) else None
            failed = False
            while running and not failed:
                timeout = None if patience is None else max(0.0, patience - loop.time())
                done, _ = await asyncio.wait(running, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    slow(bookie)
                    break
                for task in [task for task in running if task in done]:
                    del running[task]
                    try:
                        return task.result()
                    except MagnetarError as error:
                        errors.append(error)
                failed = number < len(bookies)  # after the last bookie the requests under way are waited for
    finally:
        await end_all(running)
    return None


class Replicas:
    """The copies of one ledger, for its reader or writer."""

    def __init__(self, components: LedgerComponents, ledger_id: int) -> None:
        self._transport = components.transport
        self._health = components.health
        self._labels = components.bookies.labels
        self._slow_s = components.settings.speculative_read_s
        self._zone = components.settings.zone
        self._ledger_id = ledger_id
        self._entry_bytes = 0  # average size of an entry, an estimate; 0: not known yet

    async def read(self, metadata: LedgerMetadata, first: int, last: int, max_bytes: int) -> list[bytes]:
        """See LedgerReader.read. The range must be confirmed, and `metadata` must have its ensembles."""
        entries: list[bytes] = []
        while True:
            start = first + len(entries)
            end = metadata.end_of_ensemble(start)
            end = last if end is None else min(last, end)
            read = self._read_whole if metadata.striping.cycle == 1 else self._read_striped
            entries += await read(metadata, start, end, max_bytes)
            if max_bytes or first + len(entries) > last:
                return entries

    async def _read_whole(
        self, metadata: LedgerMetadata, first: int, last: int, max_bytes: int
    ) -> list[bytes]:
        """As many of the entries first..last, all of one ensemble, as one replica returns; at least one."""

        def ask(bookie: str) -> Coroutine[Any, Any, list[bytes]]:
            return self._ask(bookie, first, last, max_bytes, EVERY_ENTRY)

        errors: list[MagnetarError] = []
        order = self._in_order(metadata, first, last)
        entries = await first_good(order, ask, self._slow_s, self._health.slow, errors)
        if entries is None:
            raise most_significant(errors, self._ledger_id, first)
        return entries

    async def _read_striped(
        self, metadata: LedgerMetadata, first: int, last: int, max_bytes: int
    ) -> list[bytes]:
        """The same for a striped ledger, from several bookies. Without `max_bytes`, all entries that can be read."""
        if max_bytes:
            # Each bookie returns at least one entry, however large: fewer are asked if only few entries fit.
            if not self._entry_bytes and metadata.last_entry >= 0:
                self._entry_bytes = metadata.length // (metadata.last_entry + 1) + LEDGER_ENTRY_HEADER_BYTES
            count = max_bytes // (self._entry_bytes or max_bytes)
            last = min(last, first + max(count, 1) - 1)
        striping = metadata.striping
        if last - first < striping.write_quorum:
            entries = await self._read_whole(metadata, first, last, max_bytes)
        else:
            reading = StripedRead(
                striping,
                metadata.ensemble_of(first).bookies,
                self._ask,
                begin=self._ledger_id % striping.ensemble_size,
                suspected=self._health.asked_last,
                far=self._far,
                slow_s=self._slow_s,
                slow=self._health.slow,
            )
            entries = await reading.read(first, last, max_bytes)
            if not entries:
                raise most_significant(reading.errors, self._ledger_id, first)
        self._entry_bytes = max(1, sum(map(len, entries)) // len(entries))
        return entries

    async def _ask(self, bookie: str, first: int, last: int, max_bytes: int, stripe: Stripe) -> list[bytes]:
        try:
            result = await self._transport.read(
                bookie, self._ledger_id, first, last, max_bytes=max_bytes, stripe=stripe
            )
        except SILENT as error:
            self._health.failed(bookie, error.code)
            if isinstance(error, RequestTimeout):
                self._health.slow(bookie)  # its disk may hang while its process says that it is back
            raise
        return verified(result.entries, self._ledger_id, stripe.ids(first, last, len(result.entries)), bookie)

    def _in_order(self, metadata: LedgerMetadata, first: int, last: int) -> list[str]:
        """The bookies to ask for the range, of at most Qw entries if the ledger is striped, in the order of preference.

        Bookies that failed or were slow come last, those of other zones behind those of this client's. Otherwise:

            each bookie has every entry    the same one comes first for all reads of a ledger, to profit from its read-ahead
            striped                        position `last % E` first, which has the whole range; the others of the write set
                                           of `first` have only its beginning
        """
        bookies = metadata.ensemble_of(first).bookies
        striped = metadata.striping.cycle > 1
        start = first if striped else self._ledger_id
        order = [bookies[position] for position in metadata.striping.write_set(start)]
        if striped and last > first:
            whole = bookies[last % len(bookies)]
            order.remove(whole)
            order.insert(0, whole)
        if self._zone:
            order.sort(key=self._far)
        order.sort(key=self._health.asked_last)
        return order

    def _far(self, bookie: str) -> bool:
        """True if this client has a zone, and the bookie is not known to be in it."""
        return bool(self._zone) and self._labels(bookie).zone != self._zone


def verified(entries: list[bytes], ledger_id: int, ids: Sequence[int], bookie: str) -> list[bytes]:
    """The entries, which must have these ids, up to the first damaged one: the next read gets that from another replica.

    Entries beyond the ids are ignored. Raises EntryDamaged if the first one is damaged, EntryNotFound if there is none.
    """
    del entries[len(ids) :]
    for index, (entry, entry_id) in enumerate(zip(entries, ids)):
        try:
            header = verify_ledger_entry(entry)
            if (header.ledger_id, header.entry_id) != (ledger_id, entry_id):
                raise EntryDamaged(
                    f"bookie {bookie} answered entry {header.entry_id} of ledger {header.ledger_id} "
                    f"for entry {entry_id} of ledger {ledger_id}"
                )
        except EntryDamaged as error:
            _log.warning("a copy is damaged at bookie %s: %s", bookie, error.message)
            if index == 0:
                raise
            return entries[:index]
    if not entries:
        raise EntryNotFound(f"bookie {bookie} answered no entry of ledger {ledger_id} that was asked for")
    return entries


def most_significant(errors: list[MagnetarError], ledger_id: int, entry_id: int) -> MagnetarError:
    """A silent bookie outweighs damage, damage outweighs absence: an entry that some bookie may have is never given up."""
    for kind in (*SILENT, EntryDamaged):
        for error in errors:
            if isinstance(error, kind):
                return error
    for error in errors:
        if not isinstance(error, EntryNotFound):
            return error
    return EntryNotFound(
        f"no replica has entry {entry_id} of ledger {ledger_id}", ledger_id=ledger_id, entry_id=entry_id
    )

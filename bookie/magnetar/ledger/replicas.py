"""The replicas of entries, and how one good copy is read when bookies are slow, silent or damaged.

After a replica that fails the next one is asked at once. A replica that is silent for `speculative_read_s` is not given up:
the next one is asked as well, the first good answer counts, and what is still under way then is cancelled. Bookies that
were silent are asked last for `suspect_bookie_s`; among the others those of the client's own zone come first. Ranges of
which no bookie has all are read in shares: see `striped_read`.
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

SILENT = (BookieUnavailable, ConnectionLost, RequestTimeout)


async def first_good(
    bookies: Sequence[str],
    ask: Callable[[str], Coroutine[Any, Any, T]],
    slow_s: float,
    slow: Callable[[str], None],
    errors: list[MagnetarError],
) -> T | None:
    """The first answer that is not a MagnetarError; None, and all of them in `errors`, when there is none.

    One bookie after another; the next one without waiting for the end of those that took longer than `slow_s` (0: never).
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
                # There is no further replica: waits for all requests under way.
                failed = number < len(bookies)
    finally:
        await end_all(running)
    return None


class ReadHistory:
    """What the reads of a ledger found out so far."""

    def __init__(self) -> None:
        self.suspects: dict[str, float] = {}  # bookie -> loop time until which it is asked last
        self.entry_bytes = 0  # estimated bytes of an entry; 0: not known yet


class Replicas:
    """The copies of one ledger."""

    def __init__(
        self,
        components: LedgerComponents,
        ledger_id: int,
        metadata: LedgerMetadata,
        history: ReadHistory,
    ) -> None:
        self._components = components
        self._ledger_id = ledger_id
        self._metadata = metadata
        self._striping = metadata.striping
        self._history = history
        self._zone = components.settings.zone

    async def read(self, first: int, last: int, max_bytes: int) -> list[bytes]:
        """Entries first..last of one ensemble that one replica can give; at least one."""

        def ask(bookie: str) -> Coroutine[Any, Any, list[bytes]]:
            return self._ask(bookie, first, last, max_bytes, EVERY_ENTRY)

        errors: list[MagnetarError] = []
        slow_s = self._components.settings.speculative_read_s
        entries = await first_good(self._in_order(first, last), ask, slow_s, self._suspect, errors)
        if entries is None:
            raise most_significant(errors, self._ledger_id, first)
        return entries

    async def read_striped(self, first: int, last: int, max_bytes: int) -> list[bytes]:
        """The same when each entry has a write set of its own. Without `max_bytes` all that can be had."""
        if max_bytes:
            # Each bookie gives one entry at least: not all are asked where one entry is about what fits.
            count = max_bytes // (self._entry_bytes() or max_bytes)
            last = min(last, first + max(count, 1) - 1)
        if last - first < self._striping.write_quorum:
            entries = await self.read(first, last, max_bytes)
        else:
            reading = StripedRead(
                self._striping,
                self._metadata.ensemble_of(first).bookies,
                self._ask,
                begin=self._ledger_id % self._striping.ensemble_size,
                suspected=self._suspected,
                far=self._far,
                slow_s=self._components.settings.speculative_read_s,
                slow=self._suspect,
            )
            entries = await reading.read(first, last, max_bytes)
            if not entries:
                raise most_significant(reading.errors, self._ledger_id, first)
        self._history.entry_bytes = max(1, sum(map(len, entries)) // len(entries))
        return entries

    def _entry_bytes(self) -> int:
        if not self._history.entry_bytes and self._metadata.last_entry >= 0:
            return self._metadata.length // (self._metadata.last_entry + 1) + LEDGER_ENTRY_HEADER_BYTES
        return self._history.entry_bytes

    async def _ask(self, bookie: str, first: int, last: int, max_bytes: int, stripe: Stripe) -> list[bytes]:
        try:
            result = await self._components.transport.read(
                bookie, self._ledger_id, first, last, max_bytes=max_bytes, stripe=stripe
            )
        except SILENT as error:
            self._components.health.failed(bookie, error.code)
            self._suspect(bookie)
            raise
        return verified(result.entries, self._ledger_id, stripe.ids(first, last, len(result.entries)), bookie)

    def _in_order(self, first: int, last: int) -> list[str]:
        """Replicas, near ones first; else the same one for a whole ledger if all have it, for its read-ahead.

        Striped, position `last % E` has all of a run of Qw entries at most; the others of the write set its beginning.
        """
        bookies = self._metadata.ensemble_of(first).bookies
        striped = len(bookies) != self._striping.write_quorum
        turn = first if striped else self._ledger_id
        order = [bookies[position] for position in self._striping.write_set(turn)]
        if striped and last > first:
            whole = bookies[last % len(bookies)]
            order.remove(whole)
            order.insert(0, whole)
        if self._zone:
            order.sort(key=self._far)
        if self._history.suspects:
            order.sort(key=self._suspected)
        return order

    def _far(self, bookie: str) -> bool:
        """Not known to be in the zone of this client, if that has one."""
        return bool(self._zone) and self._components.bookies.labels(bookie).zone != self._zone

    def _suspect(self, bookie: str) -> None:
        self._history.suspects[bookie] = (
            asyncio.get_running_loop().time() + self._components.settings.suspect_bookie_s
        )

    def _suspected(self, bookie: str) -> bool:
        until = self._history.suspects.get(bookie)
        return until is not None and until > asyncio.get_running_loop().time()


def verified(entries: list[bytes], ledger_id: int, ids: Sequence[int], bookie: str) -> list[bytes]:
    """The entries of these ids up to a damaged one, which is left to the next read, and to another replica.

    More entries than ids are ignored. Raises EntryDamaged when the first is, EntryNotFound when there is none.
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
    """A temporary error outweighs damage, damage outweighs absence: an entry that some bookie may have is never given up."""
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

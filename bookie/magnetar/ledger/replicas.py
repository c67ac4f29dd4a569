"""The copies of entries, and how one good copy is got when bookies are slow, silent or damaged.

A replica that fails is passed over at once for the next one. A replica that is silent for `speculative_read_s` is not given
up: the next one is asked as well, the first good answer counts, and what is still under way then is cancelled. Bookies that
were silent are asked last for `suspect_bookie_s`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from magnetar.proto.errors import (
    BookieUnavailable,
    ConnectionLost,
    EntryDamaged,
    EntryNotFound,
    MagnetarError,
    RequestTimeout,
)
from magnetar.proto.ledger_entry import verify_ledger_entry

from .components import LedgerComponents
from .core.metadata import LedgerMetadata

_log = logging.getLogger(__name__)

T = TypeVar("T")

# Entries of a striped ledger that are read at a time.
STRIPED_READS = 32

SILENT = (BookieUnavailable, ConnectionLost, RequestTimeout)


async def first_good(
    bookies: Sequence[str],
    ask: Callable[[str], Awaitable[T]],
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
            running[asyncio.ensure_future(ask(bookie))] = bookie
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
                # The last one has nobody behind it: all that are under way are waited for.
                failed = number < len(bookies)
    finally:
        for task in running:
            task.cancel()
        if running:
            await asyncio.gather(*running, return_exceptions=True)
    return None


class Replicas:
    """The copies of one ledger. `suspects`: bookie -> loop time until which it is asked last."""

    def __init__(
        self,
        components: LedgerComponents,
        ledger_id: int,
        metadata: LedgerMetadata,
        suspects: dict[str, float],
    ) -> None:
        self._components = components
        self._ledger_id = ledger_id
        self._metadata = metadata
        self._striping = metadata.striping
        self._suspects = suspects

    async def read(self, first: int, last: int, max_bytes: int) -> list[bytes]:
        """Entries first..last of one ensemble that one replica can give; at least one."""

        async def ask(bookie: str) -> list[bytes]:
            try:
                result = await self._components.transport.read(
                    bookie, self._ledger_id, first, last, max_bytes=max_bytes
                )
            except SILENT as error:
                self._components.health.failed(bookie, error.code)
                self._suspect(bookie)
                raise
            return verified(result.entries[: last - first + 1], self._ledger_id, first, bookie)

        errors: list[MagnetarError] = []
        slow_s = self._components.settings.speculative_read_s
        entries = await first_good(self._in_order(first, last), ask, slow_s, self._suspect, errors)
        if entries is None:
            raise _most_telling(errors, self._ledger_id, first)
        return entries

    async def read_striped(self, first: int, last: int, max_bytes: int) -> list[bytes]:
        """The same when each entry has a write set of its own: runs of Qw entries that one bookie has all of."""
        last = min(last, first + STRIPED_READS - 1)
        if max_bytes:
            # The size of entries is not known before they are read: begin with one and go on by its size.
            entries = await self.read(first, first, max_bytes)
            last = min(last, first + max(0, max_bytes // max(1, len(entries[0])) - 1))
            if last > first:
                entries += await self.read_striped(first + 1, last, 0)
            return entries
        run = self._striping.write_quorum
        starts = range(first, last + 1, run)
        results = await asyncio.gather(
            *(self.read(start, min(start + run - 1, last), 0) for start in starts), return_exceptions=True
        )
        entries = []
        for start, result in zip(starts, results, strict=True):
            if isinstance(result, BaseException):
                if entries and isinstance(result, MagnetarError):
                    break
                raise result
            entries += result
            if len(result) < min(run, last + 1 - start):  # that replica had no more; left to the next read
                break
        return entries

    def _in_order(self, first: int, last: int) -> list[str]:
        """Replicas, the preferred one first: the same for a whole ledger if all have it, for its read-ahead.

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
        if self._suspects:
            now = asyncio.get_running_loop().time()
            order.sort(key=lambda bookie: self._suspects.get(bookie, 0) > now)
        return order

    def _suspect(self, bookie: str) -> None:
        self._suspects[bookie] = (
            asyncio.get_running_loop().time() + self._components.settings.suspect_bookie_s
        )


def verified(entries: list[bytes], ledger_id: int, first: int, bookie: str) -> list[bytes]:
    """The entries up to a damaged one, which is left to the next read, and to another replica."""
    for index, entry in enumerate(entries):
        try:
            header = verify_ledger_entry(entry)
            if (header.ledger_id, header.entry_id) != (ledger_id, first + index):
                raise EntryDamaged(
                    f"bookie {bookie} answered entry {header.entry_id} of ledger {header.ledger_id} "
                    f"for entry {first + index} of ledger {ledger_id}"
                )
        except EntryDamaged as error:
            _log.warning("a copy is damaged at bookie %s: %s", bookie, error.message)
            if index == 0:
                raise
            return entries[:index]
    if not entries:
        raise EntryNotFound(f"bookie {bookie} answered no entry for {first} of ledger {ledger_id}")
    return entries


def _most_telling(errors: list[MagnetarError], ledger_id: int, entry_id: int) -> MagnetarError:
    """What may pass outweighs damage, damage outweighs absence: nobody gives up on an entry that a bookie may have."""
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

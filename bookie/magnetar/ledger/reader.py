"""Reading ledgers: batches from one replica when every bookie has every entry, entry by entry when striped.

Every entry is verified (digest, ledger, entry id). A replica that is damaged, lacks the entry or does not answer is
passed over for the next one; bookies that did not answer are asked last for a while.
"""

from __future__ import annotations

import asyncio
import logging

from magnetar.proto.errors import (
    BookieUnavailable,
    ConnectionLost,
    EntryDamaged,
    EntryNotFound,
    InvalidArgument,
    MagnetarError,
    RequestTimeout,
)
from magnetar.proto.ledger_entry import verify_ledger_entry

from .components import LedgerComponents
from .core.last_confirmed import LastConfirmedQuorum
from .core.metadata import LedgerMetadata

_log = logging.getLogger(__name__)

# Entries of a striped ledger that are read at a time.
STRIPED_READS = 32

_SILENT = (BookieUnavailable, ConnectionLost, RequestTimeout)


class LedgerReader:
    """A ledger for reading; closed, or as far as it was confirmed. Made by LedgerClient.open."""

    def __init__(self, components: LedgerComponents, ledger_id: int, metadata: LedgerMetadata) -> None:
        self.ledger_id = ledger_id
        self.metadata = metadata
        self.last_add_confirmed = metadata.last_entry  # last entry that may be read; final once closed
        self._components = components
        self._suspects: dict[str, float] = {}

    @property
    def closed(self) -> bool:
        """Whether the ledger will never have more entries."""
        return self.metadata.closed

    async def read(self, first: int, last: int, *, max_bytes: int = 0) -> list[bytes]:
        """Verified ledger entries from `first` on, without a gap and at least one.

        With `max_bytes` 0 all up to `last`; else about as many as fit, possibly fewer. EntryNotFound if `first` lies
        past last_add_confirmed; EntryDamaged, BookieUnavailable and others when no replica has a readable copy.
        """
        if not 0 <= first <= last:
            raise InvalidArgument(f"entries {first}..{last} are not a range")
        if first > self.last_add_confirmed:
            raise EntryNotFound(
                f"ledger {self.ledger_id} has no entry {first}: it ends at {self.last_add_confirmed} so far",
                ledger_id=self.ledger_id,
                entry_id=first,
            )
        return await read_entries(
            self._components,
            self.ledger_id,
            self.metadata,
            first,
            min(last, self.last_add_confirmed),
            max_bytes,
            self._suspects,
        )

    async def read_last_confirmed(self) -> int:
        """Looks how far the ledger goes now, and returns it. QuorumLost if too few bookies answer (rule 13)."""
        if not self.closed:
            self.metadata = (await self._components.read_metadata(self.ledger_id)).metadata
            if self.metadata.closed:
                self.last_add_confirmed = self.metadata.last_entry
            else:
                confirmed = await self._ask_ensemble()
                self.last_add_confirmed = max(
                    self.last_add_confirmed, confirmed, self.metadata.last_ensemble.first_entry - 1
                )
        return self.last_add_confirmed

    async def _ask_ensemble(self) -> int:
        bookies = self.metadata.last_ensemble.bookies
        quorum = LastConfirmedQuorum(self.metadata.striping, bookies)
        loop = asyncio.get_running_loop()
        ask = self._components.transport.read_last_confirmed
        tasks = {loop.create_task(ask(bookie, self.ledger_id)): bookie for bookie in bookies}
        waiting = list(tasks)
        try:
            while not quorum.covered and not quorum.complete:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in waiting if task.done()]:
                    waiting.remove(task)
                    try:
                        quorum.answered(tasks[task], task.result().last_add_confirmed, 0)
                    except MagnetarError as error:
                        quorum.answered(tasks[task], -1, error.code)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        if not quorum.covered:
            raise quorum.lost(self.ledger_id)
        return quorum.last_add_confirmed


async def read_entries(
    components: LedgerComponents,
    ledger_id: int,
    metadata: LedgerMetadata,
    first: int,
    last: int,
    max_bytes: int,
    suspects: dict[str, float] | None = None,
) -> list[bytes]:
    """See LedgerReader.read; the range must be confirmed."""
    source = _Replicas(components, ledger_id, metadata, {} if suspects is None else suspects)
    entries: list[bytes] = []
    while True:
        start = first + len(entries)
        end = metadata.end_of_ensemble(start)
        end = last if end is None else min(last, end)
        if metadata.ensemble_size == metadata.write_quorum:
            entries += await source.read(start, end, max_bytes)
        else:
            entries += await source.read_striped(start, end, max_bytes)
        if max_bytes or first + len(entries) > last:
            return entries


class _Replicas:
    """The copies of one ledger."""

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
        errors: list[MagnetarError] = []
        for bookie in self._in_order(first):
            try:
                result = await self._components.transport.read(
                    bookie, self._ledger_id, first, last, max_bytes=max_bytes
                )
                return self._verified(result.entries[: last - first + 1], first, bookie)
            except _SILENT as error:
                self._components.health.failed(bookie, error.code)
                self._suspects[bookie] = (
                    asyncio.get_running_loop().time() + self._components.settings.suspect_bookie_s
                )
                errors.append(error)
            except MagnetarError as error:
                errors.append(error)
        raise _most_telling(errors, self._ledger_id, first)

    async def read_striped(self, first: int, last: int, max_bytes: int) -> list[bytes]:
        """The same when each entry has a write set of its own."""
        last = min(last, first + STRIPED_READS - 1)
        if max_bytes:
            # The size of entries is not known before they are read: begin with one and go on by its size.
            entries = await self.read(first, first, max_bytes)
            last = min(last, first + max(0, max_bytes // max(1, len(entries[0])) - 1))
            if last > first:
                entries += await self.read_striped(first + 1, last, 0)
            return entries
        results = await asyncio.gather(
            *(self.read(entry_id, entry_id, 0) for entry_id in range(first, last + 1)), return_exceptions=True
        )
        entries = []
        for result in results:
            if isinstance(result, BaseException):
                if entries and isinstance(result, MagnetarError):
                    break
                raise result
            entries += result
        return entries

    def _in_order(self, entry_id: int) -> list[str]:
        """Replicas, the preferred one first: the same for a whole ledger if all have it, for its read-ahead."""
        bookies = self._metadata.ensemble_of(entry_id).bookies
        turn = self._ledger_id if len(bookies) == self._striping.write_quorum else entry_id
        order = [bookies[position] for position in self._striping.write_set(turn)]
        if self._suspects:
            now = asyncio.get_running_loop().time()
            order.sort(key=lambda bookie: self._suspects.get(bookie, 0) > now)
        return order

    def _verified(self, entries: list[bytes], first: int, bookie: str) -> list[bytes]:
        """The entries up to a damaged one, which is left to the next read, and to another replica."""
        for index, entry in enumerate(entries):
            try:
                header = verify_ledger_entry(entry)
                if (header.ledger_id, header.entry_id) != (self._ledger_id, first + index):
                    raise EntryDamaged(
                        f"bookie {bookie} answered entry {header.entry_id} of ledger {header.ledger_id} "
                        f"for entry {first + index} of ledger {self._ledger_id}"
                    )
            except EntryDamaged as error:
                _log.warning("a copy is damaged at bookie %s: %s", bookie, error.message)
                if index == 0:
                    raise
                return entries[:index]
        if not entries:
            raise EntryNotFound(f"bookie {bookie} answered no entry for {first} of ledger {self._ledger_id}")
        return entries


def _most_telling(errors: list[MagnetarError], ledger_id: int, entry_id: int) -> MagnetarError:
    """What may pass outweighs damage, damage outweighs absence: nobody gives up on an entry that a bookie may have."""
    for kind in (*_SILENT, EntryDamaged):
        for error in errors:
            if isinstance(error, kind):
                return error
    for error in errors:
        if not isinstance(error, EntryNotFound):
            return error
    return EntryNotFound(
        f"no replica has entry {entry_id} of ledger {ledger_id}", ledger_id=ledger_id, entry_id=entry_id
    )

"""Reading ledgers: ranges from one replica when every bookie has every entry, in shares from several when striped.

Every entry is verified (digest, ledger, entry id); which replica is asked, and what when it is slow, is in `replicas`.
An open ledger is followed by long polls: see `tail`.
"""

from __future__ import annotations

import asyncio

from magnetar.proto.errors import EntryNotFound, InvalidArgument, LedgerNotFound, MagnetarError
from magnetar.runtime.tasks import awaited, end_all

from .components import LedgerComponents
from .core.last_confirmed import LastConfirmedQuorum
from .core.metadata import LedgerMetadata
from .replicas import Replicas
from .tail import LedgerTail


class LedgerReader:
    """A ledger for reading; closed, or as far as it was confirmed. Made by LedgerClient.open."""

    def __init__(self, components: LedgerComponents, ledger_id: int, metadata: LedgerMetadata) -> None:
        self.ledger_id = ledger_id
        self.metadata = metadata
        self.last_add_confirmed = metadata.last_entry  # last entry that may be read; final once closed
        self._components = components
        self._replicas = Replicas(components, ledger_id)

    @property
    def closed(self) -> bool:
        """Whether the ledger will never have more entries."""
        return self.metadata.closed

    async def read(self, first: int, last: int, *, max_bytes: int = 0) -> list[bytes]:
        """Verified ledger entries from `first` on, without a gap and at least one.

        With `max_bytes` 0 all up to `last`; else about as many as fit, possibly fewer. EntryNotFound if `first` lies
        past last_add_confirmed; EntryDamaged, BookieUnavailable and others when no replica has a readable copy;
        LedgerNotFound if it was deleted.
        """
        if not 0 <= first <= last:
            raise InvalidArgument(f"entries {first}..{last} are not a range")
        if first > self.last_add_confirmed:
            raise EntryNotFound(
                f"ledger {self.ledger_id} has no entry {first}: it ends at {self.last_add_confirmed} so far",
                ledger_id=self.ledger_id,
                entry_id=first,
            )
        last = min(last, self.last_add_confirmed)
        try:
            return await self._replicas.read(self.metadata, first, last, max_bytes)
        except MagnetarError as error:
            # Bookies may tell of entries that were confirmed after an ensemble change that is not known here. And a bookie
            # that cannot be reached may have what the others deny: only the metadata tells that the ledger was deleted.
            if not await self._ensembles_changed(error):
                raise
        return await self._replicas.read(self.metadata, first, last, max_bytes)

    async def _ensembles_changed(self, error: MagnetarError) -> bool:
        """Reads the metadata after a failed read. LedgerNotFound; another failure leaves it at `error`."""
        ensembles = self.metadata.ensembles
        try:
            await self._read_metadata()
        except LedgerNotFound:
            raise
        except MagnetarError:
            raise error from None
        return self.metadata.ensembles != ensembles

    async def read_last_confirmed(self) -> int:
        """Looks how far the ledger goes now, and returns it. QuorumLost if too few bookies answer (rule 13)."""
        await self.read_metadata()
        if not self.closed:
            self.update_last_confirmed(await self._ask_ensemble())
        return self.last_add_confirmed

    async def read_metadata(self) -> None:
        """Looks whether the ledger was closed or changed its bookies. LedgerNotFound."""
        if not self.closed:
            await self._read_metadata()

    async def _read_metadata(self) -> None:
        self.metadata = (await self._components.read_metadata(self.ledger_id)).metadata
        if self.metadata.closed:
            self.last_add_confirmed = self.metadata.last_entry
        else:
            # What lies before an ensemble change was confirmed before it.
            self.update_last_confirmed(self.metadata.last_ensemble.first_entry - 1)

    def update_last_confirmed(self, last_add_confirmed: int) -> None:
        """Takes a last-add-confirmed that a bookie or the metadata reported; it never goes back."""
        if not self.closed:
            self.last_add_confirmed = max(self.last_add_confirmed, last_add_confirmed)

    def follow(self, first: int | None = None, *, max_bytes: int = 1 << 20) -> LedgerTail:
        """Entries from `first` on (None: past the last one confirmed now) as they are confirmed, until the ledger is closed.

            async with reader.follow(0) as tail:
                async for entries in tail: ...

        Several readers of one ledger cost their bookies a long poll each; closing the tail ends its polls.
        """
        first = self.last_add_confirmed + 1 if first is None else first
        if first < 0:
            raise InvalidArgument(f"entry {first} is not one to start from")
        return LedgerTail(self._components, self, first, max_bytes)

    async def wait(self, *, timeout_s: float) -> int:
        """Waits until more is confirmed than is known here, or the ledger is closed; returns last_add_confirmed.

        The same as before if nothing came within `timeout_s`. LedgerNotFound if it was deleted.
        """
        known = self.last_add_confirmed
        async with self.follow() as tail:
            await tail.wait(known, timeout_s)
        return self.last_add_confirmed

    async def _ask_ensemble(self) -> int:
        bookies = self.metadata.last_ensemble.bookies
        quorum = LastConfirmedQuorum(self.metadata.striping, bookies)
        ask = self._components.transport.read_last_confirmed
        tasks = {awaited(ask(bookie, self.ledger_id)): bookie for bookie in bookies}
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
            await end_all(waiting)
        if not quorum.covered:
            raise quorum.lost(self.ledger_id)
        return quorum.last_add_confirmed

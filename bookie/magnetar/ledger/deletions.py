"""Deleting ledgers: the metadata first, then the entries on every bookie of the ledger (rule 38).

    delete ──one commit──> no metadata, and a note for each bookie ──bookie has confirmed──> the note is removed
                                                         └──bookie is away, broker killed──> sent again until it has

A note is a record in the metadata store that a bookie has not confirmed the deletion of a ledger (`metadata.ledgers`).
Bookies that compare their ledgers with the metadata need none: their garbage collection finds the deletions that they
missed. Bookies of a static list have no access to the metadata, so notes are made for them (`remember`).

Deleting is idempotent: two clients may send the same deletion, or one client twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from magnetar.proto.errors import LedgerNotFound, MagnetarError
from magnetar.runtime.tasks import LongTask, TaskSet

from .directory import BookieDirectory
from .records import LedgerRecords
from .transport import BookieTransport

_log = logging.getLogger(__name__)

# Deletions that are sent to bookies at a time. Further ones wait for the next round of `_repeat`, or for garbage collection.
_MAX_IN_FLIGHT = 64
_PAGE = 1000  # notes that are read at a time


class Deletions:
    """The deletions of one ledger client. `remember`: makes notes, for bookies without the metadata."""

    def __init__(
        self,
        records: LedgerRecords,
        transport: BookieTransport,
        bookies: BookieDirectory,
        retry_s: float,
        *,
        remember: bool,
    ) -> None:
        self._records = records
        self._transport = transport
        self._bookies = bookies
        self._retry_s = retry_s
        self._remember = remember
        self._in_flight = TaskSet("delete ledgers")
        self._repeating: LongTask | None = None
        self._closed = False

    def start(self) -> None:
        """From now on sends all noted deletions, also those of earlier processes, every `retry_s`."""
        if self._remember and self._repeating is None:
            self._repeating = LongTask("the sending of missed deletions", self._repeat)

    async def delete(self, ledger_id: int) -> None:
        """The ledger's metadata is deleted when this returns; its bookies get the deletion in the background.

        Raises LedgerNotFound, and errors of the metadata store: then it may have been deleted, or not.
        """
        try:
            ensembles = (await self._records.read(ledger_id)).metadata.ensembles
            bookies = [bookie for ensemble in ensembles for bookie in ensemble.bookies]
        except LedgerNotFound:
            raise
        except MagnetarError as error:  # what cannot be read can be deleted all the same
            _log.warning("the metadata of ledger %d cannot be read: %s", ledger_id, error)
            bookies = list(self._bookies.writable())
        bookies = list(dict.fromkeys(bookies))
        await self._records.delete(ledger_id, bookies if self._remember else ())
        if len(self._in_flight) < _MAX_IN_FLIGHT and not self._closed:
            self._in_flight.begin(self._send_to_all(bookies, ledger_id), f"delete ledger {ledger_id}")

    def delete_later(self, ledger_id: int) -> None:
        """Deletes a ledger that nobody uses, and that may not exist, as soon as the metadata store answers again.

        It is left, open, empty and harmless, if `_MAX_IN_FLIGHT` deletions are under way, or the process ends before.
        """
        if len(self._in_flight) < _MAX_IN_FLIGHT and not self._closed:
            self._in_flight.begin(
                self._delete_later(ledger_id), f"delete ledger {ledger_id}, which was not used"
            )

    async def _delete_later(self, ledger_id: int) -> None:
        while True:
            await asyncio.sleep(self._retry_s)
            try:
                await self.delete(ledger_id)
                return
            except LedgerNotFound:
                return
            except MagnetarError as error:
                _log.info("ledger %d, which was not used, is not deleted yet: %s", ledger_id, error)

    async def close(self) -> None:
        """Cancels what is under way; notes stay in the metadata store."""
        self._closed = True
        if self._repeating is not None:
            await self._repeating.close()
        await self._in_flight.close()

    async def _send_to_all(self, bookies: Sequence[str], ledger_id: int) -> None:
        done = await asyncio.gather(*(self._send(bookie, ledger_id) for bookie in bookies))
        await self._forget(ledger_id, [bookie for bookie, ok in zip(bookies, done, strict=True) if ok])

    async def _send(self, bookie: str, ledger_id: int) -> bool:
        try:
            await self._transport.delete_ledger(bookie, ledger_id)
        except MagnetarError as error:
            _log.info("bookie %s did not take the deletion of ledger %d: %s", bookie, ledger_id, error)
            return False
        return True

    async def _forget(self, ledger_id: int, bookies: Sequence[str]) -> None:
        """Removes the notes of a deletion that these bookies have confirmed."""
        if not self._remember or not bookies:
            return
        try:
            await self._records.forget_deletions(ledger_id, bookies)
        except MagnetarError as error:  # the deletions are sent once more
            _log.info("notes of confirmed deletions cannot be removed: %s", error)

    async def _repeat(self) -> None:
        while True:
            try:
                for bookie in await self._records.bookies_to_delete():
                    await self._send_missed(bookie)
            except MagnetarError as error:
                _log.warning("deletions that bookies have missed cannot be sent: %s", error)
            await asyncio.sleep(self._retry_s)

    async def _send_missed(self, bookie: str) -> None:
        """Sends a bookie the deletions that it has missed, up to the first that it does not confirm."""
        after, sent = -1, 0
        while ledgers := await self._records.noted_deletions(bookie, after, _PAGE):
            for ledger_id in ledgers:
                after = ledger_id
                if not await self._send(bookie, ledger_id):
                    return
                await self._forget(ledger_id, [bookie])
                sent += 1
        if sent:
            _log.info("bookie %s has deleted %d ledgers whose deletion it had missed", bookie, sent)

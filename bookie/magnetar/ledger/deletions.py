"""Deleting ledgers: the metadata first, then the entries on every bookie of the ledger (rule 38).

    delete ──one commit──> no metadata, and a note for each bookie ──bookie has confirmed──> the note goes
                                                         └──bookie is away, broker killed──> sent again until it has

Bookies that compare their ledgers with the metadata by themselves need no notes: a deletion that they miss is found out by
their garbage collection. Those of a static list have no metadata, so `remember` makes notes (`metadata.ledgers`).

Deleting is repeatable, so it does no harm that two clients send one deletion, or one twice.
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

# Deletions that are sent to bookies at a time. Further ones wait for the next turn of `_repeat`, or for garbage collection.
_MAX_IN_FLIGHT = 64
_PAGE = 1000


class Deletions:
    """The deletions of one ledger client. `remember`: its bookies do not find out by themselves what they have missed."""

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
        """Sends from now on, again and again, what bookies have missed, also while an earlier process ran."""
        if self._remember and self._repeating is None:
            self._repeating = LongTask("the sending of missed deletions", self._repeat)

    async def delete(self, ledger_id: int) -> None:
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
        """A record of this ledger may have been made, which nobody uses: deletes it when the metadata store answers again.

        Beyond `_MAX_IN_FLIGHT` of them they stay. So they do when the process ends before: open, empty, and harmless.
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
        """Ends what is under way; notes stay."""
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
        """The notes of confirmed deletions go."""
        if not self._remember or not bookies:
            return
        try:
            await self._records.forget_deletions(ledger_id, bookies)
        except MagnetarError as error:  # they are sent once more
            _log.info("notes of deletions cannot be taken away: %s", error)

    async def _repeat(self) -> None:
        while True:
            try:
                for bookie in await self._records.bookies_to_delete():
                    await self._send_missed(bookie)
            except MagnetarError as error:
                _log.warning("deletions that bookies have missed cannot be sent: %s", error)
            await asyncio.sleep(self._retry_s)

    async def _send_missed(self, bookie: str) -> None:
        """All that the bookie has missed, until it does not answer."""
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

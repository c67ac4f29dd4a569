"""The records of ledgers, as the writers, readers, recoveries and repairs of a ledger client read and write them.

The outcome of a write whose answer is lost (ConnectionLost, RequestTimeout) is not known, and it may be done later still. It
is looked up, and decided by what is there:

    our record                       done, by this attempt or an earlier one
    the version that we write on     not done: written again. If the lost one is done meanwhile, the next one conflicts
    anything else                    somebody else's: that is the answer
    cannot be read, or lost MAX_LOST_ANSWERS times    not known: the caller gives up
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from magnetar.metadata.ledgers import LedgerManager
from magnetar.metadata.store import Watch
from magnetar.metadata.timed import metadata_in_time
from magnetar.proto.errors import (
    AlreadyExists,
    ConnectionLost,
    FinalError,
    LedgerNotFound,
    MagnetarError,
    NotFoundInStore,
    RequestTimeout,
    VersionConflict,
)

from .core.events import MetadataFailed, MetadataFound, MetadataWritten
from .core.metadata import LedgerMetadata

T = TypeVar("T")

_OUTCOME_NOT_KNOWN = (ConnectionLost, RequestTimeout)
# Each may take metadata_timeout_s; bookies and callers wait meanwhile.
MAX_LOST_ANSWERS = 3


class LedgerRecords:
    """The records of ledgers in the metadata store, as `LedgerMetadata`; a call is answered in time, or fails."""

    def __init__(self, ledgers: LedgerManager, timeout_s: float) -> None:
        self._ledgers = ledgers
        self._timeout_s = timeout_s

    async def next_id(self, count: int = 1) -> int:
        """An id that no ledger had, and no other will have; the first of `count` in a row."""
        return await self._in_time(self._ledgers.new_ids(count), "the id of a new ledger")

    async def create(self, ledger_id: int, metadata: LedgerMetadata) -> int:
        """Writes the record of a new ledger: its version. AlreadyExists; ConnectionLost, RequestTimeout: it may exist."""
        return await self._write(ledger_id, metadata.encode(), None)

    async def read(self, ledger_id: int) -> MetadataFound:
        """What the store has. Raises LedgerNotFound."""
        node = await self._in_time(self._ledgers.get(ledger_id), f"reading ledger {ledger_id}")
        if node is None:
            raise LedgerNotFound(f"ledger {ledger_id} does not exist", ledger_id=ledger_id)
        return MetadataFound(LedgerMetadata.decode(node.value, ledger_id), node.version)

    async def find(self, ledger_id: int) -> MetadataFound | MetadataFailed:
        """The same as an event."""
        try:
            return await self.read(ledger_id)
        except MagnetarError as error:
            return MetadataFailed(error)
        except Exception as error:
            return MetadataFailed(_failed(error))

    async def write(
        self, ledger_id: int, metadata: LedgerMetadata, version: int
    ) -> MetadataWritten | MetadataFound | MetadataFailed:
        """Compare-and-set. The event says what holds now; after MetadataFailed that is not known."""
        try:
            return MetadataWritten(await self._write(ledger_id, metadata.encode(), version))
        except VersionConflict:
            return await self.find(ledger_id)
        except NotFoundInStore:
            return MetadataFailed(LedgerNotFound(f"ledger {ledger_id} was deleted", ledger_id=ledger_id))
        except MagnetarError as error:
            return MetadataFailed(error)
        except Exception as error:
            return MetadataFailed(_failed(error))

    async def delete(self, ledger_id: int, remember_for: Sequence[str]) -> None:
        """Notes for these bookies what they have to delete, in the same commit. LedgerNotFound."""
        delete = self._ledgers.delete(ledger_id, remember_for=remember_for)
        try:
            await self._in_time(delete, f"deleting ledger {ledger_id}")
        except NotFoundInStore:
            raise LedgerNotFound(f"ledger {ledger_id} does not exist", ledger_id=ledger_id) from None

    async def bookies_to_delete(self) -> list[str]:
        """Bookies for which deletions are noted."""
        return await self._in_time(self._ledgers.bookies_to_delete(), "deletions that were missed")

    async def noted_deletions(self, bookie: str, after: int, limit: int) -> list[int]:
        """Deleted ledgers above `after` that the bookie has not confirmed yet, rising."""
        noted = self._ledgers.noted_deletions(bookie, after=after, limit=limit)
        return await self._in_time(noted, f"deletions that {bookie} has missed")

    async def forget_deletions(self, ledger_id: int, bookies: Sequence[str]) -> None:
        """These bookies have confirmed the deletion."""
        await self._in_time(self._ledgers.forget_deletions(ledger_id, bookies), "notes of deletions")

    def watch(self, ledger_id: int, callback: Callable[[], None]) -> Watch:
        """Calls back from the event loop after the record changed; perhaps without a change."""
        return self._ledgers.watch(ledger_id, callback)

    async def _in_time(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """The result of a call of the metadata store, or RequestTimeout."""
        return await metadata_in_time(work, self._timeout_s, what)

    async def _write(self, ledger_id: int, record: bytes, version: int | None) -> int:
        """Makes the record (`version` None), or replaces the one of this version. Returns the new version; see the module.

        AlreadyExists, VersionConflict, NotFoundInStore; ConnectionLost, RequestTimeout: it may be done.
        """
        lost: MagnetarError | None = None
        conflict: MagnetarError | None = None
        for _ in range(MAX_LOST_ANSWERS):
            try:
                if version is None:
                    create = self._ledgers.create(ledger_id, record)
                    return await self._in_time(create, f"making ledger {ledger_id}")
                put = self._ledgers.put(ledger_id, record, version=version)
                return await self._in_time(put, f"writing ledger {ledger_id}")
            except _OUTCOME_NOT_KNOWN as error:
                lost, conflict = error, None
            except (AlreadyExists, VersionConflict) as error:
                if lost is None:
                    raise
                conflict = error
            try:
                found = await self._in_time(self._ledgers.get(ledger_id), f"reading ledger {ledger_id}")
            except MagnetarError:
                break
            if found is not None and found.version != version:
                if found.value == record:
                    return found.version
                raise conflict or VersionConflict(f"ledger {ledger_id} was changed by another client")
        assert lost is not None
        raise lost


def _failed(error: Exception) -> FinalError:
    """Turns a bug of the store into an error: its callers must get an answer."""
    return FinalError(f"the metadata store failed: {error!r}")

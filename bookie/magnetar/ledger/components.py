"""The components that writers, readers and recoveries of a ledger client share; access to ledger metadata.

The outcome of a write whose answer is lost (ConnectionLost, RequestTimeout) is not known, and it may be done later still. It
is looked up, and decided by what is there:

    our record                       done, by this attempt or an earlier one
    the version that we write on     not done: written again. If the lost one is done meanwhile, the next one conflicts
    anything else                    somebody else's: that is the answer
    cannot be read, or lost MAX_LOST_ANSWERS times    not known: the caller gives up
"""

from __future__ import annotations

import random
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from magnetar.metadata.ledgers import LedgerManager
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
from magnetar.runtime.clock import Clock

from .core.events import MetadataFailed, MetadataFound, MetadataWritten
from .core.metadata import LedgerMetadata
from .directory import BookieDirectory
from .health import BookieHealth
from .placement.chooser import BookieChooser
from .settings import LedgerSettings
from .transport import BookieTransport

T = TypeVar("T")

_OUTCOME_NOT_KNOWN = (ConnectionLost, RequestTimeout)
# Each may take metadata_timeout_s; bookies and callers wait meanwhile.
MAX_LOST_ANSWERS = 3


@dataclass(frozen=True, slots=True)
class LedgerComponents:
    """The injected components; the owner of the client owns them."""

    ledgers: LedgerManager
    transport: BookieTransport
    bookies: BookieDirectory
    chooser: BookieChooser
    health: BookieHealth
    settings: LedgerSettings
    rng: random.Random
    clock: Clock

    async def next_ledger_id(self, count: int = 1) -> int:
        """An id that no ledger had, and no other will have; the first of `count` in a row."""
        return await self.in_time(self.ledgers.new_ids(count), "the id of a new ledger")

    async def new_ledger(self, metadata: LedgerMetadata, ledger_id: int) -> int:
        """Writes the record of a new ledger: its version. AlreadyExists; ConnectionLost, RequestTimeout: it may exist."""
        return await self._write(ledger_id, metadata.encode(), None)

    async def in_time(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """The result of a call of the metadata store, or RequestTimeout."""
        return await metadata_in_time(work, self.settings.metadata_timeout_s, what)

    async def read_metadata(self, ledger_id: int) -> MetadataFound:
        """What the store has. Raises LedgerNotFound."""
        node = await self.in_time(self.ledgers.get(ledger_id), f"reading ledger {ledger_id}")
        if node is None:
            raise LedgerNotFound(f"ledger {ledger_id} does not exist", ledger_id=ledger_id)
        return MetadataFound(LedgerMetadata.decode(node.value, ledger_id), node.version)

    async def find_metadata(self, ledger_id: int) -> MetadataFound | MetadataFailed:
        """The same as an event."""
        try:
            return await self.read_metadata(ledger_id)
        except MagnetarError as error:
            return MetadataFailed(error)
        except Exception as error:
            return MetadataFailed(_failed(error))

    async def write_metadata(
        self, ledger_id: int, metadata: LedgerMetadata, version: int
    ) -> MetadataWritten | MetadataFound | MetadataFailed:
        """Compare-and-set. The event says what holds now; after MetadataFailed that is not known."""
        try:
            return MetadataWritten(await self._write(ledger_id, metadata.encode(), version))
        except VersionConflict:
            return await self.find_metadata(ledger_id)
        except NotFoundInStore:
            return MetadataFailed(LedgerNotFound(f"ledger {ledger_id} was deleted", ledger_id=ledger_id))
        except MagnetarError as error:
            return MetadataFailed(error)
        except Exception as error:
            return MetadataFailed(_failed(error))

    async def _write(self, ledger_id: int, record: bytes, version: int | None) -> int:
        """Makes the record (`version` None), or replaces the one of this version. Returns the new version; see the module.

        AlreadyExists, VersionConflict, NotFoundInStore; ConnectionLost, RequestTimeout: it may be done.
        """
        lost: MagnetarError | None = None
        conflict: MagnetarError | None = None
        for _ in range(MAX_LOST_ANSWERS):
            try:
                if version is None:
                    create = self.ledgers.create(ledger_id, record)
                    return await self.in_time(create, f"making ledger {ledger_id}")
                put = self.ledgers.put(ledger_id, record, version=version)
                return await self.in_time(put, f"writing ledger {ledger_id}")
            except _OUTCOME_NOT_KNOWN as error:
                lost, conflict = error, None
            except (AlreadyExists, VersionConflict) as error:
                if lost is None:
                    raise
                conflict = error
            try:
                found = await self.in_time(self.ledgers.get(ledger_id), f"reading ledger {ledger_id}")
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

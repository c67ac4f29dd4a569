"""The components that writers, readers and recoveries of a ledger client share; access to ledger metadata."""

from __future__ import annotations

import random
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from magnetar.metadata.ledgers import LedgerManager
from magnetar.proto.errors import (
    FinalError,
    LedgerNotFound,
    MagnetarError,
    NotFoundInStore,
    VersionConflict,
)
from magnetar.runtime.clock import Clock

from .core.events import MetadataFailed, MetadataFound, MetadataWritten
from .core.metadata import LedgerMetadata
from .directory import BookieDirectory
from .health import BookieHealth
from .metadata_wait import metadata_in_time
from .placement.chooser import BookieChooser
from .settings import LedgerSettings
from .transport import BookieTransport

T = TypeVar("T")


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

    async def new_ledger(self, metadata: LedgerMetadata, ledger_id: int | None) -> tuple[int, int]:
        """Writes the metadata of a new ledger: its id and version. RequestTimeout: the node may exist, unused."""
        if ledger_id is None:
            ledger_id = await self.next_ledger_id()
        create = self.ledgers.create(ledger_id, metadata.encode())
        return ledger_id, await self.in_time(create, f"making ledger {ledger_id}")

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
            put = self.ledgers.put(ledger_id, metadata.encode(), version=version)
            return MetadataWritten(await self.in_time(put, f"writing ledger {ledger_id}"))
        except VersionConflict:
            return await self.find_metadata(ledger_id)
        except NotFoundInStore:
            return MetadataFailed(LedgerNotFound(f"ledger {ledger_id} was deleted", ledger_id=ledger_id))
        except MagnetarError as error:
            return MetadataFailed(error)
        except Exception as error:
            return MetadataFailed(_failed(error))


def _failed(error: Exception) -> FinalError:
    """Turns a bug of the store into an error: its callers must get an answer."""
    return FinalError(f"the metadata store failed: {error!r}")

"""Archived ledgers, as the managed ledger reads them: somebody else knows their files and makes entries of them again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from magnetar.proto.errors import ArchiveUnavailable

from .records import ArchivedLedger


class ArchiveReader(Protocol):
    """Implemented by `magnetar.archive.reader` over Parquet files, and in memory for tests."""

    async def read(
        self, topic: str, archived: ArchivedLedger, first: int, last: int, *, max_bytes: int
    ) -> list[bytes]:
        """Ledger entries as the bookies had them, from entry `first` on: at least one, else as many as fit in `max_bytes`.

        Entry ids, indexes of messages and what stands in messages are as before; the ledger entry header (40 bytes) is made
        anew. Raises EntryDamaged for files that are missing or are not what was written, ArchiveUnavailable for what may
        pass. May take seconds: what waits for it must be able to.
        """

    def figures(self) -> Mapping[str, int]:
        """What was read and what failed, for /metrics."""

    async def close(self) -> None:
        """Nothing is read any more; whoever waits gets ArchiveUnavailable."""


class NoArchives:
    """Of a broker that was put together without a reader."""

    async def read(
        self, topic: str, archived: ArchivedLedger, first: int, last: int, *, max_bytes: int
    ) -> list[bytes]:
        """Raises ArchiveUnavailable."""
        raise ArchiveUnavailable(
            f"ledger {archived.info.ledger_id} of {topic} is archived at {archived.location}, and this broker has no reader "
            "of archives"
        )

    def figures(self) -> Mapping[str, int]:
        """None."""
        return {}

    async def close(self) -> None:
        """Nothing is open."""

"""Tasks read ledgers from the bookies themselves, with the ledger client: other replicas, digests, speculative reads."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from magnetar.ledger import (
    GivenIdentities,
    LedgerClient,
    LedgerMetadata,
    LedgerReader,
    LedgerSettings,
    StaticBookies,
    TcpTransport,
)
from magnetar.ledger.directory import parse_address
from magnetar.metadata.store import Versioned
from magnetar.proto.bookie_identity import BookieIdentity
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.connection import ConnectionOptions

from .plan import KnownBookie, LedgerSlice, TopicLedger

if TYPE_CHECKING:
    from magnetar.metadata.ledgers import LedgerManager

# The largest frame that a bookie may answer with; its own setting bounds what it sends.
MAX_FRAME_BYTES = 128 << 20


def known_bookies(
    addresses: Mapping[str, str], identities: Mapping[str, Sequence[Any]]
) -> dict[str, KnownBookie]:
    """From `bookies` and `identities` of the broker's answers (WIRE.md), by id."""
    return {
        bookie: KnownBookie(*parse_address(text), BookieIdentity(*identities.get(bookie, ())))
        for bookie, text in addresses.items()
    }


def directory_of(bookies: Mapping[str, KnownBookie]) -> StaticBookies:
    """Their addresses."""
    return StaticBookies({name: (bookie.host, bookie.port) for name, bookie in bookies.items()})


@contextlib.asynccontextmanager
async def bookie_transport(
    directory: StaticBookies, bookies: Mapping[str, KnownBookie], settings: LedgerSettings
) -> AsyncIterator[TcpTransport]:
    """Connections to these bookies, closed with the body."""
    connection = ConnectionOptions("spark", max_message_bytes=MAX_FRAME_BYTES)
    identities = GivenIdentities({name: bookie.identity for name, bookie in bookies.items()})
    transport = TcpTransport(directory, settings, connection, identities)
    try:
        yield transport
    finally:
        await transport.close()


class PlannedLedgers:
    """What readers of planned ledgers need of a LedgerManager: the records that the plan has."""

    def __init__(self, records: Mapping[int, bytes]) -> None:
        self._records = records

    async def get(self, ledger_id: int) -> Versioned | None:
        record = self._records.get(ledger_id)
        return None if record is None else Versioned(record, 0)


@contextlib.asynccontextmanager
async def ledger_readers(
    slices: Sequence[LedgerSlice], timeout_s: float
) -> AsyncIterator[Callable[[TopicLedger], LedgerReader]]:
    """Readers of the slices' ledgers, as the plan knows them: neither their metadata nor their end is asked for again."""
    settings = LedgerSettings(read_timeout_s=timeout_s, speculative_read_s=min(2.0, timeout_s / 2))
    bookies = {name: bookie for one in slices for name, bookie in one.bookies.items()}
    directory = directory_of(bookies)
    records = PlannedLedgers({one.ledger.stored_id: one.ledger.metadata for one in slices})
    async with bookie_transport(directory, bookies, settings) as transport:
        client = LedgerClient(
            cast("LedgerManager", records), transport, directory, settings, random.Random(), SystemClock()
        )

        def reader_of(ledger: TopicLedger) -> LedgerReader:
            reader = client.reader(ledger.stored_id, LedgerMetadata.decode(ledger.metadata, ledger.stored_id))
            reader.update_last_confirmed(ledger.entries - 1)
            return reader

        try:
            yield reader_of
        finally:
            await client.close()

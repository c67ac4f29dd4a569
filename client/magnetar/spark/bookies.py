"""Tasks read ledgers from the bookies themselves, with the ledger client: other replicas, digests, speculative reads."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence

from magnetar.ledger import (
    LedgerClient,
    LedgerMetadata,
    LedgerReader,
    LedgerSettings,
    StaticBookies,
    TcpTransport,
)
from magnetar.metadata.memory import MemoryMetadataStore
from magnetar.metadata.paths import ledger_path
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.connection import ConnectionOptions

from .plan import LedgerSlice, TopicLedger

# The largest frame that a bookie may answer with; its own setting bounds what it sends.
MAX_FRAME_BYTES = 128 << 20


@contextlib.asynccontextmanager
async def bookie_transport(directory: StaticBookies, settings: LedgerSettings) -> AsyncIterator[TcpTransport]:
    """Connections to these bookies, closed with the body."""
    connection = ConnectionOptions("spark", max_message_bytes=MAX_FRAME_BYTES)
    transport = TcpTransport(directory, settings, connection)
    try:
        yield transport
    finally:
        await transport.close()


@contextlib.asynccontextmanager
async def ledger_readers(
    slices: Sequence[LedgerSlice], timeout_s: float
) -> AsyncIterator[Callable[[TopicLedger], LedgerReader]]:
    """Readers of the slices' ledgers, as the plan knows them: neither their metadata nor their end is asked for again."""
    settings = LedgerSettings(read_timeout_s=timeout_s, speculative_read_s=min(2.0, timeout_s / 2))
    directory = StaticBookies({name: address for one in slices for name, address in one.bookies.items()})
    metadata = MemoryMetadataStore()
    for stored_id, encoded in {one.ledger.stored_id: one.ledger.metadata for one in slices}.items():
        await metadata.create(ledger_path(stored_id), encoded)
    async with bookie_transport(directory, settings) as transport:
        client = LedgerClient(metadata, transport, directory, settings, random.Random(), SystemClock())

        def reader_of(ledger: TopicLedger) -> LedgerReader:
            reader = client.reader(ledger.stored_id, LedgerMetadata.decode(ledger.metadata, ledger.stored_id))
            reader.update_last_confirmed(ledger.entries - 1)
            return reader

        try:
            yield reader_of
        finally:
            await client.close()

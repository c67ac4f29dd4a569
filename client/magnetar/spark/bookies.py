"""Tasks read ledgers from the bookies themselves, with the ledger client: other replicas, digests, speculative reads."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator

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

from .plan import LedgerSlice

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
async def ledger_reader(piece: LedgerSlice, timeout_s: float) -> AsyncIterator[LedgerReader]:
    """A reader of the slice's ledger, as the plan knows it: neither its metadata nor its end is asked for again."""
    settings = LedgerSettings(read_timeout_s=timeout_s, speculative_read_s=min(2.0, timeout_s / 2))
    directory = StaticBookies(piece.bookies)
    stored_id = piece.ledger.stored_id
    async with bookie_transport(directory, settings) as transport:
        metadata = MemoryMetadataStore()
        await metadata.create(ledger_path(stored_id), piece.ledger.metadata)
        client = LedgerClient(metadata, transport, directory, settings, random.Random(), SystemClock())
        try:
            reader = client.reader(stored_id, LedgerMetadata.decode(piece.ledger.metadata, stored_id))
            reader.update_last_confirmed(piece.ledger.entries - 1)
            yield reader
        finally:
            await client.close()

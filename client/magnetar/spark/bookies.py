"""Tasks read ledgers from the bookies themselves, with the ledger client: other replicas, digests, speculative reads."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator

from magnetar.ledger import LedgerClient, LedgerReader, LedgerSettings, StaticBookies, TcpTransport
from magnetar.metadata.memory import MemoryMetadataStore
from magnetar.metadata.paths import ledger_path
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.connection import ConnectionOptions

from .plan import LedgerSlice

# The largest frame that a bookie may answer with; its own setting bounds what it sends.
MAX_FRAME_BYTES = 128 << 20


@contextlib.asynccontextmanager
async def ledger_reader(piece: LedgerSlice, timeout_s: float) -> AsyncIterator[LedgerReader]:
    """A reader of the slice's ledger, as the plan knows it: its metadata is not asked for again."""
    settings = LedgerSettings(read_timeout_s=timeout_s, speculative_read_s=min(2.0, timeout_s / 2))
    directory = StaticBookies(piece.bookies)
    transport = TcpTransport(
        directory, settings, ConnectionOptions("spark", max_message_bytes=MAX_FRAME_BYTES)
    )
    metadata = MemoryMetadataStore()
    await metadata.create(ledger_path(piece.ledger.stored_id), piece.ledger.metadata)
    client = LedgerClient(metadata, transport, directory, settings, random.Random(), SystemClock())
    try:
        reader = await client.open(piece.ledger.stored_id, recover=False)
        reader.told_confirmed(piece.ledger.entries - 1)
        yield reader
    finally:
        await client.close()
        await transport.close()
        await metadata.close()

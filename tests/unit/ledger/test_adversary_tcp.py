"""The largest entry that a real bookie takes over TCP, and the one after it."""

import random
from pathlib import Path

import pytest

from magnetar.bookie.index import ModelStorage
from magnetar.bookie.server import BookieServer
from magnetar.ledger import LedgerClient, LedgerSettings, StaticBookies, TcpTransport
from magnetar.metadata.memory import MemoryMetadataStore
from magnetar.proto.errors import MessageTooLarge
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.connection import ConnectionOptions
from support.bookie_kit import open_inline
from support.bookies import Confirmations

LARGEST = 100_000
PAYLOAD = LARGEST - LEDGER_ENTRY_HEADER_BYTES


@pytest.mark.parametrize("limit", ["of the bookie", "of the connection"])
async def test_an_entry_of_the_largest_size_and_one_of_a_byte_more(tmp_path: Path, limit: str) -> None:
    bookie = await open_inline(str(tmp_path / "bookie"), ModelStorage(), max_entry_bytes=LARGEST)
    largest_frame = LARGEST if limit == "of the connection" else 5 << 20
    server = await BookieServer.start(
        bookie, "127.0.0.1", 0, ConnectionOptions("bookie", max_message_bytes=largest_frame)
    )
    settings = LedgerSettings(1, 1, 1, explicit_lac_interval_s=0)
    directory = StaticBookies({"b": server.addresses[0]})
    transport = TcpTransport(directory, settings, ConnectionOptions("ledger client"))
    client = LedgerClient(
        MemoryMetadataStore(), transport, directory, settings, random.Random(1), SystemClock()
    )
    try:
        writer = await client.create()
        heard = Confirmations()
        writer.append(b"x" * PAYLOAD, heard)
        await heard.count(1)
        assert heard.ids == [0]
        assert len((await writer.read(0, 0))[0]) == LARGEST
        for more in (1, 1 << 20):
            writer = await client.create()
            heard = Confirmations()
            writer.append(b"x" * (PAYLOAD + more), heard)
            await heard.count(1)
            assert heard.errors == [MessageTooLarge], heard.heard[0][2]
            assert (await writer.close()).last_entry == -1
    finally:
        await client.close()
        await transport.close()
        await server.close(1)
        await bookie.close()

"""A ledger's writer is freed without the garbage collector when its ledger is closed."""

import gc
import weakref

import pytest

from magnetar.ledger import LedgerClient
from support.bookies import Bookies
from support.export_kit import appended


@pytest.mark.parametrize("deferred_sync", [False, True])
async def test_nothing_keeps_a_writer_that_is_closed(deferred_sync: bool) -> None:
    bookies = Bookies("a", "b", "c")
    client: LedgerClient = bookies.client(seed=1)
    writer = await client.create(deferred_sync=deferred_sync)
    gc.collect()
    gc.disable()
    try:
        await appended(writer, b"x")
        await writer.close()
        there = weakref.ref(writer)
        del writer
        assert there() is None
    finally:
        gc.enable()
    await client.close()

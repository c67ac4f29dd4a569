"""Two bookies in memory, and a ledger client of theirs; a module that wants others has its own `bookies`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from magnetar.ledger import LedgerClient
from support.bookies import Bookies


@pytest.fixture
async def bookies() -> Bookies:
    return Bookies("b1", "b2")


@pytest.fixture
async def ledgers(bookies: Bookies) -> AsyncIterator[LedgerClient]:
    client = bookies.client()
    yield client
    await client.close()

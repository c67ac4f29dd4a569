"""A fake broker and a client connected to it."""

from collections.abc import AsyncIterator

import pytest_asyncio

from magnetar.client import Client, connect
from support.fake_broker import FakeBroker


@pytest_asyncio.fixture
async def broker() -> AsyncIterator[FakeBroker]:
    broker = await FakeBroker.start()
    yield broker
    await broker.close()


@pytest_asyncio.fixture
async def client(broker: FakeBroker) -> AsyncIterator[Client]:
    async with connect(broker.url, backoff_first=0.01, operation_timeout=5.0) as client:
        yield client

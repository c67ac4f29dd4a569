"""A real broker and its listener on a port, over fake ledgers, for clients in the same loop."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest_asyncio

from magnetar.broker.listeners.native.connection import listener
from magnetar.client import Client, connect
from magnetar.runtime.connection import ConnectionOptions, FramedServer, start_server
from support.broker_kit import running_broker
from support.service import holding_port


@asynccontextmanager
async def serving(
    metadata: Any = None, ledgers: Any = None, port: int = 0, **settings: Any
) -> AsyncIterator[FramedServer]:
    """A broker that listens; `metadata`, `ledgers`: stores that outlive it; `port` 0: a free one."""
    with holding_port() as free:
        port = port or free
        url = f"magnetar://127.0.0.1:{port}"
        async with running_broker(ledgers, metadata, service_url=url, **settings) as broker:
            server = await start_server("127.0.0.1", port, listener(broker), ConnectionOptions(name="broker"))
            try:
                yield server
            finally:  # a test that fails must not leave it: the run would not end
                await server.close(0.0)


def connect_to(server: FramedServer, **options: Any) -> AbstractAsyncContextManager[Client]:
    """A client with short times."""
    url = f"magnetar://127.0.0.1:{server.addresses[0][1]}"
    return connect(url, **{"backoff_first": 0.01, "operation_timeout": 5.0, **options})


async def take(consumer: Any, count: int) -> list[Any]:
    """The next messages."""
    return [await consumer.receive(10.0) for _ in range(count)]


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FramedServer]:
    """Of a test alone."""
    async with serving() as server:
        yield server


@pytest_asyncio.fixture
async def client(server: FramedServer) -> AsyncIterator[Client]:
    """Of that server."""
    async with connect_to(server) as client:
        yield client

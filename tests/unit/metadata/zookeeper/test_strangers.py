"""What listens at the address of the metadata store is not ZooKeeper: one error that says so, in virtual time."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from magnetar.metadata.zookeeper.store import ZooKeeperSettings
from magnetar.proto.errors import InvalidSetting, MagnetarError, ServiceNotReady
from support.zookeeper import open_store

IMPATIENT = ZooKeeperSettings(session_timeout_s=4, open_timeout_s=3.0, request_timeout_s=1.5)


@asynccontextmanager
async def server_that(
    answers: Callable[[asyncio.StreamReader, asyncio.StreamWriter], object],
) -> AsyncIterator[int]:
    """Something that listens and is no ZooKeeper: its port."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        answers(reader, writer)
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_something_that_is_not_zookeeper() -> None:
    answer = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
    async with server_that(lambda _, writer: writer.write(answer)) as port:
        with pytest.raises(
            InvalidSetting, match=f"setting metadata.*{port}: what listens there is not ZooKeeper"
        ):
            await open_store(f"zk://127.0.0.1:{port}/root", settings=IMPATIENT)
    async with server_that(lambda _, writer: writer.write(bytes(100))) as port:
        with pytest.raises(InvalidSetting, match="not ZooKeeper"):
            await open_store(f"zk://127.0.0.1:{port}/root", settings=IMPATIENT)
    async with server_that(lambda _, writer: None) as port:
        with pytest.raises(ServiceNotReady, match="the server closed the connection"):
            await open_store(f"zk://127.0.0.1:{port}/root", settings=IMPATIENT)


@pytest.mark.parametrize("nonsense", [b"", b"\xff\xff\xff\xff", bytes(20), b"\0\0\0\x10" + b"\x7f" * 16])
async def test_a_server_that_answers_nonsense(nonsense: bytes) -> None:
    """It takes the session, and then is none: requests fail, and it is not dialed without pause."""
    handshake = struct.pack(">iiiqi", 37, 0, 4000, 1, 16) + bytes(17)
    connections = 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.read(100)
        writer.write(handshake)
        await reader.read(10)
        writer.write(nonsense)
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    address = f"zk://127.0.0.1:{server.sockets[0].getsockname()[1]}/root"
    clock = asyncio.get_running_loop().time
    before = clock()
    async with server:
        with pytest.raises(MagnetarError, match=r"ended before the answer|can be used"):
            await open_store(address, settings=IMPATIENT, clock=clock)
    assert connections < 10 + (clock() - before) * 20

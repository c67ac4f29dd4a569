"""The relays between daemons: what is held arrives later, in one direction or both, and who connects is known."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from support.cluster.lines import CLIENTS, Line, Lines
from support.service import held_port

# On the plain loop: uvloop, when it ends right after a test, reports one of the connections as unclosed; which is not known.
pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])

NAME = "bookie-1"
TO, FROM = (CLIENTS, NAME), (NAME, CLIENTS)


@pytest.fixture
async def line() -> AsyncIterator[tuple[Lines, Line, int]]:
    """In front of a server that says everything again."""

    echoing: list[asyncio.Task[Any] | None] = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        echoing.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1000):
                writer.write(data)
        await end(writer)

    holder = PortHolder()
    port = held_port(holder)
    server = await asyncio.start_server(echo, "127.0.0.1", port)
    async with Lines() as lines:
        line = await lines.line(NAME, SimpleNamespace(servers=[]))  # type: ignore[arg-type]
        process: Any = SimpleNamespace(
            command="bookie", ports={"bookie": port}, running=False, pid=os.getpid()
        )
        await line.open(process)
        yield lines, line, port
    server.close()
    await asyncio.gather(*filter(None, echoing))


class PortHolder:
    """Keeps a port for one test."""


async def end(writer: asyncio.StreamWriter) -> None:
    """Returns when nothing of the connection is left."""
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def says(reader: asyncio.StreamReader, seconds: float = 0.2) -> bytes:
    """What arrives in time."""
    try:
        return await asyncio.wait_for(reader.read(1000), seconds)
    except TimeoutError:
        return b""


@pytest.mark.parametrize("links", [[TO], [FROM], [TO, FROM]], ids=["there", "back", "both ways"])
async def test_what_is_held_arrives_when_the_link_is_healed(
    line: tuple[Lines, Line, int], links: list[tuple[str, str]]
) -> None:
    lines, its, port = line
    reader, writer = await asyncio.open_connection(its.host, port)
    writer.write(b"before")
    assert await says(reader, 5) == b"before"
    with lines.held(links):
        writer.write(b"meanwhile")
        assert await says(reader) == b""
        assert lines.withheld[links[0]] == 1
    assert await says(reader, 5) == b"meanwhile"
    await end(writer)


async def test_a_new_connection_is_held_as_well_and_its_end_too(line: tuple[Lines, Line, int]) -> None:
    lines, its, port = line
    with lines.held([TO]):
        reader, writer = await asyncio.open_connection(its.host, port)
        writer.write(b"hello")
        writer.write_eof()
        assert await says(reader) == b""
    assert await says(reader, 5) == b"hello"
    assert await says(reader, 5) == b""
    assert reader.at_eof()
    await end(writer)


async def test_a_slow_link_is_late(line: tuple[Lines, Line, int]) -> None:
    lines, its, port = line
    reader, writer = await asyncio.open_connection(its.host, port)
    loop = asyncio.get_running_loop()
    with lines.slowed([TO, FROM], 0.1):
        began = loop.time()
        writer.write(b"hello")
        assert await says(reader, 5) == b"hello"
        assert loop.time() - began >= 0.2
        assert lines.slowed_down[TO] == lines.slowed_down[FROM] == 1
    await end(writer)


async def test_who_connects_is_known_by_the_socket(line: tuple[Lines, Line, int]) -> None:
    lines, its, port = line
    _, writer = await asyncio.open_connection(its.host, port)
    own_port = writer.get_extra_info("sockname")[1]
    assert lines.owner_of(own_port) == CLIENTS  # its daemon does not run
    its.process.running = True  # type: ignore[union-attr, misc]
    assert lines.owner_of(own_port) == NAME
    assert lines.owner_of(1) == CLIENTS
    await end(writer)

"""Requests over TCP besides reads: long polls, lists, deletion, info."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.bookie import Bookie
from magnetar.bookie.server import BookieServer
from magnetar.proto.commands import (
    ENTRY_RANGE_ROW,
    LEDGER_DELETED,
    LEDGER_FENCED,
    LEDGER_ROW,
    BookieInfo,
    Command,
    DeleteLedger,
    ListEntries,
    ListLedgers,
    WaitLastConfirmed,
    decode_rows,
)
from magnetar.proto.errors import InvalidArgument, LedgerFenced, LedgerNotFound, TooManyRequests
from magnetar.proto.frames import Run
from magnetar.runtime.connection import Connection, ConnectionOptions, Reply, open_connection
from support.bookie_kit import KIB, add, add_all, entry, open_inline, until
from support.index_model import ModelStorage


class Client:
    """A `ConnectionHandler` that asks."""

    connection: Connection

    def connection_ready(self, connection: Connection) -> None:
        self.connection = connection

    def runs_received(self, runs: list[Run]) -> None:
        raise AssertionError("only answers come")

    def connection_closed(self, error: object) -> None:
        pass

    def writing_resumed(self) -> None:
        pass

    async def ask(self, command: type[Command], *fields: Any) -> Reply:
        return await self.connection.request(command(self.connection.next_request_id(), *fields), timeout=5)


class Service:
    def __init__(self, bookie: Bookie, server: BookieServer) -> None:
        self.bookie = bookie
        self.server = server

    async def client(self) -> Client:
        client = Client()
        host, port = self.server.addresses[0]
        await open_connection(host, port, client, ConnectionOptions("test"))
        return client


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    bookie = await open_inline(str(tmp_path), ModelStorage(), write_cache_bytes=2048 * KIB)
    server = await BookieServer.start(bookie, "127.0.0.1", 0, ConnectionOptions("bookie"))
    yield Service(bookie, server)
    await server.close(5.0)
    await bookie.close()


async def test_a_long_poll_is_answered_when_there_is_news_and_with_its_entries(service: Service) -> None:
    client = await service.client()
    ask = asyncio.get_running_loop().create_task
    waits = ask(client.ask(WaitLastConfirmed, 1, -1, 5000, 2))
    await until(lambda: len(service.bookie.waiters) == 1)
    # It is in nobody's way.
    assert (await client.ask(BookieInfo)).result["load"]["long_polls"] == 1
    await add_all(service.bookie, [entry(1, number) for number in range(5)])
    reply = await waits
    assert reply.result["last_add_confirmed"] == 3
    assert reply.result["sizes"] == [len(entry(1, 0)), len(entry(1, 1))]
    assert reply.payload == entry(1, 0) + entry(1, 1)
    assert (await client.ask(WaitLastConfirmed, 1, 3, 1)).result == {
        "last_add_confirmed": 3,
        "fenced": False,
        "sizes": [],
    }
    # A byte limit; one entry at least.
    assert len((await client.ask(WaitLastConfirmed, 1, -1, 1, 9, 1)).result["sizes"]) == 1
    await service.bookie.fence(1)
    assert (await client.ask(WaitLastConfirmed, 1, 3)).result["fenced"] is True


async def test_more_long_polls_than_requests_may_run_wait_at_once_and_end_with_the_connection(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magnetar.bookie.server.connection._MAX_LONG_POLLS", 100)
    client, other = await service.client(), await service.client()
    loop = asyncio.get_running_loop()
    waits = [loop.create_task(client.ask(WaitLastConfirmed, number, -1)) for number in range(100)]
    await until(lambda: len(service.bookie.waiters) == 100)
    with pytest.raises(TooManyRequests, match="long polls"):
        await client.ask(WaitLastConfirmed, 1, -1)
    # Requests of this connection and of others go on.
    assert (await client.ask(ListLedgers)).payload == b""
    assert (await other.ask(WaitLastConfirmed, 1, -1, 1)).result["last_add_confirmed"] == -1
    client.connection.abort()
    await until(lambda: len(service.bookie.waiters) == 0)
    assert all(isinstance(end, Exception) for end in await asyncio.gather(*waits, return_exceptions=True))
    assert not service.bookie.waiters.by_ledger


async def test_a_server_that_closes_lets_go_of_long_polls(tmp_path: Path) -> None:
    bookie = await open_inline(str(tmp_path), ModelStorage())
    server = await BookieServer.start(bookie, "127.0.0.1", 0, ConnectionOptions("bookie"))
    client = await Service(bookie, server).client()
    wait = asyncio.get_running_loop().create_task(client.ask(WaitLastConfirmed, 1, -1))
    await until(lambda: len(bookie.waiters) == 1)
    await asyncio.wait_for(server.close(1.0), 3.0)
    assert len(bookie.waiters) == 0
    assert isinstance((await asyncio.gather(wait, return_exceptions=True))[0], Exception)
    await bookie.close()


async def test_lists_and_deletion(service: Service) -> None:
    client, bookie = await service.client(), service.bookie
    await add_all(bookie, [entry(1, number) for number in (0, 1, 2, 5)])
    await add(bookie, entry(2, 0))
    await bookie.fence(2)
    await client.ask(DeleteLedger, 1)
    reply = await client.ask(ListLedgers, -1, 1)
    assert reply.result == {"more": True}
    assert list(decode_rows(LEDGER_ROW, reply.payload)) == [(1, LEDGER_DELETED | LEDGER_FENCED, 5, 4)]
    reply = await client.ask(ListLedgers, 1, 10)
    assert reply.result == {"more": False}
    assert list(decode_rows(LEDGER_ROW, reply.payload)) == [(2, LEDGER_FENCED, 0, -1)]
    reply = await client.ask(ListEntries, 2)
    assert (reply.result, list(decode_rows(ENTRY_RANGE_ROW, reply.payload))) == ({"next": -1}, [(0, 0)])
    with pytest.raises(LedgerNotFound):
        await client.ask(ListEntries, 1)
    with pytest.raises(LedgerNotFound):
        await client.ask(WaitLastConfirmed, 1, 99)
    assert await add(bookie, entry(1, 6)) == LedgerFenced.code
    await client.ask(DeleteLedger, 1)  # again
    await client.ask(DeleteLedger, 77)  # never seen here


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        (WaitLastConfirmed, (-1, 0)),
        (WaitLastConfirmed, (1, -2)),
        (WaitLastConfirmed, (1, 0, -5)),
        (WaitLastConfirmed, (1, 0, 1, -1)),
        (WaitLastConfirmed, (1, 1 << 63)),
        (ListLedgers, (-2,)),
        (ListLedgers, (-1, 0)),
        (ListEntries, (-3,)),
        (ListEntries, (1, -7)),
        (ListEntries, (1, 0, -1)),
        (DeleteLedger, (1 << 63,)),
    ],
)
async def test_what_makes_no_sense_is_refused(
    service: Service, command: type[Command], fields: tuple[int, ...]
) -> None:
    client = await service.client()
    with pytest.raises(InvalidArgument):
        await client.ask(command, *fields)


async def test_info_says_what_wire_md_draws(service: Service) -> None:
    client = await service.client()
    info = (await client.ask(BookieInfo)).result
    wire = (Path(__file__).parents[3] / "WIRE.md").read_text()
    drawn = wire[wire.index("The map of **BookieInfo**") :]
    table = drawn[: drawn.index("\n## ")]
    for name in (*info, *info["directories"][0], *info["load"]):
        assert f"`{name}`" in table, name
    assert {row["role"] for row in info["directories"]} <= {"data", "journal", "ledgers", "index"}
    assert {row["state"] for row in info["directories"]} == {"writable"}
    assert 0 < info["free_bytes"] <= info["total_bytes"]

"""The bookie protocol over TCP."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from magnetar.bookie import Bookie
from magnetar.bookie.server import BookieServer
from magnetar.proto.commands import (
    ADD_DONE_ROW,
    AddDone,
    AddEntry,
    BookieInfo,
    Lookup,
    ReadEntries,
    ReadLastConfirmed,
    WriteLastConfirmed,
    decode_command,
    decode_rows,
)
from magnetar.proto.errors import (
    EntryDamaged,
    EntryNotFound,
    InvalidArgument,
    LedgerFenced,
    MagnetarError,
    Unsupported,
)
from magnetar.proto.frames import Run, encode_frames
from magnetar.runtime.connection import Connection, ConnectionOptions, open_connection
from support.bookie_kit import KIB, entry, open_inline, until
from support.index_model import ModelStorage

ADD = AddEntry(0).encode()
RECOVERY_ADD = AddEntry(0, recovery=True).encode()


class Client:
    """A `ConnectionHandler` that notes the rows of AddDone."""

    def __init__(self) -> None:
        self.frames: list[list[tuple[int, int, int]]] = []
        self.closed: list[MagnetarError | None] = []
        self.connection: Connection

    def connection_ready(self, connection: Connection) -> None:
        self.connection = connection

    def runs_received(self, runs: list[Run]) -> None:
        for header, payloads in runs:
            assert isinstance(decode_command(header), AddDone)
            self.frames += [list(decode_rows(ADD_DONE_ROW, payload)) for payload in payloads]

    def connection_closed(self, error: MagnetarError | None) -> None:
        self.closed.append(error)

    def writing_resumed(self) -> None:
        pass

    @property
    def rows(self) -> list[tuple[int, int, int]]:
        return [row for frame in self.frames for row in frame]

    async def add(self, *entries: bytes, header: bytes = ADD) -> list[tuple[int, int, int]]:
        known = len(self.rows)
        self.connection.send_encoded(encode_frames(header, entries))
        await until(lambda: len(self.rows) >= known + len(entries))
        return self.rows[known:]


class Service:
    def __init__(self, bookie: Bookie, server: BookieServer) -> None:
        self.bookie = bookie
        self.server = server
        self.clients: list[Client] = []

    async def client(self) -> Client:
        client = Client()
        host, port = self.server.addresses[0]
        await open_connection(host, port, client, ConnectionOptions("test"))
        self.clients.append(client)
        return client


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    bookie = await open_inline(str(tmp_path), ModelStorage(), write_cache_bytes=2048 * KIB)
    server = await BookieServer.start(bookie, "127.0.0.1", 0, ConnectionOptions("bookie"))
    service = Service(bookie, server)
    yield service
    for client in service.clients:
        client.connection.close()
    await server.close(5.0)
    await bookie.close()


async def test_adds_are_answered_in_rows_one_frame_for_a_sync(service: Service) -> None:
    client, other = await service.client(), await service.client()
    rows = await client.add(*[entry(1, number) for number in range(100)])
    assert rows == [(1, number, 0) for number in range(100)]
    assert len(client.frames) < 10
    assert await other.add(entry(2, 0)) == [(2, 0, 0)]
    assert len(client.rows) == 100


async def test_reads(service: Service) -> None:
    client = await service.client()
    entries = [entry(1, number) for number in range(10)]
    await client.add(*entries)
    request = client.connection.request
    reply = await request(ReadEntries(client.connection.next_request_id(), 1, 2, 5), timeout=5)
    assert reply.result == {"sizes": [len(data) for data in entries[2:6]], "last_add_confirmed": 8}
    assert reply.payload == b"".join(entries[2:6])
    reply = await request(ReadLastConfirmed(client.connection.next_request_id(), 1), timeout=5)
    assert reply.result == {"last_add_confirmed": 8, "last_entry": 9}
    await request(WriteLastConfirmed(client.connection.next_request_id(), 1, 9), timeout=5)
    reply = await request(ReadLastConfirmed(client.connection.next_request_id(), 1), timeout=5)
    assert reply.result["last_add_confirmed"] == 9
    # Ids of which the remainder by 3 is 0 or 2.
    reply = await request(
        ReadEntries(client.connection.next_request_id(), 1, 2, 8, cycle=3, residues=0b101), timeout=5
    )
    assert reply.payload == b"".join(entries[number] for number in (2, 3, 5, 6, 8))
    for first, cycle, residues in ((4, 3, 0b101), (0, 65, 1), (0, 0, 1), (0, 3, 0), (0, 3, 8), (0, -3, 1)):
        command = ReadEntries(
            client.connection.next_request_id(), 1, first, 9, cycle=cycle, residues=residues
        )
        with pytest.raises(InvalidArgument):
            await request(command, timeout=5)
    # A stripe fences as every read does.
    fencing = ReadEntries(client.connection.next_request_id(), 2, 4, 90, fence=True, cycle=3, residues=0b010)
    with pytest.raises(EntryNotFound):
        await request(fencing, timeout=5)
    assert await client.add(entry(2, 0)) == [(2, 0, LedgerFenced.code)]
    with pytest.raises(InvalidArgument, match="5 to 4"):
        await request(ReadEntries(client.connection.next_request_id(), 1, 5, 4), timeout=5)
    with pytest.raises(EntryNotFound):
        await request(ReadEntries(client.connection.next_request_id(), 1, 10, 10), timeout=5)
    with pytest.raises(InvalidArgument):
        await request(ReadEntries(client.connection.next_request_id(), 1, -1, 10), timeout=5)


async def test_fencing_and_recovery_adds(service: Service) -> None:
    client = await service.client()
    with pytest.raises(EntryNotFound):
        await client.connection.request(
            ReadEntries(client.connection.next_request_id(), 5, 0, 0, fence=True), timeout=5
        )
    assert await client.add(entry(5, 0)) == [(5, 0, LedgerFenced.code)]
    assert await client.add(entry(5, 0), header=RECOVERY_ADD) == [(5, 0, 0)]
    assert await client.add(entry(5, 1)) == [(5, 1, LedgerFenced.code)]


async def test_an_entry_that_does_not_match_its_digest_is_refused(service: Service) -> None:
    client = await service.client()
    bad = entry(1, 0)[:-1] + b"?"
    rows = await client.add(bad, entry(1, 1))
    assert sorted(rows) == [(1, 0, EntryDamaged.code), (1, 1, 0)]


async def test_a_payload_that_is_no_entry_closes_this_connection_only(service: Service) -> None:
    client, other = await service.client(), await service.client()
    client.connection.send(ADD, b"short")
    await until(lambda: bool(client.closed))
    assert await other.add(entry(1, 0)) == [(1, 0, 0)]


async def test_what_a_bookie_does_not_offer_is_said(service: Service) -> None:
    client = await service.client()
    with pytest.raises(Unsupported, match="broker"):
        await client.connection.request(Lookup(client.connection.next_request_id(), "t"), timeout=5)
    reply = await client.connection.request(BookieInfo(client.connection.next_request_id()), timeout=5)
    assert reply.result["read_only"] is False


async def test_a_full_write_cache_pauses_reading_until_there_is_room(service: Service) -> None:
    client = await service.client()
    paused: list[bool] = []
    service.bookie.on_accepting.append(lambda: paused.append(True))
    for start in range(0, 600, 60):
        # Apart, so that the server can stop reading between them.
        client.connection.send_encoded(
            encode_frames(ADD, [entry(1, number, b"x" * 4000) for number in range(start, start + 60)])
        )
        await asyncio.sleep(0)
    await until(lambda: len(client.rows) == 600)
    assert {code for _, _, code in client.rows} == {0}
    assert paused


async def test_many_reads_at_once_are_all_answered(service: Service) -> None:
    client = await service.client()
    entries = [entry(1, number, b"x" * 3000) for number in range(20)]
    for data in entries:
        await client.add(data)
    await service.bookie.checkpoint()
    connection = client.connection
    replies = await asyncio.gather(
        *[
            connection.request(ReadEntries(connection.next_request_id(), 1, n % 20, n % 20), timeout=20)
            for n in range(2000)
        ]
    )
    assert [reply.payload for reply in replies] == [entries[n % 20] for n in range(2000)]


async def test_a_client_that_leaves_disturbs_nobody(service: Service) -> None:
    client, other = await service.client(), await service.client()
    client.connection.send_encoded(encode_frames(ADD, [entry(1, number) for number in range(50)]))
    await asyncio.sleep(0)
    client.connection.abort()
    assert await other.add(entry(2, 0)) == [(2, 0, 0)]
    await until(lambda: len(service.server._handlers) == 1)


async def test_a_peer_that_never_finishes_the_handshake_leaves_nothing_behind(service: Service) -> None:
    host, port = service.server.addresses[0]
    for _ in range(3):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await reader.read()
        writer.close()
    assert not service.server._handlers
    client = await service.client()
    await client.add(entry(1, 0))
    assert len(service.server._handlers) == 1
    client.connection.close()
    await until(lambda: not service.server._handlers)

"""The transport and the server under another wire protocol: length-prefixed echo, with an empty frame as ping."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from magnetar.proto.errors import ConnectionLost, MagnetarError, ServiceNotReady, TooManyRequests
from magnetar.runtime.connection import FramedServer, Transport, TransportOptions

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop", "asyncio"])
OPTIONS = TransportOptions(close_timeout_s=2.0)


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


class Echo:
    """Sends every frame back; the first one is the handshake, and an error is its name in a frame."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.frames, self.held = 0, b""
        self.ends: list[MagnetarError | None] = []
        self.resumes = 0

    def connection_made(self) -> None:
        self.transport.write((frame(b"hello"),), 9)

    def bytes_received(self, data: bytes) -> None:
        self.held += data
        while len(self.held) >= 4 and len(self.held) >= (end := 4 + int.from_bytes(self.held[:4], "big")):
            body, self.held = self.held[4:end], self.held[end:]
            self.frames += 1
            if self.frames == 1:
                self.transport.opened(body.decode())
            elif body:
                self.transport.write((frame(body),), end)

    def progress(self) -> tuple[int, int]:
        return self.frames, len(self.held)

    def ping(self) -> None:
        self.transport.write((frame(b""),), 4)

    def writing_resumed(self) -> None:
        self.resumes += 1

    def fail(self, error: Exception) -> None:
        self.close(error if isinstance(error, MagnetarError) else MagnetarError(repr(error)))

    def close(self, error: MagnetarError | None = None) -> None:
        self.transport.write((frame(type(error).__name__.encode()),), 0)
        self.transport.close(error)

    def connection_lost(self, error: MagnetarError | None) -> None:
        self.ends.append(error)


class Peer:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def next(self) -> bytes:
        async with asyncio.timeout(10):
            return await self.reader.readexactly(int.from_bytes(await self.reader.readexactly(4), "big"))

    async def rest(self) -> bytes:
        """The last frame before the peer's end of the stream."""
        last = b"nothing"
        try:
            while True:
                last = await self.next()
        except asyncio.IncompleteReadError:
            return last


class Service:
    def __init__(self) -> None:
        self.echoes: list[Echo] = []
        self.server: FramedServer

    def new_echo(self, transport: Transport) -> Echo:
        self.echoes.append(Echo(transport))
        return self.echoes[-1]

    @asynccontextmanager
    async def peer(self, greeting: bytes = b"me") -> AsyncIterator[tuple[Peer, Echo]]:
        peer = Peer(*await asyncio.open_connection(*self.server.addresses[0]))
        try:
            if greeting:
                peer.writer.write(frame(greeting))
                assert await peer.next() == b"hello"
            yield peer, self.echoes[-1]
        finally:
            peer.writer.transport.abort()


@asynccontextmanager
async def serving(options: TransportOptions = OPTIONS) -> AsyncIterator[Service]:
    service = Service()
    service.server = await FramedServer.start("127.0.0.1", 0, service.new_echo, options)
    try:
        yield service
    finally:
        await service.server.close(0.2)


async def turns_until_quiet(echo: Echo) -> int:
    """Frames that came until no more do."""
    frames, quiet = -1, 0
    async with asyncio.timeout(10):
        while quiet < 10:
            quiet = quiet + 1 if frames == echo.frames else 0
            frames = echo.frames
            await asyncio.sleep(0.005)
    return frames


async def test_frames_come_back_and_the_end_is_reported_once() -> None:
    async with serving() as service:
        async with service.peer() as (peer, echo):
            peer.writer.write(frame(b"one") + frame(b"two")[:5])
            assert await peer.next() == b"one"
            peer.writer.write(frame(b"two")[5:])
            assert await peer.next() == b"two"
            assert echo.transport.describe().startswith("me at 127.0.0.1:")
            peer.writer.write(frame(b"unfinished")[:7])
            peer.writer.write_eof()
            await echo.transport.wait_closed(5)
        (error,) = echo.ends
        assert isinstance(error, ConnectionLost)
        assert "closed the connection in the middle of a frame" in error.message


async def test_a_peer_that_does_not_read_its_answers_is_not_read_until_it_does() -> None:
    async with (
        serving(replace(OPTIONS, high_water_bytes=64 * 1024)) as service,
        service.peer() as (peer, echo),
    ):
        flooding = asyncio.create_task(flood(peer))
        received = await turns_until_quiet(echo)
        assert echo.transport.reading_paused == ("answers",)
        assert not echo.transport.writable
        assert echo.transport.buffered_bytes < 1024 * 1024
        for _ in range(received):
            await peer.next()
        flooding.cancel()
        await asyncio.wait([flooding])
        while echo.frames <= received or not echo.resumes:
            await peer.next()


async def flood(peer: Peer) -> None:
    while True:
        peer.writer.write(frame(b"z" * 1000) * 100)
        await peer.writer.drain()


@pytest.mark.parametrize("sent", [b"", frame(b"x" * 5000)])
async def test_a_peer_that_is_silent_or_never_ends_a_frame_is_lost(sent: bytes) -> None:
    async with serving(replace(OPTIONS, ping_interval_s=0.03)) as service, service.peer() as (peer, echo):

        async def trickle() -> None:
            for byte in sent:
                peer.writer.write(bytes([byte]))
                await asyncio.sleep(0.005)

        trickling = asyncio.create_task(trickle())
        await echo.transport.wait_closed(5)
        trickling.cancel()
        await asyncio.wait([trickling])
        (error,) = echo.ends
        assert error is not None
        assert ("left a frame unfinished" if sent else "was silent for 0.06 s") in error.message
        if not sent:
            assert await peer.next() == b""  # it had been pinged


async def test_who_does_not_shake_hands_and_who_is_one_too_many_is_answered_in_the_protocol() -> None:
    options = replace(OPTIONS, handshake_timeout_s=0.1, max_connections=1)
    async with serving(options) as service, service.peer(b"") as (slow, slow_echo):
        assert await slow.next() == b"hello"
        async with service.peer(b"") as (refused, refused_echo):
            assert await refused.rest() == b"TooManyRequests"
            assert isinstance(refused_echo.transport.error, TooManyRequests)
        assert await slow.rest() == b"ConnectionLost"
        assert slow_echo.transport.error is not None
        assert "did not finish the handshake within 0.1 s" in slow_echo.transport.error.message


async def test_a_protocol_that_raises_ends_its_connection_only() -> None:
    async with serving() as service, service.peer() as (good, _), service.peer() as (bad, echo):
        echo.frames = 0  # a second handshake, with bytes that are no text
        bad.writer.write(frame(b"\xff"))
        assert await bad.rest() == b"MagnetarError"
        good.writer.write(frame(b"fine"))
        assert await good.next() == b"fine"


async def test_a_server_that_stops_says_so_in_the_protocol() -> None:
    async with serving() as service, service.peer() as (peer, echo):
        closing = asyncio.create_task(service.server.close(5))
        assert await peer.rest() == b"ServiceNotReady"
        peer.writer.close()
        await closing
        assert isinstance(echo.transport.error, ServiceNotReady)
        assert service.server.connections == []

"""Connections for tests: a service that keeps its handlers, and a peer that sends bytes as it likes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from magnetar.proto.commands import (
    Connect,
    Connected,
    Send,
    decode_command,
)
from magnetar.proto.frames import FrameParser, Run, encode_frame
from magnetar.runtime.connection import (
    Connection,
    ConnectionOptions,
    FramedServer,
    open_connection,
    start_server,
)
from support.recording_handler import RecordingHandler

SERVER = ConnectionOptions("server", close_timeout_s=2.0)
CLIENT = ConnectionOptions("client", close_timeout_s=2.0)
SEND = Send(0, 1, 1).encode()
CONNECT = encode_frame(Connect(1, 1, 1).encode())


class Service:
    """A server that records its handlers, oldest first."""

    def __init__(self, answer: Callable[[Connection, list[Run]], None] | None) -> None:
        self.handlers: list[RecordingHandler] = []
        self._answer = answer
        self.server: FramedServer

    @property
    def address(self) -> tuple[str, int]:
        return self.server.addresses[0]

    def new_handler(self) -> RecordingHandler:
        self.handlers.append(RecordingHandler(self._answer))
        return self.handlers[-1]

    async def connect(
        self, options: ConnectionOptions = CLIENT
    ) -> tuple[Connection, RecordingHandler, RecordingHandler]:
        """The client's connection, its handler, and the server's handler."""
        handler = RecordingHandler()
        connection = await open_connection(*self.address, handler, options)
        accepted = self.handlers[-1]
        await accepted.until(lambda: accepted.connection is not None)
        return connection, handler, accepted


@asynccontextmanager
async def serving(
    options: ConnectionOptions = SERVER, answer: Callable[[Connection, list[Run]], None] | None = None
) -> AsyncIterator[Service]:
    service = Service(answer)
    service.server = await start_server("127.0.0.1", 0, service.new_handler, options)
    try:
        yield service
    finally:
        await service.server.close(0.2)
        assert service.server.connections == []


class RawPeer:
    """Bytes in, commands out."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._parser = FrameParser()
        self._commands: list[object] = []

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    async def next(self) -> object:
        """The next command, or None at the end of the stream."""
        async with asyncio.timeout(10):
            while not self._commands:
                try:
                    data = await self.reader.read(65536)
                except ConnectionResetError:
                    return None
                if not data:
                    return None
                for header, payloads in self._parser.feed(data):
                    self._commands += [decode_command(header)] * len(payloads)
            return self._commands.pop(0)

    async def rest(self) -> list[object]:
        found = []
        while (command := await self.next()) is not None:
            found.append(command)
        return found


@asynccontextmanager
async def raw(service: Service, *, shake: bool = True) -> AsyncIterator[RawPeer]:
    peer = RawPeer(*await asyncio.open_connection(*service.address))
    try:
        if shake:
            peer.write(CONNECT)
            assert isinstance(await peer.next(), Connected)
        yield peer
    finally:
        peer.writer.transport.abort()

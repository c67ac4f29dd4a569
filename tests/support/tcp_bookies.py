"""Bookies in memory behind real sockets: what a bookie server does, for tests of the TCP transport."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from magnetar.ledger.local_transport import LocalBookie
from magnetar.proto.commands import (
    ADD_ACCEPTED,
    ADD_DONE_ROW,
    AddDone,
    AddEntry,
    ForceLedger,
    decode_command,
    encode_rows,
)
from magnetar.proto.errors import MagnetarError
from magnetar.proto.frames import Run
from magnetar.runtime.connection import Connection, ConnectionOptions, FramedServer, start_server


class BookieConnectionHandler:
    """One connection to a bookie in memory."""

    def __init__(self, bookie: LocalBookie, deaf: asyncio.Event) -> None:
        self.bookie = bookie
        self.deaf = deaf
        self.connection: Connection | None = None
        self.tasks: dict[asyncio.Task[None], None] = {}
        self.rows: list[tuple[int, int, int]] = []

    def connection_ready(self, connection: Connection) -> None:
        """See ConnectionHandler."""
        self.connection = connection

    def connection_closed(self, error: MagnetarError | None) -> None:
        """See ConnectionHandler."""
        self.connection = None
        for task in list(self.tasks):
            task.cancel()

    def writing_resumed(self) -> None:
        """See ConnectionHandler."""

    def runs_received(self, runs: list[Run]) -> None:
        """See ConnectionHandler."""
        if self.deaf.is_set():
            return
        for header, payloads in runs:
            command = decode_command(header)
            for payload in payloads:
                if isinstance(command, AddEntry) and command.deferred:
                    self.bookie.add(payload, recovery=False, done=self.added_deferred, deferred=True)
                elif isinstance(command, AddEntry):
                    self.bookie.add(payload, recovery=command.recovery, done=self.added)
                elif isinstance(command, ForceLedger):
                    self.bookie.request_force(command.ledger_id)
                else:
                    task = asyncio.get_running_loop().create_task(self.answer(command))
                    self.tasks[task] = None
                    task.add_done_callback(self.tasks.pop)

    def added(self, ledger_id: int, entry_id: int, code: int) -> None:
        """Rows of one turn leave as one frame."""
        if not self.rows:
            asyncio.get_running_loop().call_soon(self.flush)
        self.rows.append((ledger_id, entry_id, code))

    def added_deferred(self, ledger_id: int, entry_id: int, code: int) -> None:
        """Each acceptance in a frame of its own."""
        if code != ADD_ACCEPTED:
            self.added(ledger_id, entry_id, code)
        elif self.connection is not None:
            row = encode_rows(ADD_DONE_ROW, [(ledger_id, entry_id, 0)])
            self.connection.send(AddDone(0, accepted=True).encode(), row)

    def say_held(self) -> None:
        """Adds wait for room: alive all the same."""
        if self.connection is not None:
            self.connection.send(AddDone(0).encode())

    def flush(self) -> None:
        """Sends the rows."""
        rows, self.rows = self.rows, []
        if self.connection is not None:
            self.connection.send(AddDone(0).encode(), encode_rows(ADD_DONE_ROW, rows))

    async def answer(self, command: Any) -> None:
        """Requests."""
        connection = self.connection
        assert connection is not None
        try:
            result, parts = await self.bookie.answer(command)
            connection.answer(command.request_id, result, b"".join(parts))
        except MagnetarError as error:
            connection.answer_error(command.request_id, error)


class BookieServer:
    """A listening bookie. Stop it, start it again on the same port, or make it deaf (connected, silent)."""

    def __init__(self, bookie: LocalBookie) -> None:
        self.bookie = bookie
        self.deaf = asyncio.Event()
        self.port = 0
        self.accepted = 0
        self._handlers: list[BookieConnectionHandler] = []
        self._server: FramedServer | None = None

    async def start(self) -> BookieServer:
        """Listens; on the same port as before if it did."""
        self._server = await start_server(
            "127.0.0.1",
            self.port,
            self._handler,
            ConnectionOptions("bookie", close_timeout_s=0.2),
        )
        self.port = self._server.addresses[0][1]
        return self

    def _handler(self) -> BookieConnectionHandler:
        self.accepted += 1
        handler = BookieConnectionHandler(self.bookie, self.deaf)
        self._handlers.append(handler)
        return handler

    def say_held(self) -> None:
        """On every connection: adds wait for room."""
        for handler in self._handlers:
            handler.say_held()

    @property
    def open_connections(self) -> int:
        """How many there are now."""
        return len(self._server.connections) if self._server is not None else 0

    def cut(self) -> None:
        """Breaks every connection."""
        if self._server is not None:
            for connection in self._server.connections:
                connection.abort()

    def pause_reading(self) -> None:
        """Every connection takes no more bytes, as when the bookie hangs."""
        if self._server is not None:
            for connection in self._server.connections:
                connection.pause_reading("test")

    def resume_reading(self) -> None:
        """Ends `pause_reading`."""
        if self._server is not None:
            for connection in self._server.connections:
                connection.resume_reading("test")

    async def stop(self) -> None:
        """Closes the port and all connections at once, as a kill would."""
        self.cut()
        server, self._server = self._server, None
        if server is not None:
            await server.close(0)


async def within(seconds: float, work: Coroutine[Any, Any, Any]) -> Any:
    """The result, or TimeoutError: a test that waits for what does not come."""
    return await asyncio.wait_for(work, seconds)

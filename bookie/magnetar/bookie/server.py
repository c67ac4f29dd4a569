"""The bookie protocol over TCP: frames in, engine calls, frames out. WIRE.md draws the rows.

Adds come in runs (consecutive frames with one header) and are answered in rows: one AddDone frame per connection per sync of
the journal. Reads run as tasks, a bounded number per connection, and stop while the peer does not take their answers.

Backpressure: while adds wait for room in the write cache no connection that adds is read; while a connection has too many
reads outstanding, that one is not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any

from magnetar.proto.commands import (
    ADD_DONE_ROW,
    RESERVED,
    AddDone,
    AddEntry,
    BookieInfo,
    Command,
    ReadEntries,
    ReadLastConfirmed,
    WriteLastConfirmed,
    decode_command,
)
from magnetar.proto.errors import (
    EntryDamaged,
    InvalidArgument,
    MagnetarError,
    MalformedFrame,
    StorageFailed,
    Unsupported,
)
from magnetar.proto.frames import Run
from magnetar.proto.ledger_entry import (
    LEDGER_ENTRY_HEADER_BYTES,
    decode_ledger_entry_header,
    verify_ledger_entry,
)
from magnetar.runtime.connection import Connection, ConnectionOptions, FramedServer

from .engine import Bookie

__all__ = ["BookieServer"]

_log = logging.getLogger(__name__)
_ADD_DONE = AddDone(0).encode()
_MAX_RUNNING_READS = 16
_MAX_QUEUED_READS = 1024
_DAMAGED = EntryDamaged.code
_RESOURCE = "bookie"


class BookieServer:
    """Listens for ledger clients. The bookie is the caller's: it is closed after the server."""

    def __init__(self, bookie: Bookie) -> None:
        self._bookie = bookie
        self._server: FramedServer | None = None
        # In order of their coming: waking them must not depend on hashes.
        self._handlers: dict[_BookieConnection, None] = {}

    @classmethod
    async def start(cls, bookie: Bookie, host: str, port: int, options: ConnectionOptions) -> BookieServer:
        """Raises InvalidSetting when the port cannot be used."""
        self = cls(bookie)
        self._server = await FramedServer.start(host, port, self._handler, options)
        bookie.on_accepting.append(self._accepting)
        return self

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """(host, port) of each listening socket."""
        assert self._server is not None
        return self._server.addresses

    async def close(self, drain_seconds: float) -> None:
        """Tells every peer, flushes, waits for running reads."""
        if self._accepting in self._bookie.on_accepting:
            self._bookie.on_accepting.remove(self._accepting)
        if self._server is not None:
            await self._server.close(drain_seconds)
        await asyncio.gather(*[handler.ended() for handler in list(self._handlers)])

    def _handler(self) -> _BookieConnection:
        return _BookieConnection(self._bookie, self._handlers)

    def _accepting(self) -> None:
        for handler in list(self._handlers):
            handler.adds_accepted()


class _BookieConnection:
    """One ledger client. A `ConnectionHandler`."""

    def __init__(self, bookie: Bookie, handlers: dict[_BookieConnection, None]) -> None:
        self._bookie = bookie
        self._handlers = handlers
        self._connection: Connection | None = None
        self._rows: list[bytes] = []
        # Header bytes of the last AddEntry run: a ledger client's hardly ever change.
        self._add_header = b""
        self._add_recovery = False
        self._queued: deque[Command] = deque()
        self._running: dict[asyncio.Task[None], None] = {}

    # --- the connection calls -----------------------------------------------------------------------------------------

    def connection_ready(self, connection: Connection) -> None:
        """See `ConnectionHandler`. Not known to the server before: who fails the handshake is never told closed."""
        self._connection = connection
        self._handlers[self] = None

    def runs_received(self, runs: list[Run]) -> None:
        """See `ConnectionHandler`."""
        for header, payloads in runs:
            if header == self._add_header:
                self._add(payloads)
                continue
            command = decode_command(header)
            if isinstance(command, AddEntry):
                self._add_header, self._add_recovery = header, command.recovery
                self._add(payloads)
            else:
                for _ in payloads:
                    self._receive(command)

    def connection_closed(self, error: MagnetarError | None) -> None:
        """See `ConnectionHandler`. Adds that are in the journal go on; nobody hears of them."""
        self._connection = None
        self._queued.clear()
        for task in list(self._running):
            task.cancel()
        self._forget_if_ended()

    def writing_resumed(self) -> None:
        """See `ConnectionHandler`."""
        self._run_reads()

    # --- adding -------------------------------------------------------------------------------------------------------

    def _add(self, payloads: list[bytes]) -> None:
        connection = self._connection
        if connection is None:
            return
        connection.authorize("add", _RESOURCE)
        add, recovery, done = self._bookie.add, self._add_recovery, self._added
        for entry in payloads:
            if len(entry) < LEDGER_ENTRY_HEADER_BYTES:
                raise MalformedFrame(
                    f"the payload of an AddEntry is a ledger entry of {LEDGER_ENTRY_HEADER_BYTES} bytes or more, "
                    f"not {len(entry)}"
                )
            try:
                verify_ledger_entry(entry)
            except EntryDamaged:
                header = decode_ledger_entry_header(entry)
                self._added(header.ledger_id, header.entry_id, _DAMAGED)
                continue
            add(entry, recovery=recovery, done=done)
        if not self._bookie.accepting:
            connection.pause_reading("adds")

    def adds_accepted(self) -> None:
        """The write cache has room again."""
        if self._connection is not None:
            self._connection.resume_reading("adds")

    def _added(self, ledger_id: int, entry_id: int, code: int) -> None:
        rows = self._rows
        if not rows:
            # All adds of one sync are acknowledged in one turn of the loop: the frame leaves at its end.
            asyncio.get_running_loop().call_soon(self._send_rows)
        rows.append(ADD_DONE_ROW.pack(ledger_id, entry_id, code))

    def _send_rows(self) -> None:
        rows, self._rows = self._rows, []
        if self._connection is not None:
            self._connection.send(_ADD_DONE, b"".join(rows))

    # --- everything else ----------------------------------------------------------------------------------------------

    def _receive(self, command: Command) -> None:
        connection = self._connection
        if connection is None:
            return
        if isinstance(command, BookieInfo):
            try:
                connection.authorize("info", _RESOURCE)
                connection.answer(command.request_id, self._bookie.info())
            except MagnetarError as error:
                connection.answer_error(command.request_id, error)
        elif isinstance(command, ReadEntries | ReadLastConfirmed | WriteLastConfirmed):
            self._queued.append(command)
            if len(self._queued) >= _MAX_QUEUED_READS:
                connection.pause_reading("reads")
            self._run_reads()
        else:
            name = type(command).__name__
            reason = (
                f"{name} is reserved; this bookie does not offer it yet"
                if type(command) in RESERVED
                else f"a bookie does not answer {name}; that is a broker's command"
            )
            connection.answer_error(command.request_id, Unsupported(reason))

    def _run_reads(self) -> None:
        connection = self._connection
        if connection is None:
            return
        loop = asyncio.get_running_loop()
        while self._queued and len(self._running) < _MAX_RUNNING_READS and connection.writable:
            command = self._queued.popleft()
            task = loop.create_task(self._answer(connection, command), name="bookie request")
            self._running[task] = None
            task.add_done_callback(self._request_ended)
        if len(self._queued) < _MAX_QUEUED_READS:
            connection.resume_reading("reads")

    def _request_ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a bookie request failed", exc_info=error)
        self._run_reads()
        self._forget_if_ended()

    def _forget_if_ended(self) -> None:
        if self._connection is None and not self._running:
            self._handlers.pop(self, None)

    async def _answer(self, connection: Connection, command: Command) -> None:
        try:
            await self._perform(connection, command)
        except MagnetarError as error:
            connection.answer_error(command.request_id, error)
        except Exception as error:
            _log.exception("a bookie request failed")
            connection.answer_error(command.request_id, StorageFailed(f"the bookie failed: {error!r}"))

    async def _perform(self, connection: Connection, command: Command) -> None:
        bookie = self._bookie
        result: Any = None
        if isinstance(command, ReadEntries):
            connection.authorize("fence" if command.fence else "read", _RESOURCE)
            _check_ids(command.ledger_id, command.first, command.last)
            # What the peer takes in one frame, whatever it asked for.
            limit = min(command.max_bytes or connection.max_message_bytes, connection.max_message_bytes)
            entries, confirmed = await bookie.read(
                command.ledger_id, command.first, command.last, max_bytes=limit, fence=command.fence
            )
            result = {"sizes": [len(entry) for entry in entries], "last_add_confirmed": confirmed}
            connection.answer(command.request_id, result, entries)
            return
        if isinstance(command, ReadLastConfirmed):
            connection.authorize("fence" if command.fence else "read", _RESOURCE)
            _check_ids(command.ledger_id)
            confirmed, last_entry = await bookie.read_last_confirmed(command.ledger_id, fence=command.fence)
            result = {"last_add_confirmed": confirmed, "last_entry": last_entry}
        elif isinstance(command, WriteLastConfirmed):
            connection.authorize("add", _RESOURCE)
            _check_ids(command.ledger_id)
            if not -1 <= command.last_add_confirmed < 1 << 63:
                raise InvalidArgument(f"{command.last_add_confirmed} is not a last add confirmed")
            await bookie.write_last_confirmed(command.ledger_id, command.last_add_confirmed)
        connection.answer(command.request_id, result)

    async def ended(self) -> None:
        """Waits for what still runs."""
        await asyncio.gather(*self._running, return_exceptions=True)


def _check_ids(ledger_id: int, first: int = 0, last: int = 0) -> None:
    if not 0 <= ledger_id < 1 << 63 or not 0 <= first < 1 << 63 or not last < 1 << 63:
        raise InvalidArgument(f"ledger {ledger_id} or entries {first} to {last} are outside 0 to 2^63-1")

"""The bookie's side of one connection of a ledger client.

Adds come in runs (consecutive frames with one header) and are answered in rows: one AddDone frame per connection per sync of
the journal. Other requests run as tasks, at most `_MAX_RUNNING` per connection, and none is started while the write buffer
is full. Long polls wait in tasks of their own, at most `_MAX_LONG_POLLS`; one that has an answer to read joins the queue of
requests.

Backpressure: while adds wait for room in the write cache, connections that send adds are not read (`PausedConnections`).
A connection with `_MAX_QUEUED` requests in its queue is not read either.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from typing import NamedTuple, Protocol

from magnetar.proto.commands import (
    ADD_ACCEPTED,
    ADD_DONE_ROW,
    AddDone,
    AddEntry,
    Command,
    ForceLedger,
    ReadEntries,
    ReadLastConfirmed,
    WaitLastConfirmed,
    decode_command,
)
from magnetar.proto.errors import (
    EntryDamaged,
    MagnetarError,
    MalformedFrame,
    StorageFailed,
    TooManyRequests,
    Unsupported,
)
from magnetar.proto.frames import Run
from magnetar.proto.ledger_entry import (
    LEDGER_ENTRY_HEADER_BYTES,
    decode_ledger_entry_header,
    ledger_entry_is_intact,
)
from magnetar.runtime.connection import Connection
from magnetar.runtime.tasks import TaskSet, report

from ..engine import Bookie
from ..reads import LongPollResult
from .requests import OPERATIONS, Answer, answer_long_poll, perform, wait_for_last_confirmed

# Add timeouts are seconds.
NOTICE_INTERVAL_S = 0.5


class _PausedConnection(Protocol):
    def adds_paused(self) -> None:
        """Sends the peer an AddDone without rows: its adds wait."""
        ...

    def adds_accepted(self) -> None:
        """Resumes reading."""
        ...


class PausedConnections:
    """Connections whose adds wait for room, in order: they are not read, and hear twice a second that the bookie is alive.

    For a ledger client, a bookie that is silent for the add timeout has failed (rule 21). A bookie whose write cache is full
    still works as fast as its disk does, and says so by an AddDone frame without rows. It stays silent when its disk hangs
    (`Bookie.waits_for_room`).
    """

    def __init__(self, bookie: Bookie) -> None:
        self._bookie = bookie
        self._paused: dict[_PausedConnection, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def pause(self, connection: _PausedConnection) -> None:
        """Pauses a connection whose adds wait."""
        self._paused[connection] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(NOTICE_INTERVAL_S, self._notice)

    def forget(self, connection: _PausedConnection) -> None:
        """Forgets a connection that was closed."""
        self._paused.pop(connection, None)

    def release(self) -> None:
        """Resumes all connections: the write cache has room again."""
        self.close()
        paused, self._paused = self._paused, {}
        for connection in paused:
            connection.adds_accepted()

    def close(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _notice(self) -> None:
        self._timer = None
        if not self._paused:
            return
        if self._bookie.waits_for_room:
            for connection in list(self._paused):
                connection.adds_paused()
        self._timer = asyncio.get_running_loop().call_later(NOTICE_INTERVAL_S, self._notice)


_log = logging.getLogger(__name__)
_ADD_DONE = AddDone(0).encode()
_ADD_ACCEPTED = AddDone(0, accepted=True).encode()
_MAX_RUNNING = 16
_MAX_QUEUED = 1024
_MAX_LONG_POLLS = 1024
_DAMAGED = EntryDamaged.code
_RESOURCE = "bookie"


class _LongPoll(NamedTuple):
    """A long poll that has ended and waits for its entries to be read."""

    command: WaitLastConfirmed
    result: LongPollResult


class BookieConnection:
    """The `ConnectionHandler` of one connection. It stays in `handlers` until its tasks have ended."""

    def __init__(
        self, bookie: Bookie, handlers: dict[BookieConnection, None], paused: PausedConnections
    ) -> None:
        self._bookie = bookie
        self._handlers = handlers
        self._paused = paused
        self._connection: Connection | None = None
        self._rows: list[bytes] = []
        # Header bytes of the last run of AddEntry frames: a ledger client rarely changes them, so they are decoded once.
        self._add_header = b""
        self._add_recovery = self._add_deferred = False
        self._accepted_rows: list[bytes] = []
        self._queued: deque[Command | _LongPoll] = deque()
        self._running = TaskSet("bookie request")
        self._polls = TaskSet("bookie long poll")

    # --- the connection calls -----------------------------------------------------------------------------------------

    def connection_ready(self, connection: Connection) -> None:
        """See `ConnectionHandler`.

        The server learns of the connection here: without a handshake there is no `connection_closed` either.
        """
        self._connection = connection
        self._handlers[self] = None

    def runs_received(self, runs: list[Run]) -> None:
        for header, payloads in runs:
            if header == self._add_header:
                self._add(payloads)
                continue
            command = decode_command(header)
            if isinstance(command, AddEntry):
                self._add_header, self._add_recovery = header, command.recovery
                self._add_deferred = command.deferred and not command.recovery
                self._add(payloads)
            elif isinstance(command, ForceLedger) and not command.request_id:
                # It takes effect in order with the adds, and has no answer.
                connection = self._connection
                if connection is not None:
                    connection.authorize("add", _RESOURCE)
                    self._bookie.request_force(command.ledger_id)
            else:
                for _ in payloads:
                    self._receive(command)

    def connection_closed(self, error: MagnetarError | None) -> None:
        """See `ConnectionHandler`. Adds that are in the journal still become durable; they are not answered."""
        self._connection = None
        self._paused.forget(self)
        self._queued.clear()
        self._running.cancel()
        self._polls.cancel()
        self._forget_if_ended()

    def writing_resumed(self) -> None:
        self._run_requests()

    # --- adding -------------------------------------------------------------------------------------------------------

    def _add(self, payloads: list[bytes]) -> None:
        connection = self._connection
        if connection is None:
            return
        connection.authorize("add", _RESOURCE)
        add, recovery, done = self._bookie.add, self._add_recovery, self._added
        if self._add_deferred:
            add, done = partial(add, deferred=True), self._added_deferred
        for entry in payloads:
            if ledger_entry_is_intact(entry):
                add(entry, recovery=recovery, done=done)
                continue
            if len(entry) < LEDGER_ENTRY_HEADER_BYTES:
                raise MalformedFrame(
                    f"the payload of an AddEntry is a ledger entry of {LEDGER_ENTRY_HEADER_BYTES} bytes or more, "
                    f"not {len(entry)}"
                )
            header = decode_ledger_entry_header(entry)
            done(header.ledger_id, header.entry_id, _DAMAGED)
        if not self._bookie.accepting:
            connection.pause_reading("adds")
            self._paused.pause(self)

    def adds_paused(self) -> None:
        """Tells the peer, by an AddDone frame without rows, that the bookie is alive while its adds wait."""
        if self._connection is not None and self._connection.writable:
            self._connection.send(_ADD_DONE)

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

    def _added_deferred(self, ledger_id: int, entry_id: int, code: int) -> None:
        if code != ADD_ACCEPTED:
            self._added(ledger_id, entry_id, code)
            return
        rows = self._accepted_rows
        if not rows:
            asyncio.get_running_loop().call_soon(self._send_accepted)
        rows.append(ADD_DONE_ROW.pack(ledger_id, entry_id, 0))

    def _send_accepted(self) -> None:
        rows, self._accepted_rows = self._accepted_rows, []
        if self._connection is not None:
            self._connection.send(_ADD_ACCEPTED, b"".join(rows))

    def _send_rows(self) -> None:
        rows, self._rows = self._rows, []
        if self._connection is not None:
            self._connection.send(_ADD_DONE, b"".join(rows))

    # --- everything else ----------------------------------------------------------------------------------------------

    def _receive(self, command: Command) -> None:
        connection = self._connection
        if connection is None:
            return
        operation = OPERATIONS.get(type(command))
        if operation is None:
            name = type(command).__name__
            reason = f"this is a bookie, and {name} is a broker's command: use the address of the broker"
            connection.answer_error(command.request_id, Unsupported(reason))
            return
        if isinstance(command, ReadEntries | ReadLastConfirmed) and command.fence:
            operation = "fence"
        try:
            connection.authorize(operation, _RESOURCE)
            if isinstance(command, WaitLastConfirmed):
                self._wait(connection, command)
                return
        except MagnetarError as error:
            connection.answer_error(command.request_id, error)
            return
        self._queued.append(command)
        if len(self._queued) >= _MAX_QUEUED:
            connection.pause_reading("requests")
        self._run_requests()

    def _wait(self, connection: Connection, command: WaitLastConfirmed) -> None:
        if len(self._polls) >= _MAX_LONG_POLLS:
            raise TooManyRequests(f"this connection has {len(self._polls)} long polls waiting already")
        self._polls.begin(self._poll(connection, command), ended=self._ended)

    async def _poll(self, connection: Connection, command: WaitLastConfirmed) -> None:
        try:
            result = await wait_for_last_confirmed(self._bookie, command)
        except Exception as error:
            connection.answer_error(command.request_id, _as_answer(error))
            return
        self._queued.append(_LongPoll(command, result))

    def _run_requests(self) -> None:
        connection = self._connection
        if connection is None:
            return
        while self._queued and len(self._running) < _MAX_RUNNING and connection.writable:
            self._running.begin(self._answer(connection, self._queued.popleft()), ended=self._ended)
        if len(self._queued) < _MAX_QUEUED:
            connection.resume_reading("requests")

    def _ended(self, task: asyncio.Task[None]) -> None:
        report(task)
        self._run_requests()
        self._forget_if_ended()

    def _forget_if_ended(self) -> None:
        if self._connection is None and not self._running and not self._polls:
            self._handlers.pop(self, None)

    async def _answer(self, connection: Connection, request: Command | _LongPoll) -> None:
        command = request.command if isinstance(request, _LongPoll) else request
        limit = connection.max_message_bytes
        try:
            answer: Answer
            if isinstance(request, _LongPoll):
                answer = await answer_long_poll(self._bookie, limit, request.command, request.result)
            else:
                answer = await perform(self._bookie, limit, request)
            connection.answer(command.request_id, answer.result, answer.payload)
        except Exception as error:
            connection.answer_error(command.request_id, _as_answer(error))

    async def ended(self) -> None:
        """Waits for the tasks of this connection."""
        await self._running.wait()
        await self._polls.wait()


def _as_answer(error: Exception) -> MagnetarError:
    """The error to answer: a MagnetarError as it is, anything else is our bug."""
    if isinstance(error, MagnetarError):
        return error
    _log.error("a bookie request failed", exc_info=error)
    return StorageFailed(f"the bookie failed: {error!r}")

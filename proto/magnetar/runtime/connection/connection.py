"""A framed connection on `asyncio.Protocol`: the same class accepts and connects.

    HANDSHAKE --negotiated--> READY --close()--> CLOSING (flush, then wait for the peer's end) --> CLOSED
        \\------- any error ------/-------------------------------------------- abort() ----------/

Received frames go to the handler as runs; what the connection itself knows (handshake, ping and pong, answers to its
requests, unknown commands) never reaches it. Sent frames of one loop turn leave in one write. Everything is bounded:
frames by the negotiated size, requests by count and time, the write buffer by `writable` and a hard limit, silence by the
keep-alive.

Uses of its transport: write, writelines, can_write_eof, write_eof, close, abort, is_closing, pause_reading,
resume_reading, set_write_buffer_limits, get_write_buffer_size, get_extra_info ("peername", "socket").
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from magnetar.proto.commands import Command, Failed, Ok, Ping, Pong, decode_command
from magnetar.proto.errors import ConnectionLost, FrameTooLarge, MagnetarError, MalformedFrame, UnknownCommand
from magnetar.proto.frames import FrameParser, Run, encode_frame, frame_prefix

from .addresses import format_address
from .handshake import (
    MAX_HANDSHAKE_FRAME_BYTES,
    AcceptingHandshake,
    ConnectingHandshake,
    Negotiated,
    shake_hands,
)
from .kinds import FOR_HANDLER, KINDS, kind_of
from .liveness import Liveness, Observed, Verdict
from .options import ConnectionHandler, ConnectionOptions
from .output import Output, Piece
from .requests import PendingRequests, Reply, encode_answer

_log = logging.getLogger("magnetar.connection")

_PING = encode_frame(Ping(0).encode())
_PONG = encode_frame(Pong(0).encode())
_MAX_DISCARDED_BYTES = 64 * 1024 * 1024
_OWN_WRITES = "answers"  # reason for a pause of reading while the peer does not take what it asked for


class _State(enum.Enum):
    HANDSHAKE = 1
    READY = 2
    CLOSING = 3
    CLOSED = 4


class Connection(asyncio.Protocol):
    """One connection. Not made directly: `open_connection` and `FramedServer` do (`refusal`: it is full).

    Attributes are valid from `connection_ready` on: `principal` (whom the peer authenticated as; "" on the connecting
    side), `peer` (the name the peer gave), `peer_version`, `features`, `max_frame_bytes`, `max_message_bytes`.
    """

    def __init__(
        self,
        handler: ConnectionHandler,
        options: ConnectionOptions,
        *,
        accepting: bool,
        on_opened: Callable[[Connection], object] = lambda _connection: None,
        on_closed: Callable[[Connection], object] = lambda _connection: None,
        on_fault: Callable[[Connection, MagnetarError], object] = lambda _connection, _error: None,
        refusal: MagnetarError | None = None,
    ) -> None:
        self.principal = ""
        self.peer = ""
        self.peer_version = 0
        self.features: frozenset[str] = frozenset()
        self.max_frame_bytes = options.max_frame_bytes
        self.max_message_bytes = options.max_message_bytes
        # False between high and low water of the write buffer, and once the connection is closing.
        self.writable = False
        self.address = ""  # "host:port" of the peer
        # Set when the socket is closed, which may be a while after `connection_closed`.
        self.gone = asyncio.Event()
        self.options = options
        self._loop = asyncio.get_running_loop()
        self._handler = handler
        self._accepting = accepting
        self._on_opened = on_opened
        self._on_closed = on_closed
        self._on_fault = on_fault
        self._state = _State.HANDSHAKE
        self._handshake = (AcceptingHandshake if accepting else ConnectingHandshake)(options)
        self._parser = FrameParser(MAX_HANDSHAKE_FRAME_BYTES if accepting else options.max_frame_bytes)
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        # Resolved with None when ready, or with the error; awaited by open_connection.
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self._error: MagnetarError | None = None
        self._requests = PendingRequests(self._loop, options.max_pending_requests, self.describe)
        self._output = Output(self._loop)
        self._pauses: dict[str, None] = {}
        self._reads = self._runs = self._discarded_bytes = 0
        self._liveness: Liveness | None = None
        self._refusal = refusal
        # One timer at a time: handshake timeout, then keep-alive, then close timeout.
        self._timer: asyncio.TimerHandle | None = None

    # --- what the owner calls -----------------------------------------------------------------------------------------

    @property
    def buffered_bytes(self) -> int:
        """Bytes sent and not yet taken by the kernel."""
        if self._state is _State.CLOSED:
            return 0
        return self._output.pending_bytes + self._transport.get_write_buffer_size()

    @property
    def closed(self) -> bool:
        """True when nothing can be sent any more."""
        return self._state is not _State.READY

    def send(self, header: bytes, payload: Piece | Sequence[Piece] = b"") -> None:
        """Queues one frame; a sequence is the parts of one payload. Dropped when closed (the handler was told, or will be).

        Buffers must not change afterwards. Raises FrameTooLarge for a frame that the peer would refuse. 0.7 us.
        """
        if self._state is not _State.READY:
            return
        if isinstance(payload, (bytes, bytearray, memoryview)):
            size = len(payload)
            pieces: list[Piece] = [frame_prefix(header, size), payload]
        else:
            size = sum(map(len, payload))
            pieces = [frame_prefix(header, size), *payload]
        if 2 + len(header) + size > self.max_frame_bytes:
            raise FrameTooLarge(
                f"a frame of {2 + len(header) + size} bytes exceeds the {self.max_frame_bytes} agreed with the peer; "
                "send smaller messages or raise max_message_bytes on both sides",
                length=2 + len(header) + size,
            )
        self._output.add(pieces, 6 + len(header) + size)
        if not self.writable:
            self._restrain()

    def send_encoded(self, frames: Piece) -> None:
        """Queues frames that are encoded already (`encode_frames`), each of which must respect `max_frame_bytes`."""
        if self._state is _State.READY:
            self._output.add((frames,), len(frames))
            if not self.writable:
                self._restrain()

    def next_request_id(self) -> int:
        """Counts up from 1."""
        return self._requests.next_id()

    async def request(self, command: Command, payload: bytes = b"", *, timeout: float) -> Reply:
        """Sends and waits for the answer. A request id of 0 is replaced by `next_request_id()`.

        Raises what the peer answered, RequestTimeout after `timeout` seconds (the outcome is unknown then, a late answer
        is dropped), ConnectionLost or the reason of the close, TooManyRequests at `max_pending_requests`.
        """
        if self._state is not _State.READY:
            raise self._lost()
        if command.request_id == 0:
            command = msgspec.structs.replace(command, request_id=self._requests.next_id())
        answer = self._requests.add(command, timeout)
        try:
            self.send(command.encode(), payload)
            return await answer
        finally:
            self._requests.forget(command.request_id)

    def answer(self, request_id: int, result: Any = None, payload: Piece | Sequence[Piece] = b"") -> None:
        """Sends Ok, unless the id says that no answer is wanted."""
        if request_id:
            self.send(*encode_answer(request_id, result, payload))

    def answer_error(self, request_id: int, error: MagnetarError) -> None:
        """Sends Failed, unless the id says that no answer is wanted."""
        if request_id:
            self.send(Failed.of(request_id, error).encode())

    def authorize(self, operation: str, resource: str) -> None:
        """Raises NotAuthorized unless the peer may do this."""
        self.options.authorize(self.principal, operation, resource)

    def pause_reading(self, reason: str) -> None:
        """Stops reading until every reason is withdrawn. Frames of the read in progress still arrive."""
        if not self._pauses and self._state is _State.READY and not self._transport.is_closing():
            self._transport.pause_reading()
        self._pauses[reason] = None

    def resume_reading(self, reason: str) -> None:
        """Withdraws a reason; fine if it is not there."""
        if reason in self._pauses:
            del self._pauses[reason]
            if not self._pauses and self._state is _State.READY and not self._transport.is_closing():
                self._transport.resume_reading()

    @property
    def reading_paused(self) -> tuple[str, ...]:
        """Reasons for which reading is paused."""
        return tuple(self._pauses)

    def close(self, error: MagnetarError | None = None) -> None:
        """Sends what is queued, tells `error` if given, and closes; what still arrives is dropped. May be called twice.

        Pending requests fail at once. The peer has `close_timeout_s` to take the rest.
        """
        if self._state in (_State.CLOSING, _State.CLOSED):
            return
        self._error = self._error or error
        if error is not None:
            request_id = self._handshake.request_id if self._state is _State.HANDSHAKE else 0
            self._output.add((encode_frame(Failed.of(request_id, error).encode()),), 0)
        self._begin_closing()

    def abort(self) -> None:
        """Closes at once; what is queued is lost."""
        if self._state is not _State.CLOSED:
            self._stop(_State.CLOSING)
            self._output.drop()
            if self._transport is not None:  # else the attempt ended before there was a socket
                self._transport.abort()

    def describe(self) -> str:
        """The peer, for messages: its name and address."""
        return f"{self.peer} at {self.address}" if self.peer else self.address

    # --- asyncio.Protocol -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is connected: start the handshake."""
        self._transport = cast(asyncio.Transport, transport)
        self._output.attach(self._transport)
        self.address = format_address(transport.get_extra_info("peername"))
        with contextlib.suppress(OSError, AttributeError):
            # Finds a dead peer even while reading is paused and the keep-alive cannot hear.
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        high = self.options.high_water_bytes
        self._transport.set_write_buffer_limits(high=high, low=high // 4)
        self._timer = self._loop.call_later(self.options.handshake_timeout_s, self._handshake_timed_out)
        self._on_opened(self)
        if self._refusal is not None:
            self._handshake_failed(self._refusal)
            return
        if greeting := self._handshake.begin():
            self._transport.write(greeting)

    def data_received(self, data: bytes) -> None:
        """Cuts frames and hands them on. 0.3 us a read more than the parser itself, when all are for the handler."""
        self._reads += 1
        if self._state is _State.CLOSING:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > _MAX_DISCARDED_BYTES:
                self._transport.abort()
            return
        parser = self._parser
        runs = parser.feed(data)
        self._output.in_turn = True
        try:
            if runs:
                self._runs += len(runs)
                if self._state is _State.HANDSHAKE:
                    runs = self._receive_handshake(runs)
                self._dispatch(runs)
            if parser.error is not None:
                self._bad_stream(parser.error)
        except Exception as error:
            self._handler_failed(error)
        finally:
            self._output.in_turn = False
        self._output.flush()

    def eof_received(self) -> bool:
        """The peer closed its side; so do we."""
        if self._error is None and self._state in (_State.HANDSHAKE, _State.READY):
            cut = " in the middle of a frame" if self._parser.pending_bytes else ""
            self._error = ConnectionLost(f"{self.describe()} closed the connection{cut}")
            self._wind_up()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone: fail what waits, tell the handler."""
        if exc is not None and self._error is None and self._state is not _State.CLOSING:
            self._error = ConnectionLost(f"the connection to {self.describe()} broke: {exc}")
        self._stop(_State.CLOSED)
        self._output.drop()
        self._on_closed(self)
        self._tell_closed()
        self.gone.set()

    def _tell_closed(self) -> None:
        """Once, as soon as nothing can be sent or received any more: the socket may need a while longer."""
        self._not_ready(self._lost())
        if self._liveness is not None:
            self._liveness = None
            try:
                self._handler.connection_closed(self._error)
            except Exception:
                _log.exception("connection_closed of %s failed", self.describe())

    def pause_writing(self) -> None:
        """Above high water."""
        self.writable = False

    def resume_writing(self) -> None:
        """Below low water."""
        if self._state is not _State.READY:
            return
        self.writable = True
        self.resume_reading(_OWN_WRITES)
        try:
            self._handler.writing_resumed()
        except Exception as error:
            self._handler_failed(error)

    # --- receiving ------------------------------------------------------------------------------------------------------

    def _dispatch(self, runs: list[Run]) -> None:
        """In stream order; the usual read is all for the handler and goes there as one list."""
        start = 0
        for position, (header, payloads) in enumerate(runs):
            if len(header) > 1 and KINDS[header[1]] == FOR_HANDLER and 0x90 < header[0] < 0xA0:
                continue
            if kind_of(header) == FOR_HANDLER:
                continue
            if start < position:
                self._handler.runs_received(runs[start:position])
            start = position + 1
            if self._state is _State.READY:
                self._receive_internal(header, payloads)
            if self._state is not _State.READY:
                return
        if start < len(runs):
            self._handler.runs_received(runs[start:] if start else runs)

    def _receive_internal(self, header: bytes, payloads: list[bytes]) -> None:
        try:
            command = decode_command(header)
        except UnknownCommand as error:
            # A newer peer may ask for what we do not know: say so and go on. Without an id nobody would hear it.
            if not error.details["request_id"]:
                raise
            for _ in payloads:
                self.answer_error(error.details["request_id"], error)
            return
        if isinstance(command, Ok):
            for payload in payloads:
                self._requests.resolve(command.request_id, Reply.of(command, payload))
        elif isinstance(command, Failed):
            if command.request_id == 0:
                self._error = command.to_error()
                self._begin_closing()
            else:
                self._requests.reject(command.request_id, command.to_error())
        elif isinstance(command, Ping):
            # One answer to a run of pings: the peer wants to know that we live, not how often.
            self.send_encoded(_PONG)
        elif not isinstance(command, Pong):
            raise MalformedFrame(f"{type(command).__name__} after the end of the handshake")

    def _restrain(self) -> None:
        """A peer that asks and does not read its answers: first it is not read any more, then it is cut."""
        buffered = self.buffered_bytes
        if self._accepting and buffered > 2 * self.options.high_water_bytes:
            self.pause_reading(_OWN_WRITES)
        if buffered > self.options.max_buffered_bytes:
            self._error = ConnectionLost(
                f"{self.describe()} does not read: {buffered} bytes wait for it, more than "
                f"{self.options.max_buffered_bytes}"
            )
            self._on_fault(self, self._error)
            self.abort()

    def _receive_handshake(self, runs: list[Run]) -> list[Run]:
        """Feeds the handshake; returns the runs after it."""
        try:
            answers, negotiated, runs = shake_hands(self._handshake, runs)
        except MagnetarError as error:
            self._handshake_failed(error)
            return []
        if answers:
            self._transport.write(answers)
        if negotiated is not None:
            self._become_ready(negotiated)
        return runs

    def _become_ready(self, negotiated: Negotiated) -> None:
        self.principal = negotiated.principal
        self.peer = negotiated.peer
        self.peer_version = negotiated.version
        self.features = negotiated.features
        self.max_frame_bytes = self._parser.max_frame_bytes = negotiated.max_frame_bytes
        self.max_message_bytes = negotiated.max_message_bytes
        self._state = _State.READY
        self.writable = True
        self._liveness = Liveness(self.options.ping_interval_s, self._loop.time())
        self._set_timer(self.options.ping_interval_s, self._tick)
        if not self.ready.done():
            self.ready.set_result(None)
        self._handler.connection_ready(self)

    def _not_ready(self, error: MagnetarError) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # nobody waits on the accepting side, and that is fine

    def _handshake_failed(self, error: MagnetarError) -> None:
        self._error = error
        self._not_ready(error)
        self._on_fault(self, error)
        self.close(error if self._accepting else None)

    def _handshake_timed_out(self) -> None:
        what = f"did not finish the handshake within {self.options.handshake_timeout_s:g} s"
        self._handshake_failed(ConnectionLost(f"{self.address} {what}"))

    def _bad_stream(self, error: MagnetarError) -> None:
        if self._state is _State.HANDSHAKE:
            self._handshake_failed(self._handshake.stream_error(error))
        elif self._state is _State.READY:
            self._handler_failed(error)

    def _handler_failed(self, error: Exception) -> None:
        if isinstance(error, MagnetarError):
            request_id = error.details.get("request_id", 0)
            self.answer_error(request_id, error)
            self._on_fault(self, error)
            self.close(error)
        else:
            _log.error("handler of %s failed; closing this connection", self.describe(), exc_info=error)
            self.close(MagnetarError("internal error; the log of this service has the details"))

    def _lost(self) -> MagnetarError:
        """Why it ended, as an error to raise."""
        if self._error is None:
            return ConnectionLost(f"the connection to {self.describe() or 'the peer'} is closed")
        return type(self._error)(self._error.message, **self._error.details)

    # --- keep-alive and closing -----------------------------------------------------------------------------------------

    def _set_timer(self, delay_s: float, callback: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, callback)

    def _tick(self) -> None:
        assert self._liveness is not None
        observed = Observed(self._reads, self._runs, self._parser.pending_bytes, bool(self._pauses))
        verdict, interval = self._liveness.tick(self._loop.time(), observed), self.options.ping_interval_s
        if verdict is Verdict.SILENT or verdict is Verdict.STALLED:
            self._error = ConnectionLost(f"{self.describe()} {verdict.value} for {2 * interval:g} s")
            self._on_fault(self, self._error)
            self.abort()
            return
        if verdict is Verdict.PING and self.writable:
            self.send_encoded(_PING)
        self._set_timer(interval, self._tick)

    def _begin_closing(self) -> None:
        """Half-closes, so that what was sent arrives: closing with unread input would make the kernel reset instead."""
        self._wind_up()
        if self._transport.is_closing():
            return
        try:
            if self._pauses:
                self._pauses.clear()
                self._transport.resume_reading()
            if self._transport.can_write_eof():
                self._transport.write_eof()
            else:
                self._transport.close()
        except OSError:  # the peer was faster and has reset the connection
            self._transport.abort()

    def _wind_up(self) -> None:
        """Nothing is sent any more; what was has `close_timeout_s` to leave."""
        self._stop(_State.CLOSING)
        self._output.flush()
        self._output.drop()
        self._set_timer(self.options.close_timeout_s, self._transport.abort)
        self._loop.call_soon(self._tell_closed)

    def _stop(self, state: _State) -> None:
        self._state = state
        self.writable = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._requests.fail_all(self._lost())

"""Magnetar's own wire protocol on a transport: handshake, runs of frames, ping and pong, requests and answers.

    HANDSHAKE --negotiated--> READY --transport closes--> CLOSED

Received frames go to the handler as runs; what the connection itself knows (handshake, ping and pong, answers to its
requests, unknown commands) never reaches it. The same class serves the accepting and the connecting side.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from magnetar.proto.bookie_identity import BookieIdentity
from magnetar.proto.commands import COMMANDS, Command, Failed, Ok, Ping, Pong, decode_command
from magnetar.proto.errors import ConnectionLost, FrameTooLarge, MagnetarError, MalformedFrame, UnknownCommand
from magnetar.proto.frames import FrameParser, Run, encode_frame, frame_prefix

from .addresses import format_address
from .handshake import MAX_HANDSHAKE_FRAME_BYTES, AcceptingHandshake, ConnectingHandshake, shake_hands
from .options import ConnectionOptions
from .requests import PendingRequests, Reply, encode_answer
from .server import FramedServer
from .transport import Piece, Transport

_log = logging.getLogger("magnetar.connection")

_PING = encode_frame(Ping(0).encode())
_PONG = encode_frame(Pong(0).encode())

# Handshake, keep-alive and answers have the lowest numbers; the connection deals with them itself.
_LAST_INTERNAL = 7
assert COMMANDS[6] is Ok
assert COMMANDS[_LAST_INTERNAL] is Failed
# By the second byte of a header: 1 if its frame is for the handler. msgpack writes numbers below 128 as themselves, after
# one byte for a short array, so that this look-up (0.1 us) replaces decoding. All other headers are decoded.
_FOR_HANDLER = bytes(_LAST_INTERNAL < number < 128 and number in COMMANDS for number in range(256))


class ConnectionHandler(Protocol):
    """Owner of one connection. Called from the event loop only; what it raises closes this connection only.

    `connection_closed` is called once if, and only if, `connection_ready` was.
    """

    def connection_ready(self, connection: Connection) -> None:
        """The handshake is done; negotiated values are known and frames may be sent."""

    def runs_received(self, runs: list[Run]) -> None:
        """Frames in the order of the stream: all but handshake, keep-alive and answers, and only known commands.

        Raise MalformedFrame (as `decode_command` does) for a header that cannot be used: it is sent to the peer, and the
        connection closes.
        """

    def connection_closed(self, error: MagnetarError | None) -> None:
        """Every pending request has failed already. None: this side closed it, without an error."""

    def writing_resumed(self) -> None:
        """`writable` is True again."""


class Connection:
    """One connection; see `open_connection` and `start_server`, which make it.

    Attributes are valid from `connection_ready` on: `principal` (whom the peer authenticated as; "" on the connecting
    side), `max_frame_bytes`, `max_message_bytes`, `bookie` (who the accepting side says that it
    is; None: no bookie). `transport` has its buffers and its address.
    """

    def __init__(self, transport: Transport, handler: ConnectionHandler, options: ConnectionOptions) -> None:
        self.transport = transport
        self.principal = ""
        self.bookie: BookieIdentity | None = None
        self.max_frame_bytes = options.max_frame_bytes
        self.max_message_bytes = options.max_message_bytes
        # Methods of the transport that are the connection's as they are.
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.wait_closed = transport.wait_closed
        self.abort = transport.abort
        self.probe = transport.probe
        # Resolved with None when the handshake is done, or with the error; awaited by open_connection.
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._options = options
        self._handler = handler
        self._handshake: AcceptingHandshake | ConnectingHandshake | None
        if transport.accepted:
            self._handshake = AcceptingHandshake(options)
            self._parser = FrameParser(MAX_HANDSHAKE_FRAME_BYTES)
        else:
            self._handshake = ConnectingHandshake(options)
            self._parser = FrameParser(options.max_frame_bytes)
        self._runs = 0
        self._requests = PendingRequests(options.max_pending_requests, transport.describe)

    # --- what the owner calls -----------------------------------------------------------------------------------------

    @property
    def writable(self) -> bool:
        """False between high and low water of the write buffer, and once the connection is closing."""
        return self.transport.writable

    @property
    def closed(self) -> bool:
        """True when nothing can be sent any more."""
        return self.transport.closing

    def send(self, header: bytes, payload: Piece | Sequence[Piece] = b"") -> None:
        """Queues one frame; a sequence is the parts of one payload. Dropped when closed, as the handler learns anyway.

        Buffers must not change afterwards. Raises FrameTooLarge for a frame that the peer would refuse. 0.6 us.
        """
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
        self.transport.write(pieces, 6 + len(header) + size)

    def send_encoded(self, frames: Piece) -> None:
        """Queues frames that are encoded already (`encode_frames`), each of which must respect `max_frame_bytes`."""
        self.transport.write((frames,), len(frames))

    def next_request_id(self) -> int:
        """Counts up from 1."""
        return self._requests.next_id()

    async def request(self, command: Command, payload: bytes = b"", *, timeout: float) -> Reply:
        """Sends and waits for the answer. A request id of 0 is replaced by `next_request_id()`.

        Raises what the peer answered, RequestTimeout after `timeout` seconds (the outcome is unknown then, and an answer
        that still comes is dropped), ConnectionLost or the reason of the close, TooManyRequests at `max_pending_requests`.
        """
        if self.closed:
            raise self._lost()
        if command.request_id == 0:
            command = msgspec.structs.replace(command, request_id=self._requests.next_id())
        answer = self._requests.add(command, timeout)
        header = command.encode()
        try:
            self.send(header, payload)
            return await answer
        except ConnectionLost:
            if self.transport.error is not None and self.transport.error.details.get("length") == (
                2 + len(header) + len(payload)
            ):
                raise FrameTooLarge(self.transport.error.message) from None  # this one ended the connection
            raise
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
        self._options.authorize(self.principal, operation, resource)

    @property
    def address(self) -> str:
        """`host:port` of the peer."""
        return self.transport.address

    @property
    def client_version(self) -> str:
        """What the peer calls itself."""
        return self.transport.peer

    def close(self, error: MagnetarError | None = None) -> None:
        """Sends what is queued, then Failed if `error` is given, and closes. May be called twice.

        Pending requests fail in the next turn of the loop. The peer has `close_timeout_s` to take the rest.
        """
        if error is not None:
            request_id = self._handshake.request_id if self._handshake is not None else 0
            self.transport.write((encode_frame(Failed.of(request_id, error).encode()),), 0)
        self.transport.close(error)

    # --- WireProtocol -------------------------------------------------------------------------------------------------

    def connection_made(self) -> None:
        """The connecting side sends CONNECT."""
        if isinstance(self._handshake, ConnectingHandshake):
            self.send_encoded(self._handshake.begin())

    def bytes_received(self, data: bytes) -> None:
        """Cuts frames and hands them on, in stream order; the usual read is all for the handler, as one list."""
        parser = self._parser
        runs = parser.feed(data)
        if runs:
            self._runs += len(runs)
            if self._handshake is not None:
                runs = self._receive_handshake(self._handshake, runs)
            start = 0
            for position, (header, payloads) in enumerate(runs):
                if len(header) > 1 and _FOR_HANDLER[header[1]] and 0x90 < header[0] < 0xA0:
                    continue
                if start < position:
                    self._handler.runs_received(runs[start:position])
                if self.closed:
                    return
                start = position if self._is_for_handler(header, payloads) else position + 1
            if start == 0 and runs:
                self._handler.runs_received(runs)
            elif start < len(runs) and not self.closed:
                self._handler.runs_received(runs[start:])
        if parser.error is not None and not self.closed:
            raise parser.error

    def progress(self) -> tuple[int, int]:
        """Runs so far, and bytes of an unfinished frame."""
        return self._runs, self._parser.pending_bytes

    def ping(self) -> None:
        """Sends Ping."""
        self.send_encoded(_PING)

    def writing_resumed(self) -> None:
        """The handler may go on writing."""
        self._handler.writing_resumed()

    def fail(self, error: Exception) -> None:
        """Sends the error, to the request that it belongs to as well, and closes. No MagnetarError: a bug on this side."""
        if self.closed:
            return
        if not isinstance(error, MagnetarError):
            _log.error(
                "handler of %s failed; closing this connection", self.transport.describe(), exc_info=error
            )
            error = MagnetarError("internal error; the log of this service has the details")
        else:
            if self._handshake is not None and error is self._parser.error:
                error = self._handshake.stream_error(error)
            self.transport.fault(error)
        if self._handshake is None:
            self.answer_error(error.details.get("request_id", 0), error)
            self.close(error)
            return
        if self.transport.accepted:
            self.close(error)
        else:  # the caller of open_connection gets it
            self.transport.close(error)

    def _lost(self) -> MagnetarError:
        """What a request fails with: the reason may be final for what the connection ended for, not for all others."""
        lost = self.transport.lost()
        return lost if lost.retryable else ConnectionLost(lost.message)

    def connection_lost(self, error: MagnetarError | None) -> None:
        """Fails pending requests, then reports to the handler."""
        self._requests.fail_all(self._lost)
        if self._handshake is None:
            self._handler.connection_closed(error)
        elif not self.ready.done():
            self.ready.set_exception(self.transport.lost())
            self.ready.exception()  # nobody waits on the accepting side, and that is fine
        del self._handler  # it refers to this, and nothing comes for it any more

    # --- receiving ------------------------------------------------------------------------------------------------------

    def _is_for_handler(self, header: bytes, payloads: list[bytes]) -> bool:
        """Takes the frames of a run that are for the connection itself. A peer may write a number in a longer form."""
        try:
            command = decode_command(header)
        except UnknownCommand as error:
            # A newer peer may ask for what is not known here: say so and go on. Without an id nobody would hear it.
            if not error.details["request_id"]:
                raise
            for _ in payloads:
                self.answer_error(error.details["request_id"], error)
            return False
        if isinstance(command, Ok):
            for payload in payloads:
                self._requests.resolve(command.request_id, Reply.of(command, payload))
        elif isinstance(command, Failed):
            if command.request_id == 0:
                self.transport.close(command.to_error())
            else:
                self._requests.reject(command.request_id, command.to_error())
        elif isinstance(command, Ping):
            # One answer to a run of pings: the peer wants to know that this side lives, not how often.
            self.send_encoded(_PONG)
        elif command.NUMBER > _LAST_INTERNAL:
            return True
        elif isinstance(command, Pong):
            self.transport.answered()
        else:
            raise MalformedFrame(f"{type(command).__name__} after the end of the handshake")
        return False

    def _receive_handshake(
        self, handshake: AcceptingHandshake | ConnectingHandshake, runs: list[Run]
    ) -> list[Run]:
        """Feeds the handshake; returns the runs after it."""
        answers, negotiated, runs = shake_hands(handshake, runs)
        if answers:
            self.send_encoded(answers)
        if negotiated is None:
            return []
        self._handshake = None
        self.principal = negotiated.principal
        self.bookie = negotiated.bookie
        self.max_frame_bytes = self._parser.max_frame_bytes = negotiated.max_frame_bytes
        self.max_message_bytes = negotiated.max_message_bytes
        self.transport.opened(negotiated.peer)
        if not self.ready.done():
            self.ready.set_result(None)
        self._handler.connection_ready(self)
        return runs


async def start_server(
    host: str, port: int, handler_factory: Callable[[], ConnectionHandler], options: ConnectionOptions
) -> FramedServer:
    """Listens on `host` and `port` (0: a free one). Raises ServiceNotReady when the port is taken, InvalidSetting."""
    return await FramedServer.start(
        host, port, lambda transport: Connection(transport, handler_factory(), options), options
    )


async def open_connection(
    host: str,
    port: int,
    handler: ConnectionHandler,
    options: ConnectionOptions,
    *,
    server_name: str | None = None,
) -> Connection:
    """Connects and shakes hands within `handshake_timeout_s`. `server_name`: whom TLS expects at an address; None: `host`.

    Raises ConnectionLost (nobody there, no answer, cut off), or the error that the server answered.
    """
    # Made here: the loop drops one whose attempt is cut short, and its timer would go on.
    transport = Transport(options, lambda transport: Connection(transport, handler, options))
    connection, peer = transport.protocol, format_address((host, port))
    assert isinstance(connection, Connection)
    try:
        async with asyncio.timeout(options.handshake_timeout_s):
            await asyncio.get_running_loop().create_connection(
                lambda: transport, host, port, ssl=options.tls,
                server_hostname=(server_name or host) if options.tls is not None else None,
            )  # fmt: skip
            await connection.ready
        return connection
    except BaseException as error:
        transport.abort()
        if isinstance(error, MagnetarError):
            raise
        if isinstance(error, TimeoutError):
            reason = f"did not answer within {options.handshake_timeout_s:g} s; is it a Magnetar service?"
            raise ConnectionLost(f"{peer} {reason}") from None
        if isinstance(error, OSError):
            reason = f"{error.strerror or error}; is the service running there?"
            raise ConnectionLost(f"cannot connect to {peer}: {reason}") from error
        raise

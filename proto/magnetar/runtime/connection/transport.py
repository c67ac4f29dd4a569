"""The transport under a wire protocol: buffers, back-pressure, keep-alive timers and closing, without any frame format.

    CONNECTING --connection_made--> OPENING --opened()--> OPEN
    OPENING, OPEN --close(), abort(), the peer's end of stream, a limit exceeded--> CLOSING
    OPENING, OPEN, CLOSING --connection_lost--> CLOSED

A `WireProtocol` sits on it and cuts the bytes into frames. What it writes in one turn of the loop leaves in one write:
small pieces are joined, since a system call with a thousand 20-byte buffers costs more than the copy; pieces of
LARGE_BYTES and more are handed over as they are. Everything is bounded: the write buffer by `writable` and a hard limit,
silence and unfinished frames by the keep-alive, the handshake and the close by timeouts.

Uses of the asyncio transport: write, writelines, can_write_eof, write_eof, close, abort, is_closing, pause_reading,
resume_reading, set_write_buffer_limits, get_write_buffer_size, get_extra_info ("peername", "socket").
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from magnetar.proto.errors import ConnectionLost, MagnetarError

from .addresses import format_address
from .liveness import Liveness, Observed, Verdict
from .options import TransportOptions

_log = logging.getLogger("magnetar.connection")

Piece = bytes | bytearray | memoryview

LARGE_BYTES = 32 * 1024
# More than this does not wait for the end of the turn: `writable` would then be updated only when it no longer helps.
_FLUSH_BYTES = 256 * 1024
_MAX_DISCARDED_BYTES = 64 * 1024 * 1024
# For how long a peer that is probed may be silent.
PROBE_S = 5.0
# The reason for a pause of reading while the peer does not read what it asked for.
_UNREAD_ANSWERS = "answers"


class WireProtocol(Protocol):
    """What is spoken on one transport, which makes all these calls from the event loop."""

    def connection_made(self) -> None:
        """The socket is connected, and the handshake may begin. `Transport.opened` says that it is done."""

    def bytes_received(self, data: bytes) -> None:
        """The bytes of one read. What it raises goes to `fail`."""

    def progress(self) -> tuple[int, int]:
        """A count that grows with every whole frame, and the bytes held of a frame that is not complete."""

    def ping(self) -> None:
        """The peer has been silent: write something that it has to answer."""

    def writing_resumed(self) -> None:
        """`Transport.writable` is True again. What it raises goes to `fail`."""

    def fail(self, error: Exception) -> None:
        """Tell the peer, in the protocol's own format, that `error` ends the connection, and close the transport."""

    def close(self, error: MagnetarError | None = None) -> None:
        """The server stops: tell the peer `error`, and close the transport."""

    def connection_lost(self, error: MagnetarError | None) -> None:
        """Called once, as soon as nothing can be sent or received. None: this side closed it, without an error."""


class Acceptor(Protocol):
    """The server that accepted a transport."""

    def opened(self, transport: Transport) -> MagnetarError | None:
        """The socket is connected. An error refuses the peer."""

    def closed(self, transport: Transport) -> None:
        """The socket is closed."""

    def fault(self, transport: Transport, error: MagnetarError) -> None:
        """The peer did something wrong, and its connection ends."""


class State(enum.Enum):
    """See the drawing above."""

    CONNECTING = 0
    OPENING = 1
    OPEN = 2
    CLOSING = 3
    CLOSED = 4


_OPENING, _OPEN, _CLOSING = State.OPENING, State.OPEN, State.CLOSING


class Transport(asyncio.Protocol):
    """One socket. `make_protocol` makes what is spoken on it; `acceptor` is the server, None on the connecting side."""

    def __init__(
        self,
        options: TransportOptions,
        make_protocol: Callable[[Transport], WireProtocol],
        acceptor: Acceptor | None = None,
    ) -> None:
        self.state = State.CONNECTING
        # False from high water of the write buffer until low water, before `opened`, and once it is closing.
        self.writable = False
        self.address = ""  # "host:port" of the peer
        self.peer = ""  # its name, from `opened` on
        self.error: MagnetarError | None = None  # the first reason to end
        self._options = options
        self._acceptor = acceptor
        self._loop = asyncio.get_running_loop()
        self._socket: asyncio.Transport  # from `connection_made` on
        self._socket_closed = asyncio.Event()
        self._loss_reported = False
        # Written and not yet handed to the socket. `_large`: one of the pieces is not to be joined.
        self._pieces: list[Piece] = []
        self._pending_bytes = 0
        self._large = False
        self._flush_scheduled = False
        self._in_read = False  # what is written during a read is flushed at its end
        self._pauses: dict[str, None] = {}
        self._reads = self._discarded_bytes = 0
        self._liveness: Liveness  # from `opened` on
        # Resolved when the peer answers the last `probe`, or with the end of the connection.
        self._probe: asyncio.Future[None] | None = None
        # One timer at a time: handshake timeout, then keep-alive, then close timeout.
        self._timer: asyncio.TimerHandle | None = None
        self.speak(make_protocol(self))

    # --- what the protocol and its owner call -------------------------------------------------------------------------

    @property
    def accepted(self) -> bool:
        """True on the side of the server."""
        return self._acceptor is not None

    @property
    def closing(self) -> bool:
        """True when nothing can be sent any more."""
        return self.state is _CLOSING or self.state is State.CLOSED

    @property
    def buffered_bytes(self) -> int:
        """Bytes written and not yet taken by the kernel."""
        if self.state is State.CLOSED:
            return 0
        return self._pending_bytes + self._socket.get_write_buffer_size()

    @property
    def reading_paused(self) -> tuple[str, ...]:
        """Reasons for which reading is paused."""
        return tuple(self._pauses)

    def speak(self, protocol: WireProtocol) -> None:
        """In the place of what was spoken so far: it makes the calls of this from now on."""
        self.protocol = protocol
        self._bytes_received = protocol.bytes_received

    def describe(self) -> str:
        """The peer, for messages: its name and address."""
        return f"{self.peer} at {self.address}" if self.peer else self.address or "the peer"

    def opened(self, peer: str) -> None:
        """The handshake is done: the owner may write, and the keep-alive begins."""
        self.peer = peer
        self.state = State.OPEN
        self.writable = True
        self._watch(self._options.ping_interval_s)

    def probe(self) -> asyncio.Future[None]:
        """Asks whether the peer is there. Resolved when it answers (`answered`), or when its loss was reported.

        So it is after PROBE_S of silence, as with Pulsar. It may be shared: not to be cancelled.
        """
        if self._probe is None:
            self._probe = self._loop.create_future()
            if self.state is _OPEN:
                self.protocol.ping()
                self._watch(min(PROBE_S / 2, self._options.ping_interval_s))
        return self._probe

    def answered(self) -> None:
        """The peer has answered a ping."""
        if self._probe is not None and not self.closing:
            self._probe.set_result(None)
            self._probe = None
            self._watch(self._options.ping_interval_s)

    def write(self, pieces: Sequence[Piece], size: int) -> None:
        """Queues pieces of `size` bytes together, which must not change afterwards. Dropped when it is closing."""
        if self.state is not _OPEN and self.state is not _OPENING:
            return
        self._pieces += pieces
        self._pending_bytes += size
        if size >= LARGE_BYTES:
            self._large = True
        if self._pending_bytes >= _FLUSH_BYTES:
            self._flush()
        elif not self._in_read and not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._end_of_turn)
        if not self.writable:
            self._restrain()

    def pause_reading(self, reason: str) -> None:
        """Stops reading until every reason is withdrawn. Frames of the read in progress still arrive."""
        if not self.closing:
            if not self._pauses and not self._socket.is_closing():
                self._socket.pause_reading()
            self._pauses[reason] = None

    def resume_reading(self, reason: str) -> None:
        """Withdraws a reason; fine if it is not there."""
        if reason in self._pauses:
            del self._pauses[reason]
            if not self._pauses and not self._socket.is_closing():
                self._socket.resume_reading()

    def close(self, error: MagnetarError | None = None) -> None:
        """Flushes and closes; what still arrives is discarded. The peer has `close_timeout_s` to take the rest.

        Half-closes, so that what was sent arrives: closing with unread input would make the kernel reset instead.
        """
        if self.closing:
            return
        self._wind_up(error)
        if self._socket.is_closing():
            return
        try:
            if self._pauses:
                self._pauses.clear()
                self._socket.resume_reading()
            if self._socket.can_write_eof():
                self._socket.write_eof()
            else:
                self._socket.close()
        except OSError:  # the peer was faster and has reset the connection
            self._socket.abort()

    def abort(self, error: MagnetarError | None = None) -> None:
        """Closes at once; what is queued is lost."""
        if self.state is State.CLOSED:
            return
        connected = self.state is not State.CONNECTING
        self._end(State.CLOSING, error)
        self._pieces, self._pending_bytes = [], 0
        if connected:
            self._socket.abort()

    def fault(self, error: MagnetarError) -> None:
        """The peer did something wrong: the server says so in its log."""
        if self._acceptor is not None:
            self._acceptor.fault(self, error)

    def lost(self) -> MagnetarError:
        """Why it ended, as an error of its own for each caller, since raising one adds a traceback to it."""
        if self.error is None:
            return ConnectionLost(f"the connection to {self.describe()} is closed")
        return type(self.error)(self.error.message, **self.error.details)

    async def wait_closed(self, timeout_s: float) -> None:
        """Returns when the socket is closed, which may be a while after `close`; after `timeout_s` it is aborted."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._socket_closed.wait()
        except TimeoutError:  # a peer that hangs does not close its side
            self.abort()
            await self._socket_closed.wait()

    # --- asyncio.Protocol -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is connected."""
        self._socket = cast(asyncio.Transport, transport)
        if self.state is not State.CONNECTING:  # aborted while it was on its way
            self._socket.abort()
            return
        self.state = State.OPENING
        self.address = format_address(transport.get_extra_info("peername"))
        with contextlib.suppress(OSError, AttributeError):
            # Finds a dead peer even while reading is paused and the keep-alive cannot hear.
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        high = self._options.high_water_bytes
        self._socket.set_write_buffer_limits(high=high, low=high // 4)
        self._set_timer(self._options.handshake_timeout_s, self._handshake_timed_out)
        if self._acceptor is not None and (refusal := self._acceptor.opened(self)) is not None:
            self.protocol.fail(refusal)
        else:
            self.protocol.connection_made()

    def data_received(self, data: bytes) -> None:
        """Hands a read to the protocol, and what that wrote to the socket."""
        self._reads += 1
        if self.state is _CLOSING:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > _MAX_DISCARDED_BYTES:
                self._socket.abort()
            return
        self._in_read = True
        try:
            self._bytes_received(data)
        except Exception as error:
            self.protocol.fail(error)
        finally:
            self._in_read = False
        if self._pieces:
            self._flush()

    def eof_received(self) -> bool:
        """The peer closed its side; so does this one."""
        if not self.closing:
            cut = " in the middle of a frame" if self.protocol.progress()[1] else ""
            self._wind_up(ConnectionLost(f"{self.describe()} closed the connection{cut}"))
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        broken = exc is not None and not self.closing
        self._end(
            State.CLOSED,
            ConnectionLost(f"the connection to {self.describe()} broke: {exc}") if broken else None,
        )
        self._pieces, self._pending_bytes = [], 0
        if self._acceptor is not None:
            self._acceptor.closed(self)
        self._report_loss()
        self._socket_closed.set()
        del self.protocol, self._bytes_received  # which refer to this

    def pause_writing(self) -> None:
        """Above high water."""
        self.writable = False

    def resume_writing(self) -> None:
        """Below low water."""
        if self.state is not _OPEN:
            return
        self.writable = True
        self.resume_reading(_UNREAD_ANSWERS)
        try:
            self.protocol.writing_resumed()
        except Exception as error:
            self.protocol.fail(error)

    # --- writing --------------------------------------------------------------------------------------------------------

    def _end_of_turn(self) -> None:
        self._flush_scheduled = False
        self.flush()

    def flush(self) -> None:
        """Hands what was written to the socket, before the end of the turn."""
        if self._pieces:
            self._flush()

    def _flush(self) -> None:
        pieces, self._pieces = self._pieces, []
        self._pending_bytes = 0
        if self._large:
            self._large = False
            self._socket.writelines(_join_small(pieces))
        else:
            self._socket.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def _restrain(self) -> None:
        """A peer that asks and does not read its answers: first it is not read any more, then it is cut."""
        buffered = self.buffered_bytes
        if self._acceptor is not None and buffered > 2 * self._options.high_water_bytes:
            self.pause_reading(_UNREAD_ANSWERS)
        if buffered > self._options.max_buffered_bytes:
            self._cut(
                f"does not read: {buffered} bytes wait for it, more than {self._options.max_buffered_bytes}"
            )

    # --- keep-alive and closing -----------------------------------------------------------------------------------------

    def _set_timer(self, delay_s: float, callback: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, callback)

    def _handshake_timed_out(self) -> None:
        timeout = self._options.handshake_timeout_s
        self.protocol.fail(
            ConnectionLost(f"{self.address} did not finish the handshake within {timeout:g} s")
        )

    def _watch(self, interval_s: float) -> None:
        self._liveness = Liveness(interval_s, self._loop.time(), self._observed())
        self._set_timer(interval_s, self._tick)

    def _observed(self) -> Observed:
        return Observed(self._reads, *self.protocol.progress(), bool(self._pauses))

    def _tick(self) -> None:
        interval = self._liveness.interval_s
        verdict = self._liveness.tick(self._loop.time(), self._observed())
        if verdict is Verdict.SILENT or verdict is Verdict.STALLED:
            self._cut(f"{verdict.value} for {2 * interval:g} s")
            return
        if verdict is Verdict.PING and self.writable:
            self.protocol.ping()
        self._set_timer(interval, self._tick)

    def _cut(self, reason: str) -> None:
        error = ConnectionLost(f"{self.describe()} {reason}")
        self.fault(error)
        self.abort(error)

    def _wind_up(self, error: MagnetarError | None) -> None:
        """Nothing more is written; what was has `close_timeout_s` to leave."""
        self._end(State.CLOSING, error)
        if self._pieces:
            self._flush()
        self._set_timer(self._options.close_timeout_s, self._socket.abort)
        self._loop.call_soon(self._report_loss)

    def _end(self, state: State, error: MagnetarError | None) -> None:
        self.state = state
        self.error = self.error or error
        self.writable = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _report_loss(self) -> None:
        if not self._loss_reported:
            self._loss_reported = True
            try:
                self.protocol.connection_lost(self.error)
            except Exception:
                _log.exception("connection_lost of %s failed", self.describe())
            self._probe = self._probe or self._loop.create_future()
            self._probe.set_result(None)


def _join_small(pieces: Sequence[Piece]) -> list[Piece]:
    """Joins neighbouring small pieces; large ones stay as they are."""
    joined: list[Piece] = []
    small: list[Piece] = []
    for piece in pieces:
        if len(piece) < LARGE_BYTES:
            small.append(piece)
            continue
        if small:
            joined.append(b"".join(small))
            small = []
        joined.append(piece)
    if small:
        joined.append(b"".join(small))
    return joined

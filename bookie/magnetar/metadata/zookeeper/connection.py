"""One TCP connection to a ZooKeeper server: frames, pipelined requests, watch events.

Requests of one turn of the loop leave in one write. The server answers in order, so answers are matched with a queue;
an answer out of order ends the connection. When the connection ends, every request that waits is answered with LOST at
once: it may or may not have been carried out. A request whose caller was cancelled stays in the queue until its answer
came, and takes no more than its place.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

from magnetar.proto.errors import MalformedFrame

from . import wire
from .wire import Handshake, Opcode, Request, ZooKeeperError

# An answer is bounded by what a server holds in one node or listing: a million children of 50 bytes.
MAX_FRAME_BYTES = 64 * 1024 * 1024
# The first answer has 37 bytes; what is longer comes from something that is not ZooKeeper.
_MAX_HANDSHAKE_BYTES = 1024
# Requests without an answer on one connection; more wait for their turn (`room`).
MAX_PENDING = 4096
_MAX_XID = 2**31 - 1
_ABORT_AFTER_S = 1.0
_LENGTH_BYTES = 4

# Error and frame; the error LOST stands for a connection that ended before the answer.
Answer = tuple[int, bytes]
LOST = -4  # KeeperException.Code.CONNECTIONLOSS, which no server sends


class Progress:
    """The newest state of the ensemble that this process has seen, over all its connections."""

    def __init__(self) -> None:
        self.zxid = 0


class ConnectionOwner(Protocol):
    """What a connection reports to its session; always from the loop."""

    def opened(self, connection: Connection) -> None:
        """The transport is there; nothing was sent."""

    def introduced(self, connection: Connection, handshake: Handshake) -> None:
        """The first answer."""

    def heard(self, connection: Connection, answered_sent_at: float | None, pong: bool) -> None:
        """Bytes arrived; the send time of the newest write of which they answer something, if they do."""

    def event(self, path: str) -> None:
        """A watch reports a change of this node."""

    def disconnected(self, connection: Connection, reason: str) -> None:
        """The connection is over; also for one that was closed from here."""


class Connection(asyncio.Protocol):
    """See the module docstring."""

    def __init__(self, owner: ConnectionOwner, clock: Callable[[], float], progress: Progress) -> None:
        self._owner = owner
        self._clock = clock
        self._progress = progress
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reason = "the server closed the connection"
        self._handshaken = False
        self._buffer = bytearray()  # the beginning of a frame
        self._wanted = 0  # no frame is complete before the buffer has so many bytes
        self._xid = 0
        self._pending: deque[tuple[int, asyncio.Future[Answer]]] = deque()
        self._outgoing: list[bytes] = []  # requests of this turn
        self._first_outgoing = 0  # xid of the first of them
        # First xid and time of the writes that nothing answered yet.
        self._writes: deque[tuple[int, float]] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()  # calls of `room`
        self._abort: asyncio.TimerHandle | None = None
        self.zxid = 0  # the server shows at least this state
        self.over = False
        self.closed: asyncio.Future[None] = self._loop.create_future()  # done when the transport is gone

    @property
    def pending(self) -> int:
        """Requests that wait for their answer."""
        return len(self._pending)

    # --- sending -----------------------------------------------------------------------------------------------------

    def introduce(self, first: bytes, credentials: str | None) -> None:
        """Sends the first frame, and who we are behind it."""
        assert self._transport is not None
        self.zxid = self._progress.zxid  # the frame names it, and a server that is behind refuses
        self._transport.write(first if credentials is None else first + wire.auth_frame(credentials))

    def request(self, request: Request) -> asyncio.Future[Answer]:
        """Sends a request at the end of this turn. The future never fails; if it is cancelled, so is nothing else."""
        future: asyncio.Future[Answer] = self._loop.create_future()
        if self.over:
            future.set_result((LOST, b""))
            return future
        self._xid = xid = self._xid % _MAX_XID + 1
        self._pending.append((xid, future))
        if not self._outgoing:
            self._first_outgoing = xid
            self._loop.call_soon(self._flush)
        self._outgoing.append(wire.frame(xid, request.opcode, request.record))
        return future

    async def room(self) -> None:
        """Waits until a place in the queue is free, or the connection is over; look again then."""
        place: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._free_place()  # for another one
            raise

    def ping(self) -> None:
        """Answered by `heard`."""
        self._flush()
        if self._transport is not None:
            self._transport.write(wire.frame(wire.XID_PING, Opcode.PING, b""))

    def close(self) -> None:
        """Closes the transport when what was written has left, or after a second."""
        self._flush()
        self._end("it was closed")
        if self._transport is not None and self._abort is None:
            self._transport.close()
            self._abort = self._loop.call_later(_ABORT_AFTER_S, self._transport.abort)

    def _flush(self) -> None:
        if self._outgoing and self._transport is not None:
            if not self.over:
                self._writes.append((self._first_outgoing, self._clock()))
                self._transport.write(b"".join(self._outgoing))
            self._outgoing.clear()

    # --- receiving ---------------------------------------------------------------------------------------------------

    def not_opened(self) -> None:
        """There will be no transport."""
        if self._transport is None and not self.closed.done():
            self.closed.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none of its subclasses
        if self.over:
            self._transport.abort()
        else:
            self._owner.opened(self)

    def data_received(self, data: bytes) -> None:
        if self.over:
            return
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._wanted:
                self._owner.heard(self, None, False)
                return
            data = bytes(self._buffer)
            self._buffer.clear()
        try:
            rest, answered, pong = self._frames(data)
        except MalformedFrame as error:
            self._fail(str(error))
            return
        if rest < len(data):
            self._buffer += memoryview(data)[rest:]
        self._owner.heard(self, self._sent_at(answered), pong)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._abort is not None:
            self._abort.cancel()
        if exc is not None:
            self._reason = f"the connection broke: {exc}"
        self._end(self._reason)
        if not self.closed.done():
            self.closed.set_result(None)

    def _frames(self, data: bytes) -> tuple[int, int, bool]:
        """Takes all whole frames: where the rest begins, the xid that was answered last (0: none), whether a ping was."""
        at, answered, pong = 0, 0, False
        total, decode_header = len(data), wire.decode_header
        self._wanted = _LENGTH_BYTES
        while total - at >= _LENGTH_BYTES:
            size = int.from_bytes(data[at : at + _LENGTH_BYTES], "big")
            if size > (MAX_FRAME_BYTES if self._handshaken else _MAX_HANDSHAKE_BYTES):
                raise MalformedFrame(
                    f"a frame of {size} bytes; at most {MAX_FRAME_BYTES} are allowed"
                    if self._handshaken
                    else "what listens there is not ZooKeeper"
                )
            end = at + _LENGTH_BYTES + size
            if end > total:
                self._wanted = end - at
                break
            frame = data[at + _LENGTH_BYTES : end]
            at = end
            if not self._handshaken:
                self._handshaken = True
                self._owner.introduced(self, wire.decode_handshake(frame))
                continue
            xid, zxid, error = decode_header(frame)
            if xid > 0:
                self._answer(xid, error, frame)
                answered = xid
                if zxid > self.zxid:
                    self.zxid = zxid
                    if zxid > self._progress.zxid:
                        self._progress.zxid = zxid
            elif xid == wire.XID_PING:
                pong = True
            elif xid == wire.XID_EVENT:
                self._owner.event(wire.decode_event(frame))
            elif xid == wire.XID_AUTH and error:
                raise MalformedFrame(f"the credentials were refused (error {error})")
        return at, answered, pong

    def _answer(self, xid: int, error: int, frame: bytes) -> None:
        if not self._pending or self._pending[0][0] != xid:
            raise MalformedFrame(f"an answer to request {xid}, which is not the next")
        if error in (ZooKeeperError.SESSION_EXPIRED, ZooKeeperError.SESSION_MOVED):
            # The next handshake says what became of the session.
            raise MalformedFrame("the server serves this session no longer")
        future = self._pending.popleft()[1]
        if not future.done():
            future.set_result((error, frame))
        if self._waiting:
            self._free_place()

    def _sent_at(self, answered: int) -> float | None:
        sent_at = None
        # Xids start again behind 2^31, hence the distance in place of a comparison.
        while answered and self._writes and (answered - self._writes[0][0]) % _MAX_XID <= _MAX_XID // 2:
            sent_at = self._writes.popleft()[1]
        return sent_at

    def _free_place(self) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return

    def _fail(self, reason: str) -> None:
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    def _end(self, reason: str) -> None:
        if self.over:
            return
        self.over = True
        for _, future in self._pending:
            if not future.done():
                future.set_result((LOST, b""))
        self._pending.clear()
        self._writes.clear()
        self._buffer.clear()
        while self._waiting:
            self._free_place()
        self._owner.disconnected(self, reason)

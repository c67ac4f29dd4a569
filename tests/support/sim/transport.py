"""One end of a simulated TCP connection, as asyncio's transports behave.

    write -> outgoing (the write buffer that the protocol sees) -> on the wire -> the peer's `arrived` -> data_received

What is on the wire and in the peer's `arrived` together is bounded by a window, as by the kernel's two socket buffers. The
end of the stream (FIN) travels behind the bytes; a reset overtakes them. What a protocol receives is always a prefix of what
its peer wrote.

A reset is known to the socket first. The protocol learns of it as from a kernel: by the next write at once, by a read
once what had arrived is read; while reading is paused and nothing is written, not at all.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from support.sim.process import SimProcess, owner_of
from support.sim.trace import digest

if TYPE_CHECKING:
    from support.sim.network import SimNetwork

WINDOWS = (16 * 1024, 64 * 1024, 256 * 1024, 1024 * 1024)
READ_BYTES = 256 * 1024


class SimTransport(asyncio.Transport):
    """Made in pairs by `SimNetwork.connect`; `peer` is the other end."""

    peer: SimTransport

    def __init__(
        self,
        network: SimNetwork,
        number: int,
        side: str,
        context: contextvars.Context,
        here: tuple[str, int],
        there: tuple[str, int],
    ) -> None:
        super().__init__({"sockname": here, "peername": there})
        self.lost = False  # connection_lost is on its way or done
        self.incoming_stalled = False
        self.process: SimProcess | None = owner_of(context)
        self._network = network
        self._loop = network.loop
        self._name = f"{number}{side}"
        self._context = context
        self._protocol: asyncio.Protocol | None = None
        self._window = self._loop.rng.choice(WINDOWS)
        self._outgoing = bytearray()
        self._unread = (
            0  # bytes sent that the peer's protocol has not got, or of which this end does not know it yet
        )
        # (moment, bytes) of acknowledgements on their way here, in order. They are looked at when the window matters; a
        # timer waits for the first only while bytes wait for room.
        self._acknowledgements: deque[tuple[float, int]] = deque()
        self._awaits_room = False  # such a timer is set
        self._wire: deque[bytes | None] = (
            deque()
        )  # pieces on their way to the peer, in order; None is the end
        self._due = 0  # pieces of _wire whose time has come; more than 0 only while the peer is stalled
        self._delivering = False  # a _deliver is ready to run
        self._last_arrival = 0.0  # nothing sent later arrives before this moment
        self._cut = False  # nothing that this end sends arrives any more, and no reset either
        self._powerless = False  # the machine of this end is without power: nothing answers here
        self._error: Exception | None = None  # that the socket has, and the protocol does not know yet
        self._arrived = bytearray()
        self._end_arrived = False
        self._end_told = False
        self._closing = False
        self._eof_written = False  # write_eof was called
        self._end_wanted = False  # the end is due behind what is buffered
        self._end_sent = False
        self._reading_paused = False
        self._writing_paused = False
        self._low, self._high = 16 * 1024, 64 * 1024

    # --- asyncio.Transport ---------------------------------------------------------------------------------------

    def get_protocol(self) -> asyncio.Protocol:
        """The protocol that gets all callbacks."""
        assert self._protocol is not None
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """See asyncio."""
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """sockname, peername, socket."""
        if name == "socket":
            from support.sim.network import SimSocket

            return SimSocket(super().get_extra_info("sockname"))
        return super().get_extra_info(name, default)

    def is_closing(self) -> bool:
        """See asyncio."""
        return self._closing or self.lost

    def is_reading(self) -> bool:
        """See asyncio."""
        return not (self._reading_paused or self.is_closing())

    def pause_reading(self) -> None:
        """See asyncio (no error when closing or paused)."""
        self._reading_paused = True

    def resume_reading(self) -> None:
        """See asyncio."""
        if self._reading_paused:
            self._reading_paused = False
            self._deliver_soon()

    def get_write_buffer_size(self) -> int:
        """Bytes that the network has not taken yet."""
        return len(self._outgoing)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """(low, high)."""
        return self._low, self._high

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """See asyncio."""
        if high is None:
            high = 64 * 1024 if low is None else 4 * low
        self._high, self._low = high, high // 4 if low is None else low
        self._maybe_pause()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Never blocks; what the window has no room for is buffered."""
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(f"data: a bytes-like object is required, not {type(data).__name__}")
        if self._eof_written:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self.lost or not data or self._dead():
            return
        if self._error is not None:
            self._lose(self._error)
            return
        self._outgoing += data  # also while it closes: then something is buffered, and this leaves behind it
        self._send()
        self._maybe_pause()

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """One write of all the parts."""
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        """The end travels behind what is buffered; reading goes on."""
        if self._end_wanted or self._closing or self.lost or self._dead():
            return
        if self._error is not None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected (simulated)")
        self._eof_written = self._end_wanted = True
        self._maybe_send_end()

    def can_write_eof(self) -> bool:
        """See asyncio."""
        return True

    def close(self) -> None:
        """Sends what is buffered, then the end; connection_lost(None) when it is sent."""
        if self._closing or self.lost:
            return
        self._closing = True
        if not self._outgoing:
            self._finish_closing()

    def abort(self) -> None:
        """Drops what is buffered. The kernel closes as ever: what it has taken still leaves, and the end behind it."""
        if self.lost:
            return
        self._lose(None)
        self._close_socket()

    # --- what the network does to it -------------------------------------------------------------------------------

    def start(
        self,
        factory: Callable[[], asyncio.Protocol],
        started: asyncio.Future[None] | None = None,
        accepts: Callable[[], bool] = lambda: True,
    ) -> None:
        """Makes the protocol and tells it of the connection, in the name of its process.

        `accepts` False: the listener was closed while the connection stood in its backlog, which resets it.
        """

        def connected() -> None:
            if not accepts():
                self.lost = True
                self._reset_peer()
                return
            self._protocol = factory()
            self._protocol.connection_made(self)
            self._deliver_soon()
            if started is not None and not started.done():
                started.set_result(None)

        self._soon(connected)

    def break_off(self, error: Exception) -> None:
        """The connection is broken: nothing that this end sends arrives any more, and it learns of that at its own time.

        Until then it goes on writing, as far as the window has room: a stream whose middle is lost has lost its rest.
        """
        self._cut = True
        self._wire.clear()
        self._due = 0
        if not self.lost:
            self._outside(self._network.draw_latency() * 3, self._fail, error)

    def owner_died(self) -> None:
        """The kernel closes the dead process's socket: the end behind what was sent, or a reset.

        One that the process had closed is the kernel's business already.
        """
        if self.lost:
            return
        self.lost = True
        self._outgoing.clear()
        if self._loop.rng.random() < 0.5:
            self._reset_peer()
        else:
            self._close_socket()

    def power_failed(self) -> None:
        """The machine of this end is off: the first of what was on its way arrives, and then nothing at all."""
        self.lost = self._powerless = True
        self._outgoing.clear()
        for _ in range(self._loop.rng.randint(0, len(self._wire))):
            self._wire.pop()
        self._due = min(self._due, len(self._wire))

    def power_returned(self) -> None:
        """The machine runs again and knows nothing of this connection: what the peer has sent meets a reset."""
        if self._powerless:
            self._powerless = False
            self.arrive()

    def arrive(self) -> None:
        """Takes what is due from the wire of the peer, unless nothing arrives at this end."""
        if self.incoming_stalled or self._powerless:
            return
        peer = self.peer
        while peer._due and peer._wire:
            peer._due -= 1
            piece = peer._wire.popleft()
            if self._error is not None:  # nothing arrives behind a reset
                continue
            if piece is None:
                self._end_arrived = True
            elif self.lost:  # a closed socket answers bytes with a reset
                self._reset_peer()
            else:
                self._arrived += piece
        self._deliver_soon()
        if self._outgoing:  # acknowledgements may have been held back as well
            self._await_room()

    # --- inside --------------------------------------------------------------------------------------------------

    def _dead(self) -> bool:
        return self.process is not None and not self.process.alive

    def _soon(self, callback: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_soon(callback, *arguments, context=self._context)

    def _outside(self, delay: float, callback: Callable[..., None], *arguments: Any) -> None:
        # Even what the network does to this end runs in the name of its process: a dead one gets no callback.
        self._loop.call_precisely(self._loop.now + delay, callback, *arguments, context=self._context)

    def _send(self) -> None:
        """Moves buffered bytes onto the wire as far as the window has room."""
        outgoing, network, now = self._outgoing, self._network, self._loop.now
        acknowledgements = self._acknowledgements
        while acknowledgements and acknowledgements[0][0] <= now and not self.incoming_stalled:
            self._unread -= acknowledgements.popleft()[1]
        while outgoing and self._unread < self._window:
            size = min(len(outgoing), self._window - self._unread)
            if network.cut_in_pieces and size > 1 and self._loop.rng.random() < 0.1:
                size = self._loop.rng.randrange(1, size)
            piece = bytes(outgoing[:size])
            del outgoing[:size]
            self._unread += size
            self._put_on_wire(piece)
        if outgoing:
            self._await_room()

    def _put_on_wire(self, piece: bytes | None) -> None:
        if self._cut:
            return
        # An arrival takes the oldest piece, whichever it was made for: the order holds although latencies differ.
        self._wire.append(piece)
        arrival = max(self._loop.now + self._network.draw_latency(), self._last_arrival)
        self._last_arrival = arrival
        self._loop.happens_at(arrival, self._piece_arrives)

    def _piece_arrives(self) -> None:
        self._due = min(self._due + 1, len(self._wire))
        self.peer.arrive()

    def _deliver_soon(self) -> None:
        if (
            not self._delivering
            and not self.lost
            and (self._arrived or self._end_arrived or self._error is not None)
        ):
            self._delivering = True
            self._soon(self._deliver)

    def _deliver(self) -> None:
        """Gives the protocol what has arrived, then the end of the stream, or the error that ended it."""
        self._delivering = False
        if self.lost or self._protocol is None or self._reading_paused or self._closing:
            return
        if self._arrived:
            size = min(len(self._arrived), READ_BYTES)
            if self._network.cut_in_pieces and size > 1 and self._loop.rng.random() < 0.1:
                size = self._loop.rng.randrange(1, size)
            data = bytes(self._arrived[:size])
            del self._arrived[:size]
            self.peer._acknowledged_later(size)
            self._loop.trace.record("recv", self._name, size, digest(data))
            self._protocol.data_received(data)
            self._deliver_soon()
        elif self._end_arrived:  # and once it knows, nothing is read any more
            if not self._end_told:
                self._end_told = True
                if not self._protocol.eof_received():
                    self.close()
        elif self._error is not None:
            self._lose(self._error)

    def _acknowledged_later(self, size: int) -> None:
        """The peer's protocol has got so many bytes; this end learns of it a latency later."""
        acknowledgements = self._acknowledgements
        moment = self._loop.now + self._network.draw_latency()
        if acknowledgements:
            moment = max(moment, acknowledgements[-1][0])
        acknowledgements.append((moment, size))
        if self._outgoing:
            self._await_room()

    def _await_room(self) -> None:
        # Without an acknowledgement on its way the peer has not read yet: this is called again when it does.
        if not self._awaits_room and self._acknowledgements and not self.lost:
            self._awaits_room = True
            self._loop.call_precisely(self._acknowledgements[0][0], self._room, context=self._context)

    def _room(self) -> None:
        """The first acknowledgement is here, and perhaps more of them."""
        self._awaits_room = False
        if self.lost or self.incoming_stalled:
            return
        self._send()
        if self._writing_paused and len(self._outgoing) <= self._low and self._protocol is not None:
            self._writing_paused = False
            self._protocol.resume_writing()
        self._maybe_send_end()
        if self._closing and not self._outgoing:
            self._finish_closing()

    def _maybe_pause(self) -> None:
        if not self._writing_paused and len(self._outgoing) > self._high and self._protocol is not None:
            self._writing_paused = True
            self._protocol.pause_writing()

    def _finish_closing(self) -> None:
        if not self.lost:
            self._close_socket()
            self._lose(None)

    def _close_socket(self) -> None:
        """Unread bytes at a close make the kernel send a reset instead of the end."""
        if self._arrived:
            self._reset_peer()
        else:
            self._end_wanted = True
            self._maybe_send_end()

    def _maybe_send_end(self) -> None:
        if self._end_wanted and not self._end_sent and not self._outgoing:
            self._end_sent = True
            self._put_on_wire(None)

    def _reset_peer(self) -> None:
        peer = self.peer
        if not (peer.lost or self._cut):
            reset = ConnectionResetError(errno.ECONNRESET, "connection reset by peer (simulated)")
            peer._outside(self._network.draw_latency(), peer._reset, reset)

    def _reset(self, error: Exception) -> None:
        if self.incoming_stalled:
            self._outside(0.05, self._reset, error)  # a partition holds resets back as well
        else:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """The socket has an error, which the protocol learns by its next write or read."""
        if self.lost or self._error is not None:
            return
        self._error = error
        if self._outgoing:
            self._lose(error)
        else:
            self._deliver_soon()

    def _lose(self, error: Exception | None) -> None:
        """Calls `connection_lost` of the protocol, once."""
        if self.lost:
            return
        self.lost = True
        self._outgoing.clear()
        self._loop.trace.record("lost", self._name, type(error).__name__)

        def tell() -> None:
            assert self._protocol is not None
            self._protocol.connection_lost(error)

        self._soon(tell)

"""The simulated network: listeners, and links between two transports each.

A link is a TCP connection: bytes arrive in order, after a latency drawn from the seed, cut into pieces as the seed has it,
through a window of bounded size, so a peer that stops reading makes the other side's write buffer grow. It can be cut
(both ends see a reset at their own time, what was on its way is lost from some byte on) or stalled (a partition, of all or
of one process from another in one direction: nothing arrives until it heals). When a process dies its peers see the end of
the stream or a reset, after a latency. When its machine loses its power, they see nothing: connecting hangs, and what they
send meets a reset when the machine runs again.

Hosts are names; 127.0.0.1, localhost, 0.0.0.0 and "" are the same one.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from support.sim.process import SimProcess, current_process
from support.sim.transport import SimTransport

if TYPE_CHECKING:
    from support.sim.loop import SimLoop

LOOPBACK = frozenset({"", "127.0.0.1", "localhost", "0.0.0.0", "::", "::1"})
FIRST_FREE_PORT = 40_000


def host_name(host: Any) -> str:
    """The host that a listener or a client means."""
    text = "" if host is None else str(host)
    return "127.0.0.1" if text in LOOPBACK else text


class SimServer(asyncio.AbstractServer):
    """A listening socket. Made by `SimNetwork.listen`."""

    def __init__(
        self, network: SimNetwork, factory: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> None:
        self.factory = factory
        self.process = current_process()
        self.context = contextvars.copy_context()
        self.address = (host, port)
        self._network = network

    @property
    def sockets(self) -> tuple[SimSocket, ...]:
        """One per address; empty once closed."""
        return (SimSocket(self.address),) if self.is_serving() else ()

    def is_serving(self) -> bool:
        """See asyncio."""
        return self._network.listeners.get(self.address) is self

    def close(self) -> None:
        """Takes no more connections; those that exist stay."""
        if self.is_serving():
            del self._network.listeners[self.address]

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """See asyncio."""
        return self._network.loop

    async def start_serving(self) -> None:
        """It does already."""

    async def serve_forever(self) -> None:
        """Until cancelled."""
        await self._network.loop.create_future()

    async def wait_closed(self) -> None:
        """See asyncio (3.11: returns at once)."""


class SimSocket:
    """As much of a socket as production code looks at."""

    def __init__(self, address: tuple[str, int], family: int = 2) -> None:
        self._address = address
        self.family = family

    def getsockname(self) -> tuple[str, int]:
        """(host, port)."""
        return self._address

    def setsockopt(self, *_: Any) -> None:
        """Options have no meaning here."""

    def getsockopt(self, *_: Any) -> int:
        """Options have no meaning here."""
        return 0

    def fileno(self) -> int:
        """There is no descriptor."""
        return -1


class Link:
    """One connection: the client's transport and the server's."""

    def __init__(self, number: int, client: SimTransport, server: SimTransport) -> None:
        self.number = number
        self.client = client
        self.server = server
        self._cut = False

    @property
    def alive(self) -> bool:
        """Neither end knows of an end, and the link is not cut."""
        return not (self.client.lost or self.server.lost or self._cut)

    @property
    def over(self) -> bool:
        """Both ends have ended."""
        return self.client.lost and self.server.lost

    def cut(self) -> None:
        """The connection breaks: each end learns it in its own time."""
        self._cut = True
        for end in (self.client, self.server):
            end.break_off(ConnectionResetError(errno.ECONNRESET, "connection reset (simulated)"))

    def stall(self) -> None:
        """Nothing arrives any more, either way; neither end is notified."""
        for end in (self.client, self.server):
            end.incoming_stalled = True

    def heal(self) -> None:
        """What was held back by `stall` arrives."""
        for end in (self.client, self.server):
            end.incoming_stalled = False
            end.arrive()


class SimNetwork:
    """All listeners and links of a run. Latencies are virtual seconds, uniform between the two."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.latency = (30e-6, 400e-6)
        self.tail_latency = (0.01, 0.02)  # chance and size (mean seconds) of a much later packet
        self.cut_in_pieces = True  # split reads at random bytes
        self.partitioned = False  # True: links stall, and new connections hang
        self.listeners: dict[tuple[str, int], SimServer] = {}
        self.links: dict[int, Link] = {}
        self._next_port = FIRST_FREE_PORT
        self._next_link = 0
        self._hanging: list[asyncio.Future[None]] = []  # connects that wait for the partition to heal
        self._powerless: dict[tuple[str, int], str] = {}  # address -> name of the process that listened there
        self._blocked: dict[tuple[str, str], int] = {}  # (from, to) names of processes -> how often blocked

    def draw_latency(self) -> float:
        """Virtual seconds that one packet takes."""
        rng = self.loop.rng
        chance = rng.random
        least, most = self.latency
        latency = least + (most - least) * chance()
        if chance() < self.tail_latency[0]:
            latency += rng.expovariate(1 / self.tail_latency[1])
        return latency

    def listen(self, factory: Callable[[], asyncio.Protocol], host: Any, port: int) -> SimServer:
        """Raises OSError(EADDRINUSE) as a real socket does."""
        name = host_name(host)
        if port == 0:
            self._next_port += 1
            port = self._next_port
        if (name, port) in self.listeners:
            raise OSError(errno.EADDRINUSE, f"error while attempting to bind on {(name, port)}: in use")
        server = self.listeners[name, port] = SimServer(self, factory, name, port)
        self.loop.trace.record("listen", name, port)
        return server

    async def connect(
        self, factory: Callable[[], asyncio.Protocol], host: Any, port: int
    ) -> tuple[SimTransport, asyncio.Protocol]:
        """Makes a link. Hangs while the network is partitioned or the machine has no power."""
        caller = current_process()
        address = host_name(host), port
        await self._packet()
        while (
            self.partitioned
            or address in self._powerless
            or self._handshake_blocked(caller, self.listeners.get(address))
        ):
            healed: asyncio.Future[None] = self.loop.create_future()
            self._hanging.append(healed)
            await healed
            await self._packet()
        server = self.listeners.get(address)
        if server is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"Connect call failed ({host!r}, {port})")
        self._next_link += 1
        self._next_port += 1
        number = self._next_link
        here, there = (host_name(host), self._next_port), server.address
        client = SimTransport(self, number, "c", contextvars.copy_context(), here, there)
        accepted = SimTransport(self, number, "s", server.context.copy(), there, here)
        client.peer, accepted.peer = accepted, client
        self.links[number] = Link(number, client, accepted)
        self.loop.trace.record("connect", number, port)
        # One that the closing listener had accepted already goes on; one in its backlog does not.
        accepted.start(server.factory, accepts=lambda: server.is_serving() or self.loop.rng.random() < 0.5)
        started = self.loop.create_future()
        client.start(factory, started)
        try:
            await started
        except BaseException:
            client.close()
            raise
        return client, client.get_protocol()

    async def _packet(self) -> None:
        """Waits as long as one takes."""
        arrived: asyncio.Future[None] = self.loop.create_future()
        self.loop.call_precisely(self.loop.now + self.draw_latency(), _wake, arrived)
        await arrived

    def live_links(self) -> list[Link]:
        """Links whose two ends still stand, oldest first."""
        return [link for link in self._links() if link.alive]

    def _links(self) -> list[Link]:
        for number in [number for number, link in self.links.items() if link.over]:
            del self.links[number]
        return list(self.links.values())

    def cut_one(self) -> bool:
        """Cuts a link that the seed chooses; False when there is none."""
        links = self.live_links()
        if not links:
            return False
        link = self.loop.rng.choice(links)
        self.loop.trace.fault("cut", link.number)
        link.cut()
        return True

    def partition(self, seconds: float) -> None:
        """Nothing arrives anywhere for so long; connections stay up unless somebody's keep-alive gives up."""
        if self.partitioned:
            return
        self.loop.trace.fault("partition", f"{seconds:.3f}")
        self.partitioned = True
        for link in self._links():
            link.stall()
        self.loop.call_outside(seconds, self._heal)

    def _heal(self) -> None:
        self.loop.trace.record("heal")
        self.partitioned = False
        self._restall()

    def block(self, source: str, target: str, seconds: float) -> None:
        """A one-way partition: nothing that the process `source` sends arrives at `target` for so long (names)."""
        self.loop.trace.fault("one_way", source, target, f"{seconds:.3f}")
        self._blocked[source, target] = self._blocked.get((source, target), 0) + 1
        self._restall()
        self.loop.call_outside(seconds, self._unblock, source, target)

    def blocked(self, source: str, target: str) -> bool:
        """Whether `block` holds back what goes from one process to the other."""
        return (source, target) in self._blocked

    def unblock_all(self) -> None:
        """Every `block` is over."""
        self._blocked.clear()
        self._restall()

    def _unblock(self, source: str, target: str) -> None:
        count = self._blocked.pop((source, target), 0)
        if count > 1:
            self._blocked[source, target] = count - 1
        elif count:
            self.loop.trace.record("unblock", source, target)
            self._restall()

    def _handshake_blocked(self, caller: SimProcess | None, server: SimServer | None) -> bool:
        """Whether SYN or its answer is held back."""
        if not self._blocked or caller is None or server is None or server.process is None:
            return False
        names = caller.name, server.process.name
        return names in self._blocked or names[::-1] in self._blocked

    def _restall(self) -> None:
        """Sets for each end whether something arrives there, and lets what hung try again."""
        for link in self._links():
            for end, peer in ((link.client, link.server), (link.server, link.client)):
                names = (peer.process.name if peer.process else "", end.process.name if end.process else "")
                stalled = self.partitioned or names in self._blocked
                if end.incoming_stalled and not stalled:
                    end.incoming_stalled = False
                    end.arrive()
                end.incoming_stalled = stalled
        self._try_again()

    def _try_again(self) -> None:
        hanging, self._hanging = self._hanging, []
        for future in hanging:
            _wake(future)

    def process_died(self, process: SimProcess, *, power: bool) -> None:
        """Closes its listeners; its peers are notified after a latency, or not at all if its machine lost power."""
        for address in [a for a, server in self.listeners.items() if server.process is process]:
            del self.listeners[address]
            if power:
                self._powerless[address] = process.name
        for link in self._links():
            for end in (link.client, link.server):
                if end.process is process:
                    end.power_failed() if power else end.owner_died()

    def power_returned(self, name: str) -> None:
        """The machine of the process of this name runs again."""
        addresses = [address for address, of in self._powerless.items() if of == name]
        for address in addresses:
            del self._powerless[address]
        for link in self._links():
            for end in (link.client, link.server):
                if end.process is not None and end.process.name == name:
                    end.power_returned()
        if addresses:
            self._try_again()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

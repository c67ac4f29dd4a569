"""TCP relays in front of the daemons of a cluster: partitions, both ways and one way, and slow links.

    async with Lines() as lines:
        line = await lines.line("broker-1", zookeeper)    # relays from this daemon to each ZooKeeper server
        await line.open(process)                          # a relay in front of it: 127.0.1.N, on its own port
        with lines.held([("broker-1", "zookeeper")]):     # nothing gets from the first to the second
            ...
        with lines.slowed([("broker-1", "bookie-2")], 0.05):

A link is (source, target), one direction: names of daemons, "zookeeper" or "clients". What is withheld stays in the sockets,
as with packets that are sent again and again, and arrives when the link is healed. A relay finds out who connects by the
process that owns the socket at the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.service_process import ServiceProcess

from support.zookeeper import Ensemble

Link = tuple[str, str]

CLIENTS = "clients"
ZOOKEEPER = "zookeeper"
_CHUNK = 1 << 18


class Line:
    """The relays of one daemon; made by `Lines.line`."""

    def __init__(self, lines: Lines, name: str, host: str) -> None:
        self.host = host  # where others find the daemon
        self.zookeeper_hosts = ""  # where it finds ZooKeeper
        self._lines = lines
        self._name = name
        self.process: ServiceProcess | None = None

    async def lead_to(self, zookeeper: Ensemble) -> None:
        """Relays to each server."""
        addresses: list[str] = []
        for server in zookeeper.servers:
            port = await self._lines.listen(
                "127.0.0.1", 0, server.port, lambda _: self._name, ZOOKEEPER
            )  # nobody else knows it
            addresses.append(f"127.0.0.1:{port}")
        self.zookeeper_hosts = ",".join(addresses)

    async def open(self, process: ServiceProcess) -> None:
        """A relay in front of the daemon."""
        self.process = process
        port = process.ports["bookie" if process.command == "bookie" else "magnetar"]
        await self._lines.listen(self.host, port, port, self._lines.owner_of, self._name)


class Lines:
    """See the module docstring."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}
        self._servers: list[asyncio.Server] = []
        self._held: Counter[Link] = Counter()
        self._delays: dict[Link, float] = {}
        self._healed = asyncio.Event()
        self._pumps: set[asyncio.Task[None]] = set()
        self.withheld: Counter[Link] = Counter()  # how often something was held up on a link
        self.slowed_down: Counter[Link] = Counter()

    async def line(self, name: str, zookeeper: Ensemble) -> Line:
        """For a daemon that is to be started."""
        line = self._lines[name] = Line(self, name, f"127.0.1.{len(self._lines) + 1}")
        await line.lead_to(zookeeper)
        return line

    async def __aenter__(self) -> Lines:
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        self._held.clear()
        self._healed.set()
        for task in self._pumps:
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    # --- partitions --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def held(self, links: Iterable[Link]) -> Iterator[None]:
        """Nothing arrives on these links."""
        links = list(links)
        self._held.update(links)
        try:
            yield
        finally:
            self._held.subtract(links)
            self._healed.set()
            self._healed = asyncio.Event()

    @contextlib.contextmanager
    def slowed(self, links: Iterable[Link], delay_s: float) -> Iterator[None]:
        """Everything takes so much longer on these links."""
        links = list(links)
        self._delays.update(dict.fromkeys(links, delay_s))
        try:
            yield
        finally:
            for link in links:
                self._delays.pop(link, None)

    async def _passes(self, link: Link) -> None:
        """Returns when the link lets something through."""
        if delay_s := self._delays.get(link):
            self.slowed_down[link] += 1
            await asyncio.sleep(delay_s)
        if self._held[link] > 0:
            self.withheld[link] += 1
            while self._held[link] > 0:
                await self._healed.wait()

    # --- relays ------------------------------------------------------------------------------------------------------

    def owner_of(self, port: int) -> str:
        """The daemon whose socket has this port, else clients."""
        inode = _socket_of(port)
        for name, line in self._lines.items():
            if line.process is not None and line.process.running and inode in _sockets_of(line.process.pid):
                return name
        return CLIENTS

    async def listen(
        self, host: str, port: int, target_port: int, source: Callable[[int], str], target: str
    ) -> int:
        """A relay from there to 127.0.0.1:target_port; returns its port. `source`: who connects, by the port."""

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            name = source(writer.get_extra_info("peername")[1])
            self._spawn(self._relay(reader, writer, target_port, (name, target)))

        server = await asyncio.start_server(accepted, host, port, limit=_CHUNK)
        self._servers.append(server)
        found: int = server.sockets[0].getsockname()[1]
        return found

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._pumps.add(task)
        task.add_done_callback(self._pumps.discard)

    async def _relay(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int, link: Link
    ) -> None:
        writers = [writer]
        try:
            await self._passes(link)
            found = await asyncio.open_connection("127.0.0.1", port, limit=_CHUNK)
            writers.append(found[1])
            await asyncio.gather(
                self._pump(reader, found[1], link), self._pump(found[0], writer, (link[1], link[0]))
            )
        except OSError:
            pass
        finally:
            for each in writers:
                each.transport.abort()
            for each in writers:
                with contextlib.suppress(OSError):
                    await each.wait_closed()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: Link) -> None:
        """What is read is written, and the end of it too: that is news as well, and withheld like any other."""
        broken = False
        try:
            while data := await reader.read(_CHUNK):
                if self._held[link] > 0 or link in self._delays:
                    await self._passes(link)
                writer.write(data)
                await writer.drain()
        except (OSError, RuntimeError):  # uvloop raises the second for a transport that was aborted
            broken = True
        await self._passes(link)
        if broken or writer.transport.is_closing():
            writer.transport.abort()
        else:
            with contextlib.suppress(OSError, RuntimeError):
                writer.write_eof()


def _socket_of(port: int) -> str:
    """The inode of the connected socket with this local port; empty without one."""
    wanted = f":{port:04X}"
    for row in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = row.split()
        if fields[1].endswith(wanted) and fields[3] == "01":  # established
            return f"socket:[{fields[9]}]"
    return ""


def _sockets_of(pid: int) -> set[str]:
    """Of a process, as the links of its descriptors name them."""
    names: set[str] = set()
    with contextlib.suppress(OSError):
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                names.add(os.readlink(descriptor.path))
    return names

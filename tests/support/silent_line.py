"""A TCP line on which bytes may stop to arrive without a word, as behind a firewall that forgot its connections."""

import asyncio
import contextlib


class SilentLine:
    """To `port` of this machine, from a port of its own. Leave nothing open: `close`."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._server: asyncio.Server | None = None
        self._sinks: dict[asyncio.StreamWriter, asyncio.Event] = {}  # the event: it is silent from now on
        self._pumps: set[asyncio.Task[None]] = set()

    async def open(self, port: int = 0) -> int:
        """Listens; returns its port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    def fall_silent(self) -> None:
        """Nothing that is sent on the connections that there are arrives any more, no end of them either."""
        for silent in self._sinks.values():
            silent.set()

    async def close(self) -> None:
        """Ends every connection."""
        assert self._server is not None
        self._server.close()
        for task in self._pumps:
            task.cancel()
        if self._pumps:
            await asyncio.wait(self._pumps)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection("127.0.0.1", self._to)
        for source, sink in ((reader, forth), (back, writer)):
            self._sinks[sink] = asyncio.Event()
            task = asyncio.get_running_loop().create_task(self._pump(source, sink))
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        silent = self._sinks[sink]
        try:
            with contextlib.suppress(OSError):
                while (data := await source.read(1 << 16)) and not silent.is_set():
                    sink.write(data)
            if silent.is_set():
                await asyncio.Event().wait()
        finally:
            del self._sinks[sink]
            sink.transport.abort()

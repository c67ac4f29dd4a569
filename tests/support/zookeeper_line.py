"""A TCP line to a ZooKeeper server, in the loop of the test, which a test holds up, cuts, or lets lose an answer.

async with ZooKeeperLine(server.port) as line:
    store = await open_store(f"zk://{line.address}/root")
    line.hold()                         # a partition: nothing arrives any more, on either side; line.heal() ends it
    line.cut()                          # all connections break; new ones get through
    line.lose_answer(Opcode.CREATE)     # the next such request is done; the connection breaks in place of its answer
"""

from __future__ import annotations

import asyncio
import ssl
import struct

_FRAME = struct.Struct(">i")
_REQUEST = struct.Struct(">iii")  # length, xid, opcode
_ANSWER = struct.Struct(">ii")  # length, xid


class ZooKeeperLine:
    """See the module docstring."""

    def __init__(self, port: int, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._target = port
        self._host = host
        self._server: asyncio.Server | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._writers: dict[asyncio.StreamWriter, None] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._opcode: int | None = None
        self._xid: int | None = None  # whose answer is to be lost
        self.connections = 0  # how many there ever were
        self.lost_answers = 0
        self.port = 0

    @property
    def address(self) -> str:
        """As in a URL."""
        return f"[{self._host}]:{self.port}" if ":" in self._host else f"{self._host}:{self.port}"

    async def __aenter__(self) -> ZooKeeperLine:
        self._server = await asyncio.start_server(self._accept, self._host, 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        assert self._server is not None
        self._server.close()
        self.heal()
        self.cut()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    def hold(self) -> None:
        """Nothing arrives, whoever connects gets no answer."""
        self._open.clear()

    def heal(self) -> None:
        """What was held up arrives now."""
        self._open.set()

    def cut(self) -> None:
        """Breaks all connections."""
        for writer in self._writers:
            writer.transport.abort()

    def lose_answer(self, opcode: int) -> None:
        """To the next request of this kind."""
        self._opcode = opcode

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            to_server = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        for source, sink, answers in ((reader, to_server[1], False), (to_server[0], writer, True)):
            self._writers[sink] = None
            task = asyncio.ensure_future(self._pump(source, sink, answers=answers))
            self._tasks[task] = None
            task.add_done_callback(self._tasks.pop)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool) -> None:
        rest = b""
        try:
            while data := await source.read(1 << 18):
                await self._open.wait()
                rest = self._look(rest + data, answers=answers)
                if self._xid == -1:
                    self._xid = None
                    self.lost_answers += 1
                    self.cut()
                    return
                sink.write(data)
                await sink.drain()
        except (OSError, RuntimeError):  # uvloop raises the second for a transport that was aborted
            pass
        finally:
            self._writers.pop(sink, None)
            sink.transport.abort()

    def _look(self, data: bytes, *, answers: bool) -> bytes:
        """Looks at whole frames; returns the beginning of the next one."""
        at = 0
        while len(data) - at >= _FRAME.size:
            size = _FRAME.unpack_from(data, at)[0]
            if len(data) - at < size + _FRAME.size:
                break
            if answers and size >= 4 and _ANSWER.unpack_from(data, at)[1] == self._xid:
                self._xid = -1
            elif not answers and size >= 8 and _REQUEST.unpack_from(data, at)[2] == self._opcode:
                self._xid, self._opcode = _REQUEST.unpack_from(data, at)[1], None
            at += size + _FRAME.size
        return data[at:]

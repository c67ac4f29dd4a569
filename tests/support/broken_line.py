"""A TCP line to the broker of a service, which breaks at a command of our choice.

    with BrokenLine(service) as line:
        ...option("service_url", line.url)
        line.break_at(AttachLedgers, answered=True)   # the broker does it, and nobody hears of it
        ...
        line.mend()

Lookups that the broker answers lead through the line as well. Bookies are reached directly.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from magnetar.proto import commands as c
from magnetar.proto.frames import DEFAULT_MAX_FRAME_BYTES, FrameParser, encode_frame

from .service import Service


class BrokenLine:
    """See the module docstring."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._server: asyncio.Server | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._pumps: dict[int, asyncio.Task[None]] = {}
        self._at: type[c.Command] | None = None
        self._answered = False
        self._awaited: int | None = None  # request id whose answer breaks the line
        self.broken = False
        self.port = 0

    @property
    def url(self) -> str:
        """In place of the service's."""
        return f"magnetar://127.0.0.1:{self.port}"

    def break_at(self, command: type[c.Command], *, answered: bool) -> None:
        """When such a command comes: before the broker gets it, or (`answered`) once it has answered."""
        self._at, self._answered = command, answered

    def mend(self) -> None:
        """New connections get through again."""
        self._at = self._awaited = None
        self.broken = False

    def __enter__(self) -> BrokenLine:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(self, *_exc_info: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        # Its port stands in the broker's answers in place of the broker's, in as many digits.
        while len(str(self.port)) != len(str(self._service.port)):
            if self._server is not None:
                self._server.close()
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
            self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self._break()
        if self._pumps:
            await asyncio.wait(list(self._pumps.values()))

    def _break(self) -> None:
        self.broken = True
        for writer in self._writers.values():
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.broken:
            writer.transport.abort()
            return
        try:
            to_broker = await asyncio.open_connection("127.0.0.1", self._service.port)
        except OSError:
            writer.transport.abort()
            return
        for one, source, sink in ((0, reader, to_broker[1]), (1, to_broker[0], writer)):
            self._writers[id(sink)] = sink
            task = self._loop.create_task(self._pump(source, sink, to_client=bool(one)))
            self._pumps[id(task)] = task
            task.add_done_callback(lambda done: self._pumps.pop(id(done), None))

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, to_client: bool
    ) -> None:
        parser = FrameParser(DEFAULT_MAX_FRAME_BYTES)
        try:
            while data := await source.read(1 << 16):
                for header, payloads in parser.feed(data):
                    if self._breaks(header, to_client=to_client):
                        self._break()
                        return
                    for payload in payloads:
                        sink.write(encode_frame(self._led_here(header) if to_client else header, payload))
                await sink.drain()
        except OSError:
            pass
        finally:
            self._writers.pop(id(sink), None)
            sink.transport.abort()

    def _breaks(self, header: bytes, *, to_client: bool) -> bool:
        if self._at is None:
            return False
        command: Any = c.decode_command(header)
        if to_client:
            return self._awaited is not None and getattr(command, "request_id", -1) == self._awaited
        if isinstance(command, self._at):
            if not self._answered:
                return True
            self._awaited = command.request_id
        return False

    def _led_here(self, header: bytes) -> bytes:
        return header.replace(b"127.0.0.1:%d" % self._service.port, b"127.0.0.1:%d" % self.port)


__all__ = ["BrokenLine"]

"""Imports that a daemon does not need for its start: logs and HTTP.

structlog costs 90 ms and 7 MB, aiohttp with prometheus 220 ms and 14 MB. They are imported when they are first needed, in a
thread: an import of 200 ms in the event loop would delay every client. No request of a client waits for that thread.

    LazyLogs    buffers log records until structlog is imported, then hands over to it
    LazyHttp    listens from the start; the first connection waits in the backlog until aiohttp is imported
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from magnetar.runtime.connection.addresses import listen_error
from magnetar.runtime.imports import import_in_thread
from magnetar.runtime.tasks import awaited, begin

if TYPE_CHECKING:
    from magnetar.runtime.http import HttpServer, Pages

_MAX_RECORDS = 1000
_BACKLOG = 128
# For the request of a connection that is refused.
_REFUSAL_S = 1.0


class LazyLogs(logging.Handler):
    """The root logger's handler until structlog is imported.

    `flush` imports it at once, for a process that is about to end.
    """

    def __init__(self, *, format: Literal["auto", "console", "json"], level: str, daemon: str) -> None:
        super().__init__()
        self._format: Literal["auto", "console", "json"] = format
        self._level = level
        self._daemon = daemon
        self._records: deque[logging.LogRecord] = deque(maxlen=_MAX_RECORDS)
        self._loading: asyncio.Task[None] | None = None
        self._may_load = False
        self._done = False

    def install(self) -> None:
        """Becomes the only handler of the root logger."""
        root = logging.getLogger()
        root.handlers[:] = [self]
        root.setLevel(self._level.upper())
        for noisy in ("asyncio", "aiohttp.access"):
            logging.getLogger(noisy).setLevel(logging.WARNING)

    def ready(self) -> None:
        """The daemon has started: from now on a record starts the import of structlog."""
        self._may_load = True
        if self._records:
            self._load()

    def emit(self, record: logging.LogRecord) -> None:
        """Buffers the record with its text rendered."""
        record.message = record.getMessage()
        record.msg, record.args = record.message, None
        self._records.append(record)
        if self._may_load:
            self._load()

    def flush(self) -> None:
        """Writes all buffered records before it returns."""
        if self._records:
            self._hand_over()

    def _load(self) -> None:
        if self._loading is None:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                self._hand_over()
                return
            self._loading = begin(self._load_in_thread(), "import of structlog")

    async def _load_in_thread(self) -> None:
        await import_in_thread("structlog")
        self._hand_over()

    def _hand_over(self) -> None:
        if self._done:
            return
        self._done = True
        from magnetar.runtime.logs import configure_logging

        configure_logging(format=self._format, level=self._level, daemon=self._daemon)
        for record in self._records:
            logging.getLogger(record.name).handle(record)
        self._records.clear()


class LazyHttp:
    """/metrics, /health/... and the commands of `pages`. Made by `bind`.

    At the first connection `imports` are imported, before anything is asked of `pages`.
    """

    def __init__(self, listening: socket.socket, pages: Pages, imports: Sequence[str] = ()) -> None:
        self.address: tuple[str, int] = listening.getsockname()[:2]
        self._socket = listening
        self._pages = pages
        self._imports = imports
        self._loop = asyncio.get_running_loop()
        self._starting: asyncio.Task[HttpServer | None] | None = None
        self._loop.add_reader(listening.fileno(), self._first_connection)

    @classmethod
    def bind(cls, host: str, port: int, pages: Pages, imports: Sequence[str] = ()) -> LazyHttp:
        """Listens. Raises ServiceNotReady when the port is taken, InvalidSetting."""
        try:
            family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            listening = socket.create_server(
                (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both
            )
        except OSError as error:
            raise listen_error(error, host, port, "http_port") from error
        listening.setblocking(False)
        return cls(listening, pages, imports)

    def _first_connection(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._starting = awaited(self._start(), "start of HTTP")

    async def _start(self) -> HttpServer | None:
        """None: what it needs cannot be imported. Who asked has been told, and the next connection tries again."""
        try:
            await import_in_thread("magnetar.runtime.http", *self._imports)
            from magnetar.runtime.http import HttpServer

            return await HttpServer.start(self._socket, self._pages)
        except Exception as error:
            logging.getLogger(__name__).exception("/metrics and /health cannot be served")
            await self._refuse(
                f"/metrics and /health cannot be served: {type(error).__name__}: {error}\n".encode()
            )
        self._starting = None
        self._loop.add_reader(self._socket.fileno(), self._first_connection)
        return None

    async def _refuse(self, reason: bytes) -> None:
        """Answers the connections that wait."""
        head = f"HTTP/1.0 503 Service Unavailable\r\nContent-Type: text/plain\r\nContent-Length: {len(reason)}\r\n\r\n"
        with contextlib.suppress(OSError):  # nobody waits any more
            while True:
                connection, _ = self._socket.accept()
                reader, writer = await asyncio.open_connection(sock=connection)
                with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError):
                    async with asyncio.timeout(_REFUSAL_S):
                        await reader.readuntil(b"\r\n\r\n")
                        writer.write(head.encode() + reason)
                        await writer.drain()
                writer.close()

    async def close(self) -> None:
        """Finishes requests in progress, for a second at most."""
        server = await self._starting if self._starting is not None else None
        if server is None:
            self._loop.remove_reader(self._socket.fileno())
        else:
            await server.close()
        self._socket.close()

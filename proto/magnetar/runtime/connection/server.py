"""The accepting side: one listening port, a handler per connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from magnetar.proto.errors import MagnetarError, ServiceNotReady, TooManyRequests

from .addresses import listen_error
from .connection import Connection
from .options import ConnectionHandler, ConnectionOptions

_log = logging.getLogger("magnetar.connection")
_BACKLOG = 1024
# Faults of peers are logged, but a hostile peer must not be able to fill a disk with them.
_FAULT_LINES = 10
_FAULT_WINDOW_S = 10.0


class FramedServer:
    """Made by `start`; owned by a daemon, which closes it."""

    def __init__(self, handler_factory: Callable[[], ConnectionHandler], options: ConnectionOptions) -> None:
        self.addresses: list[tuple[str, int]] = []
        self._handler_factory = handler_factory
        self._options = options
        self._server: asyncio.Server | None = None
        # A dict for its order: connections are closed in the order in which they came.
        self._connections: dict[Connection, None] = {}
        self._drained: asyncio.Future[None] | None = None
        self._stopping = False
        self._fault_window_start = 0.0
        self._faults_in_window = 0

    @classmethod
    async def start(
        cls,
        host: str,
        port: int,
        handler_factory: Callable[[], ConnectionHandler],
        options: ConnectionOptions,
    ) -> FramedServer:
        """Listens on `host` and `port` (0: a free one). Raises InvalidSetting when that cannot be done."""
        self = cls(handler_factory, options)
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                self._accept,
                host,
                port,
                ssl=options.tls,
                ssl_handshake_timeout=options.handshake_timeout_s if options.tls is not None else None,
                backlog=_BACKLOG,
            )
        except OSError as error:
            raise listen_error(error, host, port, options.port_setting) from error
        self.addresses = [_host_and_port(sock.getsockname()) for sock in self._server.sockets]
        return self

    @property
    def connections(self) -> list[Connection]:
        """Those that are open, oldest first."""
        return list(self._connections)

    def stop_accepting(self) -> None:
        """Closes the port; connections stay."""
        self._stopping = True
        if self._server is not None:
            self._server.close()

    async def close(self, drain_seconds: float) -> None:
        """Closes the port, tells every peer ServiceNotReady, flushes, and after `drain_seconds` aborts what is left."""
        self.stop_accepting()
        for connection in self.connections:
            connection.close(ServiceNotReady("the service is stopping; connect again later"))
        await self._all_gone(drain_seconds)
        for connection in self.connections:
            connection.abort()
        await self._all_gone(1.0)
        if self._server is not None:
            await self._server.wait_closed()

    async def _all_gone(self, timeout_s: float) -> None:
        if not self._connections:
            return
        self._drained = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._drained], timeout=timeout_s)
        self._drained = None

    def _accept(self) -> Connection:
        handler = self._handler_factory()
        refusal: MagnetarError | None = None
        if len(self._connections) >= self._options.max_connections:
            refusal = TooManyRequests(
                f"{len(self._connections)} connections are open already; try again later"
            )
        if self._stopping:
            refusal = ServiceNotReady("the service is stopping; connect again later")
        return Connection(
            handler,
            self._options,
            accepting=True,
            on_opened=self._opened,
            on_closed=self._closed,
            on_fault=self._fault,
            refusal=refusal,
        )

    def _opened(self, connection: Connection) -> None:
        # Not before: a TLS handshake that fails never tells its protocol, and would be counted for ever.
        self._connections[connection] = None

    def _fault(self, connection: Connection, error: MagnetarError) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._fault_window_start >= _FAULT_WINDOW_S:
            if self._faults_in_window > _FAULT_LINES:
                _log.info("%d more faults of peers", self._faults_in_window - _FAULT_LINES)
            self._fault_window_start, self._faults_in_window = now, 0
        self._faults_in_window += 1
        if self._faults_in_window <= _FAULT_LINES:
            _log.info("%s: %s: %s", connection.describe(), type(error).__name__, error.message)

    def _closed(self, connection: Connection) -> None:
        self._connections.pop(connection, None)
        if not self._connections and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)


def _host_and_port(name: object) -> tuple[str, int]:
    assert isinstance(name, tuple)
    return str(name[0]), int(name[1])

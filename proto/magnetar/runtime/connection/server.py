"""The accepting side: one listening port, a transport per connection, whichever wire protocol is spoken on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from magnetar.proto.errors import MagnetarError, ServiceNotReady, TooManyRequests

from .addresses import listen_error
from .options import TransportOptions
from .transport import Transport, WireProtocol

_log = logging.getLogger("magnetar.connection")
_BACKLOG = 1024
# Faults of peers are logged, but a hostile peer must not be able to fill a disk with them.
_FAULT_LINES = 10
_FAULT_WINDOW_S = 10.0


class FramedServer:
    """Made by `start` (or `start_server`, for Magnetar's own protocol); owned by a daemon, which closes it."""

    def __init__(self, options: TransportOptions) -> None:
        self.addresses: list[tuple[str, int]] = []
        self._options = options
        self._server: asyncio.Server | None = None
        # A dict for its order: connections are closed in the order in which they came.
        self._transports: dict[Transport, None] = {}
        self._drained: asyncio.Future[None] | None = None
        self._stopping = False
        self._fault_window_start = 0.0
        self._faults_in_window = 0

    @classmethod
    async def start(
        cls,
        host: str,
        port: int,
        make_protocol: Callable[[Transport], WireProtocol],
        options: TransportOptions,
    ) -> FramedServer:
        """Listens on `host` and `port` (0: a free one). Raises ServiceNotReady when the port is taken, InvalidSetting."""
        self = cls(options)
        try:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: Transport(options, make_protocol, self),
                host,
                port,
                ssl=options.tls,
                ssl_handshake_timeout=options.handshake_timeout_s if options.tls is not None else None,
                backlog=_BACKLOG,
            )
        except OSError as error:
            raise listen_error(error, host, port, options.port_setting, options.port_flag) from error
        self.addresses = [sock.getsockname()[:2] for sock in self._server.sockets]
        return self

    @property
    def connections(self) -> list[Transport]:
        """Those that are open, oldest first."""
        return list(self._transports)

    def stop_accepting(self) -> None:
        """Closes the port; connections stay."""
        self._stopping = True
        if self._server is not None:
            self._server.close()

    async def close(self, drain_seconds: float) -> None:
        """Closes the port, sends every peer ServiceNotReady, flushes, and after `drain_seconds` aborts what is left."""
        self.stop_accepting()
        for transport in self.connections:
            transport.protocol.close(_stopping())
        await self._drain(drain_seconds)
        for transport in self.connections:
            transport.abort()
        await self._drain(1.0)
        if self._server is not None:
            await self._server.wait_closed()

    async def _drain(self, timeout_s: float) -> None:
        if self._transports:
            self._drained = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._drained], timeout=timeout_s)
            self._drained = None

    # --- Acceptor -------------------------------------------------------------------------------------------------------

    def opened(self, transport: Transport) -> MagnetarError | None:
        """Counts a connection. Not before: a TLS handshake that fails is never reported, and would count for ever."""
        count = len(self._transports)
        self._transports[transport] = None
        if self._stopping:
            return _stopping()
        if count >= self._options.max_connections:
            return TooManyRequests(f"{count} connections are open already; try again later")
        return None

    def closed(self, transport: Transport) -> None:
        """Counts it no more."""
        self._transports.pop(transport, None)
        if not self._transports and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def fault(self, transport: Transport, error: MagnetarError) -> None:
        """Logs it, unless there are many."""
        now = asyncio.get_running_loop().time()
        if now - self._fault_window_start >= _FAULT_WINDOW_S:
            if self._faults_in_window > _FAULT_LINES:
                _log.info("%d more faults of peers", self._faults_in_window - _FAULT_LINES)
            self._fault_window_start, self._faults_in_window = now, 0
        self._faults_in_window += 1
        if self._faults_in_window <= _FAULT_LINES:
            _log.info("%s: %s: %s", transport.describe(), type(error).__name__, error.message)


def _stopping() -> ServiceNotReady:
    return ServiceNotReady("the service is stopping; connect again later")

"""The port of Pulsar's protocol. What speaks it is imported with the first connection: many never need it.

That takes 100 ms, in a thread; connections that come meanwhile are not read until it is done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from magnetar.proto.errors import MagnetarError, ServiceNotReady
from magnetar.runtime.connection import ConnectionOptions, FramedServer, Transport, WireProtocol
from magnetar.runtime.imports import import_in_thread
from magnetar.runtime.tasks import awaited

from ...service.broker import BrokerService
from ...topics.registry import Broker

_log = logging.getLogger(__name__)
_WAITING = "import"  # reason for a pause of reading


class PulsarListener:
    """Makes the protocol of each connection."""

    def __init__(self, broker: Broker, options: ConnectionOptions) -> None:
        self._service = BrokerService(broker)
        self._options = options
        self._make: Callable[[Transport], WireProtocol] | None = None
        self._loading: asyncio.Task[None] | None = None

    def protocol(self, transport: Transport) -> WireProtocol:
        """Of a new connection."""
        return _Waiting(transport, self) if self._make is None else self._make(transport)

    async def load(self) -> Callable[[Transport], WireProtocol]:
        """Raises ServiceNotReady; the next call tries again."""
        if self._make is None:
            self._loading = self._loading or awaited(self._load(), "import of Pulsar's protocol")
            await asyncio.shield(self._loading)
        assert self._make is not None
        return self._make

    async def _load(self) -> None:
        try:
            await import_in_thread(f"{__package__}.protocol")
            from .protocol import protocol_factory

            self._make = protocol_factory(self._service, self._options)
        except Exception as error:
            _log.exception("Pulsar's protocol cannot be spoken")
            raise ServiceNotReady(f"Pulsar's protocol cannot be spoken: {error!r}") from None
        finally:
            self._loading = None


class _Waiting:
    """`WireProtocol` of a connection until there is one to speak."""

    def __init__(self, transport: Transport, listener: PulsarListener) -> None:
        self._transport = transport
        self._listener = listener
        self._task: asyncio.Task[None] | None = None
        self._data = b""  # uvloop begins to read although it was told not to

    def connection_made(self) -> None:
        self._transport.pause_reading(_WAITING)
        self._task = awaited(self._become(), "a connection that waits for an import")

    async def _become(self) -> None:
        try:
            make = await self._listener.load()
        except MagnetarError as error:
            self._transport.abort(error)
        else:
            if not self._transport.closing:
                self._transport.speak(make(self._transport))
                self._transport.data_received(self._data)
                self._transport.resume_reading(_WAITING)

    def bytes_received(self, data: bytes) -> None:
        self._data += data
        self._transport.resume_reading(_WAITING)
        self._transport.pause_reading(_WAITING)

    def progress(self) -> tuple[int, int]:
        return 0, 0

    def ping(self) -> None: ...

    def writing_resumed(self) -> None: ...

    def fail(self, error: Exception) -> None:
        self._transport.abort()

    def close(self, error: MagnetarError | None = None) -> None:
        self._transport.close(error)

    def connection_lost(self, error: MagnetarError | None) -> None: ...


async def start_pulsar_listener(
    broker: Broker, host: str, port: int, options: ConnectionOptions
) -> FramedServer:
    """Raises ServiceNotReady when the port is taken, InvalidSetting."""
    return await FramedServer.start(host, port, PulsarListener(broker, options).protocol, options)

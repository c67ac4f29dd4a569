"""How connections with Magnetar's own protocol begin, on either side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from magnetar.proto.errors import ConnectionLost, MagnetarError

from .addresses import format_address
from .connection import Connection, ConnectionHandler
from .options import ConnectionOptions
from .server import FramedServer
from .transport import Transport


async def start_server(
    host: str, port: int, handler_factory: Callable[[], ConnectionHandler], options: ConnectionOptions
) -> FramedServer:
    """Listens on `host` and `port` (0: a free one). Raises ServiceNotReady when the port is taken, InvalidSetting."""
    return await FramedServer.start(
        host, port, lambda transport: Connection(transport, handler_factory(), options), options
    )


async def open_connection(
    host: str,
    port: int,
    handler: ConnectionHandler,
    options: ConnectionOptions,
    *,
    server_name: str | None = None,
) -> Connection:
    """Connects and shakes hands within `handshake_timeout_s`. `server_name`: whom TLS expects at an address; None: `host`.

    Raises ConnectionLost (nobody there, no answer, cut off), or the error that the server answered.
    """
    # Made here: the loop drops one whose attempt is cut short, and its timer would go on.
    transport = Transport(options, lambda transport: Connection(transport, handler, options))
    connection, peer = transport.protocol, format_address((host, port))
    assert isinstance(connection, Connection)
    try:
        async with asyncio.timeout(options.handshake_timeout_s):
            await asyncio.get_running_loop().create_connection(
                lambda: transport, host, port, ssl=options.tls,
                server_hostname=(server_name or host) if options.tls is not None else None,
            )  # fmt: skip
            await connection.ready
        return connection
    except BaseException as error:
        transport.abort()
        if isinstance(error, MagnetarError):
            raise
        if isinstance(error, TimeoutError):
            reason = f"did not answer within {options.handshake_timeout_s:g} s; is it a Magnetar service?"
            raise ConnectionLost(f"{peer} {reason}") from None
        if isinstance(error, OSError):
            reason = f"{error.strerror or error}; is the service running there?"
            raise ConnectionLost(f"cannot connect to {peer}: {reason}") from error
        raise

"""The connecting side."""

from __future__ import annotations

import asyncio

from magnetar.proto.errors import ConnectionLost

from .connection import Connection
from .options import ConnectionHandler, ConnectionOptions


async def open_connection(
    host: str, port: int, handler: ConnectionHandler, options: ConnectionOptions
) -> Connection:
    """Connects and shakes hands within `handshake_timeout_s`.

    Raises ConnectionLost (nobody there, no answer, cut off), or the error that the server answered.
    """
    loop = asyncio.get_running_loop()
    made: list[Connection] = []
    connected = False

    def make() -> Connection:
        made.append(Connection(handler, options, accepting=False))
        return made[-1]

    try:
        async with asyncio.timeout(options.handshake_timeout_s):
            _, connection = await loop.create_connection(make, host, port, ssl=options.tls)
            await connection.ready
            connected = True
            return connection
    except TimeoutError:
        raise ConnectionLost(
            f"{host}:{port} did not answer within {options.handshake_timeout_s:g} s; is it a Magnetar service?"
        ) from None
    except OSError as error:
        raise ConnectionLost(
            f"cannot connect to {host}:{port}: {error.strerror or error}; is the service running there?"
        ) from error
    finally:
        if not connected:
            # Also one that the loop made and, cut short, dropped: its timer runs, and nobody would tell it.
            for connection in made:
                connection.abort()


async def wait_gone(connection: Connection, timeout_s: float) -> None:
    """Returns when the socket of a connection that was closed is closed; after `timeout_s` it is cut."""
    try:
        async with asyncio.timeout(timeout_s):
            await connection.gone.wait()
    except TimeoutError:  # a peer that hangs does not close its side
        connection.abort()
        await connection.gone.wait()

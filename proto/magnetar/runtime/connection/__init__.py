"""Connections, either side, either hop: a transport that knows no frames, Magnetar's protocol on it, and the server."""

from .authentication import (
    Authenticated,
    AuthenticationExchange,
    Authenticator,
    Challenge,
    Credentials,
    NoAuthentication,
    NoCredentials,
)
from .connection import Connection, ConnectionHandler, open_connection, start_server
from .handshake import MAX_HANDSHAKE_FRAME_BYTES
from .options import ConnectionOptions, TransportOptions
from .requests import Reply
from .server import FramedServer
from .transport import Piece, Transport, WireProtocol

__all__ = [
    "MAX_HANDSHAKE_FRAME_BYTES",
    "Authenticated",
    "AuthenticationExchange",
    "Authenticator",
    "Challenge",
    "Connection",
    "ConnectionHandler",
    "ConnectionOptions",
    "Credentials",
    "FramedServer",
    "NoAuthentication",
    "NoCredentials",
    "Piece",
    "Reply",
    "Transport",
    "TransportOptions",
    "WireProtocol",
    "open_connection",
    "start_server",
]

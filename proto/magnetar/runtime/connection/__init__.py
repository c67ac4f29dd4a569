"""One framed connection, either side, either hop: handshake, keep-alive, requests and backpressure both ways."""

from .authentication import (
    AllowAll,
    Authenticated,
    AuthenticationExchange,
    Authenticator,
    Challenge,
    Credentials,
    NoAuthentication,
    NoCredentials,
)
from .connect import open_connection, wait_gone
from .connection import Connection
from .options import ConnectionHandler, ConnectionOptions
from .requests import Reply
from .server import FramedServer

__all__ = [
    "AllowAll",
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
    "Reply",
    "open_connection",
    "wait_gone",
]

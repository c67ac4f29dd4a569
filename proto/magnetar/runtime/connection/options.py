"""What a connection is told by its owner: limits, intervals and hooks; and the owner's callbacks."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from magnetar.proto.errors import MagnetarError
from magnetar.proto.frames import DEFAULT_MAX_MESSAGE_BYTES, FRAME_OVERHEAD_BYTES, Run

from .authentication import AllowAll, Authenticator, Authorize, Credentials, NoAuthentication, NoCredentials

if TYPE_CHECKING:
    from .connection import Connection

MIB = 1024 * 1024


class ConnectionHandler(Protocol):
    """Owner of one connection. Called from the event loop only; what it raises closes this connection only.

    `connection_closed` is called once if, and only if, `connection_ready` was.
    """

    def connection_ready(self, connection: Connection) -> None:
        """The handshake is done; negotiated values are known and frames may be sent."""
        ...

    def runs_received(self, runs: list[Run]) -> None:
        """Frames in the order of the stream: all but handshake, keep-alive and answers, and only known commands.

        Raise MalformedFrame (as `decode_command` does) for a header that cannot be used: the peer is told, and the
        connection closes.
        """
        ...

    def connection_closed(self, error: MagnetarError | None) -> None:
        """Every pending request has failed already. None: this side closed it, without an error."""
        ...

    def writing_resumed(self) -> None:
        """`writable` is True again."""
        ...


@dataclass(frozen=True)
class ConnectionOptions:
    """Settings and hooks of a connection, either side. Bytes and seconds."""

    # What the peer and the log call this side, for example "broker" or "client orders-1".
    name: str
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    # A Ping goes out after one interval of silence; after two the peer is lost.
    ping_interval_s: float = 30.0
    # From the TCP connection to the end of the handshake.
    handshake_timeout_s: float = 10.0
    # `writable` is False from here until a quarter of it is left. More than one entry, or every entry pauses.
    high_water_bytes: int = 4 * MIB
    # A peer that lets this much pile up is cut: owners that heed `writable` stay far below.
    max_buffered_bytes: int = 64 * MIB
    # How long `close` waits for the peer to take what was sent.
    close_timeout_s: float = 5.0
    max_pending_requests: int = 65_536
    tls: ssl.SSLContext | None = None
    authenticator: Authenticator = field(default_factory=NoAuthentication)
    credentials: Credentials = field(default_factory=NoCredentials)
    authorize: Authorize = field(default_factory=AllowAll)
    # Names of optional features of the protocol; both sides' intersection is used.
    features: tuple[str, ...] = ()
    # Accepting side only: more connections than this get TooManyRequests.
    max_connections: int = 16_384
    # What an operator changes when the port is taken; for the error message.
    port_setting: str = "port"

    @property
    def max_frame_bytes(self) -> int:
        """Largest frame this side accepts."""
        return self.max_message_bytes + FRAME_OVERHEAD_BYTES

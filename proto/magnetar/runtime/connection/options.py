"""The limits and hooks of a connection, given by its owner. Sizes are in bytes, times in seconds."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from magnetar.proto.bookie_identity import BookieIdentity
from magnetar.proto.frames import DEFAULT_MAX_MESSAGE_BYTES, FRAME_OVERHEAD_BYTES

from .authentication import Authenticator, Authorize, Credentials, NoAuthentication, NoCredentials, allow_all

MIB = 1024 * 1024


def _no_bookie(expected: BookieIdentity | None) -> None:
    """This side is no bookie."""


@dataclass(frozen=True, kw_only=True)
class TransportOptions:
    """What a transport and a server need to know, whichever wire protocol is spoken."""

    # A ping goes out after one interval of silence; after two the peer is lost.
    ping_interval_s: float = 30.0
    # From the TCP connection to the end of the handshake.
    handshake_timeout_s: float = 10.0
    # `writable` is False from here until a quarter of it is left. More than one entry, or every entry pauses.
    high_water_bytes: int = 4 * MIB
    # A peer that lets this much pile up is cut. Owners that respect `writable` stay far below.
    max_buffered_bytes: int = 64 * MIB
    # How long `close` waits for the peer to take what was sent.
    close_timeout_s: float = 5.0
    tls: ssl.SSLContext | None = None
    # Accepting side only: more connections than this get TooManyRequests.
    max_connections: int = 16_384
    # What an operator changes when the port is taken; for the error message.
    port_setting: str = "port"
    port_flag: str = ""  # "": named after the setting


@dataclass(frozen=True)
class ConnectionOptions(TransportOptions):
    """The same, and what Magnetar's own protocol needs."""

    # What the peer and the log call this side, for example "broker" or "client orders-1".
    name: str
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    max_pending_requests: int = 65_536
    authenticator: Authenticator = field(default_factory=NoAuthentication)
    credentials: Credentials = field(default_factory=NoCredentials)
    authorize: Authorize = allow_all
    # Between ledger client and bookie. The connecting side: whom it expects. The accepting side: called with that, raises
    # what refuses the peer, and returns who this side is.
    expected_bookie: BookieIdentity | None = None
    introduce: Callable[[BookieIdentity | None], BookieIdentity | None] = _no_bookie

    @property
    def max_frame_bytes(self) -> int:
        """Largest frame this side accepts."""
        return self.max_message_bytes + FRAME_OVERHEAD_BYTES

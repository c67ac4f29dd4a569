"""Pulsar's binary protocol on a transport: the handshake, keep-alive, frames to commands. It is the connection's `Link`.

    HANDSHAKE --CONNECT, and AUTH_RESPONSE to each challenge; accepted--> READY --> closed

See broker/ARCHITECTURE.md. What ends a connection is told by ERROR to a request that nobody made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from magnetar.proto.errors import MagnetarError, MalformedFrame
from magnetar.proto.pulsar import wire_pb2 as wire
from magnetar.proto.pulsar.commands import FIELDS, NO_REQUEST, PROTOCOL_VERSION, decode, encode
from magnetar.proto.pulsar.frames import FRAME_OVERHEAD_BYTES, PING, PONG, Acks, FrameCutter, Sends
from magnetar.runtime.connection import (
    MAX_HANDSHAKE_FRAME_BYTES,
    Authenticated,
    AuthenticationExchange,
    ConnectionOptions,
    NoAuthentication,
    Transport,
)

from ...service.broker import BrokerService
from .connection import ClientConnection
from .errors import error_text, server_error
from .transcoded import Transcoded

_log = logging.getLogger(__name__)

_SERVER_VERSION = "Magnetar"
_FEATURES = wire.FeatureFlags(
    supports_auth_refresh=True,
    supports_topic_watchers=True,
    supports_get_partitioned_metadata_without_auto_creation=True,
)


class PulsarProtocol:
    """`WireProtocol` of one connection, and its `Link`."""

    def __init__(
        self, transport: Transport, service: BrokerService, transcoded: Transcoded, options: ConnectionOptions
    ) -> None:
        self.client_version = ""
        self.protocol_version = 0
        self.max_message_bytes = options.max_message_bytes
        # Methods of the transport that are the connection's as they are.
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.write = transport.write
        self.probe = transport.probe
        self._transport = transport
        self._service = service
        self._transcoded = transcoded
        self._options = options
        self._principal = ""
        self._method = "none"
        self._exchange: AuthenticationExchange | None = None  # from CONNECT to the end of the handshake
        self._connection: ClientConnection | None = None  # from the end of the handshake on
        self._cutter = FrameCutter(MAX_HANDSHAKE_FRAME_BYTES)
        self._items = 0

    # --- Link --------------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """`host:port` of the client."""
        return self._transport.address

    @property
    def writable(self) -> bool:
        """False between high and low water, and once the connection is closing."""
        return self._transport.writable

    def authorize(self, operation: str, resource: str) -> None:
        """Raises NotAuthorized unless the client may do this."""
        self._options.authorize(self._principal, operation, resource)

    def send(self, frames: bytes) -> None:
        """Encoded frames."""
        self._transport.write((frames,), len(frames))

    def close(self, error: MagnetarError | None = None) -> None:
        """Flushes, then closes; a client that connects again needs no reason."""
        self._transport.close(error)

    # --- WireProtocol ------------------------------------------------------------------------------------------------

    def connection_made(self) -> None:
        """The client begins."""

    def bytes_received(self, data: bytes) -> None:
        """Cuts frames, and hands on what they say in their order."""
        items = self._cutter.feed(data)
        self._items += len(items)
        connection = self._connection
        for item in items:
            if connection is None:
                if not isinstance(item, Acks | Sends):
                    self._shake_hands(decode(item.command))
                    connection = self._connection
                else:
                    raise MalformedFrame(_FIRST)
            elif isinstance(item, Sends):
                connection.sends_received(item)
            elif isinstance(item, Acks):
                connection.acks_received(item)
            else:
                self._command(connection, decode(item.command), item.rest)
            if self._transport.closing:
                return
        if self._cutter.error is not None:
            raise self._cutter.error if connection is not None else MalformedFrame(_FIRST)

    def _command(self, connection: ClientConnection, command: wire.BaseCommand, rest: bytes) -> None:
        name = FIELDS[command.type]
        if name == "ping":
            self.send(PONG)
        elif name == "pong":
            self._transport.answered()
        elif name == "send":
            send = command.send
            run = Sends(send.producer_id, send.sequence_id, send.highest_sequence_id, [rest])
            connection.sends_received(run)
        elif name == "auth_response":
            pass  # to a challenge that nobody sends after the handshake
        else:
            connection.command_received(name, getattr(command, name))

    def progress(self) -> tuple[int, int]:
        """Items so far, and bytes of an unfinished frame."""
        return self._items, self._cutter.pending_bytes

    def ping(self) -> None:
        """PING."""
        self.send(PING)

    def writing_resumed(self) -> None:
        """Deliveries go on."""
        if self._connection is not None:
            self._connection.writing_resumed()

    def fail(self, error: Exception) -> None:
        """Tells the client, and closes. No MagnetarError: a bug on this side."""
        transport = self._transport
        if transport.closing:
            return
        if isinstance(error, MagnetarError):
            transport.fault(error)
        else:
            _log.error("the connection to %s failed; it is closed", transport.describe(), exc_info=error)
            error = MagnetarError("internal error; the log of this service has the details")
        frame = wire.CommandError(request_id=NO_REQUEST, error=server_error(error), message=error_text(error))
        self.send(encode(frame))
        transport.close(error)

    def connection_lost(self, error: MagnetarError | None) -> None:
        """Producers and consumers go with it."""
        if self._connection is not None:
            self._connection.connection_closed()
            self._connection = None  # it refers to this

    # --- handshake ---------------------------------------------------------------------------------------------------

    def _shake_hands(self, command: wire.BaseCommand) -> None:
        name = FIELDS[command.type]
        if name == "connect" and self._exchange is None:
            connect = command.connect
            self.client_version = connect.client_version[:200]
            self.protocol_version = min(connect.protocol_version, PROTOCOL_VERSION)
            self._exchange = self._begin_authentication(connect)
            self._respond(connect.auth_data)
        elif name == "auth_response" and self._exchange is not None:
            self._respond(command.auth_response.response.auth_data)
        else:
            raise MalformedFrame(_FIRST)

    def _begin_authentication(self, connect: wire.CommandConnect) -> AuthenticationExchange:
        """By the method of the client; where nobody is authenticated, credentials are not looked at, as with Pulsar."""
        authenticator = self._options.authenticator
        if not isinstance(authenticator, NoAuthentication):
            self._method = connect.auth_method_name or "none"
        return authenticator.begin(self._method)

    def _respond(self, data: bytes) -> None:
        assert self._exchange is not None
        outcome = self._exchange.respond(data)
        if not isinstance(outcome, Authenticated):
            challenge = wire.CommandAuthChallenge(
                server_version=_SERVER_VERSION,
                protocol_version=self.protocol_version,
                challenge=wire.AuthData(auth_method_name=self._method, auth_data=outcome.data),
            )
            self.send(encode(challenge))
            return
        self._exchange, self._principal = None, outcome.principal
        self._cutter.max_frame_bytes = self.max_message_bytes + FRAME_OVERHEAD_BYTES
        connected = wire.CommandConnected(
            server_version=_SERVER_VERSION,
            protocol_version=self.protocol_version,
            max_message_size=self.max_message_bytes,
            feature_flags=_FEATURES,
        )
        self.send(encode(connected))
        self._transport.opened(self.client_version)
        self._connection = ClientConnection(self._service, self._transcoded, self)


def protocol_factory(
    service: BrokerService, options: ConnectionOptions
) -> Callable[[Transport], PulsarProtocol]:
    """Of all connections of a listener, which share what was transcoded for one of them."""
    transcoded = Transcoded(options.max_message_bytes)
    return lambda transport: PulsarProtocol(transport, service, transcoded, options)


_FIRST = (
    "this port speaks Pulsar's protocol, without TLS, and the first frame must be CONNECT; "
    "Magnetar's clients and HTTP have ports of their own"
)

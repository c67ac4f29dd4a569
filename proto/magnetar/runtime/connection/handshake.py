"""The handshake, sans I/O: CONNECT, any number of AUTH_CHALLENGE rounds, CONNECTED.

    connecting side                         accepting side
    Connect(versions 1..1, max)            ->
                                           <-  AuthChallenge           (only if the method wants it)
    AuthChallenge                          ->
                                           <-  Connected(version, smaller max)

Either side answers what it does not accept with Failed and closes. `receive` takes one frame and returns the frame to
send (or b"") together with the outcome once there is one.
"""

from __future__ import annotations

from typing import NamedTuple

from magnetar.proto.bookie_identity import BookieIdentity
from magnetar.proto.commands import (
    MIN_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    AuthChallenge,
    Command,
    Connect,
    Connected,
    Failed,
    decode_command,
)
from magnetar.proto.errors import AuthenticationFailed, MagnetarError, MalformedFrame, UnsupportedVersion
from magnetar.proto.frames import FRAME_OVERHEAD_BYTES, Run, encode_frame

from .authentication import MAX_ROUNDS, Authenticated, AuthenticationExchange
from .options import ConnectionOptions

# What an unknown peer may make this side hold: enough for any token.
MAX_HANDSHAKE_FRAME_BYTES = 128 * 1024
# Smallest limit that a peer may ask for: errors and handshakes must fit.
_MIN_FRAME_BYTES = 4 * 1024
_CONNECT_REQUEST_ID = 1
_NOT_MAGNETAR = (
    "this is not the Magnetar protocol: the first frame must be CONNECT "
    "(this port serves Magnetar clients; those of Pulsar, and HTTP, have ports of their own)"
)


class Negotiated(NamedTuple):
    """What both sides agreed on."""

    principal: str
    peer: str
    max_frame_bytes: int
    max_message_bytes: int
    # Who the accepting side is, if it is a bookie.
    bookie: BookieIdentity | None = None


class AcceptingHandshake:
    """The accepting side."""

    def __init__(self, options: ConnectionOptions) -> None:
        self._options = options
        self._connect: Connect | None = None
        self._exchange: AuthenticationExchange | None = None
        self._rounds = 0

    @property
    def request_id(self) -> int:
        """The request that a Failed answers."""
        return self._connect.request_id if self._connect is not None else 0

    def stream_error(self, error: MagnetarError) -> MagnetarError:
        """The answer to a peer whose bytes are no frames."""
        return error if self._connect is not None else MalformedFrame(_NOT_MAGNETAR)

    def receive(self, header: bytes, payload: bytes) -> tuple[bytes, Negotiated | None]:
        """Raises the error to send to the peer."""
        command = decode_command(header) if self._connect is not None else _first(header)
        if self._connect is None:
            if not isinstance(command, Connect):
                raise MalformedFrame(_NOT_MAGNETAR)
            self._connect = command
            self._exchange = self._begin_authentication(command)
        elif not isinstance(command, AuthChallenge):
            raise MalformedFrame(
                f"{type(command).__name__} before the end of the handshake; wait for CONNECTED"
            )
        assert self._exchange is not None
        self._rounds += 1
        if self._rounds > MAX_ROUNDS:
            raise AuthenticationFailed(f"authentication did not end after {MAX_ROUNDS} rounds")
        outcome = self._exchange.respond(payload)
        request_id, method = self._connect.request_id, self._connect.auth_method
        if not isinstance(outcome, Authenticated):
            return encode_frame(AuthChallenge(request_id, method).encode(), outcome.data), None
        return self._accept(self._connect, outcome)

    def _begin_authentication(self, connect: Connect) -> AuthenticationExchange:
        if (
            connect.protocol_version < MIN_PROTOCOL_VERSION
            or connect.min_protocol_version > PROTOCOL_VERSION
            or connect.min_protocol_version > connect.protocol_version
        ):
            raise _no_common_version(connect.min_protocol_version, connect.protocol_version)
        if 0 < connect.max_frame_bytes < _MIN_FRAME_BYTES or connect.max_frame_bytes < 0:
            raise MalformedFrame(
                f"CONNECT allows frames of {connect.max_frame_bytes} bytes; at least {_MIN_FRAME_BYTES} are needed"
            )
        return self._options.authenticator.begin(connect.auth_method)

    def _accept(self, connect: Connect, outcome: Authenticated) -> tuple[bytes, Negotiated]:
        own = self._options
        bookie = own.introduce(connect.bookie)
        max_frame_bytes = min(own.max_frame_bytes, connect.max_frame_bytes or own.max_frame_bytes)
        negotiated = Negotiated(
            principal=outcome.principal,
            peer=connect.peer[:200],
            max_frame_bytes=max_frame_bytes,
            max_message_bytes=_message_bytes(own, max_frame_bytes),
            bookie=bookie,
        )
        connected = Connected(
            connect.request_id,
            min(PROTOCOL_VERSION, connect.protocol_version),
            [],
            max_frame_bytes,
            negotiated.max_message_bytes,
            own.name,
            bookie,
        )
        return encode_frame(connected.encode(), outcome.data), negotiated


class ConnectingHandshake:
    """The connecting side."""

    request_id = 0

    def __init__(self, options: ConnectionOptions) -> None:
        self._options = options
        self._rounds = 0

    def begin(self) -> bytes:
        """The CONNECT frame."""
        own = self._options
        connect = Connect(
            _CONNECT_REQUEST_ID,
            PROTOCOL_VERSION,
            MIN_PROTOCOL_VERSION,
            [],
            own.max_frame_bytes,
            own.name,
            own.credentials.method,
            own.expected_bookie,
        )
        return encode_frame(connect.encode(), own.credentials.begin())

    def stream_error(self, error: MagnetarError) -> MagnetarError:
        """The error for the caller when the bytes of the server are no frames."""
        return MalformedFrame(
            "the server does not speak the Magnetar protocol; check host and port "
            "(clients of Pulsar, and HTTP, have ports of their own)"
        )

    def receive(self, header: bytes, payload: bytes) -> tuple[bytes, Negotiated | None]:
        """Raises the error that the server sent, or what is wrong with its frames."""
        try:
            command = decode_command(header)
        except MalformedFrame as error:
            raise self.stream_error(error) from None
        if isinstance(command, Failed):
            raise command.to_error()
        if isinstance(command, AuthChallenge):
            self._rounds += 1
            if self._rounds > MAX_ROUNDS:
                raise AuthenticationFailed(f"authentication did not end after {MAX_ROUNDS} rounds")
            answer = self._options.credentials.respond(payload)
            return encode_frame(AuthChallenge(command.request_id, command.auth_method).encode(), answer), None
        if not isinstance(command, Connected):
            raise MalformedFrame(f"{type(command).__name__} instead of CONNECTED")
        return b"", self._accept(command)

    def _accept(self, connected: Connected) -> Negotiated:
        own = self._options
        if not MIN_PROTOCOL_VERSION <= connected.protocol_version <= PROTOCOL_VERSION:
            raise _no_common_version(connected.protocol_version, connected.protocol_version)
        max_frame_bytes = min(own.max_frame_bytes, connected.max_frame_bytes or own.max_frame_bytes)
        if max_frame_bytes < _MIN_FRAME_BYTES:
            raise MalformedFrame(f"CONNECTED allows frames of {max_frame_bytes} bytes only")
        message_bytes = _message_bytes(own, max_frame_bytes)
        return Negotiated(
            principal="",
            peer=connected.peer[:200],
            max_frame_bytes=max_frame_bytes,
            max_message_bytes=min(message_bytes, connected.max_message_bytes or message_bytes),
            bookie=connected.bookie,
        )


def shake_hands(
    handshake: AcceptingHandshake | ConnectingHandshake, runs: list[Run]
) -> tuple[bytes, Negotiated | None, list[Run]]:
    """Feeds frames until the end of the handshake: bytes to send, the outcome, and the runs that came after it."""
    answers = b""
    for position, (header, payloads) in enumerate(runs):
        for number, payload in enumerate(payloads, 1):
            answer, negotiated = handshake.receive(header, payload)
            answers += answer
            if negotiated is not None:
                rest = [(header, payloads[number:])] if number < len(payloads) else []
                return answers, negotiated, rest + runs[position + 1 :]
    return answers, None, []


def _message_bytes(own: ConnectionOptions, max_frame_bytes: int) -> int:
    # A peer with tiny frames still gets something to send: then half of a frame is left to the header.
    return min(own.max_message_bytes, max(max_frame_bytes - FRAME_OVERHEAD_BYTES, max_frame_bytes // 2))


def _first(header: bytes) -> Command:
    try:
        return decode_command(header)
    except MagnetarError as error:
        # A CONNECT of a future major version may not decode here, and the error must say that it is one.
        if header[1:2] == b"\x01":
            raise MalformedFrame(f"CONNECT cannot be decoded: {error.message}", **error.details) from None
        raise MalformedFrame(_NOT_MAGNETAR) from None


def _no_common_version(lowest: int, highest: int) -> UnsupportedVersion:
    theirs = f"version {highest}" if lowest == highest else f"versions {lowest} to {highest}"
    return UnsupportedVersion(
        f"no common protocol version: the peer speaks {theirs}, this side {MIN_PROTOCOL_VERSION} to "
        f"{PROTOCOL_VERSION}; upgrade the older of the two",
        peer_min=lowest,
        peer_max=highest,
        own_min=MIN_PROTOCOL_VERSION,
        own_max=PROTOCOL_VERSION,
    )

"""The beginning of a connection over real sockets: what both sides agree on, and what is refused and how."""

import asyncio
from dataclasses import replace

import pytest

from magnetar.proto.commands import (
    Connect,
    Connected,
    Failed,
    Ping,
)
from magnetar.proto.errors import (
    AuthenticationFailed,
    ConnectionLost,
    MagnetarError,
    MalformedFrame,
    NotAuthorized,
    UnsupportedVersion,
)
from magnetar.proto.frames import encode_frame, encode_frames
from magnetar.runtime.connection import (
    Authenticated,
    Challenge,
    open_connection,
)
from support.connections import CLIENT, CONNECT, SEND, SERVER, raw, serving
from support.recording_handler import RecordingHandler

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop", "asyncio"])

# --- handshake -------------------------------------------------------------------------------------------------------


def listening(server: asyncio.Server) -> tuple[str, int]:
    host, port = server.sockets[0].getsockname()
    return host, port


async def test_both_sides_agree() -> None:
    small = replace(SERVER, max_message_bytes=100_000)
    async with serving(small) as service:
        connection, _, accepted = await service.connect()
        assert accepted.connection is not None
        for side in (connection, accepted.connection):
            assert side.max_frame_bytes == 100_000 + 64 * 1024
            assert side.max_message_bytes == 100_000
            assert side.writable
        assert (connection.transport.peer, accepted.connection.transport.peer) == ("server", "client")
        assert accepted.connection.principal == "anonymous"


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", MalformedFrame, "not the Magnetar protocol"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40), MalformedFrame, "not the Magnetar"),
        (encode_frame(SEND, b"x"), MalformedFrame, "must be CONNECT"),
        (encode_frame(b"\xff\xff"), MalformedFrame, "must be CONNECT"),
        (encode_frame(b""), MalformedFrame, "must be CONNECT"),
        (encode_frame(b"\x93\x01\x05\xa1x"), MalformedFrame, "CONNECT cannot be decoded"),
        (encode_frame(Connect(9, 7, 5).encode()), UnsupportedVersion, "versions 5 to 7, this side 1 to 1"),
        (encode_frame(Connect(9, 0, 0).encode()), UnsupportedVersion, "version 0"),
        (encode_frame(Connect(9, 1, 1, [], 10).encode()), MalformedFrame, "at least 4096"),
        (encode_frame(Connect(9, 1, 1, auth_method="kerberos").encode()), AuthenticationFailed, "kerberos"),
        (b"\x00\x10\x00\x00" + bytes(100), MalformedFrame, "must be CONNECT"),
        (encode_frame(Ping(0).encode()), MalformedFrame, "must be CONNECT"),
    ],
)
async def test_a_bad_beginning_gets_one_clear_error(
    data: bytes, error: type[MagnetarError], words: str
) -> None:
    async with serving() as service, raw(service, shake=False) as peer:
        peer.write(data)
        (failed,) = await peer.rest()
        assert isinstance(failed, Failed)
        assert type(failed.to_error()) is error
        assert words in failed.message
        assert failed.request_id in (0, 9)
        assert service.handlers[0].closes == 0


async def test_a_newer_peer_that_can_speak_our_version_is_welcome() -> None:
    async with serving() as service, raw(service, shake=False) as peer:
        peer.write(encode_frame(Connect(4, 9, 1).encode() + b""))
        connected = await peer.next()
        assert isinstance(connected, Connected)
        assert (connected.request_id, connected.protocol_version) == (4, 1)


async def test_a_client_refuses_a_version_that_it_does_not_speak() -> None:
    async def future(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(encode_frame(Connected(1, 9).encode()))
        await reader.read(1000)
        writer.close()

    server = await asyncio.start_server(future, "127.0.0.1", 0)
    handler = RecordingHandler()
    with pytest.raises(UnsupportedVersion, match="the peer speaks version 9, this side 1 to 1; upgrade"):
        await open_connection(*listening(server), handler, CLIENT)
    assert handler.closes == 0
    server.close()


async def test_a_slow_loris_is_cut() -> None:
    async with (
        serving(replace(SERVER, handshake_timeout_s=0.1)) as service,
        raw(service, shake=False) as peer,
    ):
        peer.write(CONNECT[:5])
        (failed,) = await peer.rest()
        assert isinstance(failed, Failed)
        assert "did not finish the handshake within 0.1 s" in failed.message


async def test_frames_right_after_connect_are_not_lost() -> None:
    async with serving() as service, raw(service, shake=False) as peer:
        peer.write(CONNECT + encode_frames(SEND, [b"a", b"b"]))
        handler = service.handlers[0] if service.handlers else None
        while handler is None:
            await peer.next()
            handler = service.handlers[0]
        await handler.until(lambda: len(handler.frames) == 2)


async def test_a_server_that_never_answers_and_one_that_is_not_there() -> None:
    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            pass
        writer.close()

    silent = await asyncio.start_server(wait, "127.0.0.1", 0)
    address = listening(silent)
    with pytest.raises(ConnectionLost, match=r"did not answer within 0\.05 s"):
        await open_connection(*address, RecordingHandler(), replace(CLIENT, handshake_timeout_s=0.05))
    silent.close()
    with pytest.raises(ConnectionLost, match="is the service running"):
        await open_connection(*address, RecordingHandler(), CLIENT)


@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH_9.2p1\r\n", bytes.fromhex("00000006 00000002 080e")])
async def test_a_server_of_another_protocol(greeting: bytes) -> None:
    """The second one, of Pulsar's protocol, is a frame."""

    async def other_server(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await _reader.read(1000)
        writer.close()

    other = await asyncio.start_server(other_server, "127.0.0.1", 0)
    with pytest.raises(MalformedFrame, match="does not speak the Magnetar protocol"):
        await open_connection(*listening(other), RecordingHandler(), CLIENT)
    other.close()


class _Riddle:
    """Asks `rounds` questions before it is satisfied."""

    method = "riddle"

    def __init__(self, rounds: int = 2) -> None:
        self.rounds = rounds

    def begin(self, method: str = "") -> "_RiddleExchange | bytes":
        return _RiddleExchange(self.rounds) if method else b"who?0"

    def respond(self, challenge: bytes) -> bytes:
        return b"answer to " + challenge


class _RiddleExchange:
    def __init__(self, rounds: int) -> None:
        self.left = rounds

    def respond(self, data: bytes) -> Authenticated | Challenge:
        if self.left:
            self.left -= 1
            return Challenge(b"%d" % self.left)
        if data != b"answer to 0":
            raise AuthenticationFailed(f"wrong: {data!r}")
        return Authenticated("oedipus", b"pass")


async def test_challenge_and_response() -> None:
    riddle = _Riddle()
    server = replace(SERVER, authenticator=riddle)  # type: ignore[arg-type]
    async with serving(server) as service:
        _, _, accepted = await service.connect(replace(CLIENT, credentials=riddle))  # type: ignore[arg-type]
        assert accepted.connection is not None
        assert accepted.connection.principal == "oedipus"
        riddle.rounds = 100
        with pytest.raises(AuthenticationFailed, match="did not end"):
            await service.connect(replace(CLIENT, credentials=riddle))  # type: ignore[arg-type]


async def test_authorize_sees_principal_operation_and_resource() -> None:
    def authorize(principal: str, operation: str, resource: str) -> None:
        if operation == "produce":
            raise NotAuthorized(f"{principal} may not {operation} to {resource}")

    async with serving(replace(SERVER, authorize=authorize)) as service:
        _, _, accepted = await service.connect()
        assert accepted.connection is not None
        accepted.connection.authorize("consume", "orders")
        with pytest.raises(NotAuthorized, match="anonymous may not produce to orders"):
            accepted.connection.authorize("produce", "orders")

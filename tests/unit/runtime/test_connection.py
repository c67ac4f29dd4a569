"""Frames and requests over real sockets, on both event loops: what gets through and what ends what."""

import asyncio
import logging
import random
from dataclasses import replace

import pytest

from magnetar.proto.commands import (
    Failed,
    Flow,
    Lookup,
    Ok,
    Ping,
    Pong,
    decode_command,
)
from magnetar.proto.errors import (
    ConnectionLost,
    FrameTooLarge,
    MagnetarError,
    MalformedFrame,
    RequestTimeout,
    TooManyRequests,
    TopicNotFound,
    UnknownCommand,
)
from magnetar.proto.frames import FrameParser, Run, encode_frame, encode_frames
from magnetar.runtime.connection import Connection, FramedServer, Transport
from support.connections import CLIENT, CONNECT, SEND, SERVER, raw, serving
from support.recording_handler import RecordingHandler

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop", "asyncio"])

# --- frames ----------------------------------------------------------------------------------------------------------


async def test_runs_stay_together_and_in_order() -> None:
    async with serving() as service:
        connection, _, accepted = await service.connect()
        other = Flow(0, 1, 5).encode()
        connection.send_encoded(encode_frames(SEND, [b"%d" % number for number in range(100)]))
        connection.send(other)
        connection.send(SEND, [b"parts ", b"of one ", memoryview(b"payload")])
        connection.send(SEND, b"y" * 3_000_000)
        await accepted.until(lambda: len(accepted.frames) == 103)
        assert [payload for _, payload in accepted.frames[:100]] == [b"%d" % n for n in range(100)]
        assert accepted.frames[100] == (other, b"")
        assert accepted.frames[101] == (SEND, b"parts of one payload")
        assert accepted.frames[102] == (SEND, b"y" * 3_000_000)
        assert len(accepted.run_lengths) < 10


async def test_frames_split_at_every_byte() -> None:
    stream = encode_frames(SEND, [b"one", b"", b"three"]) + encode_frame(Flow(0, 2, 3).encode(), b"four")
    async with serving() as service, raw(service) as peer:
        handler = service.handlers[0]
        for cut in range(len(stream) + 1):
            handler.frames.clear()
            assert handler.connection is not None
            # Straight into the protocol: sockets would join the two halves again.
            handler.connection.transport.data_received(stream[:cut])
            handler.connection.transport.data_received(stream[cut:])
            assert [payload for _, payload in handler.frames] == [b"one", b"", b"three", b"four"]
        assert handler.connection is not None
        for byte in stream:
            handler.connection.transport.data_received(bytes([byte]))
        assert len(handler.frames) == 8
        peer.write(encode_frame(Ping(0).encode()))
        assert isinstance(await peer.next(), Pong)


async def test_a_frame_too_large_for_the_peer_is_refused_where_it_is_sent() -> None:
    async with serving(replace(SERVER, max_message_bytes=10_000)) as service:
        connection, _, accepted = await service.connect()
        with pytest.raises(FrameTooLarge, match="raise max_message_bytes"):
            connection.send(SEND, b"x" * 100_000)
        with pytest.raises(FrameTooLarge):
            await connection.request(Lookup(0, "x"), b"x" * 100_000, timeout=1)
        connection.send(SEND, b"fits")
        await accepted.until(lambda: bool(accepted.frames))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\xff\xff\xff\xff\x00\x01", FrameTooLarge),
        (b"\x00\x00\x00\x03\x00\x09abcdefghij", MalformedFrame),
        (encode_frame(b"\xc1garbage"), MalformedFrame),
        (encode_frame(b""), MalformedFrame),
        (encode_frame(b"\x92\xa1x\x01"), MalformedFrame),
        (encode_frame(b"\x92\x06\xa1x"), MalformedFrame),
        (encode_frame(b"\x92\x7e\x00"), UnknownCommand),
        (encode_frame(CONNECT[6:]), MalformedFrame),
    ],
)
async def test_a_bad_frame_closes_only_its_connection(data: bytes, error: type[MagnetarError]) -> None:
    async with serving() as service, raw(service) as good, raw(service) as bad:
        bad.write(encode_frame(SEND, b"before") + data + encode_frame(SEND, b"after"))
        (failed,) = await bad.rest()
        assert isinstance(failed, Failed)
        assert failed.request_id == 0
        assert type(failed.to_error()) is error
        await service.handlers[1].until(lambda: service.handlers[1].closes == 1)
        assert [payload for _, payload in service.handlers[1].frames] == [b"before"]
        assert type(service.handlers[1].error) is error
        good.write(encode_frame(Ping(0).encode()))
        assert isinstance(await good.next(), Pong)


async def test_an_unknown_command_with_an_id_is_answered_and_survived() -> None:
    async with serving() as service, raw(service) as peer:
        peer.write(encode_frame(b"\x93\x7e\x2a\xa3new") + encode_frame(SEND, b"next"))
        failed = await peer.next()
        assert isinstance(failed, Failed)
        assert failed.request_id == 42
        assert isinstance(failed.to_error(), UnknownCommand)
        await service.handlers[0].until(lambda: service.handlers[0].frames == [(SEND, b"next")])


async def test_a_result_too_large_for_a_header_arrives_in_the_payload() -> None:
    async with serving() as service:
        connection, _, accepted = await service.connect()
        result = {"topics": [f"persistent://public/default/{number}" for number in range(3000)]}
        asked = asyncio.create_task(connection.request(Lookup(0, "orders"), timeout=5))
        await accepted.until(lambda: len(accepted.frames) == 1)
        assert accepted.connection is not None
        accepted.connection.answer(decode_command(accepted.frames[0][0]).request_id, result)
        assert await asked == (result, b"")


async def test_an_error_that_quotes_a_large_header_is_told() -> None:
    async with serving() as service:
        connection, _, accepted = await service.connect()
        asked = asyncio.create_task(connection.request(Lookup(0, "x" * 65_000), timeout=5))
        await accepted.until(lambda: len(accepted.frames) == 1)
        assert accepted.connection is not None
        request_id = decode_command(accepted.frames[0][0]).request_id
        accepted.connection.answer_error(request_id, TopicNotFound("no topic " + "x" * 70_000))
        with pytest.raises(TopicNotFound, match=r"no topic x+"):
            await asked
        with pytest.raises(FrameTooLarge, match="header"):
            connection.send(b"h" * 70_000)


async def test_a_command_number_in_a_longer_form_is_understood() -> None:
    async with serving() as service, raw(service) as peer:
        odd = b"\x94\xcc\x13" + SEND[2:]  # SEND as uint8
        peer.write(encode_frame(odd, b"x") + encode_frame(b"\xdc\x00\x02\xcc\x04\x00"))
        assert isinstance(await peer.next(), Pong)
        assert service.handlers[0].frames == [(odd, b"x")]


async def test_a_half_sent_frame_at_the_end_is_a_lost_connection() -> None:
    async with serving() as service, raw(service) as peer:
        peer.write(encode_frame(SEND, b"x" * 100)[:50])
        peer.writer.write_eof()
        handler = service.handlers[0]
        await handler.until(lambda: handler.closes == 1)
        assert isinstance(handler.error, ConnectionLost)
        assert "in the middle of a frame" in handler.error.message


async def test_a_handler_that_raises_ends_its_connection_only(caplog: pytest.LogCaptureFixture) -> None:
    def answer(connection: Connection, runs: list[Run]) -> None:
        if runs[0][1][0] == b"bug":
            raise ZeroDivisionError("a bug")
        if runs[0][1][0] == b"bad":
            raise MalformedFrame("cannot use this", request_id=5)
        connection.send(SEND, b"fine")

    async with serving(answer=answer) as service:
        connection, handler, accepted = await service.connect()
        other, other_handler, _ = await service.connect()
        with caplog.at_level(logging.ERROR, "magnetar.connection"):
            connection.send(SEND, b"bug")
            await accepted.until(lambda: accepted.closes == 1)
        assert "ZeroDivisionError" in caplog.text
        await handler.until(lambda: handler.closes == 1)
        assert handler.error is not None
        assert "internal error" in handler.error.message
        other.send(SEND, b"good")
        await other_handler.until(lambda: len(other_handler.frames) == 1)
        async with raw(service) as peer:
            peer.write(encode_frame(SEND, b"bad"))
            answers = await peer.rest()
            assert [failed.request_id for failed in answers if isinstance(failed, Failed)] == [5, 0]


async def test_mutated_frames_neither_crash_nor_hang_nor_leak() -> None:
    rng = random.Random(7650)
    whole = CONNECT + encode_frames(SEND, [b"a" * 50, b"b"]) + encode_frame(Lookup(3, "topic").encode())
    whole += encode_frame(Ok(1, {"a": [1, 2]}).encode(), b"x") + encode_frame(Ping(0).encode())

    def decoding(_connection: Connection, runs: list[Run]) -> None:
        for header, _ in runs:
            decode_command(header)

    class Sink(asyncio.Transport):
        """Takes what is written; ends when it is closed."""

        def __init__(self, protocol: asyncio.BaseProtocol) -> None:
            super().__init__()
            self.protocol, self.written, self.over = protocol, b"", False

        def write(self, data: bytes | bytearray | memoryview) -> None:
            self.written += data

        def write_eof(self) -> None:
            self.over = True

        def can_write_eof(self) -> bool:
            return True

        def is_closing(self) -> bool:
            return self.over

        def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
            pass

        def get_write_buffer_size(self) -> int:
            return 0

        def abort(self) -> None:
            self.over = True

    server = FramedServer(SERVER)

    def accept(handler: RecordingHandler) -> Transport:
        return Transport(SERVER, lambda transport: Connection(transport, handler, SERVER), server)

    for _ in range(5_000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 8)):
            position = rng.randrange(len(data))
            match rng.randrange(3):
                case 0:
                    data[position] = rng.randrange(256)
                case 1:
                    del data[position : position + rng.randint(1, 20)]
                case _:
                    data[position:position] = rng.randbytes(rng.randint(1, 20))
            if not data:
                data = bytearray(b"\0")
        handler = RecordingHandler(decoding)
        transport = accept(handler)
        sink = Sink(transport)
        transport.connection_made(sink)
        cut = rng.randrange(len(data) + 1)
        transport.data_received(bytes(data[:cut]))
        transport.data_received(bytes(data[cut:]))
        for header, _ in FrameParser().feed(sink.written):
            decode_command(header)
        if sink.over:
            assert transport.closing
        transport.connection_lost(None)
        assert transport.closing
        assert handler.closes == (handler.connection is not None)


# --- requests --------------------------------------------------------------------------------------------------------


def serve_lookups(connection: Connection, runs: list[Run]) -> None:
    for header, _ in runs:
        command = decode_command(header)
        assert isinstance(command, Lookup)
        if command.topic == "missing":
            connection.answer_error(command.request_id, TopicNotFound("no such topic"))
        elif command.topic != "slow":
            connection.answer(command.request_id, {"url": command.topic}, b"payload")


async def test_requests_and_their_answers_meet() -> None:
    async with serving(answer=serve_lookups) as service:
        connection, _, _ = await service.connect()
        replies = await asyncio.gather(
            *(connection.request(Lookup(0, f"t{number}"), timeout=5) for number in range(200))
        )
        assert [reply.result["url"] for reply in replies] == [f"t{number}" for number in range(200)]
        assert replies[0].payload == b"payload"
        with pytest.raises(TopicNotFound, match="no such topic"):
            await connection.request(Lookup(0, "missing"), timeout=5)
        own = connection.next_request_id()
        assert (await connection.request(Lookup(own, "own"), timeout=5)).result == {"url": "own"}


async def test_a_request_without_an_answer_times_out() -> None:
    async with serving(answer=serve_lookups) as service:
        connection, _, accepted = await service.connect()
        with pytest.raises(RequestTimeout, match=r"did not answer Lookup in 0\.02 s"):
            await connection.request(Lookup(0, "slow"), timeout=0.02)
        assert accepted.connection is not None
        accepted.connection.answer(1, "late")
        assert (await connection.request(Lookup(0, "next"), timeout=5)).result == {"url": "next"}


async def test_pending_requests_fail_when_the_connection_ends() -> None:
    async with serving(answer=serve_lookups) as service:
        connection, handler, accepted = await service.connect()
        waiting = [asyncio.ensure_future(connection.request(Lookup(0, "slow"), timeout=60)) for _ in range(3)]
        await accepted.until(lambda: len(accepted.frames) == 3)
        assert accepted.connection is not None
        accepted.connection.abort()
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, ConnectionLost)
        await handler.until(lambda: handler.closes == 1)
        with pytest.raises(ConnectionLost):
            await connection.request(Lookup(0, "x"), timeout=1)
        connection.send(SEND, b"dropped")
        connection.close()


async def test_closing_fails_pending_requests_at_once() -> None:
    async with serving(answer=serve_lookups) as service:
        connection, handler, accepted = await service.connect()
        waiting = asyncio.ensure_future(connection.request(Lookup(0, "slow"), timeout=60))
        await accepted.until(lambda: bool(accepted.frames))
        connection.close()
        connection.close()
        with pytest.raises(ConnectionLost, match="is closed"):
            await waiting
        await handler.until(lambda: handler.closes == 1)
        assert handler.error is None
        await accepted.until(lambda: accepted.closes == 1)


async def test_requests_are_bounded() -> None:
    async with serving(answer=serve_lookups) as service:
        connection, _, _ = await service.connect(replace(CLIENT, max_pending_requests=2))
        waiting = [asyncio.ensure_future(connection.request(Lookup(0, "slow"), timeout=60)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(TooManyRequests, match="2 requests"):
            await connection.request(Lookup(0, "x"), timeout=60)
        waiting[0].cancel()
        await asyncio.wait([waiting[0]])
        assert (await connection.request(Lookup(0, "y"), timeout=5)).result == {"url": "y"}
        connection.abort()
        await asyncio.wait(waiting)
        assert isinstance(waiting[1].exception(), ConnectionLost)

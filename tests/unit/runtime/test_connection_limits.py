"""Backpressure, keep-alive, closing, and the server: everything stays bounded and everything ends."""

import asyncio
import logging
import ssl
from dataclasses import replace

import pytest

from magnetar.proto.commands import (
    Ping,
)
from magnetar.proto.errors import (
    ConnectionLost,
    InvalidSetting,
    ServiceNotReady,
    TooManyRequests,
)
from magnetar.proto.frames import Run, encode_frame, encode_frames
from magnetar.runtime.connection import (
    Connection,
    open_connection,
    start_server,
)
from support.connections import CLIENT, SEND, SERVER, raw, serving
from support.recording_handler import RecordingHandler

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop", "asyncio"])

# --- backpressure ----------------------------------------------------------------------------------------------------


async def test_reading_pauses_until_every_reason_is_withdrawn() -> None:
    async with serving() as service:
        connection, _, accepted = await service.connect()
        inner = accepted.connection
        assert inner is not None
        inner.pause_reading("cache")
        inner.pause_reading("journal")
        inner.pause_reading("journal")
        connection.send(SEND, b"x")
        # The connection works the other way round, and what it is sent waits.
        inner.send(SEND, b"y")
        assert connection.closed is False
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert accepted.frames == []
        inner.resume_reading("journal")
        assert inner.transport.reading_paused == ("cache",)
        await asyncio.sleep(0.01)
        assert accepted.frames == []
        inner.resume_reading("cache")
        inner.resume_reading("never given")
        await accepted.until(lambda: accepted.frames == [(SEND, b"x")])


async def test_a_reader_that_stops_makes_us_unwritable_and_wakes_us_again() -> None:
    async with serving() as service:
        connection, handler, accepted = await service.connect(replace(CLIENT, high_water_bytes=100_000))
        inner = accepted.connection
        assert inner is not None
        inner.pause_reading("test")
        sent = 0
        async with asyncio.timeout(10):
            while handler.resumes == 0 and connection.writable:
                connection.send(SEND, b"x" * 10_000)
                sent += 1
                await asyncio.sleep(0)
        assert connection.transport.buffered_bytes > 90_000
        assert handler.resumes == 0
        inner.resume_reading("test")
        await handler.until(lambda: handler.resumes == 1)
        assert connection.writable
        await accepted.until(lambda: len(accepted.frames) == sent)
        assert connection.transport.buffered_bytes == 0


async def test_a_peer_that_asks_and_never_reads_is_bounded() -> None:
    def echo(connection: Connection, runs: list[Run]) -> None:
        for header, payloads in runs:
            connection.send_encoded(encode_frames(header, payloads * 4))

    options = replace(SERVER, high_water_bytes=256 * 1024)
    async with serving(options, answer=echo) as service, raw(service) as peer:
        handler = service.handlers[0]
        frame = encode_frames(SEND, [b"z" * 1000] * 100)

        async def flood() -> None:
            while True:
                peer.write(frame)
                await peer.writer.drain()

        flooding = asyncio.ensure_future(flood())
        connection = handler.connection
        assert connection is not None
        # First the kernel's buffers fill up; then nothing moves any more.
        received, quiet = 0, 0
        async with asyncio.timeout(10):
            while quiet < 10:
                quiet = quiet + 1 if received == len(handler.frames) else 0
                received = len(handler.frames)
                await asyncio.sleep(0.005)
        assert connection.transport.reading_paused == ("answers",)
        assert connection.transport.buffered_bytes < 4 * 1024 * 1024
        flooding.cancel()
        await asyncio.wait([flooding])
        # It starts to read: everything flows again.
        reading = asyncio.ensure_future(peer.rest())
        await handler.until(lambda: len(handler.frames) > received)
        reading.cancel()
        await asyncio.wait([reading])


async def test_a_peer_that_never_reads_what_it_is_sent_is_cut() -> None:
    options = replace(SERVER, high_water_bytes=64 * 1024, max_buffered_bytes=1024 * 1024)
    async with serving(options) as service, raw(service):
        handler = service.handlers[0]
        connection = handler.connection
        assert connection is not None
        peak = 0
        async with asyncio.timeout(10):
            while not connection.closed:
                connection.send(SEND, b"x" * 50_000)
                peak = max(peak, connection.transport.buffered_bytes)
                await asyncio.sleep(0)
        await handler.until(lambda: handler.closes == 1)
        assert isinstance(handler.error, ConnectionLost)
        assert "does not read" in handler.error.message
        assert peak < 1024 * 1024 + 400_000


# --- keep-alive and closing ------------------------------------------------------------------------------------------


async def test_idle_connections_live_by_pings() -> None:
    fast = 0.03
    async with serving(replace(SERVER, ping_interval_s=fast)) as service:
        connection, handler, accepted = await service.connect(replace(CLIENT, ping_interval_s=fast))
        await asyncio.sleep(8 * fast)
        assert not connection.closed
        assert (handler.closes, accepted.closes) == (0, 0)


async def test_a_silent_peer_is_lost_after_two_intervals() -> None:
    async with serving(replace(SERVER, ping_interval_s=0.03)) as service, raw(service) as peer:
        handler = service.handlers[0]
        assert isinstance(await peer.next(), Ping)
        await handler.until(lambda: handler.closes == 1)
        assert isinstance(handler.error, ConnectionLost)
        assert "was silent for 0.06 s" in handler.error.message


async def test_an_unfinished_frame_does_not_count_as_life() -> None:
    async with serving(replace(SERVER, ping_interval_s=0.03)) as service, raw(service) as peer:
        handler = service.handlers[0]
        frame = encode_frame(SEND, b"x" * 10_000)

        async def trickle() -> None:
            for byte in frame:
                peer.write(bytes([byte]))
                await asyncio.sleep(0.005)

        trickling = asyncio.ensure_future(trickle())
        await handler.until(lambda: handler.closes == 1)
        trickling.cancel()
        await asyncio.wait([trickling])
        assert isinstance(handler.error, ConnectionLost)
        assert "left a frame unfinished" in handler.error.message


async def test_closing_flushes_first_and_tells_the_error() -> None:
    async with serving() as service:
        connection, handler, accepted = await service.connect()
        assert accepted.connection is not None
        # Input that the server never reads must not turn the close into a reset that loses its last frames.
        accepted.connection.pause_reading("busy")
        connection.send(SEND, b"unread" * 1000)
        await asyncio.sleep(0.01)
        for _ in range(50):
            accepted.connection.send(SEND, b"x" * 100_000)
        accepted.connection.close(ServiceNotReady("stopping"))
        accepted.connection.send(SEND, b"too late")
        await handler.until(lambda: handler.closes == 1)
        assert len(handler.frames) == 50
        assert isinstance(handler.error, ServiceNotReady)
        await accepted.until(lambda: accepted.closes == 1)
        assert isinstance(accepted.error, ServiceNotReady)


async def test_closing_does_not_wait_for_a_peer_that_hangs() -> None:
    async with serving(replace(SERVER, close_timeout_s=0.05)) as service, raw(service):
        handler = service.handlers[0]
        assert handler.connection is not None
        handler.connection.send(SEND, b"x" * 4_000_000)
        handler.connection.close()
        await handler.until(lambda: handler.closes == 1)


# --- the server ------------------------------------------------------------------------------------------------------


async def test_a_port_in_use_is_one_clear_error() -> None:
    async with serving() as service:
        host, port = service.address
        options = replace(SERVER, port_setting="broker.port", port_flag="--at")
        with pytest.raises(ServiceNotReady, match=rf"port {port} .* is in use .* --at N .* 'broker.port'"):
            await start_server(host, port, RecordingHandler, options)
        with pytest.raises(InvalidSetting, match=r"cannot listen on 203\.0\.113\.1"):
            await start_server("203.0.113.1", 0, RecordingHandler, options)


async def test_a_full_server_says_so() -> None:
    async with serving(replace(SERVER, max_connections=1)) as service:
        first, _, _ = await service.connect()
        with pytest.raises(TooManyRequests, match="1 connections are open"):
            await open_connection(*service.address, RecordingHandler(), CLIENT)
        first.close()
        accepted = service.handlers[0]
        await accepted.until(lambda: accepted.closes == 1)


async def test_a_stopping_server_tells_everybody() -> None:
    async with serving() as service:
        peers = [await service.connect() for _ in range(3)]
        await service.server.close(5)
        for _, handler, _ in peers:
            await handler.until(lambda handler=handler: handler.closes == 1)  # type: ignore[misc]
            assert isinstance(handler.error, ServiceNotReady)
        with pytest.raises(ConnectionLost):
            await open_connection(*service.address, RecordingHandler(), CLIENT)


async def test_a_hostile_peer_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as service:
        with caplog.at_level(logging.INFO, "magnetar.connection"):
            for _ in range(30):
                async with raw(service, shake=False) as peer:
                    peer.write(b"GET / HTTP/1.1\r\n\r\n")
                    await peer.rest()
        assert 0 < len(caplog.records) <= 10
        assert "this is not the Magnetar protocol" in caplog.text


async def test_tls_contexts_are_used() -> None:
    async with serving(replace(SERVER, tls=ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))) as service:
        with pytest.raises(ConnectionLost):
            await open_connection(
                *service.address, RecordingHandler(), replace(CLIENT, handshake_timeout_s=0.3)
            )

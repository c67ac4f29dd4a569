"""A probe: is the peer still there? Connections in virtual time."""

import asyncio
from dataclasses import replace

from magnetar.proto.commands import Pong
from magnetar.proto.frames import encode_frame
from support.connections import CLIENT, SEND, Service, raw, serving
from support.virtual_time import in_virtual_time


@in_virtual_time
async def test_a_peer_that_is_there_answers_at_once_and_all_who_ask_share_the_answer() -> None:
    async with serving() as service:
        connection, _, accepted = await service.connect()
        inner, loop = accepted.connection, asyncio.get_running_loop()
        assert inner is not None
        began = loop.time()
        probe = inner.probe()
        assert inner.probe() is probe
        await probe
        assert loop.time() - began < 0.2
        await asyncio.sleep(1000)
        assert not inner.closed, "the keep-alive goes on as before"
        assert inner.probe() is not probe
        connection.close()
        await asyncio.sleep(1)
        await inner.probe()  # of a connection that is closed: at once


@in_virtual_time
async def test_a_peer_that_is_silent_is_cut_after_5_s_and_its_handler_knows_it_first() -> None:
    async with serving() as service, raw(service) as peer:
        await peer_ready(service)
        handler, loop = service.handlers[-1], asyncio.get_running_loop()
        assert handler.connection is not None
        peer.write(encode_frame(Pong(0).encode()))  # nobody asked
        await asyncio.sleep(20)
        began = loop.time()
        await handler.connection.probe()
        assert 4.9 < loop.time() - began < 5.2
        assert "was silent for 5 s" in str(handler.error)


@in_virtual_time
async def test_while_reading_is_paused_silence_proves_nothing_and_what_was_on_its_way_is_no_answer() -> None:
    async with serving() as service, raw(service) as peer:
        await peer_ready(service)
        connection = service.handlers[-1].connection
        assert connection is not None
        connection.pause_reading("test")
        peer.write(encode_frame(SEND, b"x") * 3)
        probe = connection.probe()
        await asyncio.sleep(40)
        assert not probe.done()
        connection.resume_reading("test")
        await asyncio.sleep(4)
        assert not probe.done()
        await probe
        assert connection.closed


@in_virtual_time
async def test_a_ping_interval_shorter_than_a_probe_holds_for_it_too() -> None:
    async with serving(replace(CLIENT, name="server", ping_interval_s=0.5)) as service, raw(service):
        await peer_ready(service)
        connection = service.handlers[-1].connection
        assert connection is not None
        async with asyncio.timeout(1.2):
            await connection.probe()


async def peer_ready(service: Service) -> None:
    handler = service.handlers[-1]
    await handler.until(lambda: handler.connection is not None)

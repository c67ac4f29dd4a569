"""An attempt to connect that is cut anywhere leaves neither a socket nor a timer that finds one closed."""

import asyncio
from typing import Any

import pytest

from magnetar.runtime.connection import ConnectionOptions, open_connection
from support.recording_handler import RecordingHandler

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop", "asyncio"])
TIMEOUT_S = 0.05


async def test_an_attempt_that_is_cut_anywhere_leaves_nothing() -> None:
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    silent: list[asyncio.StreamWriter] = []

    async def came(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silent.append(writer)

    server = await asyncio.start_server(came, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    options = ConnectionOptions("test", handshake_timeout_s=TIMEOUT_S)
    for turns in range(16):
        attempt = asyncio.create_task(open_connection("127.0.0.1", port, RecordingHandler(), options))
        for _ in range(turns):
            await asyncio.sleep(0)
        attempt.cancel()
        await asyncio.gather(attempt, return_exceptions=True)
        assert attempt.cancelled()
    await asyncio.sleep(3 * TIMEOUT_S)
    assert failures == []
    server.close()
    for writer in silent:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for writer in silent), return_exceptions=True)
    async with asyncio.timeout(5):
        while asyncio.all_tasks() != {asyncio.current_task()}:
            await asyncio.sleep(0.001)

"""What is read once for all who ask, and kept until it changes."""

import asyncio

import pytest

from magnetar.metadata.watched import Watched
from magnetar.proto.errors import ServiceNotReady
from support.memory_metadata import MemoryMetadataStore


async def test_who_asks_while_it_is_closed_may_try_elsewhere() -> None:
    """Seed 153 of `once`: a broker that stopped cancelled the subscribe that asked, which its client took for final."""
    answer: asyncio.Future[str] = asyncio.Future()

    async def read() -> str:
        return await answer

    watched = Watched(MemoryMetadataStore(), "/a", read)
    asking = [asyncio.ensure_future(watched.get()) for _ in range(2)]
    await asyncio.sleep(0)
    await watched.close()
    for one in asking:
        with pytest.raises(ServiceNotReady, match="read /a was stopped"):
            await one


async def test_who_gives_up_does_not_stop_the_reading_of_the_others() -> None:
    answer: asyncio.Future[str] = asyncio.Future()

    async def read() -> str:
        return await answer

    watched = Watched(MemoryMetadataStore(), "/a", read)
    first, second = (asyncio.ensure_future(watched.get()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    answer.set_result("as stored")
    assert await second == "as stored" == watched.known
    assert first.cancelled()
    await watched.close()

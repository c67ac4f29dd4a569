"""An office: one holder at a time, and the next one as soon as its session ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from magnetar.metadata.election import elected
from magnetar.proto.errors import AlreadyClosed, ConnectionLost
from support.memory_metadata import MemoryMetadataStore
from support.virtual_time import in_virtual_time

OFFICE = "/office"


@in_virtual_time
async def test_the_office_goes_from_session_to_session() -> None:
    store = MemoryMetadataStore()
    sessions = [await store.open_session(10) for _ in range(3)]
    held: list[int] = []

    async def contend(number: int) -> None:
        await elected(store, OFFICE, b"%d" % number, sessions[number])
        held.append(number)

    contenders = [asyncio.ensure_future(contend(number)) for number in range(3)]
    await asyncio.sleep(1)
    assert held == [0]
    await sessions[0].close()
    await asyncio.sleep(1)
    assert held == [0, 1], "at once, and not the third one beside it"
    store.expire(sessions[1].session_id)
    await asyncio.sleep(1)
    assert held == [0, 1, 2]
    node = await store.get(OFFICE)
    assert node is not None
    assert node.value == b"2"
    await asyncio.gather(*contenders)
    await store.close()


@in_virtual_time
async def test_a_watch_that_says_nothing_is_made_up_for() -> None:
    class Silent(MemoryMetadataStore):
        """Reports no changes of the office."""

        def watch(self, path: str, callback: Any) -> Any:
            return super().watch("/elsewhere", callback)

    store = Silent()
    first, second = await store.open_session(10), await store.open_session(10)
    await elected(store, OFFICE, b"1", first)
    waiting = asyncio.ensure_future(elected(store, OFFICE, b"2", second))
    await asyncio.sleep(1)
    await first.close()
    async with asyncio.timeout(31):
        await waiting
    await store.close()


@in_virtual_time
async def test_errors_of_the_store_end_the_contest() -> None:
    class Broken(MemoryMetadataStore):
        """Its connection is lost once."""

        broken = True

        async def create(self, *given: Any, **named: Any) -> int:
            if self.broken:
                self.broken = False
                raise ConnectionLost
            return await super().create(*given, **named)

    store = Broken()
    session = await store.open_session(10)
    with pytest.raises(ConnectionLost):
        await elected(store, OFFICE, b"", session)
    store.expire(session.session_id)
    with pytest.raises(AlreadyClosed):
        await elected(store, OFFICE, b"", session)
    await store.close()

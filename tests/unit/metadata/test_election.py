"""An office: one holder at a time, and the next one as soon as its session ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from magnetar.metadata.election import elected
from magnetar.metadata.memory import MemoryMetadataStore
from magnetar.proto.errors import AlreadyClosed, ConnectionLost
from support.virtual_time import in_virtual_time

OFFICE = "/office"


async def at_leisure(create: Coroutine[Any, Any, int]) -> int:
    """Without a bound."""
    return await create


@in_virtual_time
async def test_the_office_goes_from_session_to_session() -> None:
    store = MemoryMetadataStore()
    sessions = [await store.open_session(10) for _ in range(3)]
    held: list[int] = []

    async def contend(number: int) -> None:
        await elected(store, OFFICE, b"%d" % number, sessions[number], at_leisure)
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
    await elected(store, OFFICE, b"1", first, at_leisure)
    waiting = asyncio.ensure_future(elected(store, OFFICE, b"2", second, at_leisure))
    await asyncio.sleep(1)
    await first.close()
    async with asyncio.timeout(31):
        await waiting
    await store.close()


@in_virtual_time
async def test_errors_of_the_store_end_the_contest() -> None:
    store = MemoryMetadataStore()
    session = await store.open_session(10)

    async def broken(create: Coroutine[Any, Any, int]) -> int:
        create.close()
        raise ConnectionLost

    with pytest.raises(ConnectionLost):
        await elected(store, OFFICE, b"", session, broken)
    store.expire(session.session_id)
    with pytest.raises(AlreadyClosed):
        await elected(store, OFFICE, b"", session, at_leisure)
    await store.close()

"""A connection that has ended is freed without the garbage collector, with its transport and its handler, on both sides."""

import asyncio
import gc
import weakref
from typing import Any

import pytest

from support.connections import serving

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop", "asyncio"])


@pytest.mark.parametrize("end", ["close", "abort"])
async def test_nothing_of_a_connection_is_left_when_it_has_ended(end: str) -> None:
    async with serving() as service:
        connection, handler, accepted = await service.connect()
        assert accepted.connection is not None
        there: list[weakref.ref[Any]] = [
            weakref.ref(one)
            for side in (connection, accepted.connection)
            for one in (side, side.transport, side._handler)
        ]
        gc.collect()
        gc.disable()
        try:
            getattr(connection, end)()
            await connection.wait_closed(5.0)
            await accepted.connection.wait_closed(5.0)
            service.handlers.clear()
            del connection, handler, accepted
            for _ in range(10):
                await asyncio.sleep(0)
            assert [one() for one in there if one() is not None] == []
        finally:
            gc.enable()

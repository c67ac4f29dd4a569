"""Every call of a TimedStore ends, in one clear error, and passes on what the store says."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from magnetar.metadata.store import Create
from magnetar.metadata.timed import TimedStore
from magnetar.proto.errors import NotFoundInStore, RequestTimeout
from support.memory_metadata import MemoryMetadataStore
from support.virtual_time import in_virtual_time


class HungStore(MemoryMetadataStore):
    """Answers nothing."""

    def __getattribute__(self, name: str) -> Any:
        if name not in ("get", "create", "put", "delete", "children", "next_id", "commit", "open_session"):
            return super().__getattribute__(name)

        async def call(*_: Any, **__: Any) -> None:
            await asyncio.get_running_loop().create_future()

        return call


CALLS: dict[str, Callable[[TimedStore], Awaitable[object]]] = {
    "/a": lambda store: store.get("/a"),
    "/b": lambda store: store.create("/b", b""),
    "/c": lambda store: store.put("/c", b"", version=0),
    "/d": lambda store: store.delete("/d"),
    "/e": lambda store: store.children("/e"),
    "ids": lambda store: store.next_id("ids"),
    "/f": lambda store: store.commit([Create("/f", b"")]),
    "session": lambda store: store.open_session(5.0),
}


@pytest.mark.parametrize("what", CALLS)
@in_virtual_time
async def test_no_call_is_without_end(what: str) -> None:
    with pytest.raises(RequestTimeout, match=rf"metadata_timeout_s=3 s \(.*{what}"):
        await CALLS[what](TimedStore(HungStore(), 3.0))


async def test_it_is_the_store_below_it_otherwise() -> None:
    below = MemoryMetadataStore()
    store = TimedStore(below, 3.0)
    changed: list[str] = []
    watch = store.watch("/a", changed.append)
    session = await store.open_session(5.0)
    assert await store.create("/a", b"1", session=session) == 0
    assert await store.put("/a", b"2", version=0) == 1
    assert await store.get("/a") == await below.get("/a") == (b"2", 1)
    assert await store.children("/") == ["a"]
    assert [await store.next_id("ids"), await store.next_id("ids")] == [0, 1]
    await store.commit([Create("/b", b"")])
    await store.delete("/b")
    with pytest.raises(NotFoundInStore):
        await store.delete("/b")
    assert changed
    watch.close()
    await store.close()

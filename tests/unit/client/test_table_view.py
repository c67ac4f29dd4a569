"""Reading what compactions left, and table views: the real broker and listener on a port, over fake ledgers."""

import asyncio
import gc
import threading
from typing import Any

import pytest

from magnetar.client import AlreadyClosed, Client, InvalidArgument, TopicNotFound
from magnetar.client.blocking import connect as connect_blocking
from support.client_kit import until
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore
from support.served_broker import client, connect_to, server, serving, take

__all__ = ["client", "server"]


async def send(client: Client, *messages: tuple[str | bytes | None, bytes | None]) -> list[Any]:
    async with client.create_producer("prices") as producer:
        return await producer.send_many([value for _, value in messages], keys=[key for key, _ in messages])


async def test_consumers_and_readers_of_what_is_left(client: Client) -> None:
    ids = await send(client, ("a", b"1"), ("b", b"2"), ("a", b"3"), (None, b"4"), ("b", None))
    state = await client.admin.compact_topic("prices", wait=True)
    assert (state["state"], state["compacted_messages"]) == ("done", 3), "b is remembered as deleted"
    assert (await client.admin.topic_stats("prices"))["compaction"] == state
    ids += await send(client, ("a", b"5"))
    wanted = [(ids[2], "a", b"3"), (ids[3], None, b"4"), (ids[5], "a", b"5")]
    async with client.create_reader("prices", start="earliest", read_compacted=True) as reader:
        assert [(one.id, one.key, one.value) for one in await take(reader, 3)] == wanted
        assert not await reader.has_message_available()
    for kind in ("exclusive", "failover"):
        async with client.subscribe(
            "prices", kind, type=kind, start="earliest", read_compacted=True
        ) as consumer:
            first, *rest = await take(consumer, 3)
            assert [(one.id, one.key, one.value) for one in (first, *rest)] == wanted
            await consumer.ack(first, receipt=True)
        async with client.subscribe("prices", kind, type=kind, read_compacted=True) as consumer:
            assert [one.id for one in await take(consumer, 2)] == [one.id for one in rest]
            await consumer.ack_cumulative(rest[1], receipt=True)
            await consumer.seek("earliest")
            assert (await consumer.receive(5.0)).id == first.id
    async with client.create_reader("prices", start="earliest") as reader:
        assert [one.id for one in await take(reader, 6)] == ids
    with pytest.raises(InvalidArgument, match="for exclusive and failover subscriptions and for readers"):
        client.subscribe("prices", "s", type="shared", read_compacted=True)
    with pytest.raises(TopicNotFound):
        await client.admin.compact_topic("nothing")


async def test_a_reader_of_a_topic_of_which_nothing_is_left_has_nothing_to_wait_for(client: Client) -> None:
    await send(client, ("a", b"1"), ("a", None))
    await client.admin.compact_topic("prices", wait=True)
    async with client.create_reader("prices", start="earliest", read_compacted=True) as reader:
        assert not await reader.has_message_available()
    async with client.create_table_view("prices") as view:
        assert len(view) == 0


async def test_a_table_view(client: Client) -> None:
    await send(client, ("a", b"1"), (b"b", b"2"), (None, b"-"), ("c", b"33"), ("c", None))
    async with client.create_table_view("prices") as view:
        assert view.items() == [("a", b"1"), (b"b", b"2")]
        assert (view["a"], view.get("b"), view.get("c"), view.get("c", b"-")) == (b"1", b"2", None, b"-")
        assert ("a" in view, b"a" in view, "c" in view, 5 in view) == (True, True, False, False)
        assert (list(view), view.values(), len(view), view.size_bytes) == (["a", b"b"], [b"1", b"2"], 2, 4)
        with pytest.raises(KeyError):
            view["c"]
        seen: list[Any] = []

        def broken(key: Any, value: Any) -> None:
            raise ValueError(key)

        forget, _ = view.listen(lambda key, value: seen.append((key, value))), view.listen(broken)
        await send(client, ("c", b"3"), ("a", None), ("nothing", None))
        await view.refresh()
        assert seen == [("c", b"3"), ("a", None)]
        assert view.items() == [(b"b", b"2"), ("c", b"3")]
        forget()
        await client.admin.compact_topic("prices", wait=True)
        await send(client, ("b", b"22"))
        await view.refresh()
        assert view.items() == [("b", b"22"), ("c", b"3")]
        assert len(seen) == 2
    assert view["c"] == b"3", "it can still be looked at"
    with pytest.raises(AlreadyClosed):
        await view.refresh()


async def test_changes_end_with_the_view_and_who_is_slow_gets_the_last_value(client: Client) -> None:
    async with client.create_table_view("prices") as view:
        changes = view.changes()
        first = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0)
        await send(client, ("a", b"1"))
        assert await first == ("a", b"1")
        await send(client, ("a", b"2"), ("b", b"1"), ("a", b"3"), ("b", None))
        await view.refresh()
        assert [await anext(changes) for _ in range(2)] == [("a", b"3"), ("b", None)]
        last = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0)
    with pytest.raises(StopAsyncIteration):
        await last


async def test_changes_begin_at_the_call_and_not_at_the_first_step(client: Client) -> None:
    async with client.create_table_view("prices") as view:
        changes, left = view.changes(), view.changes()
        await send(client, ("a", b"1"))
        await view.refresh()
        assert await anext(changes) == ("a", b"1")
        inner: Any = view
        assert len(inner._listeners) == 2
        del left
        gc.collect()
        assert len(inner._listeners) == 1, "what is never iterated leaves nothing behind"
    with pytest.raises(AlreadyClosed):
        await view.refresh()


async def test_a_view_survives_a_restart_in_which_what_it_knows_is_deleted_and_compacted() -> None:
    stores: dict[str, Any] = {"metadata": MemoryMetadataStore(), "ledgers": FakeLedgers()}
    async with serving(**stores) as server, connect_to(server) as client:
        port = server.addresses[0][1]
        await send(client, ("a", b"1"), ("b", b"2"))
        view = await client.create_table_view("prices")
        assert view.items() == [("a", b"1"), ("b", b"2")]
        await server.close(0.0)
        async with serving(**stores) as other, connect_to(other) as second:
            await send(second, ("a", None), ("c", b"3"))
            await second.admin.compact_topic("prices", wait=True)
        async with serving(**stores, port=port):
            await until(lambda: view.items() == [("b", b"2"), ("c", b"3")])
            await view.close()


def test_the_blocking_view() -> None:
    ready, stop = threading.Event(), threading.Event()
    url: list[str] = []

    async def serve() -> None:
        async with serving() as server:
            url.append(f"magnetar://127.0.0.1:{server.addresses[0][1]}")
            ready.set()
            await asyncio.get_running_loop().run_in_executor(None, stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        ready.wait()
        with connect_blocking(url[0]) as client:
            producer = client.create_producer("prices")
            producer.send(b"1", key="a")
            with client.create_table_view("prices") as view:
                assert (view["a"], view.get("b"), "a" in view, len(view), list(view)) == (
                    b"1",
                    None,
                    True,
                    1,
                    ["a"],
                )
                producer.send(b"2", key="b")
                view.refresh()
                assert (view.items(), view.size_bytes) == ([("a", b"1"), ("b", b"2")], 4)
                changes = view.changes()
                sending = threading.Timer(0.01, lambda: producer.send(b"3", key="a"))
                sending.start()
                assert next(changes) == ("a", b"3")
                changes.close()
                sending.join()
            assert client.admin.compact_topic("prices", wait=True)["state"] == "done"
    finally:
        stop.set()
        thread.join()

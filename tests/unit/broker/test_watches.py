"""Watches of topics: who is told, what a connection that takes nothing costs, and that nothing of a watch stays."""

from typing import Any

import msgspec
import pytest

from magnetar.broker.listeners.native import watches
from magnetar.proto import commands as c
from magnetar.proto.errors import AlreadyExists, InvalidArgument, NotAuthorized, TooManyRequests
from support.broker_kit import FakeClient, running_broker, settle


def told(client: FakeClient) -> list[tuple[int, Any]]:
    """Watch id, and what it was told: a map, or "list again"."""
    return [
        (command.watch_id, "list again" if command.list_again else msgspec.msgpack.decode(payload))
        for command, payload in client.frames
        if isinstance(command, c.TopicsChanged)
    ]


def full(name: str) -> str:
    return f"persistent://public/default/{name}"


async def test_topics_that_are_made_and_deleted_are_told() -> None:
    async with running_broker() as broker:
        client, other = FakeClient(broker), FakeClient(broker)
        await client.ask(c.CreateTopic, "old")
        await client.ask(c.WatchTopics, 7, "public/default")
        await client.ask(c.WatchTopics, 8, "acme/sales")
        await other.producer(topic="new")  # made by its first use
        await other.producer(2, topic="new")
        await other.ask(c.CreateTopic, "acme/sales/x")
        await other.ask(c.CreateTopic, "acme/other/x")
        await other.ask(c.DeleteTopic, "old")
        await settle()
        assert told(client) == [
            (7, {full("new"): True}),
            (8, {"persistent://acme/sales/x": True}),
            (7, {full("old"): False}),
        ]
        assert told(other) == []
        await client.ask(c.WatchTopics, 7, "")
        await client.ask(c.WatchTopics, 7, "")  # ended already
        client.frames.clear()
        await other.ask(c.CreateTopic, "newer")
        await settle()
        assert told(client) == []


async def test_a_connection_that_takes_nothing_is_told_to_list_again() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.ask(c.WatchTopics, 1, "public/default")
        client.writable = False
        for number in range(5):
            await client.ask(c.CreateTopic, f"t{number}")
        await settle()
        assert told(client) == []
        (watch,) = client.handler._watches._topics.values()
        assert not watch._changes, "nothing is kept for it"
        client.writable = True
        client.handler.writing_resumed()
        assert told(client) == [(1, "list again")]
        await client.ask(c.CreateTopic, "after")
        await settle()
        assert told(client)[1:] == [(1, {full("after"): True})]


async def test_too_many_changes_at_once_are_not_told_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "MAX_CHANGES", 3)
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.ask(c.WatchTopics, 1, "public/default")
        (watch,) = client.handler._watches._topics.values()
        for number in range(10):
            watch.topic_changed(full(f"t{number}"), exists=True)
        await settle()
        assert told(client) == [(1, "list again")]


async def test_watches_are_bounded_checked_and_end_with_their_connection() -> None:
    async with running_broker(max_watches_per_connection=2) as broker:
        client = FakeClient(broker)
        for namespace in ("public", "/", "a/b/c"):
            with pytest.raises(InvalidArgument, match="want tenant/namespace"):
                await client.ask(c.WatchTopics, 1, namespace)
        client.forbidden.add("list_topics")
        with pytest.raises(NotAuthorized):
            await client.ask(c.WatchTopics, 1, "public/default")
        client.forbidden.clear()
        await client.ask(c.WatchTopics, 1, "public/default")
        with pytest.raises(AlreadyExists, match="choose another id"):
            await client.ask(c.WatchTopics, 1, "public/default")
        await client.ask(c.WatchTopics, 2, "public/default")
        with pytest.raises(TooManyRequests, match="max_watches_per_connection"):
            await client.ask(c.WatchTopics, 3, "public/default")
        client.close()
        assert broker.watches._watches == {}

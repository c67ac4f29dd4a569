"""`magnetar topics` and `magnetar subscriptions`: what the broker reports, as a table or as JSON."""

from __future__ import annotations

import sys
from typing import Any

from magnetar.client import connect
from magnetar.proto.ids import TopicName

from .session import EXIT_USAGE, fail, print_json
from .tables import print_table, text


def confirm(question: str, yes: bool, *, refusal: str = "this deletes data: say --yes") -> None:
    """Asks at a terminal; in a script `--yes` is needed."""
    if yes:
        return
    if not sys.stdin.isatty():
        fail(refusal, EXIT_USAGE)
    import typer

    typer.confirm(question, abort=True)


async def list_topics(url: str, namespace: str, *, as_json: bool) -> None:
    """A name a line; short for public/default."""
    async with connect(url) as client:
        names = await client.list_topics(namespace)
    if as_json:
        print_json(names)
    else:
        for name in names:
            print(TopicName.parse(name).short)


async def topic_stats(url: str, topic: str, *, as_json: bool) -> None:
    """Figures of the topic."""
    async with connect(url) as client:
        stats = await client.topic_stats(topic)
    if as_json:
        print_json(stats)
        return
    print_table("", ("", ""), _figures(stats), right=(1,))
    if stats.get("compaction", {}).get("state", "never") != "never":
        print_table("compaction", ("", ""), _figures(stats["compaction"]), right=(1,))
    if stats.get("producers"):
        print_table(
            "producers", ("name", "epoch"), [(p["name"], text(p["epoch"])) for p in stats["producers"]]
        )
    if stats.get("subscriptions"):
        _print_subscriptions(stats["subscriptions"])


async def list_subscriptions(url: str, topic: str, *, as_json: bool) -> None:
    """Subscriptions of the topic that outlive their consumers, and readers."""
    async with connect(url) as client:
        subscriptions = (await client.topic_stats(topic)).get("subscriptions", {})
    if as_json:
        print_json(subscriptions)
    else:
        _print_subscriptions(subscriptions)


async def compact_topic(url: str, topic: str, *, action: str, wait: bool, as_json: bool) -> None:
    """Begins a compaction, shows how it stands, or gives it up."""
    async with connect(url) as client:
        if action == "start":
            state = await client.compact_topic(topic, wait=wait)
        elif action == "remove":
            state = await client.remove_compaction(topic)
        else:
            state = await client.compaction_status(topic)
    if as_json:
        print_json(state)
    else:
        print_table("", ("", ""), _figures(state), right=(1,))
    if wait and state["state"] == "failed":
        fail(f"the compaction of {topic} failed: {state['error']}")


async def delete_topic(url: str, topic: str, *, force: bool) -> None:
    """With all messages."""
    async with connect(url) as client:
        await client.delete_topic(topic, force=force)
    print(f"deleted topic {topic}")


async def delete_subscription(url: str, topic: str, subscription: str, *, force: bool) -> None:
    """With what it remembers."""
    async with connect(url) as client:
        await client.delete_subscription(topic, subscription, force=force)
    print(f"deleted subscription {subscription} of {topic}")


def _figures(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (name.replace("_", " "), text(value))
        for name, value in found.items()
        if not isinstance(value, list | dict)
    ]


def _print_subscriptions(subscriptions: dict[str, dict[str, Any]]) -> None:
    rows = [
        (
            name,
            str(found["type"]) + ("" if found.get("durable", True) else ", reader"),
            text(found.get("backlog_messages", 0)),
            text(sum(consumer.get("unacked_messages", 0) for consumer in found.get("consumers", []))),
            text(found.get("acknowledged_messages", 0)),
            text(len(found.get("consumers", []))),
        )
        for name, found in subscriptions.items()
    ]
    columns = ("name", "type", "backlog", "unacknowledged", "acknowledged", "consumers")
    print_table("subscriptions", columns, rows, right=(2, 3, 4, 5))

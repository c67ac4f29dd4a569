"""`magnetar topics` and `magnetar subscriptions`: what the broker reports, as a table or as JSON."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Any

from magnetar.client import SubscriptionNotFound, connect
from magnetar.client.options import Start
from magnetar.proto.ids import TopicName

from .session import EXIT_USAGE, fail, print_json
from .tables import counted, print_table, text


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
    print_figures(stats)
    if stats.get("compaction", {}).get("state", "never") != "never":
        _print_compaction(stats["compaction"], title="compaction")
    if stats.get("producers"):
        print_table(
            "producers", ("name", "epoch"), [(p["name"], text(p["epoch"])) for p in stats["producers"]]
        )
    if stats.get("subscriptions"):
        _print_subscriptions(stats["subscriptions"])


def print_figures(stats: dict[str, Any], title: str = "") -> None:
    """Those that are a number or a word, as a table of two columns."""
    figures = [
        (name.replace("_", " "), text(value))
        for name, value in stats.items()
        if value is not None and not isinstance(value, list | dict)
    ]
    print_table(title, ("", ""), figures, right=(1,))


def _print_compaction(state: dict[str, Any], title: str = "") -> None:
    shown = {name: value for name, value in state.items() if name != "compacted_ms"}
    if at_ms := state.get("compacted_ms"):
        moment = datetime.fromtimestamp(at_ms / 1000, UTC).astimezone()
        shown["compacted_at"] = moment.isoformat(timespec="seconds")
    print_figures(shown, title)


async def list_subscriptions(url: str, topic: str, *, as_json: bool) -> None:
    """Subscriptions of the topic that outlive their consumers, and readers."""
    async with connect(url) as client:
        subscriptions = (await client.topic_stats(topic)).get("subscriptions", {})
    if as_json:
        print_json(subscriptions)
    else:
        _print_subscriptions(subscriptions)


async def subscription_stats(url: str, topic: str, subscription: str, *, as_json: bool) -> None:
    """Figures of one subscription, and a table of its consumers. Raises SubscriptionNotFound."""
    async with connect(url) as client:
        stats = await client.topic_stats(topic)
    found = stats["subscriptions"].get(subscription)
    if found is None:
        reason = stats.get("unavailable_subscriptions", {}).get(subscription)
        raise SubscriptionNotFound(reason or f"topic {topic} has no subscription {subscription!r}")
    if as_json:
        print_json(found)
        return
    positions = {name: _place(found[name]) for name in ("mark_delete", "recovered_from")}
    print_figures({**found, **positions})
    rows = [
        (
            consumer["name"],
            text(consumer["priority_level"]),
            text(consumer["permits"]),
            text(consumer["unacked_messages"]),
            text(consumer["delivered_messages"]),
            _state(consumer),
        )
        for consumer in found["consumers"]
    ]
    if rows:
        columns = ("name", "priority", "permits", "unacked", "delivered", "state")
        print_table("consumers", columns, rows, right=(1, 2, 3, 4))


def _place(position: list[int] | None) -> str | None:
    """As a message id is written."""
    return None if position is None else ":".join(map(str, position))


def _state(consumer: dict[str, Any]) -> str:
    """What is worth knowing of a consumer, in words."""
    states = []
    if not consumer["active"]:
        states.append("waits for its place")
    if consumer["blocked_on_unacked_messages"]:
        states.append("blocked: too many unacknowledged messages")
    if consumer["draining_slots"]:
        states.append(f"others wait for {text(consumer['draining_slots'])} key slots that it holds")
    return "; ".join(states)


def _done(what: str, answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        print(what)


async def create_subscription(
    url: str, topic: str, subscription: str, start: Start, *, as_json: bool
) -> None:
    """Where nobody consumes yet."""
    async with connect(url) as client:
        await client.create_subscription(topic, subscription, start=start)
    answer = {"topic": topic, "subscription": subscription}
    _done(f"created subscription {subscription} of {topic}", answer, as_json=as_json)


async def seek_subscription(url: str, topic: str, subscription: str, to: Start, *, as_json: bool) -> None:
    """Whoever consumes it."""
    async with connect(url) as client:
        await client.seek_subscription(topic, subscription, to)
        stats = (await client.topic_stats(topic))["subscriptions"][subscription]
    mark, backlog = stats["mark_delete"], stats["backlog_messages"]
    answer = {"mark_delete": mark, "backlog_messages": backlog}
    coming = counted(backlog, "message", "messages")
    what = f"subscription {subscription} of {topic} goes on at {_place(mark)}; {coming} to come"
    _done(what, answer, as_json=as_json)


async def skip_messages(url: str, topic: str, subscription: str, count: int, *, as_json: bool) -> None:
    """The next `count`."""
    async with connect(url) as client:
        skipped = await client.skip_messages(topic, subscription, count)
    messages = counted(skipped, "message", "messages")
    _done(f"skipped {messages} of {subscription} in {topic}", {"skipped": skipped}, as_json=as_json)


async def clear_backlog(url: str, topic: str, subscription: str, *, as_json: bool) -> None:
    """All that is stored now."""
    async with connect(url) as client:
        skipped = await client.clear_backlog(topic, subscription)
    what = f"skipped all messages of {subscription} in {topic}, {text(skipped)} at most"
    _done(what, {"skipped": skipped}, as_json=as_json)


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
        _print_compaction(state)
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


async def expire_messages(url: str, topic: str, subscription: str, before_ms: int, *, as_json: bool) -> None:
    """What the topic stored before a time counts as acknowledged."""
    async with connect(url) as client:
        messages = await client.expire_messages(topic, subscription, before_ms)
    if as_json:
        print_json({"messages": messages})
    else:
        what = counted(messages, "message", "messages")
        print(f"expired {what} of subscription {subscription} of {topic}")


def _print_subscriptions(subscriptions: dict[str, dict[str, Any]]) -> None:
    rows = [
        (
            name,
            str(found["type"]) + ("" if found.get("durable", True) else ", reader"),
            text(found.get("backlog_messages", 0)),
            text(sum(consumer.get("unacked_messages", 0) for consumer in found.get("consumers", []))),
            text(found.get("acknowledged_messages", 0)),
            text(found.get("acknowledged_ranges", 0)),
            text(len(found.get("consumers", []))),
            _blocked(found),
        )
        for name, found in subscriptions.items()
    ]
    columns = ("name", "type", "backlog", "unacked", "acked", "holes", "consumers", "blocked")
    print_table("subscriptions", columns, rows, right=(2, 3, 4, 5, 6))


def _blocked(subscription: dict[str, Any]) -> str:
    """Why not everything is delivered that could be, in few words."""
    consumers = subscription.get("consumers", [])
    reasons = []
    if subscription.get("unreadable_entries"):
        reasons.append("unreadable entries")
    if subscription.get("blocked_on_unacked_messages"):
        reasons.append("too many unacknowledged")
    reasons += [f"{one['name']}: unacknowledged" for one in consumers if one["blocked_on_unacked_messages"]]
    reasons += [f"keys wait for {one['name']}" for one in consumers if one["draining_slots"]]
    return ", ".join(reasons)

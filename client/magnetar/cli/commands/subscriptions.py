"""`magnetar subscriptions`: who has acknowledged how much of a topic, who holds what, and changing it."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magnetar.proto.errors import SubscriptionNotFound
from magnetar.runtime.quantities import counted

from ..terminal.command import Answer, command
from ..terminal.options import DEFAULT_URL, Begin, Force, Subscription, Topic, Url
from ..terminal.session import connected, milliseconds, where
from ..terminal.tables import Table, figures, text
from .formats import Format, chosen

if TYPE_CHECKING:
    from magnetar.client import Client

subscriptions_app = typer.Typer(
    no_args_is_help=True, help="List, make, move, expire and delete subscriptions."
)


@command(subscriptions_app, "list")
async def subscriptions_list(client: Client, topic: Topic) -> Answer:
    """Subscriptions of a topic with their backlog."""
    found = (await client.admin.topic_stats(topic)).get("subscriptions", {})
    return Answer(found, [table_of_subscriptions(found)])


@command(subscriptions_app, "get")
@command(subscriptions_app, "stats")
async def subscriptions_stats(client: Client, topic: Topic, subscription: Subscription) -> Answer:
    """Figures of one subscription and its consumers: who holds what, who is blocked, who waits for whom."""
    stats = await client.admin.topic_stats(topic)
    found: dict[str, Any] | None = stats["subscriptions"].get(subscription)
    if found is None:
        reason = stats.get("unavailable_subscriptions", {}).get(subscription)
        raise SubscriptionNotFound(reason or f"topic {topic} has no subscription {subscription!r}")
    positions = {name: _place(found.get(name)) for name in ("mark_delete", "recovered_from")}
    shown = [figures({**found, **positions})]
    counts = ("priority_level", "permits", "unacked_messages", "delivered_messages")
    if found["consumers"]:
        rows = [
            (
                consumer["name"],
                *(consumer.get(name, "") for name in ("address", "client")),
                *(text(consumer[count]) for count in counts),
                _state(consumer),
            )
            for consumer in found["consumers"]
        ]
        columns = ("name", "address", "client", "priority", "permits", "unacked", "delivered", "state")
        shown.append(Table("consumers", columns, rows, right=(3, 4, 5, 6)))
    return Answer(found, shown)


def _place(position: list[int] | None) -> str | None:
    """A position in the form in which message ids are written, as 12:3."""
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


@command(subscriptions_app, "create")
async def subscriptions_create(
    client: Client, topic: Topic, subscription: Subscription, start: Begin = "latest"
) -> Answer:
    """Make a subscription before anybody consumes: from --start on it keeps what is stored."""
    await client.admin.create_subscription(topic, subscription, start=start)
    made = {"topic": topic, "subscription": subscription}
    return Answer(made, [f"created subscription {subscription} of {topic}"])


@command(subscriptions_app, "seek")
async def subscriptions_seek(
    client: Client,
    topic: Topic,
    subscription: Subscription,
    to: Annotated[
        Any,
        typer.Option(
            "--to",
            help="earliest, latest, a message id (inclusive) or a time, as --start.",
            metavar="WHERE",
            parser=partial(where, "--to"),
        ),
    ],
) -> Answer:
    """Move a subscription, back or forth; consumers that are connected go on there."""
    await client.admin.seek_subscription(topic, subscription, to)
    stats = (await client.admin.topic_stats(topic))["subscriptions"][subscription]
    found = {name: stats.get(name) for name in ("mark_delete", "backlog_messages")}
    coming = counted(stats["backlog_messages"], "message")
    place = _place(found["mark_delete"]) or "its place in each partition"
    return Answer(found, [f"subscription {subscription} of {topic} goes on at {place}; {coming} to come"])


@command(subscriptions_app, "skip")
async def subscriptions_skip(
    client: Client,
    topic: Topic,
    subscription: Subscription,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many messages.", metavar="COUNT")],
) -> Answer:
    """Acknowledge the next messages, whoever holds them; seeking back brings them again while they are stored."""
    skipped = await client.admin.skip_messages(topic, subscription, count)
    return Answer(
        {"skipped": skipped}, [f"skipped {counted(skipped, 'message')} of {subscription} in {topic}"]
    )


@command(
    subscriptions_app,
    "clear",
    question="Skip all messages of {subscription} in {topic}?",
    refusal="this skips all messages: say --yes",
)
async def subscriptions_clear(client: Client, topic: Topic, subscription: Subscription) -> Answer:
    """Acknowledge everything that is stored now, whoever holds it."""
    skipped = await client.admin.clear_backlog(topic, subscription)
    shown = f"skipped all messages of {subscription} in {topic}, {text(skipped)} at most"
    return Answer({"skipped": skipped}, [shown])


@command(subscriptions_app, "peek")
async def subscriptions_peek(
    topic: Topic,
    subscription: Subscription,
    count: Annotated[
        int, typer.Option("-n", "--count", min=1, help="How many messages, 1,000 at most.", metavar="COUNT")
    ] = 1,
    format: Format = None,
    url: Url = DEFAULT_URL,
    as_json: bool = False,
) -> None:
    """Print the next messages that are not acknowledged, without delivering them."""
    encode = chosen(format, as_json=as_json)
    async with connected(url) as client:
        for message in await client.admin.peek_messages(topic, subscription, count):
            sys.stdout.buffer.write(encode(message) + b"\n")
    sys.stdout.buffer.flush()


@command(subscriptions_app, "delete", question="Delete the subscription {subscription} of {topic}?")
async def subscriptions_delete(
    client: Client, topic: Topic, subscription: Subscription, force: Force = False
) -> Answer:
    """Delete a subscription and what it remembers."""
    await client.admin.delete_subscription(topic, subscription, force=force)
    deleted = {"topic": topic, "subscription": subscription}
    return Answer(deleted, [f"deleted subscription {subscription} of {topic}"])


def _age(text: str) -> str:
    """As it was given, for the question; a wrong one ends the command."""
    milliseconds("--older-than", text)
    return text


@command(
    subscriptions_app,
    "expire",
    question="Give up all messages of the subscription {subscription} of {topic} that are older than {older_than}?",
    refusal="this gives up messages: say --yes",
)
async def subscriptions_expire(
    client: Client,
    topic: Topic,
    subscription: Subscription,
    older_than: Annotated[
        str,
        typer.Option(
            "--older-than", help="What the topic stored longer ago: 90s, 2h, 7d.", metavar="AGE", parser=_age
        ),
    ],
) -> Answer:
    """Give up old messages of a subscription: they count as acknowledged."""
    before_ms = max(int(time.time() * 1000) - milliseconds("--older-than", older_than), 0)
    expired = await client.admin.expire_messages(topic, subscription, before_ms)
    shown = f"expired {counted(expired, 'message')} of subscription {subscription} of {topic}"
    return Answer({"messages": expired}, [shown])


def table_of_subscriptions(subscriptions: dict[str, dict[str, Any]]) -> Table:
    """A row for each."""
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
    return Table("subscriptions", columns, rows, right=(2, 3, 4, 5, 6))


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

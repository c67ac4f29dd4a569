"""`magnetar subscriptions`: who has acknowledged how much of a topic, who holds what, and changing it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..terminal.asking import Ask, asks
from ..terminal.options import DEFAULT_URL, Force, Format, Json, Start, Subscription, Topic, Url
from ..terminal.session import exclusive, milliseconds, parsed, run, start_of
from ..terminal.tables import counted, print_figures, print_table, text

if TYPE_CHECKING:
    from magnetar.client import Client

subscriptions_app = typer.Typer(
    no_args_is_help=True, help="List, make, move, expire and delete subscriptions."
)


@asks(subscriptions_app, "list")
def subscriptions_list(topic: Topic) -> Ask:
    """Subscriptions of a topic with their backlog."""

    async def find(client: Client) -> dict[str, Any]:
        found: dict[str, Any] = (await client.admin.topic_stats(topic)).get("subscriptions", {})
        return found

    return Ask(find, print_subscriptions)


@asks(subscriptions_app, "stats")
def subscriptions_stats(topic: Topic, subscription: Subscription) -> Ask:
    """Figures of one subscription and its consumers: who holds what, who is blocked, who waits for whom."""

    async def find(client: Client) -> dict[str, Any]:
        from magnetar.client import SubscriptionNotFound

        stats = await client.admin.topic_stats(topic)
        found: dict[str, Any] | None = stats["subscriptions"].get(subscription)
        if found is None:
            reason = stats.get("unavailable_subscriptions", {}).get(subscription)
            raise SubscriptionNotFound(reason or f"topic {topic} has no subscription {subscription!r}")
        return found

    return Ask(find, _print_subscription)


def _print_subscription(found: dict[str, Any]) -> None:
    positions = {name: _place(found[name]) for name in ("mark_delete", "recovered_from")}
    print_figures({**found, **positions})
    figures = ("priority_level", "permits", "unacked_messages", "delivered_messages")
    rows = [
        (consumer["name"], *(text(consumer[figure]) for figure in figures), _state(consumer))
        for consumer in found["consumers"]
    ]
    if rows:
        columns = ("name", "priority", "permits", "unacked", "delivered", "state")
        print_table("consumers", columns, rows, right=(1, 2, 3, 4))


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


@asks(subscriptions_app, "create")
def subscriptions_create(topic: Topic, subscription: Subscription, start: Start = "latest") -> Ask:
    """Make a subscription before anybody consumes: from --start on it keeps what is stored."""
    begin = start_of(start)

    async def create(client: Client) -> dict[str, str]:
        await client.admin.create_subscription(topic, subscription, start=begin)
        return {"topic": topic, "subscription": subscription}

    return Ask(create, lambda _: print(f"created subscription {subscription} of {topic}"))


@asks(subscriptions_app, "seek")
def subscriptions_seek(
    topic: Topic,
    subscription: Subscription,
    to: Annotated[
        str,
        typer.Option(
            "--to", help="earliest, latest, a message id (inclusive) or a time, as --start.", metavar="WHERE"
        ),
    ],
) -> Ask:
    """Move a subscription, back or forth; consumers that are connected go on there."""
    from magnetar.client.options import parse_start

    where = parsed("--to", parse_start, to)

    async def seek(client: Client) -> dict[str, Any]:
        await client.admin.seek_subscription(topic, subscription, where)
        stats = (await client.admin.topic_stats(topic))["subscriptions"][subscription]
        return {name: stats[name] for name in ("mark_delete", "backlog_messages")}

    def show(found: dict[str, Any]) -> None:
        coming = counted(found["backlog_messages"], "message", "messages")
        print(
            f"subscription {subscription} of {topic} goes on at {_place(found['mark_delete'])}; {coming} to come"
        )

    return Ask(seek, show)


@asks(subscriptions_app, "skip")
def subscriptions_skip(
    topic: Topic,
    subscription: Subscription,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many messages.", metavar="COUNT")],
) -> Ask:
    """Acknowledge the next messages, whoever holds them; seeking back brings them again while they are stored."""

    async def skip(client: Client) -> dict[str, int]:
        return {"skipped": await client.admin.skip_messages(topic, subscription, count)}

    def show(found: dict[str, int]) -> None:
        print(f"skipped {counted(found['skipped'], 'message', 'messages')} of {subscription} in {topic}")

    return Ask(skip, show)


@asks(
    subscriptions_app,
    "clear",
    question="Skip all messages of {subscription} in {topic}?",
    refusal="this skips all messages: say --yes",
)
def subscriptions_clear(topic: Topic, subscription: Subscription) -> Ask:
    """Acknowledge everything that is stored now, whoever holds it."""

    async def clear(client: Client) -> dict[str, int]:
        return {"skipped": await client.admin.clear_backlog(topic, subscription)}

    def show(found: dict[str, int]) -> None:
        print(f"skipped all messages of {subscription} in {topic}, {text(found['skipped'])} at most")

    return Ask(clear, show)


@subscriptions_app.command("peek")
def subscriptions_peek(
    topic: Topic,
    subscription: Subscription,
    count: Annotated[
        int, typer.Option("-n", "--count", min=1, help="How many messages, 1,000 at most.", metavar="COUNT")
    ] = 1,
    format: Format = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Print the next messages that are not acknowledged, without delivering them."""
    from . import consume as command

    exclusive({"--format": format is not None, "--json": as_json})
    encode = parsed("--format", command.encoder, "json" if as_json else format)
    run(command.peek(url, topic, subscription, count, encode))


@asks(subscriptions_app, "delete", json=False, question="Delete the subscription {subscription} of {topic}?")
def subscriptions_delete(topic: Topic, subscription: Subscription, force: Force = False) -> Ask:
    """Delete a subscription and what it remembers."""
    return Ask(
        lambda client: client.admin.delete_subscription(topic, subscription, force=force),
        lambda _: print(f"deleted subscription {subscription} of {topic}"),
    )


@asks(
    subscriptions_app,
    "expire",
    question="Give up all messages of the subscription {subscription} of {topic} that are older than {older_than}?",
    refusal="this gives up messages: say --yes",
)
def subscriptions_expire(
    topic: Topic,
    subscription: Subscription,
    older_than: Annotated[
        str,
        typer.Option("--older-than", help="What the topic stored longer ago: 90s, 2h, 7d.", metavar="AGE"),
    ],
) -> Ask:
    """Give up old messages of a subscription: they count as acknowledged."""
    before_ms = max(int(time.time() * 1000) - milliseconds("--older-than", older_than), 0)

    async def expire(client: Client) -> dict[str, int]:
        return {"messages": await client.admin.expire_messages(topic, subscription, before_ms)}

    def show(found: dict[str, int]) -> None:
        expired = counted(found["messages"], "message", "messages")
        print(f"expired {expired} of subscription {subscription} of {topic}")

    return Ask(expire, show)


def print_subscriptions(subscriptions: dict[str, dict[str, Any]]) -> None:
    """A table with a row for each."""
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

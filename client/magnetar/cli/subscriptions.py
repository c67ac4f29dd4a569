"""`magnetar subscriptions`: names, options and help of its commands. What a command does is imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import (
    DEFAULT_URL,
    Force,
    Format,
    Json,
    Start,
    Subscription,
    Topic,
    Url,
    Yes,
)

subscriptions_app = typer.Typer(
    no_args_is_help=True, help="List, make, move, expire and delete subscriptions."
)


@subscriptions_app.command("list")
def subscriptions_list(topic: Topic, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Subscriptions of a topic with their backlog."""
    from . import admin
    from .session import run

    run(admin.list_subscriptions(url, topic, as_json=as_json))


@subscriptions_app.command("stats")
def subscriptions_stats(
    topic: Topic, subscription: Subscription, url: Url = DEFAULT_URL, as_json: Json = False
) -> None:
    """Figures of one subscription and its consumers: who holds what, who is blocked, who waits for whom."""
    from . import admin
    from .session import run

    run(admin.subscription_stats(url, topic, subscription, as_json=as_json))


@subscriptions_app.command("create")
def subscriptions_create(
    topic: Topic,
    subscription: Subscription,
    start: Start = "latest",
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Make a subscription before anybody consumes: from --start on it keeps what is stored."""
    from . import admin
    from .session import run, start_of

    run(admin.create_subscription(url, topic, subscription, start_of(start), as_json=as_json))


@subscriptions_app.command("seek")
def subscriptions_seek(
    topic: Topic,
    subscription: Subscription,
    to: Annotated[
        str,
        typer.Option(
            "--to", help="earliest, latest, a message id (inclusive) or a time, as --start.", metavar="WHERE"
        ),
    ],
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Move a subscription, back or forth; consumers that are connected go on there."""
    from magnetar.client.options import parse_start

    from . import admin
    from .session import parsed, run

    where = parsed("--to", parse_start, to)
    run(admin.seek_subscription(url, topic, subscription, where, as_json=as_json))


@subscriptions_app.command("skip")
def subscriptions_skip(
    topic: Topic,
    subscription: Subscription,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many messages.", metavar="COUNT")],
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Acknowledge the next messages, whoever holds them; seeking back brings them again while they are stored."""
    from . import admin
    from .session import run

    run(admin.skip_messages(url, topic, subscription, count, as_json=as_json))


@subscriptions_app.command("clear")
def subscriptions_clear(
    topic: Topic, subscription: Subscription, yes: Yes = False, url: Url = DEFAULT_URL, as_json: Json = False
) -> None:
    """Acknowledge everything that is stored now, whoever holds it."""
    from . import admin
    from .session import run

    refusal = "this skips all messages: say --yes"
    admin.confirm(f"Skip all messages of {subscription} in {topic}?", yes, refusal=refusal)
    run(admin.clear_backlog(url, topic, subscription, as_json=as_json))


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
    from .session import exclusive, parsed, run

    exclusive({"--format": format is not None, "--json": as_json})
    encode = parsed("--format", command.encoder, "json" if as_json else format)
    run(command.peek(url, topic, subscription, count, encode))


@subscriptions_app.command("delete")
def subscriptions_delete(
    topic: Topic,
    subscription: Subscription,
    force: Force = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Delete a subscription and what it remembers."""
    from . import admin
    from .session import run

    admin.confirm(f"Delete the subscription {subscription} of {topic}?", yes)
    run(admin.delete_subscription(url, topic, subscription, force=force))


@subscriptions_app.command("expire")
def subscriptions_expire(
    topic: Topic,
    subscription: Annotated[str, typer.Argument(metavar="SUBSCRIPTION")],
    older_than: Annotated[
        str,
        typer.Option("--older-than", help="What the topic stored longer ago: 90s, 2h, 7d.", metavar="AGE"),
    ],
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Give up old messages of a subscription: they count as acknowledged."""
    import time

    from . import admin
    from .session import milliseconds, run

    before_ms = int(time.time() * 1000) - milliseconds("--older-than", older_than)
    admin.confirm(
        f"Give up all messages of the subscription {subscription} of {topic} that are older than {older_than}?",
        yes,
        refusal="this gives up messages: say --yes",
    )
    run(admin.expire_messages(url, topic, subscription, max(before_ms, 0), as_json=as_json))

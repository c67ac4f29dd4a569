"""`magnetar topics`: topics are made, grown and deleted; what brokers report; policies."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magnetar.proto.ids import NO_PARTITION, TopicName
from magnetar.runtime.quantities import counted

from ..terminal.command import Answer, command
from ..terminal.options import Force, Topic
from ..terminal.tables import Table, figures, text
from .policies import TOPIC_POLICIES, add_policies
from .subscriptions import table_of_subscriptions

if TYPE_CHECKING:
    from magnetar.client import Client

    from .policies import Update

topics_app = typer.Typer(
    no_args_is_help=True, help="Create, list, inspect and delete topics; their policies."
)


@command(topics_app, "list")
async def topics_list(
    client: Client,
    namespace: Annotated[str, typer.Argument(help="tenant/namespace; all without it.")] = "",
) -> Answer:
    """Names of the topics; a partitioned topic in one line, with --json each of its partitions."""
    names = await client.admin.list_topics(namespace)
    partitions: dict[TopicName, int] = {}
    for name in map(TopicName.parse, names):
        partitions[name.whole] = partitions.get(name.whole, 0) + (name.partition != NO_PARTITION)
    shown = [
        name.short + (f" ({counted(count, 'partition')})" if count else "")
        for name, count in partitions.items()
    ]
    return Answer(names, shown)


@command(topics_app, "get")
async def topics_get(client: Client, topic: Topic) -> Answer:
    """Who serves a topic, its partitions, its subscriptions, and whether it is terminated."""
    stats = await client.admin.topic_stats(topic)
    found = {
        "name": stats["topic"],
        "partitions": len(stats.get("partitions") or ()),
        "brokers": await client.admin.owners(topic),
        "terminated": stats["terminated"],
        "subscriptions": sorted(stats["subscriptions"]),
    }
    lists = {name: ", ".join(value) or "-" for name, value in found.items() if isinstance(value, list)}
    return Answer(found, [figures({**found, **lists})])


@command(topics_app, "create")
async def topics_create(
    client: Client,
    topic: Topic,
    partitions: Annotated[
        int | None, typer.Option("--partitions", min=1, help="How many; without it, it has none.")
    ] = None,
) -> Answer:
    """Create a topic, with --partitions a partitioned one; fine if it is there as it is to be."""
    await client.admin.create_topic(topic, partitions=partitions or 0)
    made = f" with {counted(partitions, 'partition')}" if partitions else ""
    return Answer({"topic": topic, "partitions": partitions or 0}, [f"created topic {topic}{made}"])


@command(topics_app, "update-partitions")
async def topics_update_partitions(
    client: Client,
    topic: Topic,
    partitions: Annotated[int, typer.Argument(min=1, help="How many it is to have: not fewer than it has.")],
) -> Answer:
    """Give a partitioned topic more partitions; its producers and consumers use them at once."""
    count = await client.admin.update_partitions(topic, partitions)
    return Answer({"topic": topic, "partitions": count}, [f"topic {topic} has {counted(count, 'partition')}"])


@command(topics_app, "stats")
async def topics_stats(client: Client, topic: Topic) -> Answer:
    """Figures of one topic: sizes, ledgers, producers, subscriptions and their backlog; of all partitions together."""
    stats = await client.admin.topic_stats(topic)
    shown = [figures(stats)]
    if stats.get("partitions"):
        shown.append(_partitions(stats["partitions"]))
    if stats.get("compaction", {}).get("state", "never") != "never":
        shown.append(_compaction(stats["compaction"], title="compaction"))
    if stats.get("producers"):
        rows = [
            (
                producer["name"],
                text(producer.get("epoch", "")),
                *(producer[name] for name in ("access_mode", "address", "client")),
            )
            for producer in stats["producers"]
        ]
        shown.append(Table("producers", ("name", "epoch", "access", "address", "client"), rows))
    if stats.get("subscriptions"):
        shown.append(table_of_subscriptions(stats["subscriptions"]))
    return Answer(stats, shown)


def _partitions(partitions: list[dict[str, Any]]) -> Table:
    rows = [
        (
            str(TopicName.parse(one["topic"]).partition),
            *(text(one[name]) for name in ("messages_in", "stored_messages", "stored_bytes")),
            text(len(one["producers"])),
            text(sum(found["backlog_messages"] for found in one["subscriptions"].values())),
        )
        for one in partitions
    ]
    columns = ("number", "messages in", "stored", "bytes", "producers", "backlog")
    return Table("partitions", columns, rows, right=range(len(columns)))


def _compaction(state: dict[str, Any], title: str = "") -> Table:
    shown = {name: value for name, value in state.items() if name != "compacted_ms"}
    if at_ms := state.get("compacted_ms"):
        moment = datetime.fromtimestamp(at_ms / 1000, UTC).astimezone()
        shown["compacted_at"] = moment.isoformat(timespec="seconds")
    return figures(shown, title)


def _topic_policies(topic: Topic) -> Update:
    """Set policies of a topic, and show those in force and where each is set."""
    return lambda client, changed: client.admin.update_topic_policies(topic, changed)


add_policies(topics_app, TOPIC_POLICIES, _topic_policies)


@command(topics_app, "compact", exclusive={"--wait": "wait", "--status": "status", "--remove": "remove"})
async def topics_compact(
    client: Client,
    topic: Topic,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when it is over; exit code 1 if it failed.")
    ] = False,
    status: Annotated[bool, typer.Option("--status", help="Only show how it stands.")] = False,
    remove: Annotated[
        bool, typer.Option("--remove", help="Give compaction up: delete what the last one left.")
    ] = False,
) -> Answer:
    """Keep the last message of each key, for readers with read_compacted; others still get all."""
    if status:
        state = await client.admin.compaction_status(topic)
    elif remove:
        state = await client.admin.remove_compaction(topic)
    else:
        state = await client.admin.compact_topic(topic, wait=wait)
    failed = wait and state["state"] == "failed"
    return Answer(
        state, [_compaction(state)], f"the compaction of {topic} failed: {state['error']}" if failed else ""
    )


@command(
    topics_app,
    "terminate",
    question="Terminate {topic}? Nobody can ever publish to it again.",
    refusal="a topic that is terminated takes messages never again: say --yes",
)
async def topics_terminate(client: Client, topic: Topic) -> Answer:
    """Let a topic take no more messages, for good: consumers get what it has, and then its end."""
    ends = await client.admin.terminate_topic(topic)
    lines = [f"terminated {name}, last message {end or 'none'}" for name, end in ends.items()]
    return Answer({name: end and str(end) for name, end in ends.items()}, lines)


@command(topics_app, "delete", question="Delete {topic} with all its messages?")
async def topics_delete(client: Client, topic: Topic, force: Force = False) -> Answer:
    """Delete a topic with all its messages and subscriptions."""
    await client.admin.delete_topic(topic, force=force)
    return Answer({"topic": topic}, [f"deleted topic {topic}"])

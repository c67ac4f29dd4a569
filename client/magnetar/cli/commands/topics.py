"""`magnetar topics` and `magnetar namespaces`: what the broker reports of topics, their policies, and deleting them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from ..terminal.asking import Ask, asks
from ..terminal.options import Force, Topic
from ..terminal.session import exclusive
from ..terminal.tables import print_figures, print_table, text
from .policies import NAMESPACE_POLICIES, TOPIC_POLICIES, Update, add_policies
from .subscriptions import print_subscriptions

topics_app = typer.Typer(no_args_is_help=True, help="List, inspect and delete topics; their policies.")
namespaces_app = typer.Typer(no_args_is_help=True, help="Policies of namespaces.")


@asks(topics_app, "list")
def topics_list(
    namespace: Annotated[str, typer.Argument(help="tenant/namespace; all without it.")] = "",
) -> Ask:
    """Names of the topics."""

    def show(names: list[str]) -> None:
        from magnetar.proto.ids import TopicName

        for name in names:
            print(TopicName.parse(name).short)

    return Ask(lambda client: client.admin.list_topics(namespace), show)


@asks(topics_app, "stats")
def topics_stats(topic: Topic) -> Ask:
    """Figures of one topic: sizes, ledgers, producers, subscriptions and their backlog."""
    return Ask(lambda client: client.admin.topic_stats(topic), _print_topic)


def _print_topic(stats: dict[str, Any]) -> None:
    print_figures(stats)
    if stats.get("compaction", {}).get("state", "never") != "never":
        _print_compaction(stats["compaction"], title="compaction")
    if stats.get("producers"):
        rows = [(producer["name"], text(producer["epoch"])) for producer in stats["producers"]]
        print_table("producers", ("name", "epoch"), rows)
    if stats.get("subscriptions"):
        print_subscriptions(stats["subscriptions"])


def _print_compaction(state: dict[str, Any], title: str = "") -> None:
    shown = {name: value for name, value in state.items() if name != "compacted_ms"}
    if at_ms := state.get("compacted_ms"):
        moment = datetime.fromtimestamp(at_ms / 1000, UTC).astimezone()
        shown["compacted_at"] = moment.isoformat(timespec="seconds")
    print_figures(shown, title)


def _topic_policies(topic: Topic) -> Update:
    """Set policies of a topic, and show those in force and where each is set."""
    return lambda client, changed: client.admin.update_topic_policies(topic, changed)


def _namespace_policies(
    namespace: Annotated[str, typer.Argument(help="tenant/namespace, as public/default.")],
) -> Update:
    """Set policies of all topics of a namespace that have none of their own, and show those in force."""
    return lambda client, changed: client.admin.update_namespace_policies(namespace, changed)


add_policies(topics_app, TOPIC_POLICIES, _topic_policies)
add_policies(namespaces_app, NAMESPACE_POLICIES, _namespace_policies)


@asks(topics_app, "compact")
def topics_compact(
    topic: Topic,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when it is over; exit code 1 if it failed.")
    ] = False,
    status: Annotated[bool, typer.Option("--status", help="Only show how it stands.")] = False,
    remove: Annotated[
        bool, typer.Option("--remove", help="Give compaction up: delete what the last one left.")
    ] = False,
) -> Ask:
    """Keep the last message of each key, for readers with read_compacted; others still get all."""
    exclusive({"--wait": wait, "--status": status, "--remove": remove})

    def failure(state: dict[str, Any]) -> str:
        failed = wait and state["state"] == "failed"
        return f"the compaction of {topic} failed: {state['error']}" if failed else ""

    if status:
        return Ask(lambda client: client.admin.compaction_status(topic), _print_compaction)
    if remove:
        return Ask(lambda client: client.admin.remove_compaction(topic), _print_compaction)
    return Ask(lambda client: client.admin.compact_topic(topic, wait=wait), _print_compaction, failure)


@asks(topics_app, "delete", json=False, question="Delete {topic} with all its messages?")
def topics_delete(topic: Topic, force: Force = False) -> Ask:
    """Delete a topic with all its messages and subscriptions."""
    return Ask(
        lambda client: client.admin.delete_topic(topic, force=force),
        lambda _: print(f"deleted topic {topic}"),
    )

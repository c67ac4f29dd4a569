"""What `magnetar topics` and `magnetar subscriptions` show of partitioned topics."""

from __future__ import annotations

from typing import Any, cast

from magnetar.cli.commands.subscriptions import subscriptions_list, subscriptions_seek, subscriptions_stats
from magnetar.cli.commands.topics import topics_list, topics_stats
from magnetar.cli.terminal.tables import Table
from magnetar.client import Client
from support.served_broker import connect_to, serving


class Named:
    """A service with these topics."""

    def __init__(self, *names: str) -> None:
        self.admin = self
        self._names = [f"persistent://{name}" for name in names]

    async def list_topics(self, namespace: str) -> list[str]:
        return self._names


async def test_a_partitioned_topic_is_one_row() -> None:
    names = [f"public/default/orders-partition-{number}" for number in (0, 1, 10, 2)]
    service = Named("acme/x/one-partition-0", "public/default/a", *names, "public/default/z")
    answer = await topics_list(cast(Any, service))
    assert answer.shown == [
        "persistent://acme/x/one (1 partition)",
        "a",
        "orders (4 partitions)",
        "z",
    ]
    assert len(answer.value) == 7, "a script gets all"


def table(shown: Any, title: str) -> list[tuple[str, ...]]:
    (found,) = [one for one in shown if isinstance(one, Table) and one.title == title]
    return [tuple(row) for row in found.rows]


async def used(client: Client) -> None:
    await client.admin.create_topic("orders", partitions=2)
    await client.subscribe("orders", "billing", name="ann")
    producer = await client.create_producer("orders-partition-1", name="p")
    await producer.send(b"hello")


async def test_figures_of_the_whole_and_of_each_partition() -> None:
    async with serving() as server, connect_to(server) as client:
        await used(client)
        shown = (await topics_stats(client, "orders")).shown
        assert table(shown, "partitions") == [
            ("0", "0", "0", "0", "0", "0"),
            ("1", "1", "1", "102", "1", "1"),
        ]
        assert ("stored messages", "1") in table(shown, "")
        assert table(shown, "subscriptions")[0][:3] == ("billing", "exclusive", "1")
        assert table((await subscriptions_list(client, "orders")).shown, "subscriptions")[0][6] == "1"
        shown = (await subscriptions_stats(client, "orders", "billing")).shown
        assert ("backlog messages", "1") in table(shown, "")
        assert table(shown, "consumers")[0][0] == "ann"
        answer = await subscriptions_seek(client, "orders", "billing", "earliest")
        assert answer.shown == [
            "subscription billing of orders goes on at its place in each partition; 1 message to come"
        ]
        assert answer.value == {"mark_delete": None, "backlog_messages": 1}

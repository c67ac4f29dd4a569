"""Rule 48: a request is validated whole before anything is made."""

from typing import Any

import pytest

from magnetar.broker.log.topic_names import list_topics
from magnetar.proto import commands as c
from magnetar.proto.errors import InvalidCallError
from support.broker_kit import FakeClient, running_broker

REFUSED: list[tuple[type[c.Command], tuple[Any, ...], dict[str, Any]]] = [
    (c.Subscribe, (1, "orders", ""), {"durable": False, "hash_ranges": [(0, 65_536)]}),
    (c.Subscribe, (1, "orders", "s"), {"type": "failover", "hash_ranges": [(0, 10)]}),
    (c.Subscribe, (1, "orders", "s"), {"type": "key_shared", "hash_ranges": [(10, 0)]}),
    (c.Subscribe, (1, "orders", "s"), {"type": "key_shared", "hash_ranges": [(0, 10), (5, 20)]}),
    (c.Subscribe, (1, "orders", "s"), {"type": "several"}),
    (c.Subscribe, (1, "orders", "s"), {"type": "shared", "read_compacted": True}),
    (c.Subscribe, (1, "orders", "s"), {"start": ("middle", None)}),
    (c.Subscribe, (1, "orders", "s"), {"start": ("id", b"short")}),
    (c.Subscribe, (1, "orders", ""), {}),
    (c.CreateSubscription, ("orders", "a/b"), {"start": ("latest", None)}),
    (c.CreateSubscription, ("orders", "s"), {"start": ("middle", None)}),
    (c.CreateProducer, (1, "orders"), {"access_mode": "alone"}),
]


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize(("command", "fields", "named"), REFUSED)
async def test_rule_48_a_refused_call_leaves_nothing_behind(
    command: type[c.Command], fields: tuple[Any, ...], named: dict[str, Any], exists: bool
) -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        if exists:
            await client.ask(c.CreateTopic, "orders")
        with pytest.raises(InvalidCallError):
            await client.ask(command, *fields, **named)
        assert not [name for topic in broker.topics.values() for name in topic.subscriptions]
        assert bool(await list_topics(broker.metadata, "", count=10)) == exists
        assert bool(broker.topics) == exists

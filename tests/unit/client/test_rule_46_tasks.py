"""What runs in a client's background and meets a defect tells whoever depends on it."""

import asyncio

import pytest

from magnetar.client import Client
from magnetar.client.connection.attachment import Attachment
from magnetar.client.table_view import TableView
from magnetar.proto.errors import FinalError
from support.fake_broker import FakeBroker
from support.served_broker import connect_to, serving


async def test_rule_46_a_table_view_that_cannot_go_on_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was silently left as it stood."""
    async with serving() as server, connect_to(server) as client, client.create_table_view("prices") as view:
        await send(client, b"1")
        await view.refresh()
        monkeypatch.setattr(TableView, "_apply", broken)
        await send(client, b"2")
        with pytest.raises(FinalError, match="a defect"):
            await view.refresh()


async def test_rule_46_a_consumer_that_cannot_attach_again_by_a_defect_ends_with_an_error(
    broker: FakeBroker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for ever."""
    consumer = await client.subscribe("t", "s", start="earliest")
    monkeypatch.setattr(Attachment, "_attach_once", broken)
    receiving = asyncio.create_task(consumer.receive())
    broker.cut()
    with pytest.raises(FinalError, match="a defect"):
        await asyncio.wait_for(receiving, 20)


async def send(client: Client, value: bytes) -> None:
    async with client.create_producer("prices") as producer:
        await producer.send(value, "a")


def broken(*_: object) -> None:
    raise KeyError("a defect")

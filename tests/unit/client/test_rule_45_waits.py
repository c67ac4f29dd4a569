"""Rule 45: no wait of the client is silent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from magnetar.client import connect
from magnetar.proto.commands import CreateProducer, Subscribe
from support.client_kit import until
from support.fake_broker import FakeBroker
from support.virtual_time import in_virtual_time


def waits(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Beside that the connection was lost."""
    return [text for record in caplog.records if "has waited" in (text := record.getMessage())]


@in_virtual_time
@pytest.mark.parametrize("kind", ["consumer", "reader", "producer"])
async def test_rule_45_a_broker_that_is_away_longer_than_a_timeout_is_waited_for_with_one_warning(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    broker = await FakeBroker.start()
    async with connect(broker.url, operation_timeout=10.0, backoff_max=1.0) as client:
        call: Callable[[], Coroutine[Any, Any, Any]]
        if kind == "producer":
            producer = await client.create_producer("t", send_timeout=3600.0)
            call = partial(producer.send, b"0")
        elif kind == "consumer":
            call = (await client.subscribe("t", "s")).receive
        else:
            call = (await client.create_reader("t", start="earliest")).read_next
        port = broker.port
        await broker.close()
        caplog.set_level(logging.WARNING)
        waiting = asyncio.ensure_future(call())
        await asyncio.sleep(9)
        assert not waits(caplog)
        await asyncio.sleep(300)
        [text] = waits(caplog)
        assert "has waited 10 s for a broker that serves it, and goes on waiting: " in text
        assert kind in text
        assert str(port) in text
        await broker.listen(port)
        opening = CreateProducer if kind == "producer" else Subscribe
        await until(lambda: len(broker.received(opening)) == 2)
        if kind != "producer":
            await (await client.create_producer("t")).send(b"0")
        await asyncio.wait_for(waiting, 60)
        await asyncio.sleep(60)
        assert len(waits(caplog)) == 1
    await broker.close()

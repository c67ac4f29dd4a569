"""Planted defects of compaction: what must hold is written once, holds, and is broken by each of them."""

import asyncio
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any

import pytest

from magnetar.broker.compaction import compactor
from magnetar.broker.compaction.core.rows import encode_index_page, key_digests
from support.broker_kit import TOPIC, running_broker, settle
from support.compaction_kit import (
    compact,
    compacted,
    compacted_once,
    horizon_of,
    publisher,
    read_all,
)
from support.fake_ledger import FakeLedgers
from support.virtual_time import in_virtual_time


async def the_last_message_of_a_key_is_left() -> None:
    async with running_broker() as broker:
        client = await publisher(broker)
        batch: list[Any] = [("a", b"1"), ("b", b"2"), ("a", b"3")]
        sent = [(at, *one) for at, one in zip(await client.send_batches(batch), batch)]
        await compact(broker)
        assert await read_all(broker) == compacted(sent, horizon_of(broker))


async def nothing_is_switched_before_the_ledger_is_durable_and_closed() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers) as broker:
        client = await publisher(broker)
        await client.send_batches([("a", b"1")])
        topic = broker.topics[str(TOPIC)]
        ledgers.hold = True
        topic.compaction.begin()
        while len(ledgers.ledgers) < 2:
            await settle(1)
        # Longer than all that a compaction does, in virtual time.
        await asyncio.sleep(10)
        assert horizon_of(broker) == (0, 0, 0)
        ledgers.hold = False
        ledgers.confirm()
        await compacted_once(topic)
        pointer = topic.ledger.list.record.compaction
        assert pointer is not None
        assert ledgers.ledgers[pointer.ledger_id].closed


CHECKS = [the_last_message_of_a_key_is_left, nothing_is_switched_before_the_ledger_is_durable_and_closed]


@pytest.mark.parametrize("check", CHECKS)
@in_virtual_time
async def test_it_holds(check: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await check()


@in_virtual_time
async def test_the_newest_is_dropped_instead_of_the_oldest() -> None:
    async def remember(self: compactor.Compactor, key: tuple[int, int], entry: Any) -> None:
        for place, digest in zip(count((key[0] << 63) | (key[1] << 20)), key_digests(entry)):
            self._latest.setdefault(digest, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compactor.Compactor, "_remember", remember)
        with pytest.raises(AssertionError):
            await the_last_message_of_a_key_is_left()


@in_virtual_time
async def test_it_switches_before_the_ledger_is_durable() -> None:
    async def finish(self: compactor.CompactedWriter) -> tuple[int, int, int]:
        await self._end_chunk()
        await self._append(encode_index_page(self._tables))
        assert self._writer is not None
        return self._writer.ledger_id, 1, self._writer.length

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compactor.CompactedWriter, "finish", finish)
        with pytest.raises(AssertionError):
            await nothing_is_switched_before_the_ledger_is_durable_and_closed()

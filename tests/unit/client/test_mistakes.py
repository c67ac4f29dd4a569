"""Mistaken calls: the error comes at the call, names what is wrong, and costs nothing but itself (rule 41)."""

import asyncio
from typing import Any

import pytest

from magnetar.client import Client, InvalidArgument, MagnetarError
from support.fake_broker import FakeBroker

LONE_SURROGATE = "caf\udce9"  # what os.fsdecode makes of a Latin-1 file name: a str that has no UTF-8 form


async def test_receipts_can_be_gathered_and_waited_for(client: Client) -> None:
    producer = await client.create_producer("t")
    receipts = [producer.send_nowait(b"%d" % i) for i in range(10)]
    ids = await asyncio.gather(*receipts)
    assert ids == sorted(set(ids))
    done, pending = await asyncio.wait(map(asyncio.ensure_future, receipts))
    assert sorted(task.result() for task in done) == ids
    assert not pending
    assert len({*receipts, *receipts}) == 10
    assert [await one for one in asyncio.as_completed(receipts)]


@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize(
    "bad",
    [
        {"key": LONE_SURROGATE},
        {"properties": {LONE_SURROGATE: "a"}},
        {"properties": {"a": LONE_SURROGATE}},
        {"key": "k", "event_time": 1 << 63},
    ],
)
async def test_a_message_that_cannot_be_encoded_costs_no_other(
    broker: FakeBroker, client: Client, batching: bool, bad: dict[str, Any]
) -> None:
    producer = await client.create_producer("t", batching=batching)
    receipts = []
    for i in range(100):
        receipts.append(producer.send_nowait(b"%d" % i, key=f"k{i}"))
        if i == 50:
            with pytest.raises(InvalidArgument):
                producer.send_nowait(b"bad", **bad)
            with pytest.raises(InvalidArgument):
                await producer.send(b"bad", **bad)
    await producer.flush()
    assert len({await receipt for receipt in receipts}) == 100
    assert sum(entry.message_count for entry in broker.topic("t").entries) == 100


@pytest.mark.parametrize(
    "columns",
    [
        {"keys": ["a", LONE_SURROGATE, None]},
        {"keys": [b"\xff", LONE_SURROGATE, "b"]},
        {"keys": ["a", 5, "b"]},
        {"properties": [None, {"a": LONE_SURROGATE}, None]},
        {"event_times": [1, -1, None]},
    ],
)
async def test_send_many_names_the_message_that_is_wrong_and_sends_nothing(
    broker: FakeBroker, client: Client, columns: dict[str, Any]
) -> None:
    producer = await client.create_producer("t")
    with pytest.raises(InvalidArgument, match="message 1: "):
        await producer.send_many([b"0", b"1", b"2"], **columns)
    await producer.flush()
    assert not broker.topic("t").entries


async def test_what_cannot_be_encoded_after_all_fails_its_receipts_and_flush(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = await client.create_producer("t", compression="lz4")
    monkeypatch.setitem(__import__("sys").modules, "lz4.block", None)
    receipts = [producer.send_nowait(b"%d" % i) for i in range(3)]
    with pytest.raises(MagnetarError, match="cannot be encoded"):
        await producer.flush()
    for receipt in receipts:
        with pytest.raises(MagnetarError, match="cannot be encoded"):
            await receipt
    assert producer.pending_bytes == 0
    with pytest.raises(MagnetarError, match="cannot be encoded"):
        await producer.send_many([b"0", b"1"])
    monkeypatch.undo()
    await producer.send(b"again")

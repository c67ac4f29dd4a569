"""Rule 45: an entry that is damaged on all its replicas is an error at whoever waits for it, and can be passed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from magnetar.client import Client, EntryUnreadable, InvalidArgument, MessageId, ReceiveTimeout, blocking
from magnetar.proto.errors import BookieUnavailable, MagnetarError
from support.fake_ledger import FakeLedgers, FakeReader
from support.served_broker import connect_to, serving, take
from support.virtual_time import in_virtual_time

FAST: dict[str, Any] = {"retry_initial_ms": 1, "retry_max_ms": 100, "max_entry_read_attempts": 3}
TYPES = ["exclusive", "failover", "shared", "key_shared"]


async def send(client: Client, topic: str, count: int) -> list[MessageId]:
    """Messages 0, 1, ..., an entry each."""
    async with client.create_producer(topic) as producer:
        return [await producer.send(b"%d" % number) for number in range(count)]


@asynccontextmanager
async def damaged(
    *entries: int, count: int = 5, **settings: Any
) -> AsyncIterator[tuple[Any, Client, FakeLedgers]]:
    """A topic "t" of `count` messages, an entry each, of which these are damaged; its owner has them not in memory."""
    ledgers = FakeLedgers()
    async with (
        serving(ledgers=ledgers, **FAST, **settings) as server,
        connect_to(server) as client,
    ):
        ids = await send(client, "t", count)
        ledgers.damaged.update((ids[entry].ledger, ids[entry].entry) for entry in entries)
        yield server, client, ledgers


async def values(receiver: Any, count: int) -> list[bytes]:
    return [message.value for message in await take(receiver, count)]


async def unreadable(receiver: Any, how: str) -> EntryUnreadable:
    """What is raised by one of the ways of receiving."""
    call = {
        "receive": receiver.receive,
        "iteration": receiver.__aiter__().__anext__,
        "batches": receiver.batches().__anext__,
        "receive_batch": receiver.receive_batch,
    }[how]
    with pytest.raises(EntryUnreadable) as raised:
        await call()
    return raised.value


async def opened(client: Client, kind: Any) -> Any:
    if kind == "reader":
        return await client.create_reader("t", start="earliest")
    if kind == "topics":
        await client.admin.create_topic("other")
        return await client.subscribe(["t", "other"], "s", start="earliest")
    return await client.subscribe("t", "s", type=kind, start="earliest")


@in_virtual_time
@pytest.mark.parametrize("kind", [*TYPES, "reader", "topics"])
async def test_rule_45_a_damaged_entry_is_raised_once_and_skipped(kind: Any) -> None:
    async with damaged(1, 2) as (_, client, _):
        receiver = await opened(client, kind)
        assert await values(receiver, 1) == [b"0"]
        for entry, how in ((1, "receive"), (2, "batches")):
            error = await unreadable(receiver, how)
            assert (error.id.entry, error.topic) == (entry, "persistent://public/default/t")
            assert error.reason == f"entry {entry} of ledger {error.id.ledger} is damaged"
            assert "skip(error)" in error.message
            with pytest.raises(ReceiveTimeout):  # once
                await receiver.receive(1.0)
            await receiver.skip(error)
        assert await values(receiver, 2) == [b"3", b"4"]
        if kind != "reader":
            [figures] = (await client.admin.topic_stats("t"))["subscriptions"].values()
            assert (figures["skipped_entries"], figures["unreadable_entries"]) == (2, [])


@in_virtual_time
@pytest.mark.parametrize("how", ["receive", "iteration", "batches", "receive_batch"])
async def test_rule_45_every_way_of_receiving_raises(how: str) -> None:
    async with damaged(0) as (_, client, _):
        for receiver in (await opened(client, "exclusive"), await opened(client, "reader")):
            error = await unreadable(receiver, how)
            await receiver.skip(error)
            assert await values(receiver, 4) == [b"1", b"2", b"3", b"4"]


@in_virtual_time
async def test_what_was_skipped_stays_skipped_and_a_seek_goes_on_as_well() -> None:
    async with damaged(1) as (server, client, _):
        consumer, reader = await opened(client, "exclusive"), await opened(client, "reader")
        for receiver in (consumer, reader):
            await receiver.skip(await unreadable_after(receiver, 1))
        [ledger] = {message.id.ledger for message in await take(reader, 1)}
        for connection in list(server.connections):
            connection.abort()
        await asyncio.sleep(1.0)
        assert await values(reader, 2) == [b"3", b"4"]
        assert await values(consumer, 4) == [b"0", b"2", b"3", b"4"]
        # Whoever comes to it once more is told once more, and may seek behind it.
        await reader.seek("earliest")
        await unreadable_after(reader, 1)
        await reader.seek(MessageId(ledger, 2, 0))
        assert await values(reader, 3) == [b"2", b"3", b"4"]


async def unreadable_after(receiver: Any, count: int) -> EntryUnreadable:
    await values(receiver, count)
    return await unreadable(receiver, "receive")


@in_virtual_time
async def test_a_reader_that_skipped_goes_on_behind_it_on_another_connection() -> None:
    async with damaged(0) as (server, client, _):
        reader = await opened(client, "reader")
        await reader.skip(await unreadable(reader, "receive"))
        for connection in list(server.connections):
            connection.abort()
        await asyncio.sleep(1.0)
        assert await values(reader, 4) == [b"1", b"2", b"3", b"4"]


@in_virtual_time
@pytest.mark.parametrize("kind", ["exclusive", "shared", "reader"])
async def test_rule_45_whoever_seeks_back_without_skipping_is_told_again(kind: Any) -> None:
    async with damaged(1) as (_, client, _):
        receiver = await opened(client, kind)
        for _ in range(2):
            await unreadable_after(receiver, 1)
            await receiver.seek("earliest")


@in_virtual_time
async def test_rule_45_a_consumer_that_comes_later_is_told_as_well() -> None:
    async with damaged(0) as (_, client, _):
        for _ in range(2):
            async with client.subscribe("t", "s", start="earliest") as consumer:
                await unreadable(consumer, "receive")


@in_virtual_time
async def test_rule_45_an_error_that_may_pass_is_waited_out_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    away: list[MagnetarError] = [BookieUnavailable("bookie 1 is away")]
    read = FakeReader.read

    async def maybe(reader: FakeReader, first: int, last: int, **options: Any) -> list[bytes]:
        if away and reader.ledger.properties["kind"] == "topic":
            raise away[0]
        return await read(reader, first, last, **options)

    async with damaged() as (_, client, _):
        monkeypatch.setattr(FakeReader, "read", maybe)
        consumer = await opened(client, "exclusive")
        caplog.set_level(logging.WARNING, "magnetar.client")
        with pytest.raises(ReceiveTimeout):
            await consumer.receive(1.0)
        [told] = [
            record.getMessage() for record in caplog.records if record.name.startswith("magnetar.client")
        ]
        assert "waits for entry 0 of ledger" in told
        assert told.endswith("which cannot be read now: bookie 1 is away")
        away.clear()
        assert await values(consumer, 5) == [b"0", b"1", b"2", b"3", b"4"]


@in_virtual_time
async def test_by_policy_the_broker_goes_on_by_itself() -> None:
    async with damaged(1, unreadable_entry_policy="skip") as (_, client, _):
        assert await values(await opened(client, "exclusive"), 4) == [b"0", b"2", b"3", b"4"]


@in_virtual_time
async def test_skip_takes_what_was_raised() -> None:
    async with damaged(0) as (_, client, _):
        for receiver in (await opened(client, "exclusive"), await opened(client, "reader")):
            error = await unreadable(receiver, "receive")
            wrong: Any = error.id
            with pytest.raises(InvalidArgument):
                await receiver.skip(wrong)
            other = EntryUnreadable("x", **{**error.details, "topic": "persistent://public/default/other"})
            with pytest.raises(InvalidArgument):
                await receiver.skip(other)


@pytest.mark.asyncio(loop_factories=["uvloop"])  # not in virtual time
async def test_the_blocking_client_raises_and_skips_as_well() -> None:
    async with damaged(1) as (server, _, _):
        port = server.addresses[0][1]

        def work() -> list[bytes | None]:
            with blocking.connect(f"magnetar://127.0.0.1:{port}") as client:
                found = []
                for receiver in (
                    client.subscribe("t", "s", start="earliest"),
                    client.create_reader("t", start="earliest"),
                ):
                    with receiver:
                        found.append(receiver.receive(10.0).value)
                        with pytest.raises(EntryUnreadable) as raised:
                            receiver.receive(10.0)
                        receiver.skip(raised.value)
                        found.append(receiver.receive(10.0).value)
                return found

        assert await asyncio.to_thread(work) == [b"0", b"2"] * 2

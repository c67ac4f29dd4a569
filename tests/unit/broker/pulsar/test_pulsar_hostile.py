"""Clients of Pulsar's protocol that mean harm: it costs them their connection, or their own messages, and nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from magnetar.proto.pulsar import wire_pb2 as wire
from magnetar.proto.pulsar.ids import encode_ack_set
from magnetar.runtime.connection import ConnectionOptions, FramedServer
from support.compaction_kit import compact
from support.pulsar_lies import REFUSED, STORED
from support.pulsar_messages import encrypted, frame
from support.pulsar_scenario import PulsarClient, pulsar_server
from support.virtual_time import in_virtual_time

BITS = 2**64 - 1


class Hostile(PulsarClient):
    """It has shaken hands."""

    def open_producer(self, producer_id: int = 1, topic: str = "orders", **fields: Any) -> None:
        self.send("PRODUCER", **{"topic": topic, "producer_id": producer_id, "request_id": 1, **fields})

    def subscribe(self, type: str = "SHARED", consumer_id: int = 1, **fields: Any) -> None:
        given = {"topic": "orders", "subscription": "s", "initial_position": "EARLIEST", **fields}
        self.send("SUBSCRIBE", consumer_id=consumer_id, sub_type=type, request_id=2, **given)

    def flow(self, permits: int, consumer_id: int = 1) -> None:
        self.send("FLOW", consumer_id=consumer_id, message_permits=permits)

    async def reads(self, type: str, subscription: str = "s") -> list[bytes]:
        """The values of a new consumer."""
        self.subscribe(type, subscription=subscription)
        await self.next("success")
        self.flow(2**32 - 1)
        return await self.values()

    async def heard(self) -> list[str]:
        """The names of all commands since the last call, and "end"."""
        await asyncio.sleep(1)
        names = [name for name, *_ in self.received] + ["end"] * self.ended
        self.received.clear()
        return names

    async def values(self) -> list[bytes]:
        """Of unbatched messages, since the last call."""
        await asyncio.sleep(1)
        found = [
            rest[10 + int.from_bytes(rest[6:10], "big") :]
            for name, _, rest in self.received
            if name == "message"
        ]
        self.received.clear()
        return found


@asynccontextmanager
async def hostile(server: FramedServer) -> AsyncIterator[Hostile]:
    client = Hostile(*await asyncio.open_connection(*server.addresses[0]))
    try:
        client.send("CONNECT", client_version="hostile", protocol_version=21)
        await client.next("connected")
        yield client
    finally:
        await client.close()


async def stored(server: FramedServer, *contents: bytes) -> list[str]:
    """What a producer hears that sends these."""
    async with hostile(server) as client:
        client.open_producer()
        await client.next("producer_success")
        for number, content in enumerate(contents):
            client.send("SEND", content, producer_id=1, sequence_id=number)
        return await client.heard()


@in_virtual_time
async def lie(content: bytes, heard: list[str]) -> None:
    async with pulsar_server() as (broker, server):
        good = [b"good-%d" % number for number in range(3)]
        await stored(server, frame(good[0]))
        assert await stored(server, content) == heard
        await stored(server, frame(good[1]))
        await compact(broker)
        await stored(server, frame(good[2]))
        for type in ("EXCLUSIVE", "SHARED", "KEY_SHARED", "FAILOVER"):
            async with hostile(server) as reader:
                found = [value for value in await reader.reads(type, type) if value in good]
                assert found == good


@pytest.mark.parametrize("name", REFUSED)
def test_a_lie_that_is_found_out_fails_its_producer_alone(name: str) -> None:
    lie(REFUSED[name], ["send_error", "close_producer"])


@pytest.mark.parametrize("name", STORED)
def test_a_lie_that_is_stored_costs_its_reader_that_message(name: str) -> None:
    lie(STORED[name], ["send_receipt"])


def every_other(messages: int) -> list[int]:
    return encode_ack_set([(n, n) for n in range(0, messages, 2)], messages)


@in_virtual_time
async def test_one_acknowledgement_of_a_million_ranges_does_not_stop_the_broker() -> None:
    async with pulsar_server() as (_, server), hostile(server) as client:
        await stored(server, encrypted(2**15))
        client.subscribe()
        await client.next("success")
        client.flow(1)
        message = await client.next("message")
        place, words = message.message_id, every_other(2**15)
        many = [
            wire.MessageIdData(
                ledger_id=place.ledger_id, entry_id=place.entry_id + n, ack_set=words[: 512 - n]
            )
            for n in range(100)
        ]
        same = many[:1] * 500
        client.send("ACK", consumer_id=1, ack_type="INDIVIDUAL", message_id=many, request_id=9)
        refused = await client.next("ack_response")
        assert refused.error == wire.ServerError.TooManyRequests
        client.send("ACK", consumer_id=1, ack_type="INDIVIDUAL", message_id=same, request_id=10)
        assert not (await client.next("ack_response")).HasField("error")
        client.send("REDELIVER_UNACKNOWLEDGED_MESSAGES", consumer_id=1, message_ids=[place] * 500)
        client.flow(2**15)
        again = await client.next("message")
        assert list(again.ack_set) == words


IDS = [(0, 5 << 20), (0, BITS), (BITS, BITS), (2**63 - 1, 2**63 - 1), (7, 0), (0, 2**63), (BITS - 1, 0)]


@pytest.mark.parametrize("type", ["SHARED", "EXCLUSIVE"])
@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize("ack_set", [(), (0,), (BITS >> 1,) * 3, (-1,) * 2000])
def test_acknowledgements_of_what_never_was_move_nothing(
    type: str, cumulative: bool, ack_set: tuple[int, ...]
) -> None:
    @in_virtual_time
    async def play() -> None:
        values = [b"%d" % number for number in range(4)]
        async with pulsar_server() as (_, server), hostile(server) as client:
            await stored(server, *[frame(value, sequence_id=n) for n, value in enumerate(values)])
            assert await client.reads(type) == values
            for number, (ledger, entry) in enumerate(IDS):
                one = wire.MessageIdData(ledger_id=ledger, entry_id=entry, ack_set=ack_set)
                kind: Any = "CUMULATIVE" if cumulative else "INDIVIDUAL"
                asked: dict[str, Any] = {"request_id": number}
                for named in (asked, {}):
                    client.send("ACK", consumer_id=1, ack_type=kind, message_id=[one], **named)
                client.send("REDELIVER_UNACKNOWLEDGED_MESSAGES", consumer_id=1, message_ids=[one])
            assert (await client.heard()).count("ack_response") == len(IDS)
            await client.close()
            async with hostile(server) as other:
                assert await other.reads(type) == values

    play()


@in_virtual_time
async def test_permits_seeks_and_ids_again_and_again() -> None:
    async with pulsar_server() as (_, server), hostile(server) as client:
        await stored(server, *[frame(b"%d" % n, sequence_id=n) for n in range(4)])
        client.subscribe("EXCLUSIVE")
        for _ in range(5):
            client.flow(2**32 - 1)
        client.subscribe("EXCLUSIVE")
        client.flow(2**32 - 1)
        client.send("SEEK", consumer_id=1, request_id=5)
        for time_ms in (BITS, 0):
            client.send("SEEK", consumer_id=1, request_id=5, message_publish_time=time_ms)
        for ledger, entry in IDS:
            one = wire.MessageIdData(ledger_id=ledger, entry_id=entry)
            client.send("SEEK", consumer_id=1, request_id=6, message_id=one)
            client.subscribe("EXCLUSIVE")
        client.send("UNSUBSCRIBE", consumer_id=1, request_id=7)
        client.send("UNSUBSCRIBE", consumer_id=1, request_id=8)
        for _ in range(3):
            client.open_producer()
        heard = await client.heard()
        assert "end" not in heard
        assert await client.reads("EXCLUSIVE") == [b"0", b"1", b"2", b"3"]


@in_virtual_time
async def test_a_subscription_begins_somewhere_whatever_is_asked_for() -> None:
    async with pulsar_server() as (_, server), hostile(server) as client:
        await stored(server, frame(b"0"))
        for number, (ledger, entry) in enumerate(IDS):
            one = wire.MessageIdData(ledger_id=ledger, entry_id=entry, ack_set=[0])
            client.subscribe(
                consumer_id=number, subscription=f"r{number}", durable=False, start_message_id=one
            )
        for number, seconds in enumerate((2**63, 2**63 - 1, BITS), 20):
            fields: dict[str, Any] = {"start_message_rollback_duration_sec": seconds}
            client.subscribe(consumer_id=number, subscription=f"b{number}", priority_level=-(2**31), **fields)
        ranges = [wire.IntRange(start=n % 65536, end=n % 65536) for n in range(200_000)]
        sticky = wire.KeySharedMeta(key_shared_mode="STICKY", hash_ranges=ranges)
        client.subscribe("KEY_SHARED", 30, subscription="k", key_shared_meta=sticky)
        heard = await client.heard()
        assert "end" not in heard
        assert heard.count("success") + heard.count("error") == len(IDS) + 4


@in_virtual_time
async def test_an_encrypted_batch_of_which_a_part_is_acknowledged_comes_whole_with_an_ack_set() -> None:
    """Only its consumers can open it, so it does not go out message by message."""
    async with pulsar_server() as (_, server):
        await stored(server, encrypted(3))
        for words in ([], [0b110]):
            async with hostile(server) as client:
                client.subscribe()
                await client.next("success")
                client.flow(3)
                message = await client.next("message")
                assert list(message.ack_set) == words
                place = message.message_id
                one = wire.MessageIdData(ledger_id=place.ledger_id, entry_id=place.entry_id, ack_set=[0b110])
                client.send("ACK", consumer_id=1, ack_type="INDIVIDUAL", message_id=[one], request_id=9)
                await client.next("ack_response")


NAMES = [
    "",
    "/",
    "//",
    "a/b",
    "a/b/c/d",
    "a\0b",
    "a\n",
    "x" * 2**16,
    "\0" * 2**16,
    "a/b/" * 2**14,
    "\0" * 10**6,
]
OF_TOPICS: dict[str, dict[str, Any]] = {
    "LOOKUP": {},
    "PARTITIONED_METADATA": {},
    "PRODUCER": {"producer_id": 1},
    "SUBSCRIBE": {"consumer_id": 1, "subscription": "s", "sub_type": "SHARED"},
    "GET_SCHEMA": {},
    "GET_OR_CREATE_SCHEMA": {"schema": wire.Schema(name="s", schema_data=b"", type="STRING")},
}


@pytest.mark.parametrize("name", NAMES, ids=lambda name: f"{name[:4]!r} {len(name)}")
def test_rule_42_what_an_error_quotes_of_a_name_fits_a_frame(name: str) -> None:
    @in_virtual_time
    async def play() -> None:
        async with pulsar_server() as (broker, server), hostile(server) as client:
            for number, (command, fields) in enumerate(OF_TOPICS.items()):
                client.send(command, topic=name, request_id=number, **fields)
            client.send("GET_TOPICS_OF_NAMESPACE", namespace=name, request_id=20)
            client.send(
                "WATCH_TOPIC_LIST", namespace="a/b", topics_pattern="(" + name, request_id=21, watcher_id=1
            )
            if name:  # the service chooses one for a consumer without a name
                client.send(
                    "SUBSCRIBE", topic="t", request_id=22, **OF_TOPICS["SUBSCRIBE"] | {"subscription": name}
                )
            await asyncio.sleep(1)
            asked = {*range(len(OF_TOPICS)), 20, 21, *([22] if name else [])}
            accepted = [
                one.request_id for kind, one, _ in client.received if kind in ("producer_success", "success")
            ]
            assert not accepted
            assert sorted(one.request_id for _, one, _ in client.received) == sorted(asked)
            assert all(one.ByteSize() < 10_000 for _, one, _ in client.received)
            assert not client.ended
            assert not broker.topics

    play()


@in_virtual_time
async def test_rule_42_a_list_of_topics_that_no_frame_holds_is_refused() -> None:
    options = ConnectionOptions("broker", max_message_bytes=1024)
    async with pulsar_server(options) as (_, server), hostile(server) as client:
        for number in range(50):
            client.open_producer(number, f"{number:0240}")
            await client.next("producer_success")
        client.send("GET_TOPICS_OF_NAMESPACE", namespace="public/default", request_id=3)
        client.send(
            "WATCH_TOPIC_LIST", namespace="public/default", topics_pattern=".*", request_id=4, watcher_id=1
        )
        client.send("LOOKUP", topic="orders", request_id=5)
        await asyncio.sleep(1)
        client.open_producer(50, "another", request_id=6)  # of which nobody watches
        await asyncio.sleep(1)
        assert len(client.received) == 4
        answers = {one.request_id: one for _, one, _ in client.received}
        assert "bytes" in answers[3].message
        assert "bytes" in answers[4].message
        assert not answers[5].HasField("error")


@in_virtual_time
async def test_rule_47_what_a_client_calls_itself_is_noted_as_far_as_it_is_short() -> None:
    async with pulsar_server() as (_, server):
        client = await PulsarClient.connect(server)
        client.send("CONNECT", client_version="x" * 100_000, protocol_version=21)
        await client.next("connected")
        (transport,) = server.connections
        assert len(transport.peer) == 200
        await client.close()

"""Connections of Pulsar's protocol under pressure: imports, backpressure, clients that do not read, several brokers."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from magnetar.broker.listeners.pulsar import listener
from magnetar.broker.listeners.pulsar.consumers import Consumer
from magnetar.broker.listeners.pulsar.producers import Producer
from magnetar.broker.listeners.pulsar.requests import ROWS
from magnetar.broker.service.broker import BrokerService
from magnetar.proto.errors import (
    AuthenticationFailed,
    MagnetarError,
    NotAllowed,
    NotAuthorized,
    QuorumLost,
    StorageFailed,
    TopicNotServed,
)
from magnetar.proto.ids import TopicName
from magnetar.proto.pulsar import wire_pb2 as wire
from magnetar.proto.pulsar.frames import PING
from magnetar.runtime.connection import Authenticated, Challenge, ConnectionOptions
from support.broker_kit import FakeClient
from support.cluster_kit import brokers
from support.fake_ledger import FakeLedgers
from support.pulsar_messages import batch, frame, single
from support.pulsar_scenario import PulsarClient, pulsar_server
from support.virtual_time import in_virtual_time

MIB = 1024 * 1024


@asynccontextmanager
async def connected(server: Any) -> AsyncIterator[PulsarClient]:
    client = await PulsarClient.connect(server)
    try:
        client.send("CONNECT", client_version="test", protocol_version=21)
        await client.next("connected")
        yield client
    finally:
        await client.close()


async def producer(client: PulsarClient, **fields: Any) -> Any:
    client.send("PRODUCER", **{"topic": "orders", "producer_id": 1, "request_id": 1, **fields})
    return await client.next("producer_success")


def send(client: PulsarClient, sequence_id: int, value: bytes, producer_id: int = 1) -> None:
    content = frame(value, sequence_id=sequence_id)
    client.send("SEND", content, producer_id=producer_id, sequence_id=sequence_id)


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_the_first_connections_wait_for_the_import_and_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imports: list[str] = []

    async def slow(name: str) -> None:
        imports.append(name)
        await asyncio.sleep(0.05)

    monkeypatch.setattr(listener, "import_in_thread", slow)
    async with pulsar_server(port=0) as (_, server):
        clients = [await PulsarClient.connect(server) for _ in range(3)]
        for client in clients:
            client.send("CONNECT", client_version="test", protocol_version=21)
        for client in clients:
            await client.next("connected")
            await client.close()
    assert imports == ["magnetar.broker.listeners.pulsar.protocol"]


class Reads:
    """A transport that reads although it was told not to, as uvloop's does."""

    def __init__(self) -> None:
        self.closing = False
        self.heard: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.heard.append((name, *given))


@pytest.mark.parametrize("closing", [False, True])
async def test_what_is_read_during_the_import_is_kept_for_who_speaks_then(*, closing: bool) -> None:
    imported = asyncio.Event()

    async def load() -> Any:
        await imported.wait()
        return lambda transport: "protocol"

    transport: Any = Reads()
    waiting = listener._Waiting(transport, SimpleNamespace(load=load))  # type: ignore[arg-type]
    waiting.connection_made()
    for part in (b"one ", b"two"):
        waiting.bytes_received(part)
        assert transport.heard[-1] == ("pause_reading", "import")
    transport.heard.clear()
    transport.closing = closing
    imported.set()
    await asyncio.sleep(0.01)
    assert transport.heard == (
        []
        if closing
        else [("speak", "protocol"), ("data_received", b"one two"), ("resume_reading", "import")]
    )


@in_virtual_time
async def test_rule_46_what_cannot_be_imported_closes_the_connection_and_the_next_one_tries_again() -> None:
    attempts = 0

    async def fails(name: str) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise ImportError("no module named protobuf")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listener, "import_in_thread", fails)
        async with pulsar_server() as (_, server):
            first = await PulsarClient.connect(server)
            await asyncio.sleep(1)
            assert first.ended
            await first.close()
            async with connected(server):
                assert attempts == 2


@in_virtual_time
async def test_a_full_budget_stops_reading_and_its_room_goes_on() -> None:
    ledgers = FakeLedgers()
    async with (
        pulsar_server(ledgers=ledgers, max_topic_publish_bytes=1000) as (_, server),
        connected(server) as client,
    ):
        await producer(client)
        ledgers.hold = True
        (transport,) = server.connections
        for number in range(20):
            send(client, number, bytes(100))
            await asyncio.sleep(0.1)
        assert transport.reading_paused
        assert client.received == []
        ledgers.hold = False
        ledgers.confirm()
        await client.until(20)
        assert [one.sequence_id for _, one, _ in client.received] == list(range(20))
        assert not transport.reading_paused


@in_virtual_time
async def test_a_producer_above_its_rate_is_not_read_until_it_may_go_on() -> None:
    async with pulsar_server() as (broker, server), connected(server) as client:
        admin = FakeClient(broker)
        await producer(client)
        await admin.change_policies(topic="orders", publish_rate_messages=10)
        began = asyncio.get_running_loop().time()
        for number in range(100):
            send(client, number, b"x")
        async with asyncio.timeout(60):
            while len(client.received) < 100:
                await asyncio.sleep(0.1)
        assert asyncio.get_running_loop().time() - began > 5


@in_virtual_time
async def test_a_producer_that_its_client_closes_above_its_rate_is_not_waited_for() -> None:
    async with pulsar_server() as (broker, server), connected(server) as client:
        await producer(client)
        await FakeClient(broker).change_policies(topic="orders", publish_rate_messages=10)
        with client.one_write():
            for number in range(100):
                send(client, number, b"x")
            client.send("CLOSE_PRODUCER", producer_id=1, request_id=2)
        await asyncio.sleep(0.1)
        (transport,) = server.connections
        assert not transport.reading_paused


@in_virtual_time
async def test_a_producer_that_is_closed_above_its_rate_holds_up_nobody_else() -> None:
    async with pulsar_server() as (broker, server), connected(server) as client:
        admin = FakeClient(broker)
        await producer(client)
        await producer(client, topic="others", producer_id=2, request_id=2)
        await admin.change_policies(topic="orders", publish_rate_messages=10)
        for number in range(100):
            send(client, number, b"x")
        await asyncio.sleep(0.5)
        (transport,) = server.connections
        assert transport.reading_paused == ("rate of producer 1",)
        await broker.unload(TopicName.parse("orders"), TopicNotServed("it is unloaded"))
        send(client, 0, b"x", producer_id=2)
        await asyncio.sleep(1)
        assert [name for name, one, _ in client.received if one.producer_id == 2] == ["send_receipt"]


@in_virtual_time
async def test_a_client_that_does_not_read_is_not_read_and_nothing_is_lost_when_it_does() -> None:
    options = ConnectionOptions("broker", high_water_bytes=10_000)
    async with pulsar_server(options) as (_, server), connected(server) as client:
        client.hear(hears=False)
        (transport,) = server.connections
        most = 0
        for turn in range(300):
            for number in range(100):
                client.send("LOOKUP", topic="orders", request_id=100 * turn + number)
            await asyncio.sleep(0.01)
            most = max(most, transport.buffered_bytes)
        assert most < 300_000
        assert transport.reading_paused
        client.hear(hears=True)
        await asyncio.sleep(10)
        assert [one.request_id for _, one, _ in client.received] == list(range(30_000))


@in_virtual_time
async def test_what_cannot_be_stored_for_now_is_sent_again_on_a_new_producer() -> None:
    async with pulsar_server() as (broker, server), connected(server) as client:
        await producer(client, producer_name="p")
        topic = await broker.topic(TopicName.parse("orders"), create=False)
        (session,) = topic.producers
        session.fail(0, QuorumLost("too few bookies"))
        closed = await client.next("close_producer")
        assert (closed.producer_id, closed.request_id) == (1, 2**64 - 1)
        await producer(client, producer_name="p", epoch=1, request_id=2)


@pytest.mark.parametrize("error", [QuorumLost("too few bookies"), StorageFailed("no disk")])
def test_rule_50_what_may_be_sent_again_is_given_up_by_nobody(error: MagnetarError) -> None:
    """A SEND_ERROR is the end of its message with most reasons: the client is to open the producer, and send again."""

    @in_virtual_time
    async def play() -> None:
        ledgers = FakeLedgers()
        async with pulsar_server(ledgers=ledgers) as (broker, server), connected(server) as client:
            await producer(client, producer_name="p")
            topic = await broker.topic(TopicName.parse("orders"), create=False)
            ledgers.hold = True
            send(client, 0, b"x")
            await asyncio.sleep(0.1)
            topic.fence(error)
            await asyncio.sleep(0.1)
            assert [name for name, *_ in client.received] == ["close_producer"]

    play()


@in_virtual_time
async def test_rule_27_a_duplicate_has_the_receipt_of_its_send_and_no_place() -> None:
    async with pulsar_server(deduplication=True) as (_, server), connected(server) as client:
        assert (await producer(client, producer_name="p")).last_sequence_id == -1
        receipts: list[Any] = []
        for _ in range(2):
            send(client, 0, b"0")
            send(client, 1, b"1")
            content = batch([single(b"2"), single(b"3")], sequence_id=2, highest_sequence_id=3)
            client.send("SEND", content, producer_id=1, sequence_id=2, highest_sequence_id=3, num_messages=2)
            send(client, 4, b"4")
            await client.until(4)
            receipts = [client.received.pop(0)[1] for _ in range(4)]
            assert [(one.sequence_id, one.highest_sequence_id) for one in receipts] == [
                (0, 0), (1, 0), (2, 3), (4, 0),
            ]  # fmt: skip
        nowhere = [(one.message_id.ledger_id, one.message_id.entry_id) for one in receipts]
        assert nowhere == [(2**64 - 1, 2**64 - 1)] * 4
        client.send("CLOSE_PRODUCER", producer_id=1, request_id=2)
        await client.next("success")
        assert (await producer(client, producer_name="p")).last_sequence_id == 4


@in_virtual_time
async def test_sends_that_are_stored_in_several_entries_have_their_own_ids() -> None:
    async with pulsar_server(max_entry_bytes=2_000) as (_, server), connected(server) as client:
        await producer(client)
        for number in range(40):
            send(client, number, bytes(100))
        await client.until(40)
        receipts = [one for _, one, _ in client.received]
        assert [one.sequence_id for one in receipts] == list(range(40))
        ids = [one.message_id.entry_id for one in receipts]
        assert ids == sorted(set(ids))
        assert len({one >> 20 for one in ids}) > 1


@in_virtual_time
async def test_rule_31_nothing_is_confirmed_while_the_session_is_in_doubt() -> None:
    async with pulsar_server() as (broker, server), connected(server) as client:
        await producer(client)
        send(client, 0, b"x")
        await client.next("send_receipt")
        client.send(
            "SUBSCRIBE", topic="orders", subscription="s", sub_type=1, consumer_id=1, request_id=2,
            initial_position=1,
        )  # fmt: skip
        await client.next("success")
        client.send("FLOW", consumer_id=1, message_permits=1)
        place = (await client.next("message")).message_id
        ownership = broker.topics["persistent://public/default/orders"]._components.ownership
        ownership.valid = False  # type: ignore[misc]
        client.send("ACK", consumer_id=1, ack_type=0, message_id=[place], request_id=3)
        client.send("SEEK", consumer_id=1, request_id=4, message_publish_time=0)
        client.send("GET_TOPICS_OF_NAMESPACE", namespace="public/default", request_id=5)
        await asyncio.sleep(1)
        ownership.valid = True  # type: ignore[misc]
        errors = {"error", "ack_response"}
        answers = {one.request_id: one.error for name, one, _ in client.received if name in errors}
        assert answers == {
            3: wire.ServerError.ServiceNotReady,
            4: wire.ServerError.MetadataError,
            5: wire.ServerError.ServiceNotReady,
        }


@in_virtual_time
async def test_a_producer_that_is_open_is_not_opened_by_what_holds_up_its_messages() -> None:
    ledgers = FakeLedgers()
    async with pulsar_server(ledgers=ledgers) as (broker, server), connected(server) as client:
        await producer(client)
        ledgers.hold = True
        send(client, 0, b"x")
        await asyncio.sleep(0.1)
        (session,) = broker.topics["persistent://public/default/orders"].producers
        session.delay(QuorumLost("too few bookies"))
        await asyncio.sleep(0.1)
        assert client.received == []


@in_virtual_time
async def test_rule_44_producers_that_were_closed_here_are_forgotten() -> None:
    async with pulsar_server() as (broker, server), connected(server) as client:
        (transport,) = server.connections
        protocol: Any = transport.protocol
        for number in range(5):
            await producer(client, producer_id=number)
            await broker.unload(TopicName.parse("orders"), TopicNotServed("it is unloaded"))
            await client.next("close_producer")
            await asyncio.sleep(31)
        assert len(protocol._connection._closed_producers) == 1


@in_virtual_time
async def test_rule_40_requests_and_waits_for_room_end_with_their_connection() -> None:
    ledgers = FakeLedgers()
    async with pulsar_server(ledgers=ledgers, max_topic_publish_bytes=1000) as (broker, server):
        async with connected(server) as client:
            await producer(client)
            client.send(
                "SUBSCRIBE", topic="orders", subscription="s", sub_type=0, consumer_id=1, request_id=2
            )
            await client.next("success")
            ledgers.hold = True
            client.send("SEEK", consumer_id=1, request_id=4, message_publish_time=0)
            for number in range(20):
                send(client, number, bytes(100))
            await asyncio.sleep(0.1)
            (transport,) = server.connections
            assert transport.reading_paused == ("publish",)
            budget = broker.topics["persistent://public/default/orders"].publish_budget
            assert budget.waiting == 1
            assert requests_of_clients() == 1
        await asyncio.sleep(100)  # who is not read is missed when a ping cannot be sent
        assert budget.waiting == 0
        assert requests_of_clients() == 0
        ledgers.hold = False
        ledgers.confirm()
        await asyncio.sleep(1)


def requests_of_clients() -> int:
    return sum(task.get_name() == "request of a client" for task in asyncio.all_tasks())


@in_virtual_time
async def test_consumers_that_are_lost_one_after_another_are_counted() -> None:
    async with pulsar_server() as (broker, server):
        async with connected(server) as client:
            await producer(client)
            send(client, 0, b"x")
            await client.next("send_receipt")
        for end in ["lost"] * 5 + ["closed"] * 5:
            async with connected(server) as client:
                client.send(
                    "SUBSCRIBE", topic="orders", subscription=end, sub_type=1, consumer_id=1, request_id=2,
                    initial_position=1,
                )  # fmt: skip
                await client.next("success")
                client.send("FLOW", consumer_id=1, message_permits=1)
                await client.next("message")
                if end == "closed":
                    client.send("CLOSE_CONSUMER", consumer_id=1, request_id=3)
                    await client.next("success")
            await asyncio.sleep(1)
        subscriptions = broker.topics["persistent://public/default/orders"].subscriptions
        assert "connections of 5 consumers were lost" in subscriptions["lost"].trouble()
        assert subscriptions["closed"].trouble() == ""


@in_virtual_time
async def test_a_watch_goes_on_when_its_client_reads_again() -> None:
    options = ConnectionOptions("broker", high_water_bytes=10_000)
    async with pulsar_server(options) as (_, server), connected(server) as client, connected(server) as other:
        client.send(
            "WATCH_TOPIC_LIST", request_id=1, watcher_id=1, namespace="public/default", topics_pattern=".*"
        )
        await client.next("watch_topic_list_success")
        client.hear(hears=False)
        async with asyncio.timeout(60):
            while all(transport.writable for transport in server.connections):
                for number in range(100):
                    client.send("LOOKUP", topic="orders", request_id=number)
                await asyncio.sleep(0.01)
        for number in range(3):
            await producer(other, topic=f"t{number}", producer_id=number)
        client.hear(hears=True)
        await asyncio.sleep(5)
        (update,) = [one for name, one, _ in client.received if name == "watch_topic_update"]
        assert [one.rpartition("/")[2] for one in update.new_topics] == ["t0", "t1", "t2"]


@in_virtual_time
async def test_a_request_too_many_is_refused_by_its_own_answer() -> None:
    async with pulsar_server(max_requests_per_connection=1) as (_, server), connected(server) as client:
        client.send("PRODUCER", topic="orders", producer_id=1, request_id=1)
        client.send("LOOKUP", topic="orders", request_id=2)
        client.send("SUBSCRIBE", topic="orders", subscription="s", sub_type=0, consumer_id=1, request_id=3)
        refused = await client.next("lookup_response")
        assert refused.error == wire.ServerError.TooManyRequests
        assert (await client.next("error")).error == wire.ServerError.TooManyRequests
        await client.next("producer_success")


class Everybody:
    """A caller who may do everything."""

    def authorize(self, operation: str, resource: str) -> None: ...


async def test_look_ups_at_another_broker_name_the_owner() -> None:
    async with brokers() as cluster:
        for name in "ab":
            await cluster.start(name, pulsar_url=f"pulsar://{name}:6650", http_url=f"http://{name}:8080")
        services = [BrokerService(one.broker) for one in cluster.brokers.values()]
        answers = []
        for number in range(8):
            command = wire.CommandLookup(topic=f"topic-{number}", request_id=1)
            for service in services:
                while True:
                    try:
                        answer: Any = await ROWS["lookup"].answer(service, Everybody(), command)  # type: ignore[arg-type]
                    except MagnetarError:
                        await asyncio.sleep(0.1)
                        continue
                    break
                answers.append(answer)
                if answer.response == answer.REDIRECT:
                    command.authoritative = True
        assert {one.broker_service_url for one in answers} == {"pulsar://a:6650", "pulsar://b:6650"}
        assert all(one.authoritative for one in answers)
        assert {one.response for one in answers} == {answer.CONNECT, answer.REDIRECT}


@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize("end", ["close", "abort"])
async def test_nothing_of_a_connection_is_left_when_it_has_ended(end: str) -> None:
    async with pulsar_server(port=0) as (_broker, server), connected(server) as client:
        client.send("PRODUCER", topic="orders", producer_id=1, request_id=1)
        client.send("PRODUCER", topic="orders", producer_id=2, request_id=2)
        client.send("SUBSCRIBE", topic="orders", subscription="s", sub_type=1, consumer_id=1, request_id=3)
        client.send("SUBSCRIBE", topic="orders", subscription="s", sub_type=1, consumer_id=2, request_id=4)
        client.send(
            "WATCH_TOPIC_LIST", request_id=5, watcher_id=1, namespace="public/default", topics_pattern=".*"
        )
        client.send("WATCH_TOPIC_LIST", request_id=6, watcher_id=2, namespace="a/b", topics_pattern="(")
        await client.until(6)
        client.send("FLOW", consumer_id=1, message_permits=10)
        for number in range(5):
            send(client, number, b"x")
        client.send("CLOSE_PRODUCER", producer_id=2, request_id=7)
        client.send("CLOSE_CONSUMER", consumer_id=2, request_id=8)
        await client.until(18)
        (transport,) = server.connections
        protocol: Any = transport.protocol
        connection = protocol._connection
        there: list[weakref.ref[Any]] = [weakref.ref(one) for one in (transport, protocol, connection)]
        del protocol, connection
        gc.collect()
        gc.disable()
        try:
            getattr(transport, end)()
            await transport.wait_closed(5.0)
            del transport
            for _ in range(10):
                await asyncio.sleep(0)
            assert [one() for one in there if one() is not None] == []
            assert [one for one in gc.get_objects() if isinstance(one, Producer | Consumer)] == []
        finally:
            gc.enable()


# --- who is connected ----------------------------------------------------------------------------------------------------


class Secret:
    """Asks whoever comes by its method for a second word."""

    def __init__(self) -> None:
        self.asked = False

    def begin(self, method: str) -> Secret:
        """An exchange. Raises AuthenticationFailed."""
        if method != "secret":
            raise AuthenticationFailed("only 'secret' is known here")
        return Secret()

    def respond(self, data: bytes) -> Authenticated | Challenge:
        """The first word is a name, and the second one sesame. Raises AuthenticationFailed."""
        if not self.asked:
            self.asked = True
            return Challenge(b"and?")
        if data != b"sesame":
            raise AuthenticationFailed("a wrong word")
        return Authenticated("alice")


def said(word: bytes) -> dict[str, Any]:
    return {"client_version": "test", "response": wire.AuthData(auth_method_name="secret", auth_data=word)}


HELLO: dict[str, Any] = {
    "client_version": "test",
    "protocol_version": 21,
    "auth_method_name": "secret",
    "auth_data": b"alice",
}


@in_virtual_time
async def test_who_is_authenticated_may_do_what_is_theirs_and_no_more() -> None:
    asked: list[tuple[str, str]] = []

    def authorize(principal: str, operation: str, resource: str) -> None:
        asked.append((principal, operation))
        if operation != "consume":
            raise NotAuthorized(f"{principal} may not {operation}")

    options = ConnectionOptions("broker", authenticator=Secret(), authorize=authorize)
    async with pulsar_server(options) as (_, server):
        client = await PulsarClient.connect(server)
        client.send("CONNECT", **HELLO)
        challenge = (await client.next("auth_challenge")).challenge
        assert (challenge.auth_method_name, challenge.auth_data) == ("secret", b"and?")
        client.send("AUTH_RESPONSE", **said(b"sesame"))
        await client.next("connected")
        client.send("PRODUCER", topic="orders", producer_id=1, request_id=1)
        refused = await client.next("error")
        assert (refused.error, refused.message) == (
            wire.ServerError.AuthorizationError,
            "alice may not produce",
        )
        client.send("SUBSCRIBE", topic="orders", subscription="s", sub_type=0, consumer_id=1, request_id=2)
        await client.next("success")
        assert {principal for principal, _ in asked} == {"alice"}
        await client.close()


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        ([("CONNECT", HELLO), ("AUTH_RESPONSE", said(b"open"))], wire.ServerError.AuthenticationError),
        ([("CONNECT", HELLO | {"auth_method_name": "token"})], wire.ServerError.AuthenticationError),
        ([("CONNECT", HELLO), ("CONNECT", HELLO)], wire.ServerError.NotAllowedError),
        ([("CONNECT", HELLO), ("LOOKUP", {"topic": "t", "request_id": 1})], wire.ServerError.NotAllowedError),
        ([("AUTH_RESPONSE", said(b"sesame"))], wire.ServerError.NotAllowedError),
    ],
)
def test_who_is_not_authenticated_gets_nothing(sent: list[tuple[str, dict[str, Any]]], error: Any) -> None:
    @in_virtual_time
    async def play() -> None:
        options = ConnectionOptions("broker", authenticator=Secret())
        async with pulsar_server(options) as (_, server):
            client = await PulsarClient.connect(server)
            with client.one_write():
                for name, fields in sent:
                    client.send(name, **fields)
            await asyncio.sleep(1)
            names = [name for name, *_ in client.received if name != "auth_challenge"]
            assert names == ["error"]
            assert client.received[-1][1].error == error
            assert client.ended
            await client.close()

    play()


@in_virtual_time
async def test_rule_44_a_frame_is_as_large_as_a_message_only_after_the_handshake() -> None:
    options = ConnectionOptions("broker", max_message_bytes=200_000)
    async with pulsar_server(options) as (_, server):
        bomb = await PulsarClient.connect(server)
        bomb.writer.write((180_000).to_bytes(4, "big") + bytes(4))
        await asyncio.sleep(1)
        assert bomb.ended
        await bomb.close()
        async with connected(server) as client:
            await producer(client)
            send(client, 0, bytes(200_000))
            await client.next("send_receipt")


@in_virtual_time
async def test_rule_42_native_batches_are_cut_to_what_connected_named() -> None:
    options = ConnectionOptions("broker", max_message_bytes=5_000)
    async with pulsar_server(options) as (broker, server), connected(server) as client:
        owner = FakeClient(broker)
        answer = await owner.producer(9)
        owner.publish_batch([bytes(1_000)] * 30, first=0, producer_id=9, epoch=answer["epoch"])
        await owner.confirmed(30)
        client.send(
            "SUBSCRIBE", topic="orders", subscription="s", sub_type=0, consumer_id=1, request_id=2,
            initial_position=1,
        )  # fmt: skip
        await client.next("success")
        client.send("FLOW", consumer_id=1, message_permits=30)
        await asyncio.sleep(1)
        sizes = [len(rest) for _, _, rest in client.received]
        assert len(sizes) > 6
        assert max(sizes) < 6_000


@in_virtual_time
async def test_a_client_whose_last_frame_is_always_on_its_way_is_alive() -> None:
    async with pulsar_server() as (_, server), connected(server) as client:
        for _ in range(20):
            client.writer.write(PING[5:] + PING[:5] if _ else PING[:5])
            await asyncio.sleep(10)
        assert not client.ended
        assert [name for name, *_ in client.received] == ["pong"] * 19


@in_virtual_time
async def test_look_ups_say_whether_clients_stay_on_the_url_that_they_were_given() -> None:
    async with pulsar_server(pulsar_through_service_url=True) as (_, server), connected(server) as client:
        client.send("LOOKUP", topic="orders", request_id=1)
        assert (await client.next("lookup_response")).proxy_through_service_url


async def test_rule_54_a_broker_that_does_not_speak_the_protocol_is_said_to() -> None:
    async with brokers() as cluster:
        await cluster.start("a", pulsar_port=0, http_url="http://a:8080")
        (one,) = cluster.brokers.values()
        command = wire.CommandLookup(topic="orders", request_id=1)
        with pytest.raises(NotAllowed, match="where Pulsar's protocol is not spoken"):
            await ROWS["lookup"].answer(BrokerService(one.broker), Everybody(), command)  # type: ignore[arg-type]


@in_virtual_time
async def test_rule_46_what_fails_by_a_bug_is_answered_too() -> None:
    async with pulsar_server() as (_, server), connected(server) as client:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BrokerService, "list_topics", None)
            client.send("GET_TOPICS_OF_NAMESPACE", namespace="public/default", request_id=1)
            refused = await client.next("error")
        assert (refused.request_id, refused.error) == (1, wire.ServerError.ServiceNotReady)
        assert "failed here" in refused.message


# --- watches ---------------------------------------------------------------------------------------------------------


def watch(client: PulsarClient, request_id: int, watcher_id: int, **fields: Any) -> None:
    given = {"namespace": "public/default", "topics_pattern": ".*", **fields}
    client.send("WATCH_TOPIC_LIST", request_id=request_id, watcher_id=watcher_id, **given)


@in_virtual_time
async def test_rule_44_watches_are_bounded_and_one_that_failed_holds_no_place() -> None:
    async with pulsar_server(max_watches_per_connection=1) as (_, server), connected(server) as client:
        watch(client, 1, 1, topics_pattern="(")
        assert (await client.next("error")).error == wire.ServerError.NotAllowedError
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BrokerService, "list_topics", None)
            watch(client, 2, 2)
            await client.next("error")
        watch(client, 3, 3)
        await client.next("watch_topic_list_success")
        watch(client, 4, 4)
        assert (await client.next("error")).error == wire.ServerError.TooManyRequests
        watch(client, 5, 3, topics_pattern=".*a")  # in the place of the one with its id
        await client.next("watch_topic_list_success")
        for number, topic in enumerate(("a", "b", "non-persistent://public/default/na")):
            client.send("PRODUCER", topic=topic, producer_id=number, request_id=10 + number)
        await asyncio.sleep(1)
        (update,) = [one for name, one, _ in client.received if name == "watch_topic_update"]
        assert list(update.new_topics) == ["persistent://public/default/a"]


@in_virtual_time
async def test_what_changes_while_topics_are_listed_follows_once() -> None:
    async with pulsar_server() as (broker, server), connected(server) as client:
        await producer(client)
        listing = asyncio.Event()
        listed = BrokerService.list_topics

        async def slowly(*args: Any, **kwargs: Any) -> Any:
            found = await listed(*args, **kwargs)
            await listing.wait()
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BrokerService, "list_topics", slowly)
            watch(client, 2, 1)
            await asyncio.sleep(1)
            topics = list(BrokerService(broker)._broker.topics)
            assert topics == ["persistent://public/default/orders"]
            await producer(client, topic="others", producer_id=2, request_id=3)
            for one in connection_of(server)._watches._watches.values():
                one.topic_changed("persistent://public/default/orders", True)  # which the list has
                one.topic_changed("persistent://public/default/none", False)
            await asyncio.sleep(1)
            assert client.received == []
            listing.set()
            success = await client.next("watch_topic_list_success")
        assert list(success.topic) == ["persistent://public/default/orders"]
        update = await client.next("watch_topic_update")
        assert list(update.new_topics) == ["persistent://public/default/others"]
        assert list(update.deleted_topics) == []
        await asyncio.sleep(1)
        assert client.received == []


@in_virtual_time
async def test_rule_40_a_watch_that_is_closed_while_it_begins_watches_nothing() -> None:
    async with pulsar_server() as (_, server), connected(server) as client:
        begins, stopped = asyncio.Event(), list[bool]()

        async def slowly(*args: Any) -> Any:
            await begins.wait()
            return lambda: stopped.append(True)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BrokerService, "watch_topics", slowly)
            watch(client, 1, 1)
            await asyncio.sleep(1)
            client.send("WATCH_TOPIC_LIST_CLOSE", request_id=2, watcher_id=1)
            await client.next("success")
            begins.set()
            await asyncio.sleep(1)
        assert stopped == [True]


def connection_of(server: Any) -> Any:
    (transport,) = server.connections
    return transport.protocol._connection

"""Topics for programs without a client, against a service of its own."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer, make_mocked_request

from magnetar.client import connect
from magnetar.gateway.gateway import Gateway
from magnetar.gateway.kept import Kept
from magnetar.gateway.messages import failed
from magnetar.proto.errors import MagnetarError
from magnetar.runtime.tasks import awaited, end_all
from support.service import Service

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("gateway") / "data")
    service.start()
    yield service
    service.stop()


@pytest_asyncio.fixture
async def session(service: Service) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://127.0.0.1:{service.http_port}") as session:
        yield session


async def ask(
    session: aiohttp.ClientSession, method: str, path: str, body: Any = None, status: int = 200
) -> Any:
    data = io.BytesIO(json.dumps(body).encode()) if body is not None else None
    async with session.request(method, path, data=data) as answer:
        found = await answer.json() if answer.content_type == "application/json" else await answer.text()
        assert answer.status == status, found
        return found


def text(row: dict[str, Any]) -> bytes:
    return base64.b64decode(row["payload"])


async def test_the_limit_of_a_body_is_that_of_a_message(session: aiohttp.ClientSession) -> None:
    topic, large = "/topics/persistent/public/default/large", "x" * (5 << 20)
    for body, status in (
        ({"messages": [{"payload": large}]}, 200),
        ({"messages": [{"payload": large * 2}]}, 413),
    ):
        async with session.post(topic, data=io.BytesIO(json.dumps(body).encode())) as answer:
            found = await answer.json()
            assert answer.status == status, found
            assert status == 200 or "chunking=True" in found["reason"]


async def test_what_is_published_is_taken_and_acknowledged(session: aiohttp.ClientSession) -> None:
    topic = "/topics/persistent/public/default/rest"
    taking = f"{topic}/subscription/s?start=earliest"
    assert await ask(session, "GET", f"{taking}&timeoutMs=0") == []
    messages = [{"payload": "one", "key": "k", "properties": {"a": "b"}}, {"payload": "two", "eventTime": 5}]
    results = (await ask(session, "POST", topic, {"messages": messages}))["messagePublishResults"]
    assert [row["errorCode"] for row in results] == [0, 0]
    taken: list[Any] = []
    while len(taken) < 2:
        taken += await ask(session, "GET", f"{taking}&messages=10&timeoutMs=30000")
    assert [text(row) for row in taken] == [b"one", b"two"]
    assert (taken[0]["key"], taken[0]["properties"], taken[1]["eventTime"]) == ("k", {"a": "b"}, 5)
    assert [row["messageId"] for row in taken] == [row["messageId"] for row in results]
    ids = [row["messageId"] for row in taken]
    for _ in range(2):  # the answer may have been lost
        await ask(session, "POST", f"{topic}/subscription/s/acknowledge", [*ids, *ids], 204)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "reason"),
    [
        ("POST", "", {"messages": [{"payload": 5}]}, 400, "Expected `str | null`, got `int`"),
        ("POST", "", {"messages": [{}] * 1001}, 412, "1001 messages in one request"),
        ("POST", "/partitions/7", {"messages": [{"payload": ""}]}, 404, "has no partition 7"),
        ("POST", "", {"messages": [{"payloadBase64": "no"}]}, 412, "payloadBase64 is not base64"),
        ("POST", "", {"messages": [{"eventTime": 1 << 70}]}, 400, "eventTime"),
        ("POST", "%FF", {"messages": []}, 400, "the path is not UTF-8"),
        ("POST", "%2Fmore", {"messages": []}, 412, "not a topic name"),
        ("POST", "/subscription/s/acknowledge", ["AAAA"], 412, "a message id has 24 bytes"),
        ("GET", "/subscription/s?messages=many", None, 412, "messages is 'many'"),
        ("GET", f"/subscription/s?messages={'9' * 5000}", None, 412, "messages is '999"),
        ("GET", f"/subscription/s?start={'9' * 5000}", None, 412, "not a message id"),
        ("GET", "/subscription/s?start=never", None, 412, "messageId is not base64"),
        ("GET", "/events?start=never", None, 412, "messageId is not base64"),
    ],
)
async def test_what_is_asked_wrongly_is_refused_with_one_reason(
    session: aiohttp.ClientSession, method: str, path: str, body: Any, status: int, reason: str
) -> None:
    found = await ask(session, method, f"/topics/persistent/public/default/wrong{path}", body, status)
    assert reason in found["reason"]


async def test_a_message_that_is_refused_fails_alone(session: aiohttp.ClientSession) -> None:
    messages = [{"payload": "a"}, {"payload": "b", "deliverAt": 1 << 60}, {"payload": "c"}]
    found = await ask(session, "POST", "/topics/persistent/public/default/alone", {"messages": messages})
    assert [bool(row["errorCode"]) for row in found["messagePublishResults"]] == [False, True, False]


async def events(session: aiohttp.ClientSession, count: int, path: str, last: str = "") -> list[str]:
    """Ids."""
    headers = {"Last-Event-ID": last} if last else {}
    found: list[str] = []
    async with session.get(path, headers=headers) as answer:
        assert answer.content_type == "text/event-stream"
        while len(found) < count:
            line = (await answer.content.readline()).decode().strip()
            if line.startswith("id: "):
                found.append(line[4:])
    return found


async def test_a_tail_goes_on_behind_the_last_event(session: aiohttp.ClientSession) -> None:
    topic = "/topics/persistent/public/default/tail"
    rows = [{"payload": str(number)} for number in range(4)]
    found = await ask(session, "POST", topic, {"messages": rows})
    ids = [row["messageId"] for row in found["messagePublishResults"]]
    assert await events(session, 2, f"{topic}/events?start=earliest") == ids[:2]
    assert await events(session, 2, f"{topic}/events", last=ids[1]) == ids[2:]


async def test_websockets_speak_as_pulsars(session: aiohttp.ClientSession) -> None:
    topic = "persistent/public/default/ws"
    consumer = await session.ws_connect(
        f"/ws/v2/consumer/{topic}/s?subscriptionType=Shared&negativeAckRedeliveryDelay=10&receiverQueueSize=2"
    )
    producer = await session.ws_connect(f"/ws/v2/producer/{topic}")
    await producer.send_str("nonsense")
    assert "not the JSON" in (await producer.receive_json())["errorMsg"]
    for number in range(3):
        payload = base64.b64encode(b"%d" % number).decode()
        await producer.send_json({"payload": payload, "context": str(number), "properties": {"x": "y"}})
        answer = await producer.receive_json()
        assert (answer["result"], answer["context"]) == ("ok", str(number))
    first, second = await consumer.receive_json(), await consumer.receive_json()
    assert (text(first), text(second), first["properties"]) == (b"0", b"1", {"x": "y"})
    await consumer.send_json({"type": "isEndOfTopic"})
    assert await consumer.receive_json() == {"endOfTopic": "false"}, "the queue of two is full"
    await consumer.send_json({"messageId": first["messageId"]})
    assert text(await consumer.receive_json()) == b"2"
    await consumer.send_json({"type": "negativeAcknowledge", "messageId": second["messageId"]})
    again = await consumer.receive_json()
    assert (text(again), again["redeliveryCount"]) == (b"1", 1)
    await consumer.send_json({"messageId": first["messageId"]})
    assert "waits to be acknowledged" in (await consumer.receive_json())["errorMsg"]
    reader = await session.ws_connect(f"/ws/v2/reader/{topic}?messageId=earliest")
    assert text(await reader.receive_json()) == b"0"
    pulling = await session.ws_connect(
        f"/ws/v2/consumer/{topic}/pull?pullMode=true&subscriptionInitialPosition=Earliest"
    )
    await pulling.send_json({"type": "permit", "permitMessages": 1})
    assert text(await pulling.receive_json()) == b"0"
    await pulling.send_json({"type": "isEndOfTopic"})
    assert await pulling.receive_json() == {"endOfTopic": "false"}
    for socket in (consumer, producer, reader, pulling):
        await socket.close()


async def test_a_websocket_that_cannot_be_opened_is_refused_before_it_is(
    session: aiohttp.ClientSession,
) -> None:
    path = "/ws/v2/consumer/persistent/public/default/ws/s"
    assert "connect with ws://" in (await ask(session, "GET", path, status=400))["reason"]
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await session.ws_connect(f"{path}?subscriptionType=nosuch")
    assert refused.value.status == 412


async def test_the_health_check_lets_a_message_through(session: aiohttp.ClientSession) -> None:
    assert await ask(session, "GET", "/admin/v2/brokers/health") == "ok"


async def test_a_health_check_whose_message_is_not_stored_is_no_fault_of_who_asks(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was answered with 400, as a wrong request is; whoever balances load wants 503."""
    from magnetar.gateway.gateway import Gateway
    from magnetar.proto.errors import QuorumLost, ServiceNotReady

    async def refused(*_: Any) -> list[dict[str, Any]]:
        return [failed(QuorumLost("too few bookies"))]

    monkeypatch.setattr(Gateway, "produce", refused)
    gateway = Gateway(service.url, "standalone", 1 << 20)
    request = make_mocked_request("GET", "/admin/v2/brokers/health")
    with pytest.raises(ServiceNotReady, match="too few bookies"):
        await gateway.handle(request)
    await gateway.close()


async def test_what_nobody_comes_for_is_closed_and_at_most_so_many_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    closed: list[str] = []

    class Thing:
        ended = False

        def __init__(self, name: str) -> None:
            self.name = name

        async def close(self) -> None:
            closed.append(self.name)

        def abort(self) -> None:
            closed.append(f"{self.name}, at once")

    async def made(name: str) -> Thing:
        return Thing(name)

    async def broken() -> Thing:
        raise ValueError("it cannot be opened")

    kept: Kept[Thing] = Kept("things", idle_s=0.01, most=2)
    with pytest.raises(ValueError, match="cannot be opened"):
        async with kept.use("x", broken):
            pass
    async with kept.use("x", lambda: made("x")) as thing, kept.use("x", lambda: made("y")) as same:
        assert thing is same, "one at a time, and after a failure another one"
        await asyncio.sleep(0.02)
        assert closed == []
    async with asyncio.timeout(20):
        while closed != ["x"]:
            await asyncio.sleep(0.001)
    kept = Kept("things", idle_s=3600, most=2)
    for name in "abc":
        async with kept.use(name, lambda name=name: made(name)):  # type: ignore[misc]
            pass
    thing.ended = True  # too late for it
    await kept.close()
    assert closed == ["x", "a", "b", "c"]
    kept = Kept("things", idle_s=3600, most=2)
    async with kept.use("d", lambda: made("d")) as thing:
        thing.ended = True
    await asyncio.sleep(0.01)
    assert closed[4:] == ["d"]
    failing = awaited(kept.use("e", broken).__aenter__())
    await asyncio.sleep(0)
    failing.cancel()  # nobody is there any more who could be told
    await asyncio.sleep(0.01)
    async with kept.use("e", lambda: made("e")) as thing:
        thing.close = asyncio.Event().wait  # type: ignore[assignment,method-assign]
    monkeypatch.setattr("magnetar.gateway.kept._CLOSE_S", 0.01)
    async with asyncio.timeout(20):
        await kept.close()
    assert closed[5:] == ["e, at once"]


@contextlib.asynccontextmanager
async def own(service: Service, idle_s: float = 60.0) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
    """A gateway within this process, as another broker of the cluster has one."""
    gateway = Gateway(service.url, "other", 5 << 20, idle_s)

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await gateway.handle(request) or web.Response(status=404)
        except MagnetarError as error:
            return web.Response(status=500, text=error.message)

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handle)
    server = TestServer(application)
    await server.start_server()
    async with aiohttp.ClientSession(server.make_url("/")) as session:
        yield gateway, session
        await gateway.close()
    await server.close()


async def take(session: aiohttp.ClientSession, topic: str, count: int, start: str = "earliest") -> list[Any]:
    found: list[Any] = []
    async with asyncio.timeout(30):
        while len(found) < count:
            path = f"{topic}/subscription/s?start={start}&messages={count - len(found)}&timeoutMs=5000"
            found += await ask(session, "GET", path)
    return found


async def publish(session: aiohttp.ClientSession, topic: str, *payloads: str) -> list[Any]:
    body = {"messages": [{"payload": payload} for payload in payloads]}
    rows: list[Any] = (await ask(session, "POST", topic, body))["messagePublishResults"]
    return rows


async def test_any_broker_takes_an_acknowledgement_of_messages_in_chunks_too(
    service: Service, session: aiohttp.ClientSession
) -> None:
    topic = "/topics/persistent/public/default/anywhere"
    async with own(service, idle_s=1.0) as (_, other):
        assert await ask(other, "GET", f"{topic}/subscription/s?timeoutMs=0") == []
        producer = await session.ws_connect("/ws/v2/producer/persistent/public/default/anywhere")
        large = bytes(11 << 20)
        await producer.send_json({"payload": base64.b64encode(large).decode()})
        assert (await producer.receive_json())["result"] == "ok"
        await ask(
            session, "POST", topic, {"messages": [{"payloadBase64": base64.b64encode(b"\xff").decode()}]}
        )
        taken = await take(other, topic, 2)
        assert [text(row) for row in taken] == [large, b"\xff"]
        ids = [row["messageId"] for row in taken]
        await ask(session, "POST", f"{topic}/subscription/s/acknowledge", ids, 204)
        for _ in range(4):
            assert await ask(other, "GET", f"{topic}/subscription/s?timeoutMs=700") == []
        await producer.close()


async def test_what_was_taken_and_is_not_acknowledged_comes_again_though_others_take_on(
    service: Service,
) -> None:
    topic = "/topics/persistent/public/default/forgotten"
    async with own(service, idle_s=1.0) as (_, session):
        await publish(session, topic, "a", "b")
        (first,) = await take(session, topic, 1)
        (second,) = await take(session, topic, 1)
        await ask(session, "POST", f"{topic}/subscription/s/acknowledge", [second["messageId"]], 204)
        (again,) = await take(session, topic, 1)
        assert (text(again), again["redeliveryCount"]) == (b"a", 1), first


async def test_a_terminated_topic_gives_all_and_a_deleted_one_begins_anew(
    service: Service, session: aiohttp.ClientSession
) -> None:
    topic, name = "/topics/persistent/public/default/ending", "persistent://public/default/ending"
    await publish(session, topic, "a", "b")
    assert len(await take(session, topic, 1)) == 1
    async with connect(service.url) as client:
        await client.admin.terminate_topic(name)
        assert [text(row) for row in await ask(session, "GET", f"{topic}/subscription/s?messages=9")] == [
            b"b"
        ]
        found = await ask(session, "POST", topic, {"messages": [{"payload": "c"}]}, 412)
        assert "terminated" in found["reason"]
        await client.admin.delete_topic(name, force=True)
        with contextlib.suppress(AssertionError):  # one request may learn of it
            assert await ask(session, "GET", f"{topic}/subscription/s?timeoutMs=200") == []
        await publish(session, topic, "d")
        assert [text(row) for row in await take(session, topic, 1)] == [b"d"]


async def test_a_tail_of_a_partitioned_topic_goes_on_in_each_partition(
    service: Service, session: aiohttp.ClientSession
) -> None:
    topic = "/topics/persistent/public/default/parts"
    async with connect(service.url) as client:
        await client.admin.create_topic("persistent://public/default/parts", partitions=3)
    for partition in range(3):
        await publish(session, f"{topic}/partitions/{partition}", *(f"{partition}-{n}" for n in range(4)))
    seen: list[str] = []
    last = ""
    for count in (1, 4, 2, 5):
        headers = {"Last-Event-ID": last} if last else {}
        async with session.get(f"{topic}/events?start=earliest", headers=headers) as answer:
            for _ in range(count):
                row, last = await next_event(answer)
                seen.append(text(row).decode())
    assert sorted(seen) == [f"{partition}-{n}" for partition in range(3) for n in range(4)]
    async with session.get(f"{topic}/events") as answer:
        await answer.content.readuntil(b"open\n\n")
        await publish(session, f"{topic}/partitions/1", "new")
        row, last = await next_event(answer)
        assert text(row) == b"new"
    await publish(session, f"{topic}/partitions/2", "meanwhile")
    async with session.get(f"{topic}/events", headers={"Last-Event-ID": last}) as answer:
        assert text((await next_event(answer))[0]) == b"meanwhile"


async def next_event(answer: aiohttp.ClientResponse) -> tuple[Any, str]:
    assert answer.status == 200, await answer.text()
    place = ""
    async with asyncio.timeout(20):
        async for line in answer.content:
            if line.startswith(b"id: "):
                place = line[4:].decode().strip()
            elif line.startswith(b"data: "):
                return json.loads(line[6:]), place
    raise AssertionError("the tail has ended")


@pytest.mark.parametrize(("size", "most"), [(10, 1000), (1 << 20, 16)])
async def test_who_reads_no_answers_is_read_no_further(
    service: Service, monkeypatch: pytest.MonkeyPatch, size: int, most: int
) -> None:
    async def never(*_: object) -> None:
        sent.append(1)
        await asyncio.Event().wait()

    sent: list[int] = []
    monkeypatch.setattr("magnetar.gateway.websocket._send", never)
    async with own(service) as (_, session):
        producer = await session.ws_connect(f"/ws/v2/producer/persistent/public/default/unread-{size}")
        frame = '{"payload": "%s"}' % ("A" * size)

        async def send_all() -> None:
            for _ in range(2 * most):
                await producer.send_str(frame)

        sending = awaited(send_all())
        async with asyncio.timeout(30):
            while len(sent) < most * 3 // 4:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert len(sent) <= most
        await end_all([sending])


async def test_a_message_that_comes_again_takes_no_more_room(session: aiohttp.ClientSession) -> None:
    topic = "persistent/public/default/again"
    consumer = await session.ws_connect(
        f"/ws/v2/consumer/{topic}/s?subscriptionType=Shared&receiverQueueSize=2&ackTimeoutMillis=1000"
    )
    (sent,) = await publish(session, f"/topics/{topic}", "a")
    for _ in range(3):
        assert (await consumer.receive_json(timeout=20))["messageId"] == sent["messageId"]
    await consumer.send_json({"messageId": sent["messageId"]})
    await publish(session, f"/topics/{topic}", "b", "c")
    assert {text(await consumer.receive_json(timeout=20)) for _ in "bc"} == {b"b", b"c"}
    await consumer.send_bytes(b"not text")
    while "not the JSON" not in (await consumer.receive_json(timeout=20)).get("errorMsg", ""):
        pass
    await consumer.close()


async def test_pulsars_access_modes_are_known(session: aiohttp.ClientSession) -> None:
    for mode in ("Shared", "ExclusiveWithFencing", "Exclusive", "WaitForExclusive"):
        path = f"/ws/v2/producer/persistent/public/default/modes-{mode}"
        producer = await session.ws_connect(f"{path}?accessMode={mode}")
        await producer.close()


async def test_open_websockets_and_tails_do_not_hold_up_the_end(tmp_path: Any) -> None:
    service = Service(tmp_path / "data")
    await asyncio.to_thread(service.start)
    base = f"http://127.0.0.1:{service.http_port}"
    async with aiohttp.ClientSession(base) as session:
        topic = "persistent/public/default/open"
        payload = "x" * 500_000
        for _ in range(20):
            await publish(session, f"/topics/{topic}", payload)
        consumer = await session.ws_connect(f"/ws/v2/consumer/{topic}/s?subscriptionInitialPosition=Earliest")
        producer = await session.ws_connect(f"/ws/v2/producer/{topic}")
        tail = await session.get(f"/topics/{topic}/events?start=earliest")  # nobody reads it
        waiting = awaited(session.get(f"/topics/{topic}-2/subscription/s?timeoutMs=60000"))
        await asyncio.sleep(0.5)
        began = time.monotonic()
        await asyncio.to_thread(service.stop)
        assert time.monotonic() - began < 6.0
        assert (await producer.receive()).data == 1001
        tail.close()
        await end_all([waiting])
        await consumer.close()

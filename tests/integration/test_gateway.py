"""Topics for programs without a client, against a service of its own."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

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
    async with session.request(method, path, json=body) as answer:
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
    await ask(session, "POST", f"{topic}/subscription/s/acknowledge", ids, 204)
    gone = await ask(session, "POST", f"{topic}/subscription/s/acknowledge", ids, 404)
    assert "not held here any more" in gone["reason"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "reason"),
    [
        ("POST", "", {"messages": [{"payload": 5}]}, 400, "Expected `str | null`, got `int`"),
        ("POST", "", {"messages": [{}] * 1001}, 412, "1001 messages in one request"),
        ("POST", "/partitions/7", {"messages": [{"payload": ""}]}, 404, "has no partition 7"),
        ("GET", "/subscription/s?messages=many", None, 412, "messages is 'many'"),
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


async def test_what_nobody_comes_for_is_closed_and_at_most_so_many_are_kept() -> None:
    from magnetar.gateway.kept import Kept

    closed: list[str] = []

    class Thing:
        def __init__(self, name: str) -> None:
            self.name = name

        async def close(self) -> None:
            closed.append(self.name)

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
    await kept.close()
    assert closed == ["x", "a", "b", "c"]

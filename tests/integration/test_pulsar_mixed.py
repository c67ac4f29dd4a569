"""Programs of both protocols share topics: what one sends the other gets, whatever happens to brokers in the middle.

Pulsar's own Python client, in processes of its own, and the native one send to one topic with deduplication, and both are in
one Shared and one Key_Shared subscription. 0 lost, 0 altered, 0 doubled, in order by producer.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pulsar", reason="there is no pulsar-client for this Python")

from magnetar.broker import start_pulsar_listener
from magnetar.client import Client, Consumer, SubscriptionType, connect
from magnetar.runtime.connection import ConnectionOptions
from support.cluster_kit import brokers
from support.pulsar_child import key, payload
from support.service import Service, held_port

TOPIC = "mixed"
OF_PULSAR = {
    "p-single": '{"batching_enabled": false}',
    "p-batch": '{"batching_enabled": true, "batching_max_publish_delay_ms": 1}',
    "p-small": '{"batching_enabled": true, "batching_max_messages": 20}',
}
BATCHED = ("p-batch", "p-small")
NATIVE: dict[str, dict[str, Any]] = {"n-single": {"batching": False}, "n-batch": {"compression": "zstd"}}
MESSAGES = 300  # of each producer in each round
_TESTS = Path(__file__).parents[1]


class Child:
    """A process with Pulsar's client (`support.pulsar_child`)."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout

    @classmethod
    @asynccontextmanager
    async def run(cls, *arguments: str) -> AsyncIterator[Child]:
        """Ready; it is ended in the end."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "support.pulsar_child", *arguments, stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(_TESTS)},
        )  # fmt: skip
        child = cls(process)
        try:
            assert await child.line() == "ready"
            yield child
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    async def line(self) -> str:
        """The next one that it prints."""
        return (await self._stdout.readline()).decode().removesuffix("\n")

    async def send(self, count: int) -> None:
        """Returns when so many more messages are stored."""
        self._stdin.write(b"%d\n" % count)
        assert await self.line() == "Result.Ok"


class Mixed:
    """All producers and consumers of a topic, and what they see."""

    def __init__(self, client: Client, pulsar: str) -> None:
        self._client = client
        self._pulsar = pulsar
        self._stack = AsyncExitStack()
        self._sends: list[Callable[[int], Coroutine[None, None, None]]] = []
        self._sent = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.seen: dict[str, list[tuple[str, int]]] = {}  # by consumer
        self.subscriptions: dict[str, list[str]] = {"shared": [], "key_shared": []}

    async def __aenter__(self) -> Mixed:
        try:
            await self._begin_all()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _begin_all(self) -> None:
        client, enter = self._client, self._stack.enter_async_context
        await client.create_producer(TOPIC, name="first")
        await client.admin.update_topic_policies(TOPIC, {"deduplication": True})
        for name, options in OF_PULSAR.items():
            child = await enter(Child.run("produce", self._pulsar, TOPIC, name, options))
            self._sends.append(child.send)
        for name, named in NATIVE.items():
            producer = await enter(client.create_producer(TOPIC, name=name, send_timeout=600, **named))

            async def send(count: int, producer: object = producer, name: str = name) -> None:
                numbers = range(self._sent, self._sent + count)
                await asyncio.gather(
                    *[producer.send_nowait(payload(name, n), key=key(n)) for n in numbers]  # type: ignore[attr-defined]
                )

            self._sends.append(send)
        types: list[tuple[SubscriptionType, str]] = [("shared", "Shared"), ("key_shared", "KeyShared")]
        for type, of_pulsar in types:
            consumer = await client.subscribe(TOPIC, type, type=type, start="earliest")
            await enter(consumer)
            child = await enter(Child.run("consume", self._pulsar, TOPIC, type, of_pulsar))
            self._begin(f"native {type}", self._read(consumer), type)
            self._begin(f"pulsar {type}", self._read_child(child), type)
        tail = await enter(Child.run("consume", self._pulsar, TOPIC, "tail", "Exclusive"))
        self._begin("tail", self._read_child(tail), "tail")

    def _begin(self, name: str, lines: AsyncIterator[bytes], subscription: str) -> None:
        self.seen[name] = []
        self.subscriptions.setdefault(subscription, []).append(name)
        self._tasks.append(asyncio.create_task(self._follow(self.seen[name], lines)))

    async def _follow(self, seen: list[tuple[str, int]], lines: AsyncIterator[bytes]) -> None:
        async for line in lines:
            seen.append(read(line))

    async def _read(self, consumer: Consumer) -> AsyncIterator[bytes]:
        async for message in consumer:
            yield message.value or b""
            await consumer.ack(message)

    async def _read_child(self, child: Child) -> AsyncIterator[bytes]:
        while line := await child.line():
            yield line.encode()

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    async def send(self, count: int, disturb: Callable[[], Awaitable[None]] | None = None) -> None:
        """All producers do, and in the middle of that something happens.

        A first message should be receipted before: on its first connection and on those after that without a receipt, the
        library in C++ begins to count behind the last sequence id that the broker knows, whatever it has sent meanwhile.
        """
        before = len(self.seen["tail"])
        async with asyncio.TaskGroup() as sending:
            for send in self._sends:
                sending.create_task(send(count))
            if disturb is not None:
                await self._until(lambda: len(self.seen["tail"]) > before + count // 2)
                await disturb()
        self._sent += count

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert not any(task.done() for task in self._tasks), [task for task in self._tasks if task.done()]
            await asyncio.sleep(0.02)

    async def check(self) -> None:
        """Everything arrived at every subscription, as it was sent; who begins anew sees each message once, and in order."""
        wanted = {name: list(range(self._sent)) for name in (*OF_PULSAR, *NATIVE)}
        total = len(wanted) * self._sent
        for names in self.subscriptions.values():
            await self._until(lambda: len({one for name in names for one in self.seen[name]}) >= total)  # noqa: B023
            for name in names:
                assert len(self.seen[name]) > 0, name
        # What both consumers of a key had may come again to one of them, whose acknowledgement was lost with the broker.
        native, of_pulsar = (self.seen[name] for name in self.subscriptions["key_shared"])
        both = set(native) & set(of_pulsar)
        for seen in (native, of_pulsar):
            # A batch of Pulsar's goes where its first key belongs, so that others of it are not in order.
            check_order([one for one in seen if one not in both and one[0] not in BATCHED], by_key=True)
        check_order(self.seen["tail"], by_key=False)
        found: list[tuple[str, int]] = []
        async with self._client.create_reader(TOPIC, start="earliest") as reader:
            while len(found) < total:
                found.append(read((await reader.read_next(timeout=30)).value or b""))
            assert not await reader.has_message_available()
        again: list[tuple[str, int]] = []
        async with Child.run("consume", self._pulsar, TOPIC, "again", "Exclusive") as child:
            while len(again) < total:
                again.append(read((await child.line()).encode()))
        assert found == again
        by_producer = {name: [number for of, number in found if of == name] for name in wanted}
        assert by_producer == wanted
        last = {key(number): payload(name, number) for name, number in found}
        async with self._client.create_table_view(TOPIC) as view:
            assert dict(view.items()) == last


def read(line: bytes) -> tuple[str, int]:
    """The producer and the number of a message that nobody altered."""
    name, number, _ = line.split(b":")
    assert line == payload(name.decode(), int(number))
    return name.decode(), int(number)


def check_order(seen: list[tuple[str, int]], *, by_key: bool) -> None:
    """The numbers of each producer, or of each of its keys, rise, apart from those that came before."""
    found = defaultdict[tuple[str, str], list[int]](list)
    for name, number in dict.fromkeys(seen):
        found[name, key(number) if by_key else ""].append(number)
    for of, numbers in found.items():
        assert numbers == sorted(numbers), of


@pytest.mark.real
async def test_a_kill_and_a_restart_lose_alter_and_double_nothing(tmp_path: Path) -> None:
    service = Service(tmp_path / "data", pulsar=True)
    await asyncio.to_thread(service.start)
    try:
        async with (
            connect(service.url) as client,
            Mixed(client, f"pulsar://127.0.0.1:{service.pulsar_port}") as mixed,
        ):

            async def kill() -> None:
                await asyncio.to_thread(service.kill, "both")
                await asyncio.to_thread(service.start)

            async def restart() -> None:
                await asyncio.to_thread(service.stop)
                await asyncio.to_thread(service.start)

            await mixed.send(1)
            await mixed.send(MESSAGES, kill)
            await mixed.send(MESSAGES, restart)
            await mixed.check()
    finally:
        await asyncio.to_thread(service.stop)


@pytest.mark.real
async def test_a_hand_over_loses_alters_and_doubles_nothing() -> None:
    async with brokers(default_bundles=1) as cluster, AsyncExitStack() as stack:
        ports = {name: held_port(cluster) for name in ("a", "b")}
        for name, port in ports.items():
            one = await cluster.start(name, pulsar_url=f"pulsar://127.0.0.1:{port}", default_bundles=1)
            server = await start_pulsar_listener(one.broker, "127.0.0.1", port, ConnectionOptions(name))
            stack.push_async_callback(server.close, 0.0)
        urls = ",".join(one.url.partition("://")[2] for one in cluster.brokers.values())
        pulsar = "pulsar://" + ",".join(f"127.0.0.1:{port}" for port in ports.values())
        async with connect(f"magnetar://{urls}") as client, Mixed(client, pulsar) as mixed:

            async def hand_over() -> None:
                source = cluster.owner_of(TOPIC)
                (target,) = [one for one in cluster.brokers.values() if one is not source]
                await source.ownership.administration.transfer(TOPIC, target.broker.settings.name)

            await mixed.send(1)
            for _ in range(3):
                await mixed.send(MESSAGES, hand_over)
            await mixed.check()

"""What a broker's dispatch costs, without sockets and disks: a broker on ledgers in memory, in this process.

    python -m bench dispatch [--rounds N]

(1) tail: one entry of one message, published and delivered to one exclusive consumer.
(2) the same in a topic with 1,000 subscriptions of which one has a consumer; and with 1,000 that all have one, of which one
    has permits.
(3) 1,000 consumers on one Shared subscription, all with permits; and of whom one has permits.

The figures are microseconds of one publish until the last delivery of it, the whole broker included: compare them with (1).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from bench.arguments import console
from magnetar.broker import Broker, BrokerSettings
from magnetar.broker.dispatch.subscription import SubscribeRequest
from magnetar.broker.topics.core.producers import Claim
from magnetar.proto.admission import admit_groups
from magnetar.proto.batch import encode_batch
from magnetar.proto.ids import TopicName
from magnetar.proto.ledger_entry import encode_ledger_entry
from support.memory_metadata import MemoryMetadataStore

MANY = 1_000
PUBLISHES = 2_000


class _Clock:
    def now_ms(self) -> int:
        return int(time.time() * 1000)


class _Ledgers:
    """Ledgers that confirm in the next turn of the loop and forget what they were given."""

    def __init__(self) -> None:
        self._next_id = 0

    async def create(self, *, ledger_id: int | None = None, **_: Any) -> _Writer:
        self._next_id += 1
        return _Writer(self._next_id if ledger_id is None else ledger_id)

    async def next_id(self, count: int = 1) -> int:
        self._next_id += count
        return self._next_id - count

    async def delete(self, ledger_id: int) -> None:
        pass

    def figures(self) -> dict[str, int]:
        return {}

    def suspects(self) -> tuple[str, ...]:
        return ()


class _Writer:
    replaceable = False

    def __init__(self, ledger_id: int) -> None:
        self.ledger_id = ledger_id
        self.last_add_confirmed = -1
        self.length = 0
        self._loop = asyncio.get_running_loop()

    def append(self, payload: bytes, confirmed: Callable[[int, bytes, None], None]) -> int:
        entry_id = self.last_add_confirmed + 1
        self.last_add_confirmed = entry_id
        self.length += len(payload)
        entry = encode_ledger_entry(self.ledger_id, entry_id, entry_id - 1, self.length, payload)
        self._loop.call_soon(confirmed, entry_id, entry, None)
        return entry_id

    def detach(self) -> None:
        pass

    async def close(self) -> Any:
        return argparse.Namespace(last_entry=self.last_add_confirmed, length=self.length)


class _Port:
    """One or many consumers, or a producer; counts what it gets."""

    writable = True
    peer = "bench"

    def __init__(self) -> None:
        self.deliveries = 0

    def deliver(self, delivery: Any) -> None:
        self.deliveries += 1

    def receipts(self, rows: Any) -> None:
        pass

    def consumer_closed(self, error: Exception) -> None:
        pass

    send_failed = producer_closed = consumer_closed


async def _measure(subscribe: Callable[[Any], Awaitable[Callable[[], int]]]) -> float:
    """Microseconds of one publish until its delivery."""
    settings = BrokerSettings(max_ledger_entries=10_000_000, cursor_flush_interval_ms=60_000)
    ledgers: Any = _Ledgers()
    broker = Broker(MemoryMetadataStore(), ledgers, settings, _Clock())
    await broker.start()
    try:
        topic: Any = await broker.find(TopicName.parse("bench"))
        delivered = await subscribe(topic)
        session = await topic.open_producer(Claim("p", 0), lambda _: _Port())
        group = admit_groups([encode_batch([b"x" * 100], sequence_id=0, publish_time_ms=0)])
        times: list[float] = []
        for count in range(1, PUBLISHES + 1):
            start = time.perf_counter()
            topic.publish(session, group)
            while delivered() < count:  # noqa: ASYNC110
                await asyncio.sleep(0)
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e6
    finally:
        await broker.close()


async def _tail(topic: Any, *, others: int = 0, connected: bool = False) -> Callable[[], int]:
    """One exclusive consumer with permits, beside subscriptions that have nothing to do."""
    port = _Port()
    subscription, consumer, _ = await topic.subscriptions.subscribe(SubscribeRequest("active"), port)
    subscription.flow(consumer, 1 << 30, 0)
    for number in range(others):
        other, idle, _ = await topic.subscriptions.subscribe(SubscribeRequest(f"idle-{number}"), _Port())
        if not connected:
            other.remove_consumer(idle)
    return lambda: port.deliveries


async def _shared(topic: Any, *, with_permits: int) -> Callable[[], int]:
    """Many consumers on one subscription."""
    port = _Port()
    for number in range(MANY):
        asked = SubscribeRequest("shared", "shared")
        subscription, consumer, _ = await topic.subscriptions.subscribe(asked, port)
        if number >= MANY - with_permits:
            subscription.flow(consumer, 1 << 30, 0)
    return lambda: port.deliveries


async def _work(rounds: int) -> dict[str, list[float]]:
    cases: dict[str, Callable[[Any], Awaitable[Callable[[], int]]]] = {
        "one subscription": _tail,
        f"{MANY} subscriptions, one has a consumer": lambda topic: _tail(topic, others=MANY - 1),
        f"{MANY} subscriptions with consumers, one has permits": lambda topic: _tail(
            topic, others=MANY - 1, connected=True
        ),
        f"Shared, {MANY} consumers, one has permits": lambda topic: _shared(topic, with_permits=1),
        f"Shared, {MANY} consumers with permits": lambda topic: _shared(topic, with_permits=MANY),
    }
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            found[name].append(await _measure(case))
    return found


def main(arguments: Sequence[str]) -> int:
    """Prints the medians of the rounds."""
    parser = argparse.ArgumentParser(prog="python -m bench dispatch", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    found = asyncio.run(_work(given.rounds))
    screen = console()
    first = statistics.median(next(iter(found.values())))
    for name, figures in found.items():
        figure = statistics.median(figures)
        screen.print(f"{name:55} {figure:8.1f} us a publish  {figure / first:6.2f} times the first")
    return 0

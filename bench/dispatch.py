"""What a broker's dispatch costs, without sockets and disks: a broker on ledgers in memory, in this process.

    python -m bench dispatch [--rounds N]

(1) tail: one entry of one message, published and delivered to one exclusive consumer.
(2) the same in a topic with 1,000 subscriptions of which one has a consumer; and with 1,000 that all have one, of which one
    has permits.
(3) 1,000 consumers on one Shared subscription, all with permits; and of whom one has permits.
(4) 10,000 keys of a Key_Shared subscription that move between 50 consumers, of whom every 20 ms one leaves and another one
    joins. Each message is acknowledged 5 ms after its delivery; until then a consumer that joins gets nothing of its key.

The figures of (1) to (3) are microseconds of one publish until the last delivery of it, the whole broker included: compare
them with (1). Those of (4) are messages a second, the longest time until a delivery, of keys that moved to another consumer
and of the others, and the memory that the run has taken.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from bench.arguments import console
from magnetar.broker import Broker, BrokerSettings
from magnetar.metadata.memory import MemoryMetadataStore
from magnetar.proto.batch import admit_groups, encode_batch
from magnetar.proto.ids import TopicName
from magnetar.proto.ledger_entry import encode_ledger_entry

MANY = 1_000
PUBLISHES = 2_000


KEYS = 10_000
KEY_CONSUMERS = 50
KEY_MESSAGES = 200_000
MESSAGES_PER_PUBLISH = 100
MOVE_INTERVAL_S = 0.02
ACK_DELAY_S = 0.005


class _Clock:
    def now_ms(self) -> int:
        return int(time.time() * 1000)


class _Ledgers:
    """Ledgers that confirm in the next turn of the loop and, unless told to keep it, forget what they were given."""

    def __init__(self, *, keep: bool = False) -> None:
        self._next_id = 0
        self._keep = keep

    async def create(self, *, ledger_id: int | None = None, **_: Any) -> _Writer:
        self._next_id += 1
        return _Writer(self._next_id if ledger_id is None else ledger_id, self._keep)

    async def next_id(self, count: int = 1) -> int:
        self._next_id += count
        return self._next_id - count

    async def delete(self, ledger_id: int) -> None:
        pass

    def figures(self) -> dict[str, int]:
        return {}


class _Writer:
    restorable = False

    def __init__(self, ledger_id: int, keep: bool) -> None:
        self.ledger_id = ledger_id
        self._entries: list[bytes] | None = [] if keep else None
        self.last_add_confirmed = -1
        self.length = 0
        self._loop = asyncio.get_running_loop()

    def append(self, payload: bytes, confirmed: Callable[[int, bytes, None], None]) -> int:
        entry_id = self.last_add_confirmed + 1
        self.last_add_confirmed = entry_id
        self.length += len(payload)
        entry = encode_ledger_entry(self.ledger_id, entry_id, entry_id - 1, self.length, payload)
        if self._entries is not None:
            self._entries.append(entry)
        self._loop.call_soon(confirmed, entry_id, entry, None)
        return entry_id

    async def read(self, first: int, last: int, *, max_bytes: int) -> list[bytes]:
        assert self._entries is not None
        found = self._entries[first : last + 1]
        return found[: max(max_bytes // len(found[0]), 1)]

    def detach(self) -> None:
        pass

    async def close(self) -> Any:
        return argparse.Namespace(last_entry=self.last_add_confirmed, length=self.length)


class _Port:
    """One or many consumers, or a producer; counts what it gets."""

    writable = True

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
        topic = await broker.find(TopicName.parse("bench"))
        delivered = await subscribe(topic)
        session = await topic.open_producer("p", epoch=0, access_mode="shared", new_port=lambda _: _Port())
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
    subscription, consumer = await topic.subscribe("active", port)
    subscription.flow(consumer, 1 << 30, 0)
    for number in range(others):
        other, idle = await topic.subscribe(f"idle-{number}", _Port())
        if not connected:
            other.remove_consumer(idle)
    return lambda: port.deliveries


async def _shared(topic: Any, *, with_permits: int) -> Callable[[], int]:
    """Many consumers on one subscription."""
    port = _Port()
    for number in range(MANY):
        subscription, consumer = await topic.subscribe("shared", port, type="shared")
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


class _KeyConsumer:
    """Notes when each message came, and acknowledges it a little later."""

    writable = True

    def __init__(self, run: _MovingKeys) -> None:
        self._run = run
        self.consumer: Any = None

    def deliver(self, delivery: Any) -> None:
        entry = delivery.entry
        first = entry.batch_start_index(delivery.first_batch)
        end = entry.end_indexes[delivery.last_batch - 1]
        hidden = {index for start, last in delivery.hidden for index in range(start, last + 1)}
        indexes = [index for index in range(first, end) if index not in hidden]
        for index in indexes:
            self._run.delivered(self, delivery.entry_id * MESSAGES_PER_PUBLISH + index)
        rows = [(delivery.ledger_id, delivery.entry_id, index, index) for index in indexes]
        asyncio.get_running_loop().call_later(ACK_DELAY_S, self._acknowledge, rows)

    def _acknowledge(self, rows: list[tuple[int, int, int, int]]) -> None:
        if not self.consumer.closed:
            self._run.subscription.acknowledge(self.consumer, rows, cumulative=False, done=None)

    def active_changed(self, active: bool) -> None:
        pass

    def consumer_closed(self, error: Exception) -> None:
        pass


class _MovingKeys:
    """(4). Message n, in entry n // MESSAGES_PER_PUBLISH, has key n % KEYS."""

    def __init__(self) -> None:
        self.subscription: Any = None
        self.published_at: list[float] = []  # by entry
        self.deliveries = 0  # of messages that had not been delivered before
        self._seen = bytearray(KEY_MESSAGES)
        self._owners: list[_KeyConsumer | None] = [None] * KEYS  # who got a key last
        self.moves = 0
        self.longest_s = {"moved": 0.0, "stayed": 0.0}

    def delivered(self, port: _KeyConsumer, number: int) -> None:
        owner, self._owners[number % KEYS] = self._owners[number % KEYS], port
        moved = owner is not None and owner is not port
        self.moves += moved
        if not self._seen[number]:
            self._seen[number] = 1
            self.deliveries += 1
            waited = time.perf_counter() - self.published_at[number // MESSAGES_PER_PUBLISH]
            kind = "moved" if moved else "stayed"
            self.longest_s[kind] = max(self.longest_s[kind], waited)

    async def join(self, topic: Any, number: int) -> Any:
        port = _KeyConsumer(self)
        self.subscription, port.consumer = await topic.subscribe(
            "keys", port, type="key_shared", consumer_name=f"consumer-{number}"
        )
        self.subscription.flow(port.consumer, 1 << 30, 0)
        return port.consumer

    async def play(self, topic: Any) -> float:
        """Seconds from the first publish to the last delivery."""
        session = await topic.open_producer("p", epoch=0, access_mode="shared", new_port=lambda _: _Port())
        consumers = [await self.join(topic, number) for number in range(KEY_CONSUMERS)]
        joined = len(consumers)
        start = time.perf_counter()
        move_at = start + MOVE_INTERVAL_S
        for first in range(0, KEY_MESSAGES, MESSAGES_PER_PUBLISH):
            batches = [
                encode_batch([b"x" * 100], sequence_id=n, publish_time_ms=0, keys=[b"%d" % (n % KEYS)])
                for n in range(first, first + MESSAGES_PER_PUBLISH)
            ]
            self.published_at.append(time.perf_counter())
            topic.publish(session, admit_groups(batches), whole=True)
            await asyncio.sleep(0)
            if time.perf_counter() >= move_at:
                move_at += MOVE_INTERVAL_S
                self.subscription.remove_consumer(consumers.pop(0))
                consumers.append(await self.join(topic, joined))
                joined += 1
        while self.deliveries < KEY_MESSAGES:  # noqa: ASYNC110
            await asyncio.sleep(ACK_DELAY_S)
        return time.perf_counter() - start


async def _moving_keys() -> str:
    settings = BrokerSettings(max_ledger_entries=10_000_000, cursor_flush_interval_ms=60_000)
    ledgers: Any = _Ledgers(keep=True)
    broker = Broker(MemoryMetadataStore(), ledgers, settings, _Clock())
    await broker.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        run = _MovingKeys()
        seconds = await run.play(await broker.find(TopicName.parse("keys")))
    finally:
        await broker.close()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return (
        f"Key_Shared, {KEYS} keys, {KEY_CONSUMERS} consumers that join and leave: {KEY_MESSAGES / seconds:,.0f} msg/s, "
        f"{run.moves} moves of a key, the longest wait of a key that moved {run.longest_s['moved'] * 1000:.0f} ms, "
        f"of another one {run.longest_s['stayed'] * 1000:.0f} ms, memory + {grown:.0f} MiB"
    )


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
    screen.print(asyncio.run(_moving_keys()))
    return 0

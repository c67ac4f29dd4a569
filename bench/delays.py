"""What delayed messages cost a broker, without sockets and disks: a broker on ledgers in memory, in this process.

    python -m bench delays [--seconds N] [--pending N]

(1) 200,000 messages a second, scheduled and delivered side by side: batches of 1,000 that are all due after one second;
    batches of 100 that are due at random times within five seconds; single messages that are all due after one second, and,
    to compare, others that are not delayed.
(2) a million single messages that wait over a year: bytes of memory each; how long the topic loads, until its new messages
    are delivered and until the index is whole; and a publish until its delivery in another topic meanwhile, beside before.

Publishing, index and dispatch are in one process, which spends what is printed as CPU, but for encoding batches. Late: from
the due time to the delivery.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

from bench.arguments import console
from bench.percentiles import percentiles
from magnetar.broker import Broker, BrokerSettings
from magnetar.broker.dispatch.core.delay_index import DelayIndex
from magnetar.broker.dispatch.subscription import SubscribeRequest
from magnetar.broker.topics.core.producers import Claim
from magnetar.proto.admission import admit_groups
from magnetar.proto.batch import encode_batch
from magnetar.proto.batch_extensions import EXT_DELIVER_AT_MS
from magnetar.proto.ids import TopicName
from magnetar.proto.ranges import complement
from magnetar.runtime.clock import SystemClock
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore

RATE = 200_000
DELAY_MS, SPREAD_MS = 1_000, 5_000
QUIET_S = 2.0
TURN_S = 0.01
YEAR_MS = 365 * 24 * 3_600_000
SETTINGS = BrokerSettings(
    max_ledger_entries=10_000_000,
    cursor_flush_interval_ms=60_000,
    max_unacked_messages_per_consumer=0,
    max_unacked_messages_per_subscription=0,
    max_topic_publish_bytes=1 << 30,
)
clock = SystemClock()


class _Port:
    """A consumer that acknowledges at once, or a producer."""

    writable = True
    peer = "bench"

    def __init__(self) -> None:
        self.messages = 0
        self.deliveries: list[tuple[int, int, int, int]] = []
        self.late_ms: list[int] = []

    def deliver(self, delivery: Any) -> None:
        entry = delivery.entry
        first = entry.batch_start_index(delivery.first_batch)
        last = entry.end_indexes[delivery.last_batch - 1] - 1
        for start, end in complement(delivery.hidden, first, last):
            self.messages += end - start + 1
            self.deliveries.append((delivery.ledger_id, delivery.entry_id, start, end))
        start = entry.batch_bounds(delivery.first_batch)[0]
        if entry.data[start + 48 : start + 49] == b"\x81":  # its extensions: a map of one
            due_ms = int.from_bytes(entry.data[start + 51 : start + 59])
            self.late_ms.append(clock.now_ms() - due_ms)

    def receipts(self, rows: Any) -> None:
        pass

    def consumer_closed(self, error: Exception) -> None:
        pass

    send_failed = producer_closed = send_delayed = consumer_closed


class _Stage:
    """A topic of a broker, with a producer and a shared consumer."""

    def __init__(self, topic: Any, session: Any, subscription: Any, consumer: Any, port: _Port) -> None:
        self.topic, self.session, self.port = topic, session, port
        self.subscription, self.consumer = subscription, consumer
        self.sent = 0
        self.encode_s = 0.0  # what is a client's work

    @classmethod
    async def of(cls, broker: Broker, name: str) -> _Stage:
        topic: Any = await broker.topic(TopicName.parse(name), create=True)
        port: Any = _Port()
        subscription, consumer, _ = await topic.subscriptions.subscribe(
            SubscribeRequest("jobs", "shared"), port
        )
        subscription.flow(consumer, 1 << 30, 0)
        session = await topic.open_producer(Claim("p", 0), lambda _: port)
        return cls(topic, session, subscription, consumer, port)

    def publish(self, batches: Sequence[tuple[int, int]]) -> None:
        """Of so many messages each, due then (0: at once)."""
        encoded, start = [], time.process_time()
        for messages, due_ms in batches:
            extensions = {EXT_DELIVER_AT_MS: due_ms} if due_ms else None
            encoded.append(
                encode_batch(
                    [b"x" * 100] * messages, sequence_id=self.sent, publish_time_ms=0, extensions=extensions
                )
            )
            self.sent += messages
        self.encode_s += time.process_time() - start
        self.topic.publish(self.session, admit_groups(encoded))

    def acknowledge(self) -> None:
        """What was delivered, as a client does it now and then."""
        rows, self.port.deliveries = self.port.deliveries, []
        if rows:
            self.subscription.acknowledge(self.consumer, rows, cumulative=False, done=None)


async def _stream(say: Any, name: str, size: int, seconds: float, delay_ms: Any) -> None:
    broker = Broker(MemoryMetadataStore(), FakeLedgers(), SETTINGS, clock)
    await broker.start()
    stage = await _Stage.of(broker, "stream")
    loop = asyncio.get_running_loop()
    start, cpu = loop.time(), time.process_time()
    while (passed := loop.time() - start) < seconds:
        due = int(passed * RATE) - stage.sent
        if due >= size:
            now_ms = clock.now_ms()
            stage.publish([(size, now_ms + delay_ms() if delay_ms else 0) for _ in range(due // size)])
        stage.acknowledge()
        await asyncio.sleep(TURN_S)
    published_s = loop.time() - start
    while stage.port.messages < stage.sent and loop.time() - start < 3 * seconds + 10:
        stage.acknowledge()
        await asyncio.sleep(TURN_S)
    cpu = time.process_time() - cpu
    cpu -= stage.encode_s
    late = percentiles(ms / 1e3 for ms in stage.port.late_ms or (0,))
    say(
        f"{name:55} {stage.sent / published_s:9,.0f} a second  {stage.port.messages / stage.sent:6.1%} delivered  late "
        f"{late.p50:5.0f} ms p50 {late.p99:5.0f} ms p99  {cpu / stage.sent * 1e6:5.2f} us of CPU each"
    )
    await broker.close()


async def _other(stage: _Stage, until: asyncio.Event) -> list[float]:
    """Seconds of publishes until their deliveries, one every 2 ms."""
    found: list[float] = []
    while not until.is_set():
        expected, start = stage.port.messages + 1, time.perf_counter()
        stage.publish([(1, 0)])
        while stage.port.messages < expected:  # noqa: ASYNC110
            await asyncio.sleep(0)
        found.append(time.perf_counter() - start)
        stage.acknowledge()
        await asyncio.sleep(0.002)
    return found


async def _pending(say: Any, count: int) -> None:
    metadata, ledgers = MemoryMetadataStore(), FakeLedgers()
    broker = Broker(metadata, ledgers, SETTINGS, clock)
    await broker.start()
    stage = await _Stage.of(broker, "year")
    drawn, now_ms = random.Random(1), clock.now_ms()
    start = time.perf_counter()
    for _ in range(count // 1_000):
        stage.publish([(1, now_ms + 60_000 + drawn.randrange(YEAR_MS)) for _ in range(1_000)])
        while stage.topic.publish_budget.used:  # noqa: ASYNC110
            await asyncio.sleep(0)
    say(f"{count:,} single messages over a year are published in {time.perf_counter() - start:.1f} s")
    index = stage.topic.delays.index
    pieces = list(index.pieces())
    say(f"stored in {sum(map(len, pieces)) / index.rows:.1f} bytes each")
    await broker.close()
    gc.collect()
    tracemalloc.start()
    index = DelayIndex()
    for piece in pieces:
        list(index.apply(piece, now_ms))
    say(f"in memory {tracemalloc.get_traced_memory()[0] / index.rows:.1f} bytes each")
    tracemalloc.stop()
    del index, pieces, stage

    broker = Broker(metadata, ledgers, SETTINGS, clock)
    await broker.start()
    other = await _Stage.of(broker, "other")
    quiet, loaded = asyncio.Event(), asyncio.Event()
    asyncio.get_running_loop().call_later(QUIET_S, quiet.set)
    before = percentiles(await _other(other, quiet))
    measuring = asyncio.ensure_future(_other(other, loaded))
    await asyncio.sleep(0.1)
    start = time.perf_counter()
    topic: Any = await broker.topic(TopicName.parse("year"), create=False)
    loaded_s = time.perf_counter() - start
    year = await _Stage.of(broker, "year")
    while not topic.delays.whole:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    whole_s = time.perf_counter() - start
    year.publish([(1, 0)])
    while not year.port.messages:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    served_s = time.perf_counter() - start
    loaded.set()
    times = await measuring
    during = percentiles(times)
    say(
        f"the topic is loaded after {loaded_s * 1e3:.0f} ms, its index is whole after {whole_s:.2f} s, and a new message, "
        f"behind all that wait, is delivered after {served_s:.2f} s"
    )
    say(
        f"another topic's publish until delivery: {before.p50:.2f} ms p50 {before.p99:.2f} ms p99 "
        f"before, {during.p50:.2f} ms p50 {during.p99:.2f} ms p99 meanwhile ({len(times)})"
    )
    await broker.close()


async def _work(say: Any, seconds: float, pending: int) -> None:
    drawn = random.Random(1)
    await _stream(say, "batches of 1,000, due after 1 s", 1_000, seconds, lambda: DELAY_MS)
    await _stream(say, "batches of 100, due within 5 s", 100, seconds, lambda: drawn.randrange(SPREAD_MS))
    await _stream(say, "single messages, due after 1 s", 1, seconds, lambda: DELAY_MS)
    await _stream(say, "single messages, without a delay", 1, seconds, None)
    await _pending(say, pending)


def main(arguments: Sequence[str]) -> int:
    """Prints each figure when it is there."""
    parser = argparse.ArgumentParser(prog="python -m bench delays", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--pending", type=int, default=1_000_000)
    given = parser.parse_args(arguments)
    asyncio.run(_work(console().print, given.seconds, given.pending))
    return 0

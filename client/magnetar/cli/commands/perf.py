"""`magnetar perf`: measures the speed of a service by the public API only.

At full speed the latency of one message in about a thousand is measured: measuring each would slow down what is measured.
At a rate a send takes longer than one right after another: the processes on its way sleep in between, and have to be woken.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from magnetar.client import Consumer, MessageBatch, Reader, connect

from ..terminal.progress import ProgressMeter
from ..terminal.session import print_json, start_of

UNCONFIRMED_MESSAGES = 20_000
TICK_S = 0.002
SEND_TIMEOUT_S = 60.0


class Latencies:
    """Samples in seconds."""

    def __init__(self) -> None:
        self._samples: list[float] = []

    def add(self, seconds: float) -> None:
        """One sample."""
        self._samples.append(seconds)

    def percentile(self, percent: float) -> float:
        """0 without samples."""
        if not self._samples:
            return 0.0
        self._samples.sort()
        return self._samples[min(len(self._samples) - 1, int(len(self._samples) * percent / 100))]

    def as_ms(self) -> dict[str, float]:
        """p50, p99 and p99.9 in milliseconds; nothing without samples."""
        if not self._samples:
            return {}
        return {f"p{percent:g}_ms": round(self.percentile(percent) * 1000, 3) for percent in (50, 99, 99.9)}


def report(
    what: str, watch: ProgressMeter, payload_bytes: int, latencies: Latencies, *, as_json: bool
) -> None:
    """The figures at the end."""
    seconds = max(watch.seconds, 1e-9)
    figures: dict[str, Any] = {
        "messages": watch.done,
        "seconds": round(seconds, 3),
        "messages_per_s": round(watch.done / seconds),
        "mib_per_s": round(payload_bytes / seconds / (1 << 20), 2),
        "latency": latencies.as_ms(),
    }
    if as_json:
        print_json({"what": what, **figures})
        return
    latency = "  ".join(
        f"{name.removesuffix('_ms')} {value:.2f} ms" for name, value in figures["latency"].items()
    )
    print(
        f"{what}: {figures['messages']:,} messages in {seconds:.2f} s = {figures['messages_per_s']:,}/s, "
        f"{figures['mib_per_s']:.1f} MiB/s; {latency or 'no latency, since all were published before it began'}"
    )


async def produce(
    url: str,
    topic: str,
    *,
    size: int,
    rate: float,
    messages: int | None,
    batch: int,
    as_json: bool,
) -> None:
    """`batch` 1 sends each message in a frame of its own; else `send_many`, with the time until it was durable."""
    value = b"m" * size
    latencies = Latencies()
    watch = ProgressMeter("sending", total=messages)
    async with (
        connect(url) as client,
        client.create_producer(topic, batching=batch > 1, send_timeout=SEND_TIMEOUT_S) as producer,
    ):
        unconfirmed: deque[asyncio.Future[Any]] = deque()

        def note_sent(count: int, receipt: Awaitable[Any]) -> None:
            """Counts and times the messages when they are stored."""
            sent_at = time.perf_counter()

            def stored(future: asyncio.Future[Any]) -> None:
                if not future.cancelled() and future.exception() is None:
                    latencies.add(time.perf_counter() - sent_at)
                    watch.advance(count)

            future = asyncio.ensure_future(receipt)
            future.add_done_callback(stored)
            unconfirmed.append(future)

        with watch, contextlib.suppress(asyncio.CancelledError):
            sent = 0
            while messages is None or sent < messages:
                allowed = UNCONFIRMED_MESSAGES
                if rate:
                    allowed = int(watch.seconds * rate) + 1 - sent
                count = min(batch if batch > 1 else 500, allowed, (messages or 1 << 62) - sent)
                if count <= 0:
                    await asyncio.sleep(TICK_S)
                    continue
                if batch > 1:
                    note_sent(count, producer.send_many([value] * count))
                else:
                    for _ in range(count - 1):
                        producer.send_nowait(value)
                    note_sent(count, producer.send_nowait(value))
                sent += count
                await asyncio.sleep(0)
                while unconfirmed and (unconfirmed[0].done() or sent - watch.done > UNCONFIRMED_MESSAGES):
                    await unconfirmed.popleft()
            while unconfirmed:
                await unconfirmed.popleft()
    report("produced", watch, watch.done * size, latencies, as_json=as_json)


async def consume(
    url: str,
    topic: str,
    subscription: str,
    *,
    kind: str,
    start: str,
    messages: int | None,
    as_json: bool,
) -> None:
    """Acknowledges each batch. The latency is from publishing to here, by this machine's clock.

    The subscription is not durable: however the command ends, nothing stays that keeps the topic from being trimmed.
    """
    begin = start_of(start)
    async with (
        connect(url) as client,
        client.subscribe(topic, subscription, type=kind, start=begin, durable=False) as consumer,
    ):
        await _receive("consumed", consumer, consumer, messages, as_json=as_json)


async def tail(url: str, topic: str, *, start: str, messages: int | None, as_json: bool) -> None:
    """Without a subscription."""
    begin = start_of(start)
    async with connect(url) as client, client.create_reader(topic, start=begin) as reader:
        await _receive("tailed", reader, None, messages, as_json=as_json)


async def _receive(
    what: str, source: Consumer | Reader, acknowledge: Consumer | None, messages: int | None, *, as_json: bool
) -> None:
    latencies = Latencies()
    payload_bytes, began_ms = 0, time.time() * 1000
    watch = ProgressMeter(what, total=messages)
    with watch, contextlib.suppress(asyncio.CancelledError):
        batches: AsyncIterator[MessageBatch] = source.batches()
        async for batch in batches:
            if not watch.done:
                watch.began = time.perf_counter()
            if batch[-1].publish_time >= began_ms:  # the age of a backlog is no latency
                latencies.add(time.time() - batch[-1].publish_time / 1000)
            payload_bytes += sum(len(message.value or b"") for message in batch)
            if acknowledge is not None:
                await acknowledge.ack(batch)
            watch.advance(len(batch))
            if messages is not None and watch.done >= messages:
                break
    report(what, watch, payload_bytes, latencies, as_json=as_json)

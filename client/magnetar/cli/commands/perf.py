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
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from magnetar.runtime.quantities import counted

from ..terminal.command import Answer, command
from ..terminal.options import Begin, Kind, Topic
from ..terminal.progress import ProgressMeter
from .consume import say_if_new

if TYPE_CHECKING:
    from magnetar.client import Client, Consumer, MessageBatch, Reader

UNCONFIRMED_MESSAGES = 20_000
TICK_S = 0.002
SEND_TIMEOUT_S = 60.0

perf_app = typer.Typer(no_args_is_help=True, help="Measure: produce, consume or tail as fast as it goes.")

Messages = Annotated[
    int | None,
    typer.Option("--messages", "-n", min=1, help="How many; without it until Ctrl-C.", metavar="N"),
]


def percentiles(samples: list[float]) -> dict[str, float]:
    """p50, p99 and p99.9 in milliseconds, of seconds; nothing without samples."""
    ordered = sorted(samples)
    places = {f"p{percent:g}_ms": int(len(ordered) * percent / 100) for percent in (50, 99, 99.9)}
    return {name: round(ordered[place] * 1000, 3) for name, place in places.items()} if ordered else {}


def report(what: str, watch: ProgressMeter, payload_bytes: int, latencies: list[float]) -> Answer:
    """The figures at the end."""
    seconds = max(watch.seconds, 1e-9)
    figures: dict[str, Any] = {
        "messages": watch.done,
        "seconds": round(seconds, 3),
        "messages_per_s": round(watch.done / seconds),
        "mib_per_s": round(payload_bytes / seconds / (1 << 20), 2),
        "latency": percentiles(latencies),
    }
    latency = "  ".join(
        f"{name.removesuffix('_ms')} {value:.2f} ms" for name, value in figures["latency"].items()
    )
    shown = (
        f"{what}: {counted(watch.done, 'message')} in {seconds:.2f} s = {figures['messages_per_s']:,}/s, "
        f"{figures['mib_per_s']:.1f} MiB/s; {latency or 'no latency, since all were published before it began'}"
    )
    return Answer({"what": what, **figures}, [shown])


@command(perf_app, "produce", warnings=True)
async def produce(
    client: Client,
    topic: Topic,
    size: Annotated[int, typer.Option("--size", min=1, help="Bytes of a message.", metavar="N")] = 100,
    rate: Annotated[
        float, typer.Option("--rate", min=0, help="Messages per second; 0: as fast as it goes.", metavar="N")
    ] = 0,
    messages: Messages = None,
    batch: Annotated[
        int,
        typer.Option(
            "--batch", min=1, help="Messages a batch; 1 sends each in a frame of its own.", metavar="N"
        ),
    ] = 1000,
) -> Answer:
    """Send messages and show the rate and the time until each was durable.

    At a --rate each takes longer than one sent right after another: the
    processes on its way sleep in between, and have to be woken.
    """
    value = b"m" * size
    latencies: list[float] = []
    watch = ProgressMeter("sending", total=messages)
    async with client.create_producer(topic, batching=batch > 1, send_timeout=SEND_TIMEOUT_S) as producer:
        unconfirmed: deque[asyncio.Future[Any]] = deque()

        def note_sent(count: int, receipt: Awaitable[Any]) -> None:
            """Counts and times the messages when they are stored."""
            sent_at = time.perf_counter()

            def stored(future: asyncio.Future[Any]) -> None:
                if not future.cancelled() and future.exception() is None:
                    latencies.append(time.perf_counter() - sent_at)
                    watch.advance(count)

            future = asyncio.ensure_future(receipt)
            future.add_done_callback(stored)
            unconfirmed.append(future)

        with watch, contextlib.suppress(asyncio.CancelledError):  # Ctrl-C: what was measured is shown
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
    return report("produced", watch, watch.done * size, latencies)


@command(perf_app, "consume", warnings=True)
async def consume(
    client: Client,
    topic: Topic,
    subscription: Annotated[
        str,
        typer.Option(
            "-s",
            "--subscription",
            help="It is not durable: it ends with the last command that uses it. Commands that use one share its messages.",
            metavar="NAME",
        ),
    ] = "perf",
    kind: Kind = "shared",
    start: Begin = "earliest",
    messages: Messages = None,
) -> Answer:
    """Receive and acknowledge each message, and show the rate."""
    await say_if_new(client, topic)
    # Not durable: however the command ends, nothing stays that keeps the topic from being trimmed.
    async with client.subscribe(
        topic, subscription, type=cast(Any, kind), start=start, durable=False
    ) as consumer:
        return await _receive("consumed", consumer, consumer, messages)


@command(perf_app, "tail", warnings=True)
async def tail(client: Client, topic: Topic, start: Begin = "latest", messages: Messages = None) -> Answer:
    """Follow a topic and show the rate and the time from publishing to here."""
    await say_if_new(client, topic)
    async with client.create_reader(topic, start=start) as reader:
        return await _receive("tailed", reader, None, messages)


async def _receive(
    what: str, source: Consumer | Reader, acknowledge: Consumer | None, messages: int | None
) -> Answer:
    latencies: list[float] = []
    payload_bytes, began_ms = 0, time.time() * 1000
    watch = ProgressMeter(what, total=messages)
    with watch, contextlib.suppress(asyncio.CancelledError):
        batches: AsyncIterator[MessageBatch] = source.batches()
        async for batch in batches:
            if not watch.done:
                watch.began = time.perf_counter()
            if batch[-1].publish_time >= began_ms:  # the age of a backlog is no latency
                latencies.append(time.time() - batch[-1].publish_time / 1000)
            payload_bytes += sum(len(message.value or b"") for message in batch)
            if acknowledge is not None:
                await acknowledge.ack(batch)
            watch.advance(len(batch))
            if messages is not None and watch.done >= messages:
                break
    return report(what, watch, payload_bytes, latencies)

"""The processes of the demo: producer, tailing reader, workers; `python -m deploy.demo.demo_roles ROLE ...`.

Each prints one JSON line per event on standard output ({"event": "ready" | "progress" | "done", ...}), and is asked to
finish by a line on standard input, and at the end writes what it saw into a file (`Record`), so that the demo can compare.

A process counts distinct messages by the "id" inside the message, and notes the xxh3-64 of each value: a message counts as
arrived when its content does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgpack
from xxhash import xxh3_64_intdigest

from magnetar.client import Message, connect
from magnetar.proto.errors import MagnetarError

from .demo_flights import read_flights

TOPIC = "flights"
SUBSCRIPTION = "workers"
REPORT_INTERVAL_S = 0.2
IDLE_S = 1.5  # nothing came for so long after the producer was done: there is no more
# A reader that waits for longer after the kill would be taken for one that has all.
BACKOFF_MAX_S = 0.5
CHUNK = 100
RECONNECT_TIMEOUT_S = 120.0


@dataclass
class Record:
    """What one process saw.

    hashes[id] is the xxh3-64 of the value that was confirmed (producer) or arrived first (reader, worker), 0 for none.
    received and receipts hold message ids with the system's monotonic time: of each delivery, and of the receipt of its
    acknowledgement.
    """

    hashes: array[int]
    duplicates: int = 0
    out_of_order: int = 0  # first occurrences that came after one with a higher id
    received: list[tuple[bytes, float]] = field(default_factory=list)
    receipts: list[tuple[bytes, float]] = field(default_factory=list)
    highest: int = -1

    @classmethod
    def empty(cls, count: int) -> Record:
        """For `count` messages, of which nothing was seen."""
        return cls(array("Q", bytes(8 * count)))

    @property
    def distinct(self) -> int:
        """Number of messages seen."""
        return len(self.hashes) - self.hashes.count(0)

    def note(self, value: bytes | None) -> None:
        """One delivery."""
        assert value is not None, "the demo sends no tombstones"
        number = json.loads(value)["id"]
        if self.hashes[number]:
            self.duplicates += 1
            return
        self.hashes[number] = xxh3_64_intdigest(value) or 1
        if number < self.highest:
            self.out_of_order += 1
        else:
            self.highest = number

    def save(self, path: Path) -> None:
        """Writes everything to `path`."""
        path.write_bytes(
            msgpack.packb(
                [self.hashes.tobytes(), self.duplicates, self.out_of_order, self.received, self.receipts]
            )
        )

    @classmethod
    def load(cls, path: Path) -> Record:
        """What `save` wrote."""
        hashes, duplicates, out_of_order, received, receipts = msgpack.unpackb(path.read_bytes())
        return cls(array("Q", hashes), duplicates, out_of_order, received, receipts)


class Reporter:
    """Prints progress a few times a second, and knows when to finish."""

    def __init__(self) -> None:
        self.finish = asyncio.Event()
        self.figures: dict[str, int] = {}
        self.last_arrival = time.monotonic()

    async def run(self) -> None:
        """Until cancelled."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        command = asyncio.create_task(reader.readline())
        try:
            while True:
                emit("progress", **self.figures)
                if command.done():
                    self.finish.set()
                await asyncio.sleep(REPORT_INTERVAL_S)
        finally:
            command.cancel()

    async def no_more(self) -> None:
        """Returns when the producer is done and nothing has arrived for a while."""
        await self.finish.wait()
        self.last_arrival = time.monotonic()  # the one before the kill is too old to tell anything
        # Each arrival moves the deadline; an event per arrival would cost more than this.
        while (left := self.last_arrival + IDLE_S - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left)


def emit(event: str, **fields: Any) -> None:
    """One line for the demo to read."""
    print(json.dumps({"event": event, **fields}), flush=True)


async def produce(arguments: argparse.Namespace, reporter: Reporter, record: Record) -> None:
    """Sends every flight at the given rate; a flight is confirmed when its receipt came."""
    flights = read_flights(arguments.count)
    # Bounded: what is sent and unconfirmed while the service is away.
    unconfirmed: asyncio.Queue[list[tuple[int, int, Awaitable[Any]]] | None] = asyncio.Queue(2000)
    figures = reporter.figures = {"sent": 0, "confirmed": 0, "failed": 0}

    async def confirm() -> None:
        while (chunk := await unconfirmed.get()) is not None:
            for number, digest, receipt in chunk:
                try:
                    await receipt
                except MagnetarError as error:
                    figures["failed"] += 1
                    emit("failed", message=str(error), id=number)
                else:
                    record.hashes[number] = digest
                    figures["confirmed"] += 1

    async with (
        connect(arguments.url, backoff_max=BACKOFF_MAX_S) as client,
        client.create_producer(TOPIC, name="demo", send_timeout=RECONNECT_TIMEOUT_S) as producer,
    ):
        emit("ready")
        loop = asyncio.get_running_loop()
        confirming = loop.create_task(confirm())
        began = loop.time()
        while chunk := list(islice(flights, CHUNK)):
            await unconfirmed.put(
                [
                    (number, xxh3_64_intdigest(value) or 1, producer.send_nowait(value, key=carrier))
                    for number, carrier, value in chunk
                ]
            )
            figures["sent"] += len(chunk)
            await asyncio.sleep(max(0.0, began + figures["sent"] / arguments.rate - loop.time()))
        await unconfirmed.put(None)
        await confirming


async def tail(arguments: argparse.Namespace, reporter: Reporter, record: Record) -> None:
    """Follows the topic without a subscription."""
    figures = reporter.figures = {"tailed": 0, "duplicates": 0}
    async with (
        connect(arguments.url, backoff_max=BACKOFF_MAX_S) as client,
        client.create_reader(TOPIC, start="earliest") as reader,
    ):
        emit("ready")
        async for batch in until(reader.batches(), reporter):
            for message in batch:
                record.note(message.value)
            figures["duplicates"] = record.duplicates
            figures["tailed"] += len(batch)


async def work(arguments: argparse.Namespace, reporter: Reporter, record: Record) -> None:
    """Handles messages of the shared subscription and acknowledges each with a receipt."""
    figures = reporter.figures = {"worked": 0, "acknowledged": 0, "came_back": 0}
    acknowledged: set[bytes] = set()
    acknowledging: set[asyncio.Task[None]] = set()

    async def acknowledge(batch: Sequence[Message], ids: Sequence[bytes]) -> None:
        # One call for the batch: its receipt is the receipt of every message in it.
        try:
            await consumer.ack(batch, receipt=True)
        except MagnetarError as error:
            if not error.retryable:
                raise
            return  # without a receipt they may come again, and then are handled again
        now = time.monotonic()
        acknowledged.update(ids)
        record.receipts.extend((identity, now) for identity in ids)
        figures["acknowledged"] = len(acknowledged)

    async with (
        connect(arguments.url, backoff_max=BACKOFF_MAX_S) as client,
        client.subscribe(TOPIC, SUBSCRIPTION, type="shared", start="earliest") as consumer,
    ):
        emit("ready")
        async for batch in until(consumer.batches(), reporter):
            now = time.monotonic()
            messages = list(batch)
            ids = [message.id.to_bytes() for message in messages]
            record.received += [(identity, now) for identity in ids]
            figures["came_back"] += sum(identity in acknowledged for identity in ids)
            for message in messages:
                record.note(message.value)
            figures["worked"] += len(messages)
            task = asyncio.create_task(acknowledge(messages, ids))
            acknowledging.add(task)
            task.add_done_callback(acknowledging.discard)
        if acknowledging:
            await asyncio.gather(*acknowledging)


async def until(
    source: AsyncIterator[Sequence[Message]], reporter: Reporter
) -> AsyncIterator[Sequence[Message]]:
    """What `source` gives, until there is no more."""
    ending = asyncio.ensure_future(reporter.no_more())
    arrival: asyncio.Future[Sequence[Message]] | None = None
    try:
        while True:
            arrival = asyncio.ensure_future(anext(source))
            await asyncio.wait([arrival, ending], return_when=asyncio.FIRST_COMPLETED)
            if not arrival.done():
                return
            reporter.last_arrival = time.monotonic()
            yield arrival.result()
    finally:
        for waiting in (arrival, ending):
            if waiting is not None and not waiting.done():
                waiting.cancel()
                await asyncio.wait([waiting])


ROLES: dict[str, Callable[[argparse.Namespace, Reporter, Record], Awaitable[None]]] = {
    "producer": produce,
    "reader": tail,
    "worker": work,
}


async def run(arguments: argparse.Namespace) -> None:
    """Plays one role to its end and writes the record."""
    reporter, record = Reporter(), Record.empty(arguments.count)
    reporting = asyncio.create_task(reporter.run())
    try:
        await ROLES[arguments.role](arguments, reporter, record)
    finally:
        reporting.cancel()
    record.save(arguments.out)
    emit("progress", **reporter.figures)
    emit("done")


def main() -> None:
    """Entry point of the child processes."""
    parser = argparse.ArgumentParser(description="One process of the demo; started by deploy.demo.demo.")
    parser.add_argument("role", choices=sorted(ROLES))
    parser.add_argument("--url", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--rate", type=float, default=20_000)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is the demo's to handle; it then terminates its children
    try:
        if sys.platform != "win32":
            import uvloop

            uvloop.run(run(arguments))
        else:
            asyncio.run(run(arguments))
    except MagnetarError as error:
        emit("failed", message=str(error))
        # The record is not written: whatever it held is no proof.
        os._exit(1)


if __name__ == "__main__":
    main()

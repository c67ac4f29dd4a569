"""Each message once: producers of topics with deduplication, and what must hold for them.

a message is stored once     whatever reader looks, and however often its producer sent it
none is missing              its number is its sequence id, so what is stored is 0, 1, 2, ... of each producer
a program that is started anew goes on behind `last_sequence_id`, and stores what its predecessor had not
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from dataclasses import replace

from magnetar.broker import BrokerSettings
from magnetar.client import Producer
from magnetar.client.chunked_id import ChunkedMessageId
from magnetar.proto.errors import MagnetarError
from magnetar.proto.ids import MessageId
from sim.consuming import KEYS
from sim.deliveries import Name, Violation
from sim.history import History, name_of, value_of
from sim.load import Load
from support.sim import SimProcess

MAX_MESSAGE_BYTES = 4_000  # of what is not sent in chunks
LARGEST = (20_000, 3_000)  # with and without chunks


def deduplicated(settings: BrokerSettings) -> BrokerSettings:
    """With snapshots so often that crashes come before, during and after them."""
    return replace(
        settings,
        deduplication=True,
        deduplication_snapshot_entries=6,
        deduplication_snapshot_interval_ms=400,
        max_inline_cursor_bytes=200,
    )


class OnceHistory(History):
    """The rules of this module beside the others."""

    def __init__(self, *, trimming: bool = False) -> None:
        super().__init__(trimming=trimming)
        self.duplicate_receipts = 0
        self._seen: set[Name] = set()  # by the tail reader

    def confirm(self, name: Name, message_id: MessageId) -> None:
        """See History."""
        self.duplicate_receipts += message_id.is_duplicate
        if (
            not message_id.is_duplicate or name not in self.confirmed
        ):  # a predecessor may have had the receipt
            super().confirm(name, message_id)

    def tailed(self, message_id: MessageId, value: bytes) -> None:
        """See History."""
        name = name_of(value)
        if name in self._seen:
            raise Violation(f"stored twice: the reader got {name} at {message_id} once more")
        self._seen.add(name)
        super().tailed(message_id, value)

    def check_reread(self, entries: list[tuple[MessageId, bytes]]) -> None:
        """See History."""
        super().check_reread(entries)
        places: dict[Name, MessageId] = {}
        for message_id, value in entries:
            name = name_of(value)
            if name in places:
                raise Violation(f"stored twice: {name} at {places[name]} and {message_id}")
            places[name] = message_id
        known = {name: its for name, its in self.confirmed.items() if not its.is_duplicate}
        for subscription in self.subscriptions.values():
            subscription.check_passed_over({**known, **places})
        if self.trimming:
            return
        lost = [name for name in self.confirmed if name not in places]
        if lost:
            raise Violation(f"acknowledged as duplicates or otherwise, and not stored: {lost[:5]}")
        for producer in {producer for producer, _ in places}:
            numbers = sorted(number for one, number in places if one == producer)
            if numbers != list(range(len(numbers))):
                raise Violation(
                    f"a gap: {producer} has {len(numbers)} messages, and the last is {numbers[-1]}"
                )

    def counts(self) -> dict[str, int]:
        """See History."""
        return {**super().counts(), "duplicate_receipts": self.duplicate_receipts}


class ControlHistory(History):
    """Without deduplication: the receipt of a message in chunks may name the second copy of its first chunk."""

    def check_reread(self, entries: list[tuple[MessageId, bytes]]) -> None:
        """See History."""
        for message_id, value in entries:
            confirmed = self.confirmed.get(name_of(value))
            if confirmed is not None and isinstance(message_id, ChunkedMessageId):
                if any(chunk[:3] == confirmed[:3] for chunk in message_id.chunks):
                    self.confirmed[name_of(value)] = message_id
        super().check_reread(entries)


class OnceLoad(Load):
    """Its producers are programs, one or another of which is ended and started again, now and then."""

    def start(self) -> None:
        """See Load."""
        self._programs: dict[str, SimProcess] = {}
        for subscription in self.history.subscriptions.values():
            subscription.chunks = True
        super().start()
        self.producers.append(asyncio.create_task(self._end_programs()))

    def _spawn(self, name: str, work: Awaitable[None]) -> asyncio.Task[None]:
        if name not in [kind for kind, _ in self.kinds]:
            return super()._spawn(name, work)
        work.close()  # type: ignore[attr-defined]
        return asyncio.create_task(self._keep_alive(name, dict(self.kinds)[name]), name=name)

    async def _keep_alive(self, name: str, batching: bool) -> None:
        """Starts the program until it has ended by itself."""
        done: list[bool] = []
        number = 0
        while not done:
            number += 1
            process = self._programs[name] = self._loop.start_process(f"{self.around.prefix}{name} {number}")
            failures: list[BaseException] = []
            process.spawn(self._run_program(name, batching, done, failures), name=f"{name} {number}")
            while process.alive and not done and not failures:
                await asyncio.sleep(0.1)
            if failures:
                raise failures[0]
            await asyncio.sleep(self._loop.rng.uniform(0.1, 1.0))

    async def _run_program(
        self, name: str, batching: bool, done: list[bool], failures: list[BaseException]
    ) -> None:
        try:
            await self._produce(name, batching)
            done.append(True)
        except Exception as error:
            failures.append(error)

    async def _end_programs(self) -> None:
        rng = random.Random(self._loop.rng.getrandbits(64))
        while self.producing:
            await asyncio.sleep(rng.expovariate(0.3))
            process = self._programs.get(rng.choice([kind for kind, _ in self.kinds]))
            if process is not None and process.alive and self.producing:
                self._loop.trace.fault("program_ended", process.name)
                process.kill()

    async def _produce(self, name: str, batching: bool) -> None:
        rng = random.Random(self._loop.rng.getrandbits(64))
        client = await self.client(name, max_message_bytes=MAX_MESSAGE_BYTES)
        producers: list[Producer] = []

        async def open_producer() -> None:
            producers.append(
                await client.create_producer(
                    self.topic,
                    name=name,
                    batching=batching,
                    batching_by_key=name == "paced",
                    chunking=name != "paced",
                    send_timeout=300.0,
                )
            )

        await self.until_done(open_producer)
        (producer,) = producers
        waiting: list[asyncio.Task[None]] = []
        number = self._next_number(name, producer)
        while self.producing or number < self.history.sent.get(name, 0):
            burst = 1 if name == "paced" else rng.choice(self.bursts)
            for _ in range(burst):
                message = (name, number)
                number += 1
                self.history.sent[name] = max(self.history.sent.get(name, 0), number)
                key = f"{name}-{message[1] % KEYS}"
                padding = min(rng.choice(self.paddings), LARGEST[name == "paced"])
                receipt = producer.send_nowait(
                    value_of(message, padding), key, deliver_at=self._deliver_at(message)
                )
                waiting.append(asyncio.create_task(self._confirm(message, receipt)))
            waiting = [task for task in waiting if not task.done() or task.exception() is not None]
            await asyncio.sleep(rng.expovariate(self.bursts_per_s if burst > 1 else self.paced_per_s))
        await asyncio.gather(*waiting)
        await client.close()

    def _acknowledged(self, name: str) -> int:
        """The last number of a program that has a receipt; -1: none."""
        return max((one for producer, one in self.history.confirmed if producer == name), default=-1)

    def _next_number(self, name: str, producer: Producer) -> int:
        """Where a program goes on."""
        number, acknowledged = producer.last_sequence_id + 1, self._acknowledged(name)
        if number <= acknowledged:
            raise Violation(f"{name} goes on at {number}, and {acknowledged} is acknowledged")
        return number

    async def _confirm(self, message: Name, receipt: Awaitable[MessageId]) -> None:
        try:
            message_id = await receipt
        except MagnetarError as error:
            self.history.failed[message] = repr(error)
            return
        if message_id.is_duplicate:
            self._loop.trace.fault("duplicate")
        self.history.confirm(message, message_id)


class ControlLoad(OnceLoad):
    """The same programs where nothing is deduplicated: each goes on behind the last receipt that it has."""

    def _next_number(self, name: str, producer: Producer) -> int:
        return self._acknowledged(name) + 1


__all__ = ["ControlHistory", "ControlLoad", "OnceHistory", "OnceLoad", "deduplicated"]

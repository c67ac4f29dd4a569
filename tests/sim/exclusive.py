"""Producers that want a topic for themselves, and what must hold for them.

epochs never fall     what is stored, whoever reads it, was sent under topic epochs that never fall: of two producers that
                      believe to be alone, one stores nothing any more
the topic goes on     however its producers lose it, fence each other, wait, and give up waiting
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from magnetar.client import Client, Producer
from magnetar.proto.errors import MagnetarError, ProducerFenced
from magnetar.proto.ids import MessageId
from sim.deliveries import Name, Violation
from sim.history import History, name_of, value_of
from sim.load import Load

MODES = ("exclusive", "wait_for_exclusive", "wait_for_exclusive", "exclusive_with_fencing")


class ExclusiveHistory(History):
    """The rules of this module beside the others."""

    def __init__(self, *, trimming: bool = False) -> None:
        super().__init__(trimming=trimming)
        self.epochs: dict[Name, int] = {}  # under which each message was sent
        self._last = (-1, "")  # epoch, of what the tail reader had last

    def tailed(self, message_id: MessageId, value: bytes) -> None:
        """See History."""
        super().tailed(message_id, value)
        self._last = self._check_epoch(self._last, name_of(value), f"the reader at {message_id}")

    def check_reread(self, entries: list[tuple[MessageId, bytes]]) -> None:
        """See History."""
        super().check_reread(entries)
        last = (-1, "")
        for message_id, value in entries:
            last = self._check_epoch(last, name_of(value), f"the second reading at {message_id}")

    def _check_epoch(self, last: tuple[int, str], name: Name, where: str) -> tuple[int, str]:
        found = (self.epochs[name], name[0])
        if found[0] < last[0] or (found[0] == last[0] and found[1] != last[1]):
            raise Violation(
                f"two exclusive producers: {where} got {name} of epoch {found[0]} behind one of {last[1]}, epoch {last[0]}"
            )
        return found

    def counts(self) -> dict[str, int]:
        """See History."""
        return {**super().counts(), "epochs": len(set(self.epochs.values()))}


class ExclusiveLoad(Load):
    """Its producers are programs of one name that take the topic from each other."""

    history: ExclusiveHistory

    async def _produce(self, name: str, batching: bool) -> None:
        rng = random.Random(self._loop.rng.getrandbits(64))
        client = await self.client(name)
        while self.producing:
            patience = self._loop.time() + rng.uniform(0.5, 8.0)
            producer = await self._open(client, rng.choice(MODES), batching, patience)
            if producer is not None:
                await self._use(name, producer, rng)
            await asyncio.sleep(rng.uniform(0.0, 0.5))
        await client.close()

    async def _open(self, client: Client, mode: Any, batching: bool, patience: float) -> Producer | None:
        """None: others have the topic, until it has no `patience` left, or it is the end."""

        async def create() -> Producer:
            return await client.create_producer(
                self.topic, name="writer", access_mode=mode, batching=batching, send_timeout=300.0
            )

        opening = asyncio.create_task(create())
        while not opening.done() and self.producing and self._loop.time() < patience:
            await asyncio.wait([opening], timeout=0.5)
        opening.cancel()  # it might wait for ever
        try:
            return await opening
        except asyncio.CancelledError:
            self._loop.trace.fault("gave_up_waiting")
        except ProducerFenced:
            self._loop.trace.fault("refused_as_others_are_there")
        except MagnetarError as error:
            if not error.retryable:
                raise
        return None

    async def _use(self, name: str, producer: Producer, rng: random.Random) -> None:
        until = self._loop.time() + rng.uniform(0.2, 4.0)
        waiting: list[asyncio.Task[None]] = []
        while self.producing and self._loop.time() < until and not producer.ended:
            for _ in range(rng.choice(self.bursts)):
                message = self.history.send(name)
                self.history.epochs[message] = producer.topic_epoch
                receipt = producer.send_nowait(value_of(message, rng.choice(self.paddings)), name)
                waiting.append(asyncio.create_task(self._confirm(message, receipt)))
            await asyncio.sleep(rng.expovariate(self.paced_per_s))
        if producer.ended:
            self._loop.trace.fault("fenced")
        await asyncio.gather(*waiting)
        try:
            await producer.close()
        except MagnetarError as error:
            if error.retryable:
                raise

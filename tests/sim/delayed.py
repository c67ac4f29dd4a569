"""Messages with a delivery time, and what must hold for them on shared and key_shared subscriptions.

never early     nobody is handed one before the clock of the service has shown its time, since it was sent
hardly late     in the calm after the storm it comes at most 100 ms after its time, or after its receipt if that is later;
                then no packet is much later than others
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from magnetar.broker.topics import delays
from magnetar.client.options import SUBSCRIPTION_TYPES, SubscriptionType
from magnetar.proto.ids import MessageId
from sim.consuming import INDIVIDUAL, KEYS, plan_of
from sim.deliveries import Holder, Name, Subscription, Violation
from sim.history import History, value_of
from sim.load import Load
from support.sim import SimClock, SimLoop, SimProcess
from support.sim.clock import EPOCH_MS

DELAYED = 0.3  # of the messages
DELAYS_S = (0.1, 10.0)
LATE_S = 0.1
MEASURED = 40  # messages of the calm
MEASURED_PRODUCER = "measured"
AT_REST_WITHIN_S = 35.0


_set_now_and_then = SimClock.set_now_and_then


@contextmanager
def noted_clocks() -> Iterator[None]:
    """For a run, which makes `DelayedHistory.clocks`; states are stored so often that crashes come at every step of that."""
    with (
        patch.object(
            SimClock,
            "set_now_and_then",
            lambda clock, process: DelayedHistory.clocks.set_now_and_then(clock, process),
        ),
        patch.object(delays, "EVERY_ENTRIES", 6),
        patch.object(delays, "INTERVAL_MS", 400),
    ):
        yield


class Clocks:
    """What the clocks of the service show: until `hold`, somebody sets them."""

    def __init__(self, loop: SimLoop, names: str) -> None:
        """`names`: how those of processes begin that serve topics."""
        self._loop = loop
        self._names = names
        self._held = False
        self._clocks: dict[str, SimClock] = {}  # of the present process of each name
        self._skews: dict[str, list[tuple[float, int]]] = {}  # of these: since when, ms

    def set_now_and_then(self, clock: SimClock, process: SimProcess) -> None:
        """In place of that of SimClock."""
        if not process.alive:
            return
        if not self._held:
            _set_now_and_then(clock, process)
        if process.name.startswith(self._names):
            self._clocks[process.name] = clock
            self._note(process.name)

    def hold(self) -> None:
        """From here on they show the time."""
        self._held = True
        for name, clock in self._clocks.items():
            clock.skew_ms = 0
            self._note(name)

    def _note(self, name: str) -> None:
        self._skews.setdefault(name, []).append((self._loop.now, self._clocks[name].skew_ms))

    def highest_ms(self, since: float, until: float) -> int:
        """The latest time that one of them showed in a span."""
        return max(
            EPOCH_MS + skew_ms + int(min(end, until) * 1000)
            for skews in self._skews.values()
            for (at, skew_ms), end in zip(skews, [*(at for at, _ in skews[1:]), until], strict=True)
            if end >= since and at <= until
        )


class DelayedSubscription(Subscription):
    """Of a subscription that keeps to delivery times."""

    history: DelayedHistory | None = None  # None: one of the others

    def handed_out(
        self,
        holder: Holder,
        message_id: MessageId,
        name: Name,
        *,
        now: float,
        arrived: float | None = None,
        **given: Any,
    ) -> None:
        """See Subscription."""
        if self.history is not None and arrived is not None:
            # What came before `subscribe` returned did so at a time that is not known.
            self.history.came(self, name, arrived if arrived > holder.attached else now)
        super().handed_out(holder, message_id, name, now=now, arrived=arrived, **given)


class DelayedHistory(History):
    """The rules of this module beside the others."""

    clocks: Clocks

    def __init__(self, *, trimming: bool = False) -> None:
        super().__init__(trimming=trimming)
        self.due_ms: dict[Name, int] = {}
        self.sent_at: dict[Name, float] = {}
        self.receipt_at: dict[Name, float] = {}
        self.measured = 0
        self._came: set[tuple[str, Name]] = set()  # those of the calm, by subscription

    def came(self, subscription: Subscription, name: Name, arrived: float) -> None:
        """A consumer was sent a message."""
        due_ms = self.due_ms.get(name)
        if due_ms is None:
            return
        shown_ms = self.clocks.highest_ms(self.sent_at[name], arrived)
        if shown_ms < due_ms:
            raise Violation(
                f"early: {subscription.name} was sent {name} at {arrived:.3f}, {due_ms - shown_ms} ms before the clock of "
                f"the service showed its time"
            )
        if name[0] == MEASURED_PRODUCER and (subscription.name, name) not in self._came:
            self._came.add((subscription.name, name))
            self.measured += 1
            due = (due_ms - EPOCH_MS) / 1000
            late = arrived - max(due, self.receipt_at.get(name, due))
            if late > LATE_S:
                raise Violation(f"late: {subscription.name} was sent {name} {late:.3f} s after its time")

    def counts(self) -> dict[str, int]:
        """See History."""
        return {
            **super().counts(),
            "delayed": len(self.due_ms),
            "measured": self.measured,
        }


class DueLoad(Load):
    """A part of the messages has a delivery time."""

    history: DelayedHistory
    subscription = DelayedSubscription

    def start(self) -> None:
        """See Load."""
        for subscription in self.history.subscriptions.values():
            if subscription.type in INDIVIDUAL:
                assert isinstance(subscription, DelayedSubscription)
                subscription.history, subscription.delayed = self.history, self.history.due_ms
        super().start()

    def _deliver_at(self, message: Name) -> int | None:
        """See Load. Of a message that is sent once more the first time counts, as that may be stored."""
        rng = random.Random(f"{self._loop.seed} {message}")
        if rng.random() >= DELAYED and message[0] != MEASURED_PRODUCER:
            return None
        self.history.sent_at.setdefault(message, self._loop.now)
        due_ms = EPOCH_MS + int((self._loop.now + rng.uniform(*DELAYS_S)) * 1000)
        self.history.due_ms.setdefault(message, due_ms)
        return due_ms

    def stop_disturbing(self) -> None:
        """See Load."""
        super().stop_disturbing()
        self.history.clocks.hold()


class DelayedLoad(DueLoad):
    """When the storm is over, others follow, which are not to be late."""

    paddings = (0, 10, 100, 1000)
    bursts_per_s = 4.0
    paced_per_s = 20.0

    def __init__(self, loop: SimLoop, history: DelayedHistory, url: str) -> None:
        first: SubscriptionType = loop.rng.choice(("shared", "key_shared"))
        second = loop.rng.choice([type for type in SUBSCRIPTION_TYPES if type != first])
        super().__init__(
            loop,
            history,
            url,
            [plan_of(loop.rng, type, trimming=history.trimming) for type in (first, second)],
        )

    def stop_disturbing(self) -> None:
        """See Load."""
        super().stop_disturbing()
        self.producers.append(self._spawn(MEASURED_PRODUCER, self._measure()))

    async def _measure(self) -> None:
        client = await self.client(MEASURED_PRODUCER)
        end = self._loop.now + AT_REST_WITHIN_S
        await asyncio.sleep(10.0)  # whatever came last in the storm is over
        while self.history.missing() and self._loop.now < end:
            await asyncio.sleep(0.5)
        network = self._loop.network
        network.tail_latency = (0.0, network.tail_latency[1])  # what is measured is the service
        async with client.create_producer(self.topic, name=MEASURED_PRODUCER) as producer:
            for _ in range(MEASURED if self._loop.now < end else 0):
                message = self.history.send(MEASURED_PRODUCER)
                due_ms = self._deliver_at(message)
                self.history.confirm(
                    message,
                    await producer.send(
                        value_of(message, 10), f"{message[0]}-{message[1] % KEYS}", deliver_at=due_ms
                    ),
                )
                self.history.receipt_at[message] = self._loop.now
        await client.close()


__all__ = ["Clocks", "DelayedHistory", "DelayedLoad", "DueLoad", "noted_clocks"]

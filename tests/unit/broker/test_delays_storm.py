"""Delayed messages over seeds of crashes, unloads, roll-overs, trimming, consumers that come and go.

Never early, none lost, none twice but for what was handed out and not acknowledged, and hardly late while somebody is there;
with planted defects.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from magnetar.broker.dispatch.core import dispatcher
from magnetar.broker.dispatch.core.delay_index import DelayIndex
from magnetar.broker.topics import delays
from magnetar.broker.topics.delays import TopicDelays
from magnetar.proto import commands as c
from support.broker_kit import settle
from support.long_form import times
from support.sim import SimLoop
from unit.broker.test_delays import Client, Stage

SEEDS = times(10, 300)
SETTINGS: dict[str, Any] = {"max_ledger_entries": 4, "maintenance_interval_s": 3.0, "min_ledger_age_ms": 0}


class Storm:
    """One seed: a topic, its shared subscription, and what must come when."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.stage = Stage(**SETTINGS)
        self.due_ms: dict[bytes, int] = {}
        self.acknowledged: set[bytes] = set()
        self.there_since_ms = 1 << 62  # a consumer with permits, and the index is read
        self.number = 0
        self.there = False

    async def run(self) -> None:
        for _ in range(self.rng.randint(3, 6)):
            self.there, self.there_since_ms = False, 1 << 62
            async with self.stage.served(crashes=self.rng.random() < 0.6) as (topic, client):
                for _ in range(self.rng.randint(4, 24)):
                    await self.step(topic, client)
        async with self.stage.served() as (topic, client):
            await self.join(client)
            await asyncio.sleep(100)
            self.look(client)
            missing = self.due_ms.keys() - self.acknowledged - set(client.values)
            assert not missing, f"never came: {sorted(missing)}"

    async def step(self, topic: Any, client: Client) -> None:
        match self.rng.choice(
            ["publish", "publish", "publish", "wait", "wait", "join", "leave", "acknowledge"]
        ):
            case "publish":
                now_ms, batches = self.stage.clock.now_ms(), []
                for _ in range(self.rng.randint(1, 4)):
                    values = []
                    delay_ms = self.rng.choice([0, 10, 300, 2_000, self.rng.randrange(20_000), 90_000])
                    for _ in range(self.rng.randint(1, 3)):
                        values.append(b"%d" % self.number)
                        self.due_ms[values[-1]] = now_ms + delay_ms
                        self.number += 1
                    batches.append((values, now_ms + delay_ms if delay_ms else None))
                await client.publish_at(*batches)
            case "wait":
                await asyncio.sleep(self.rng.choice([0.0, 0.011, 0.3, 3.0, 12.0]))
            case "join" if not self.there:
                await self.join(client)
            case "leave" if self.there:
                self.look(client)
                await client.ask(c.CloseConsumer, 1)
                client.messages.clear()
                client.came_ms.clear()
                self.there, self.there_since_ms = False, 1 << 62
            case "acknowledge" if client.messages:
                for message in client.messages:
                    if self.rng.random() < 0.7:
                        await client.ack(message.row())
                        self.acknowledged.add(message.value)
        self.look(client)

    async def join(self, client: Client) -> None:
        client.messages.clear()
        client.came_ms.clear()
        await client.consumer(type="shared", permits=100_000)
        await settle()
        self.there = True
        self.there_since_ms = self.stage.clock.now_ms() + 50

    def look(self, client: Client) -> None:
        values = client.values
        assert len(values) == len(set(values)), "delivered twice"
        now_ms = self.stage.clock.now_ms()
        for value in values:
            late_ms = client.came_ms[value] - self.due_ms[value]
            assert late_ms >= 0, f"{value!r} is early"
            assert late_ms <= 100 or self.due_ms[value] < self.there_since_ms, (
                f"{value!r} is {late_ms} ms late"
            )
        if self.there_since_ms + 100 <= now_ms:
            due = {value for value, due_ms in self.due_ms.items() if due_ms < now_ms - 100}
            assert due <= set(values) | self.acknowledged, "did not come"


def play(seed: int) -> None:
    loop = SimLoop(seed=seed)
    try:
        loop.run(Storm(random.Random(seed)).run())
    finally:
        loop.close()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots and changes."""
    monkeypatch.setattr(delays, "EVERY_ENTRIES", 3)
    monkeypatch.setattr(delays, "INTERVAL_MS", 1_500)


def test_each_seed() -> None:
    for seed in range(SEEDS):
        play(seed)


def plant_no_state_before_the_first(patch: pytest.MonkeyPatch) -> None:
    """The first delayed entry does not wait until the state is stored."""
    ready = TopicDelays.ready
    patch.setattr(TopicDelays, "ready", lambda self: ready(self) or True)


def plant_dispatch_before_the_index_is_read(patch: pytest.MonkeyPatch) -> None:
    """After a restart everything is delivered at once."""
    patch.setattr(dispatcher, "ENTRY_DELAYED", 0)


def plant_what_is_not_stored_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The log behind the snapshot is not looked at."""
    patch.setattr(TopicDelays, "replay", lambda self, *given: None)


def plant_changes_lost(patch: pytest.MonkeyPatch) -> None:
    """A change has the rows that came since the change before the last one was asked for, but for its first."""
    changes = TopicDelays.changes
    patch.setattr(TopicDelays, "changes", lambda self: list(changes(self))[1:])


def plant_bucket_lost_at_a_roll_over(patch: pytest.MonkeyPatch) -> None:
    """What is to be spread over narrower buckets when a second begins is lost when something is due meanwhile."""
    spread = DelayIndex._spread

    def lossy(self: Any, level: int) -> None:
        if level == 1 and len(self._spreading[1][1]) > 2:
            del self._spreading[1][1][0]
        spread(self, level)

    patch.setattr(DelayIndex, "_spread", lossy)


def plant_missed_forgotten(patch: pytest.MonkeyPatch) -> None:
    """What became due while nobody was there is never delivered by this broker."""
    released = dispatcher.DispatchCore.released
    patch.setattr(
        dispatcher.DispatchCore,
        "released",
        lambda self, runs: released(self, runs) if self.consumers else None,
    )


PLANTS = [plant for name, plant in list(globals().items()) if name.startswith("plant_")]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_the_storm_notices(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    for seed in range(200):
        try:
            play(seed)
        except Exception:
            return
    raise AssertionError("no seed notices it")

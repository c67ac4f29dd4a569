"""Subscriptions of all four types on one topic against a reference model, by what a client sees, over unloads and crashes.

Everything is real from the listener to the cursor ledgers, which are in memory. The model is told what consumers do before
they do it, and sees each delivery when it is sent. After each step it compares what must have come. In the end everything
is acknowledged, and the cursors stand at the end of the topic.

The long form plays 100 runs of 500 steps.
"""

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, Phase, settings, stateful
from hypothesis import strategies as st
from hypothesis.internal.conjecture import engine
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from magnetar.broker import Broker, BrokerSettings
from magnetar.proto import commands as c
from magnetar.proto.batch import encode_batch
from magnetar.proto.errors import ConnectionLost, TopicNotServed
from magnetar.proto.ids import MessageId
from support.broker_kit import TOPIC, FakeClient, FakeClock
from support.fake_ledger import FakeLedgers
from support.long_form import LONG, times
from support.memory_metadata import MemoryMetadataStore
from support.sim import SimLoop

TYPES = ["exclusive", "failover", "shared", "key_shared"]
INDIVIDUAL = ("shared", "key_shared")
KEYS = [b"a", b"b", b"c", b"d", b"e"]
LARGEST_BATCH = 5
TAKEOVER_S = 1.0
PLENTY = 10_000
LONGEST = 32 * 1024  # of what Hypothesis draws for an example
Row = tuple[int, int, int, int]
# What a step does in detail follows from one number: more would use up what Hypothesis draws for an example.
PICK = st.integers(0, 65_535)


class Model:
    """The reference: who holds which message of one subscription, how often it was delivered, what is acknowledged.

    Messages are numbers in the order of the topic. A message is acknowledged, held by a consumer, waits because it was given
    back by itself (`returned`), or is still to be delivered in its turn.
    """

    def __init__(self, type: str, keys: list[bytes]) -> None:
        self.type = type
        self.keys = keys  # of all messages there are
        self.priorities: dict[str, int] = {}  # of the consumers, as they joined
        self.permits: dict[str, int] = {}
        self.acked: set[int] = set()
        self.holder: dict[int, str] = {}
        self.returned: set[int] = set()
        self.counts: dict[int, int] = {}
        self.takeover_at: float | None = None

    @property
    def active(self) -> str | None:
        """Who gets everything where one consumer does."""
        return min(self.priorities, key=lambda name: self.priorities[name], default=None)

    @property
    def in_turn(self) -> list[int]:
        """What was not delivered yet, or is to be delivered from the mark-delete position on."""
        gone = (self.acked, self.holder, self.returned)
        return [n for n in range(len(self.keys)) if not any(n in where for where in gone)]

    def time_is(self, now: float) -> None:
        """A takeover ends: the consumer that is active now gets what is not acknowledged."""
        if self.takeover_at is not None and now >= self.takeover_at - 0.002:
            self.takeover_at = None
            self.holder.clear()
            self.returned.clear()

    def joins(self, name: str, priority: int, permits: int, now: float) -> None:
        """A consumer."""
        before = self.active
        self.priorities[name] = priority
        self.permits[name] = permits
        if self.type == "failover" and before is not None and self.active != before:
            self.takeover_at = now + TAKEOVER_S

    def leaves(self, name: str) -> None:
        """What it held is to be delivered again, and counts no more for it: nothing was reported as handed out."""
        before = self.active
        del self.priorities[name], self.permits[name]
        if self.type in INDIVIDUAL:
            held = [n for n, holder in self.holder.items() if holder == name]
            for n in held:
                del self.holder[n]
            self.returned.update(held)
        elif self.active != before:
            self.takeover_at = None
            self.holder.clear()
            self.returned.clear()

    def nacked(self, n: int) -> None:
        """By the consumer that holds it."""
        del self.holder[n]
        self.counts[n] += 1
        self.returned.add(n)

    def acknowledged(self, messages: list[int]) -> None:
        """By whomever."""
        for n in messages:
            self.acked.add(n)
            self.holder.pop(n, None)
            self.returned.discard(n)

    def sought(self, target: int) -> None:
        """As if nothing from `target` on had ever been delivered, and everything before it were acknowledged."""
        self.acked = set(range(target))
        self.holder.clear()
        self.returned.clear()
        self.counts.clear()

    def ended(self) -> None:
        """The topic was unloaded, or the broker was killed."""
        self.holder.clear()
        self.returned.clear()
        self.priorities.clear()
        self.permits.clear()
        self.takeover_at = None

    def delivered(self, name: str, n: int, count: int) -> None:
        """Is it right that this consumer gets this message now?"""
        assert n not in self.acked, f"{n} is acknowledged"
        assert n not in self.holder, f"{n} is at {self.holder.get(n)}"
        assert count == self.counts.setdefault(n, 0), f"{n} has the count {count}, not {self.counts[n]}"
        assert self.permits[name] > -LARGEST_BATCH, f"{name} has no permits"
        self.permits[name] -= 1
        if self.type == "key_shared":
            for other in range(len(self.keys)):
                if self.keys[other] == self.keys[n] and other not in self.acked:
                    assert self.holder.get(other, name) == name, f"{n} while {other} is elsewhere"
                    assert other >= n or other in self.holder, f"{n} overtakes {other}"
        elif self.type != "shared":
            assert name == self.active, f"{name} is not active"
            assert self.takeover_at is None, "a delivery during a takeover"
            assert n in self.returned or n == self.in_turn[0], f"{n} comes before {self.in_turn[0]}"
        self.returned.discard(n)
        self.holder[n] = name

    def check_all_delivered(self) -> None:
        """Nothing that can be delivered is left."""
        if self.type == "key_shared":
            ready = bool(self.permits) and not self.holder and min(self.permits.values()) > 0
        elif self.type == "shared":
            ready = any(permits > 0 for permits in self.permits.values())
        else:
            ready = self.active is not None and self.takeover_at is None and self.permits[self.active] > 0
        assert not ready or not (self.in_turn or self.returned), (
            f"{self.in_turn or self.returned} do not come"
        )


class ModelClient(FakeClient):
    """A connection with one consumer. What arrives is compared with the model at once."""

    def __init__(self, machine: "SubscriptionMachine", model: Model, name: str) -> None:
        super().__init__(machine.broker)
        self.machine = machine
        self.model = model
        self.name = name

    def _delivered(self, command: c.Deliver, body: bytes) -> None:
        before = len(self.messages)
        super()._delivered(command, body)
        self.model.time_is(self.machine.loop.now)
        for message in self.messages[before:]:
            number = int(message.value)
            assert self.machine.rows.setdefault(number, message.row()) == message.row()
            try:
                self.model.delivered(self.name, number, message.redelivered)
            except AssertionError as error:  # to the dispatcher it would be a defect of this connection
                self.machine.wrong.append(error)


class SubscriptionMachine(RuleBasedStateMachine):
    """See the module docstring."""

    @initialize(inline=st.booleans())
    def begin(self, inline: bool) -> None:
        self.loop = SimLoop(seed=1)
        self.ledgers, self.metadata = FakeLedgers(), MemoryMetadataStore()
        self.settings = BrokerSettings(
            cursor_flush_interval_ms=1,
            min_ledger_age_ms=0,
            max_ledger_entries=15,
            max_cursor_ledger_entries=20,
            max_inline_cursor_bytes=1 << 16 if inline else 1,
            failover_delay_ms=int(TAKEOVER_S * 1000),
        )
        self.wrong: list[AssertionError] = []  # what the model said to deliveries
        self.rows: dict[int, Row] = {}
        self.keys: list[bytes] = []
        self.models = {type: Model(type, self.keys) for type in TYPES}
        self.clients: dict[str, dict[str, ModelClient]] = {type: {} for type in TYPES}
        self.marks: dict[str, Any] = {}
        self.names = 0
        self.run(self.load())
        for type in TYPES:
            self.run(self.join(type, PLENTY, 1))
        for _ in range(6):
            self.publish([KEYS[0], KEYS[1], KEYS[2]])

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        async def settled() -> None:
            await work
            await self.settle()

        self.loop.run(settled())
        if self.wrong:
            raise self.wrong[0]

    async def settle(self, seconds: float = 0.02) -> None:
        """Everything that was asked for is done, and durable."""
        await asyncio.sleep(seconds)
        for model in self.models.values():
            model.time_is(self.loop.now)

    async def load(self) -> None:
        """The broker starts, and the topic is loaded when somebody asks for it."""
        self.broker = Broker(self.metadata, self.ledgers, self.settings, FakeClock())
        await self.broker.start()
        self.producer = FakeClient(self.broker)
        answer = await self.producer.producer(9)
        self.epoch = answer["epoch"]

    # --- the topic ---------------------------------------------------------------------------------------------------

    @rule(pick=PICK)
    def publish_one_batch(self, pick: int) -> None:
        """Its messages may have different keys."""
        rng = Random(pick)
        self.publish([rng.choice(KEYS) for _ in range(rng.randint(1, LARGEST_BATCH))])

    def publish(self, keys: list[bytes]) -> None:
        """A batch."""
        first = len(self.keys)
        self.keys += keys
        batch = encode_batch(
            [b"%d" % (first + number) for number in range(len(keys))],
            sequence_id=first,
            publish_time_ms=0,
            keys=keys,
        )

        async def send() -> None:
            before = sum(row[1] for row in self.producer.receipts)
            self.producer.frame(c.Send(0, 9, self.epoch), batch)
            await self.producer.confirmed(before + len(keys))

        self.run(send())

    @precondition(lambda self: len(self.keys) % 5 == 0)
    @rule(killed=st.booleans())
    def reload(self, killed: bool) -> None:
        """The broker stops, or is killed, and another one takes its place."""
        for type in TYPES:
            self.models[type].ended()
            self.clients[type].clear()

        async def restart() -> None:
            if killed:
                for topic in list(self.broker.topics.values()):
                    topic.ledger.fence(TopicNotServed("killed"))
            await self.broker.close()
            await self.load()

        self.run(restart())

    @precondition(lambda self: self.models["failover"].takeover_at is not None)
    @rule()
    def time_passes(self) -> None:
        self.run(self.settle(2 * TAKEOVER_S))

    # --- consumers ---------------------------------------------------------------------------------------------------

    @rule(pick=PICK)
    def joins(self, pick: int) -> None:
        rng = Random(pick)
        type = rng.choice(TYPES)
        if len(self.clients[type]) < (1 if type == "exclusive" else 4):
            self.run(self.join(type, rng.choice([0, 3, PLENTY, PLENTY]), rng.randrange(3)))

    async def join(self, type: str, permits: int, priority: int) -> None:
        self.names += 1
        model, name = self.models[type], f"c{self.names}"
        client = self.clients[type][name] = ModelClient(self, model, name)
        model.joins(name, priority if type in ("failover", "shared") else 0, permits, self.loop.now)
        await client.consumer(
            1, type, type=type, name=name, permits=permits, priority_level=model.priorities[name]
        )

    @precondition(lambda self: any(self.clients.values()))
    @rule(pick=PICK)
    def leaves(self, pick: int) -> None:
        rng = Random(pick)
        type, name = self.consumer(rng)
        client = self.clients[type].pop(name)
        self.models[type].leaves(name)

        async def leave() -> None:
            if rng.random() < 0.5:
                await client.ask(c.CloseConsumer, 1)
            else:
                client.handler.connection_closed(ConnectionLost("cut"))

        self.run(leave())

    @precondition(lambda self: any(self.clients.values()))
    @rule(pick=PICK)
    def grant(self, pick: int) -> None:
        rng = Random(pick)
        type, name = self.consumer(rng)
        permits = rng.choice([1, 5, PLENTY])
        self.models[type].permits[name] += permits
        self.frame(type, name, c.Flow(0, 1, permits))

    def consumer(self, rng: Random) -> tuple[str, str]:
        """One of those that there are."""
        return rng.choice([(type, name) for type in TYPES for name in self.clients[type]])

    def held(self, rng: Random) -> tuple[str, str, int]:
        """A message that somebody has, and who."""
        type = rng.choice([type for type in TYPES if self.held_of(type)])
        number, name = rng.choice(self.held_of(type))
        return type, name, number

    def held_of(self, type: str) -> list[tuple[int, str]]:
        """Messages and who has them, without those of a consumer that left while it was being taken over."""
        return sorted(item for item in self.models[type].holder.items() if item[1] in self.clients[type])

    def frame(self, type: str, name: str, command: c.Command, rows: list[Row] | None = None) -> None:
        async def send() -> None:
            self.clients[type][name].frame(command, b"" if rows is None else c.encode_rows(c.ACK_ROW, rows))

        self.run(send())

    # --- what they do ------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.anything_is_held)
    @rule(pick=PICK)
    def acknowledge(self, pick: int) -> None:
        """A message and some that follow, whoever has them."""
        rng = Random(pick)
        type, name, number = self.held(rng)
        following = range(number, number + rng.randint(1, 8))
        numbers = [n for n in following if n in self.models[type].holder]
        self.models[type].acknowledged(numbers)
        rows = [self.rows[n] for n in numbers]
        self.run(self.ack(type, name, rows, cumulative=False, receipt=rng.random() < 0.5))

    @precondition(lambda self: self.anything_is_held)
    @rule(pick=PICK)
    def acknowledge_up_to(self, pick: int) -> None:
        rng = Random(pick)
        type, name, number = self.held(rng)
        if type not in INDIVIDUAL:
            self.models[type].acknowledged(list(range(number + 1)))
            row = self.rows[number]
            self.run(self.ack(type, name, [row], cumulative=True, receipt=rng.random() < 0.5))

    async def ack(self, type: str, name: str, rows: list[Row], *, cumulative: bool, receipt: bool) -> None:
        client = self.clients[type][name]
        if receipt:
            await client.ack(*rows, cumulative=cumulative)
        else:
            client.frame(c.Ack(0, 1, cumulative), c.encode_rows(c.ACK_ROW, rows))

    @precondition(lambda self: self.anything_is_held)
    @rule(pick=PICK)
    def nack(self, pick: int) -> None:
        type, name, number = self.held(Random(pick))
        self.models[type].nacked(number)
        self.frame(type, name, c.Redeliver(0, 1), [self.rows[number]])

    @property
    def anything_is_held(self) -> bool:
        return any(self.held_of(type) for type in TYPES)

    @precondition(lambda self: len(self.keys) % 3 == 0 and any(self.clients.values()))
    @rule(pick=PICK)
    def seek(self, pick: int) -> None:
        """To something that was delivered once and is still there."""
        rng = Random(pick)
        type, name = self.consumer(rng)
        ledger = self.broker.topics[str(TOPIC)]
        there = sorted(number for number, row in self.rows.items() if ledger.log.is_known(row[0]))
        if there:
            number = rng.choice(there)
            self.models[type].sought(number)
            self.marks.pop(type, None)
            target = MessageId(*self.rows[number][:3]).to_bytes()

            async def seek() -> None:
                await self.clients[type][name].ask(c.Seek, 1, ("id", target))

            self.run(seek())

    # --- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def as_modelled(self) -> None:
        for type, model in self.models.items():
            model.check_all_delivered()
            topic = self.broker.topics.get(str(TOPIC))
            subscription = None if topic is None else topic.subscriptions.get(type)
            if subscription is None:
                continue
            subscription.cursor.state.check()
            mark = subscription.cursor.state.mark_delete
            assert mark >= self.marks.get(type, mark), f"the mark-delete position of {type} went back"
            self.marks[type] = mark
            below = [number for number, row in self.rows.items() if row[:3] < mark]
            assert model.acked.issuperset(below), f"{type}: {set(below) - model.acked} are not acknowledged"

    def teardown(self) -> None:
        if not hasattr(self, "models"):
            return
        for type, model in self.models.items():
            if not self.clients[type]:
                self.run(self.join(type, PLENTY, 0))
            for name in list(self.clients[type]):
                model.permits[name] += PLENTY
                self.frame(type, name, c.Flow(0, 1, PLENTY))
        self.run(self.settle(2 * TAKEOVER_S))
        for type, model in self.models.items():
            while model.holder:
                for name in sorted(set(model.holder.values())):
                    numbers = sorted(n for n, holder in model.holder.items() if holder == name)
                    model.acknowledged(numbers)
                    rows = [self.rows[n] for n in numbers]
                    self.run(self.ack(type, name, rows, cumulative=False, receipt=True))
            assert len(model.acked) == len(self.keys), f"{type}: not everything was delivered"
        self.loop.run(self.broker.close())
        self.loop.close()


class TestSubscriptionMachine(SubscriptionMachine.TestCase):  # type: ignore[misc,valid-type]
    """Runs of all 500 steps: what Hypothesis draws for an example may be four times as much as it allows by default."""

    def runTest(self) -> None:
        """See unittest."""
        with patch.object(stateful, "BUFFER_SIZE", LONGEST), patch.object(engine, "BUFFER_SIZE", LONGEST):
            super().runTest()


TestSubscriptionMachine.settings = settings(
    max_examples=times(3, 100),
    stateful_step_count=500,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    # A long run tells what it found; making it smaller takes minutes.
    phases=[phase for phase in Phase if phase is not Phase.shrink or not LONG],
)

"""Delayed messages on a whole broker: when they come, and that no crash, load, jump of the clock or limit changes it."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from magnetar.broker import Broker, Topic
from magnetar.broker.dispatch.core.delay_index import DelayIndex, Run
from magnetar.broker.log.records import log_state_path
from magnetar.broker.topics import delays
from magnetar.broker.topics.log_state import StoredLogState
from magnetar.proto import commands as c
from magnetar.proto.batch import encode_batch
from magnetar.proto.batch_extensions import EXT_DELIVER_AT_MS
from magnetar.proto.errors import BookieUnavailable, InvalidArgument, TooManyRequests, TopicNotServed
from support.broker_kit import TOPIC, FakeClient, running_broker, settle
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore
from support.virtual_time import in_virtual_time
from unit.broker.test_terminate import ends

PATH = log_state_path(TOPIC, delays.KIND)
LATE_MS = 20


class WallClock:
    """Follows the loop, but for its jumps."""

    def __init__(self) -> None:
        self.ahead_ms = 1_800_000_000_000 - 1_000_000  # the next hour begins soon

    def now_ms(self) -> int:
        return self.ahead_ms + int(asyncio.get_running_loop().time() * 1000)


class Client(FakeClient):
    """Notes when each message came."""

    def __init__(self, broker: Broker, clock: WallClock) -> None:
        super().__init__(broker)
        self.clock = clock
        self.sent = 0
        self.came_ms: dict[bytes, int] = {}

    def _delivered(self, command: c.Deliver, body: bytes) -> None:
        super()._delivered(command, body)
        for message in self.messages:
            self.came_ms.setdefault(message.value, self.clock.now_ms())

    async def publish_at(self, *batches: tuple[list[bytes], int | None]) -> None:
        """Batches with what they are due at, in as many frames of one run; returns once they are receipted."""
        receipted = sum(row[1] for row in self.receipts)
        for values, due_ms in batches:
            extensions = None if due_ms is None else {EXT_DELIVER_AT_MS: due_ms}
            batch = encode_batch(values, sequence_id=self.sent, publish_time_ms=0, extensions=extensions)
            self.frame(c.Send(0, 1, 0), batch)
            self.sent += len(values)
        await self.confirmed(receipted + sum(len(values) for values, _ in batches))

    def assert_exact(self, due: dict[bytes, int]) -> None:
        """Each came once, none early, and all in time."""
        assert sorted(self.values) == sorted(due)
        late = {value: self.came_ms[value] - due_ms for value, due_ms in due.items()}
        assert min(late.values()) >= 0, late
        assert max(late.values()) <= LATE_MS, late


class Stage:
    """What outlives a broker."""

    def __init__(self, **settings: Any) -> None:
        self.ledgers, self.metadata, self.clock = FakeLedgers(), MemoryMetadataStore(), WallClock()
        self.settings = {"max_inline_cursor_bytes": 1, **settings}

    @asynccontextmanager
    async def served(self, *, crashes: bool = False) -> AsyncIterator[tuple[Topic, Client]]:
        """By the next broker."""
        async with running_broker(self.ledgers, self.metadata, self.clock, **self.settings) as broker:
            topic = await broker.topic(TOPIC, create=True)
            client = Client(broker, self.clock)
            await client.producer(name="p")
            yield topic, client
            if crashes:
                topic.ledger.fence(TopicNotServed("crash"))


@in_virtual_time
async def test_messages_come_when_they_are_due_in_the_order_of_their_times() -> None:
    for type in ("shared", "key_shared", "exclusive"):
        stage, drawn = Stage(), random.Random(1)
        async with stage.served() as (_, client):
            await client.consumer(type=type)
            now_ms = stage.clock.now_ms()
            delays_ms = [drawn.choice([0, 30, 500, 60_000, drawn.randrange(1_100_000)]) for _ in range(300)]
            due = {b"%d" % number: now_ms + delay_ms for number, delay_ms in enumerate(delays_ms)}
            await client.publish_at(
                *[([value], due_ms if due_ms > now_ms else None) for value, due_ms in due.items()]
            )
            if type == "exclusive":
                assert client.values == list(due)
                continue
            await asyncio.sleep(1_110)
            client.assert_exact(due)
            assert client.values == sorted(due, key=lambda value: (due[value], int(value)))


@in_virtual_time
async def test_rule_29_delayed_messages_pin_the_mark_delete_position_and_survive_a_restart() -> None:
    for crashes in (True, False):
        for later_ms in (0, 150_500):
            stage = Stage()
            async with stage.served(crashes=crashes) as (topic, client):
                await client.consumer(type="shared")
                now_ms = stage.clock.now_ms()
                due = {b"%d" % number: now_ms + 100_000 + 1_000 * number for number in range(200)}
                batches = [([value], due_ms) for value, due_ms in due.items()]
                await client.publish_at(*batches[:100])
                await asyncio.sleep(later_ms / 1000)  # a snapshot is written after 120 s
                await client.publish_at(([b"now"], None), *batches[100:])
                await client.ack((*client.messages[-1].id, client.messages[-1].id[2]))
                seen = [value for value in client.values if value != b"now"]
                assert topic.subscriptions["billing"].cursor.state.mark_delete == (0, 0, 0)
                assert seen == [value for value, due_ms in due.items() if due_ms <= stage.clock.now_ms()]
            async with stage.served(crashes=crashes) as (topic, heir):
                await heir.consumer(type="shared")
                await settle()
                assert heir.values == seen, "what was not acknowledged comes again, and nothing else"
                await asyncio.sleep(400)
                assert heir.values == list(due)
                rest = {value: due_ms for value, due_ms in due.items() if value not in seen}
                assert all(0 <= heir.came_ms[value] - due_ms <= LATE_MS for value, due_ms in rest.items())
                assert not topic.delays.index


@in_virtual_time
async def test_a_crash_right_after_the_first_delayed_message_leaves_the_next_owner_its_index() -> None:
    stage = Stage()
    async with stage.served(crashes=True) as (_, client):
        await client.publish_at(([b"plain"], None))
        assert await stage.metadata.get(PATH) is None
        await client.publish_at(([b"late"], stage.clock.now_ms() + 5_000))
        assert await stage.metadata.get(PATH) is not None
    async with stage.served() as (_, heir):
        await heir.consumer(type="shared")
        await asyncio.sleep(4.9)
        assert heir.values == [b"plain"]
        await asyncio.sleep(0.2)
        assert heir.values == [b"plain", b"late"]


@in_virtual_time
async def test_nothing_that_may_be_delayed_is_dispatched_while_the_index_is_read() -> None:
    stage = Stage()
    async with stage.served(crashes=True) as (_, client):
        await client.publish_at(([b"plain"], None))
        late_ms = stage.clock.now_ms() + 300_000
        await client.publish_at(
            ([b"late"], late_ms), ([b"due meanwhile"], late_ms - 160_000), ([b"with it"], None)
        )
        await asyncio.sleep(121)  # the index is in its ledger
    readable, opens = asyncio.Event(), stage.ledgers.open

    async def open(ledger_id: int, *, recover: bool) -> Any:
        if stage.ledgers.ledgers[ledger_id].properties["kind"] == delays.KIND:
            await readable.wait()
        return await opens(ledger_id, recover=recover)

    stage.ledgers.open = open  # type: ignore[method-assign]
    async with stage.served() as (topic, heir):
        await heir.consumer(type="shared")
        await heir.consumer(2, "other", type="exclusive")
        await asyncio.sleep(30)
        assert sorted(heir.values) == [b"due meanwhile", b"late", b"plain", b"plain", b"with it"]
        assert "not known" in topic.subscriptions["billing"].trouble()
        heir.messages.clear()
        await heir.publish_at(([b"later still"], stage.clock.now_ms() + 1_000))  # is appended all the same
        readable.set()
        await asyncio.sleep(2)
        assert heir.values[1:] == [
            b"due meanwhile",
            b"with it",
            b"later still",
        ]  # the exclusive one has it at once
        assert not topic.subscriptions["billing"].trouble()
        await asyncio.sleep(300)
        assert heir.values[4:] == [b"late"]


@in_virtual_time
async def test_what_becomes_due_between_two_attempts_to_read_the_index_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(retry_initial_ms=4_000)
    async with stage.served() as (_, client):
        due_ms = stage.clock.now_ms() + 10_000
        await client.publish_at(([b"late"], due_ms), ([b"later"], due_ms + 60_000))
    replay, failing = StoredLogState._replay, [BookieUnavailable("away")]

    async def replayed(self: StoredLogState, place: Any) -> None:
        if failing:
            raise failing.pop()
        await replay(self, place)

    monkeypatch.setattr(StoredLogState, "_replay", replayed)
    async with stage.served() as (topic, heir):
        await heir.consumer(type="shared")
        await settle()
        assert topic.delays.index, "it is read in part"
        assert topic.subscriptions["billing"].trouble()
        stage.clock.ahead_ms += 10_000
        await asyncio.sleep(5)
        assert not topic.subscriptions["billing"].trouble()
        assert heir.values == [b"late"]
        await asyncio.sleep(60)
        assert heir.values == [b"late", b"later"]


@in_virtual_time
async def test_the_clock_may_jump() -> None:
    stage = Stage()
    async with stage.served() as (_, client):
        await client.consumer(type="shared")
        due_ms = stage.clock.now_ms() + 1_800_000
        await client.publish_at(([b"a"], due_ms), ([b"b"], due_ms + 60_000))
        stage.clock.ahead_ms -= 7_200_000
        await asyncio.sleep(1_900)
        assert not client.values
        stage.clock.ahead_ms += 7_200_000
        await asyncio.sleep(1.1)
        assert client.values == [b"a", b"b"]


@in_virtual_time
async def test_an_index_that_stays_empty_is_let_go_and_begun_again() -> None:
    stage = Stage(maintenance_interval_s=10.0)
    async with stage.served() as (topic, client):
        await client.consumer(type="shared")
        for number in range(3):
            assert topic.delays.index is None
            await client.publish_at(([b"%d" % number], stage.clock.now_ms() + 30_000))
            await asyncio.sleep(29)
            assert await stage.metadata.get(PATH) is not None
            assert len(client.values) == number
            await asyncio.sleep(31)
            assert len(client.values) == number + 1
            assert await stage.metadata.get(PATH) is None
        await client.publish_at(([b"a"], stage.clock.now_ms() + 60_000))
    async with stage.served() as (topic, client):
        assert topic.delays.index is not None


@in_virtual_time
async def test_a_store_that_fails_holds_up_the_first_delayed_message_and_says_so() -> None:
    stage = Stage()
    async with stage.served() as (_, client):
        await client.publish_at(([b"plain"], None))
        create = stage.metadata.create

        async def fail(*given: Any, **named: Any) -> Any:
            raise BookieUnavailable("the store is away")

        stage.metadata.create = fail  # type: ignore[method-assign]
        waiting = asyncio.create_task(client.publish_at(([b"late"], stage.clock.now_ms() + 100)))
        await asyncio.sleep(1)
        assert not waiting.done()
        assert any(isinstance(command, c.SendDelayed) for command, _ in client.frames)
        stage.metadata.create = create  # type: ignore[method-assign]
        await asyncio.sleep(10)
        await waiting


@in_virtual_time
async def test_a_delay_beyond_the_limit_fails_alone() -> None:
    stage = Stage(max_delivery_delay_ms=60_000)
    async with stage.served() as (_, client):
        now_ms = stage.clock.now_ms()
        for number, due_ms in enumerate((now_ms + 60_000, None, now_ms + 61_000)):
            extensions = None if due_ms is None else {EXT_DELIVER_AT_MS: due_ms}
            batch = encode_batch([b"a"], sequence_id=number, publish_time_ms=0, extensions=extensions)
            client.frame(c.Send(0, 1, 0), batch)
        await client.confirmed(2)
        (failure,) = client.failures
        assert (failure.sequence_id, failure.code) == (2, InvalidArgument.code)
        assert "max_delivery_delay_ms" in failure.message


@in_virtual_time
async def test_so_many_delayed_messages_and_no_more() -> None:
    stage = Stage()
    async with stage.served() as (topic, client):
        await topic.change_policies({"max_delayed_messages": 10})
        await client.consumer(type="shared")
        await client.publish_at(([b"a"] * 10, stage.clock.now_ms() + 60_000))
        client.frame(c.Send(0, 1, 0), encode_batch([b"b"], sequence_id=10, publish_time_ms=0))
        await client.confirmed(11)
        full = {EXT_DELIVER_AT_MS: stage.clock.now_ms() + 1_000}
        late = encode_batch([b"c"], sequence_id=11, publish_time_ms=0, extensions=full)
        client.frame(c.Send(0, 1, 0), late)
        await settle()
        (failure,) = client.failures
        assert (failure.code, failure.action) == (TooManyRequests.code, TooManyRequests.action.value)
        assert "max_delayed_messages" in failure.message
        await topic.subscriptions["billing"].skip_to(topic_end(topic))
        await client.producer(2, name="q")
        client.frame(c.Send(0, 2, 0), late)
        await client.confirmed(12)


@in_virtual_time
async def test_a_policy_switches_delays_off_and_another_one_gathers_what_is_due() -> None:
    stage = Stage()
    async with stage.served() as (topic, client):
        await client.consumer(type="shared")
        await client.publish_at(([b"waits"], stage.clock.now_ms() + 60_000))
        await topic.change_policies({"delayed_delivery": False})
        await asyncio.sleep(1.1)
        assert client.values == [b"waits"]
        await client.publish_at(([b"at once"], stage.clock.now_ms() + 60_000))
        await settle()
        assert client.values[1:] == [b"at once"]
        await topic.change_policies({"delayed_delivery": None, "delayed_delivery_tick_ms": 500})
        now_ms = stage.clock.now_ms()
        await client.publish_at(
            *[([b"%d" % delay_ms], now_ms + delay_ms) for delay_ms in (2_000, 2_100, 2_400)]
        )
        await asyncio.sleep(1.99)
        assert client.values[2:] == []
        await asyncio.sleep(0.02)
        assert client.values[2:] == [b"2000"]
        await asyncio.sleep(0.48)
        assert client.values[3:] == [], "what is due by now comes together"
        await asyncio.sleep(0.03)
        assert client.values[3:] == [b"2100", b"2400"]


def topic_end(topic: Topic) -> Any:
    async def find() -> Any:
        return topic.ledger.list.end

    return find


@in_virtual_time
async def test_what_is_skipped_expired_or_acknowledged_does_not_come() -> None:
    stage = Stage(message_ttl_ms=20_000, message_expiry_interval_s=5.0)
    async with stage.served() as (topic, client):
        await client.consumer(type="shared")
        now_ms = stage.clock.now_ms()
        await client.publish_at(([b"skipped"], now_ms + 1_000), ([b"acknowledged"], now_ms + 1_000))
        await client.publish_at(([b"in time"], now_ms + 10_000), ([b"expired"], now_ms + 60_000))
        billing = topic.subscriptions["billing"]

        async def find() -> Any:
            return topic.ledger.list.ledgers[0].ledger_id, 0, 1

        await billing.skip_to(find)
        await client.ack((topic.ledger.list.ledgers[0].ledger_id, 0, 1, 1))
        await asyncio.sleep(100)
        assert client.values == [b"in time"]
        assert billing.cursor.state.mark_delete == topic.ledger.list.end


@in_virtual_time
async def test_a_terminated_topic_ends_for_who_has_skipped_what_is_withheld() -> None:
    stage = Stage()
    async with stage.served() as (topic, client):
        await client.consumer(type="shared")
        await client.publish_at(([b"in a year"], stage.clock.now_ms() + 1_000_000_000))
        await client.ask(c.TerminateTopic, str(TOPIC))
        await settle()
        assert ends(client) == []
        await topic.subscriptions["billing"].skip_to(topic_end(topic))
        await settle()
        assert ends(client) == [(0, 0)]


@in_virtual_time
async def test_without_consumers_nothing_is_queued_and_a_seek_begins_anew() -> None:
    stage = Stage()
    async with stage.served() as (topic, client):
        await client.consumer(type="shared")
        due_ms = stage.clock.now_ms() + 1_000
        await client.publish_at(*[([b"%d" % number], due_ms + number) for number in range(5)])
        await client.ask(c.CloseConsumer, 1)
        await asyncio.sleep(10)
        assert not topic.subscriptions["billing"].dispatcher.core.due
        await client.consumer(2, type="shared")
        await settle()
        assert client.values == [b"%d" % number for number in range(5)]
        await client.publish_at(([b"late"], stage.clock.now_ms() + 1_000))
        await client.ask(c.Seek, 2, ("earliest", None))
        await asyncio.sleep(2)
        assert client.values[5:] == [*[b"%d" % number for number in range(5)], b"late"]


@in_virtual_time
async def test_others_are_served_between_steps_that_only_spread_what_is_due_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, steps = Stage(), list[float]()

    def spreads(self: DelayIndex, now_ms: int) -> tuple[list[Run], bool]:
        steps.append(asyncio.get_running_loop().time())
        return [], len(steps) < 6

    monkeypatch.setattr(DelayIndex, "take_due", spreads)
    async with stage.served() as (_, client):
        await client.publish_at(([b"a"], stage.clock.now_ms() + 500))
        await asyncio.sleep(1)
    assert min(later - step for step, later in pairwise(steps[:6])) >= 0.001


@in_virtual_time
async def test_a_defect_in_the_index_ends_the_topic_here(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage()
    async with stage.served() as (topic, client):
        await client.consumer(type="shared")
        await client.publish_at(([b"a"], stage.clock.now_ms() + 1_000))
        assert topic.delays.index is not None
        topic.delays.index._blocks.clear()
        topic.delays.index._order.clear()
        topic.delays.index._current = None  # type: ignore[assignment]
        await asyncio.sleep(2)
        assert topic.not_served is not None
        assert "cannot be released" in caplog.text


@in_virtual_time
async def test_an_owner_that_is_shut_out_does_not_let_go_of_the_index_of_the_next_one() -> None:
    stage = Stage()
    async with stage.served() as (topic, client):
        await client.publish_at(([b"a"], stage.clock.now_ms() + 100))
        await asyncio.sleep(1)
        async with stage.served(crashes=True) as (_, heir):
            await heir.publish_at(([b"b"], stage.clock.now_ms() + 50_000))
            for _ in range(2):  # it has not noticed yet
                topic.delays.maintain(0)
                await settle()
            assert topic.not_served is not None
        async with stage.served() as (_, last):
            await last.consumer(type="shared")
            await asyncio.sleep(10)
            assert last.values == [b"a"]
            await asyncio.sleep(41)
            assert last.values == [b"a", b"b"]

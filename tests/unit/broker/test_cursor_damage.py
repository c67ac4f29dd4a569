"""Rule 41: a cursor that cannot be read costs its subscription only, visibly, and nothing is passed over silently."""

import asyncio
from typing import Any

import pytest

from magnetar.broker import Broker
from magnetar.broker.cursors.cursor import Cursor
from magnetar.broker.cursors.pointer import PointerRecord
from magnetar.broker.log.records import cursor_path
from magnetar.proto import commands as c
from magnetar.proto.errors import (
    BookieUnavailable,
    DataDirectoryError,
    MagnetarError,
    ServiceNotReady,
    TopicNotServed,
)
from support.broker_kit import TOPIC, FakeClient, running_broker, settle
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore

MESSAGES = 6


class Stage:
    """What outlives a broker: six messages, and two shared subscriptions, of which `billing` acknowledged some."""

    def __init__(self) -> None:
        self.ledgers, self.metadata = FakeLedgers(), MemoryMetadataStore()

    def broker(self, **settings: Any) -> Any:
        return running_broker(
            self.ledgers, self.metadata, retry_initial_ms=1, retry_max_ms=2, maintenance_interval_s=1e6, **settings
        )  # fmt: skip

    async def prepare(self, acknowledge: tuple[int, ...], **settings: Any) -> int:
        """Each acknowledgement is a delta of its own, the first comes with the snapshot. Returns the cursor ledger."""
        async with self.broker(**settings) as broker:
            client = FakeClient(broker)
            await client.producer()
            for number in range(MESSAGES):
                client.publish(b"%d" % number, first=number)
                await client.confirmed(number + 1)
            await client.consumer(2, "audit", type="shared", permits=0)
            await client.consumer(type="shared")
            await client.received(MESSAGES)
            for number in acknowledge:
                await client.ack(client.messages[number].row())
            await crash(broker)
        return (await self.pointer()).ledger_id

    async def pointer(self, name: str = "billing") -> PointerRecord:
        stored = await self.metadata.get(cursor_path(TOPIC, name))
        assert stored is not None
        return PointerRecord.decode(stored.value, "")

    async def damage_pointer(self, value: bytes = b"\x00 damaged") -> None:
        path = cursor_path(TOPIC, "billing")
        stored = await self.metadata.get(path)
        assert stored is not None
        await self.metadata.put(path, value, version=stored.version)


async def crash(broker: Broker) -> None:
    for topic in list(broker.topics.values()):
        topic.ledger.fence(TopicNotServed("crash"))
    await broker.close()


async def delivered(broker: Broker, subscription: str = "billing") -> list[bytes]:
    client = FakeClient(broker)
    await client.consumer(subscription=subscription, type="shared")
    await settle()
    client.close()
    return client.values


async def stats(broker: Broker) -> dict[str, Any]:
    found: dict[str, Any] = await FakeClient(broker).ask(c.TopicStats, "orders")
    return found


def all_but(*acknowledged: int) -> list[bytes]:
    return [b"%d" % number for number in range(MESSAGES) if number not in acknowledged]


@pytest.mark.parametrize(
    ("damaged", "kept"),
    [
        ({0}, (0, 4, 3, 1)),  # the snapshot: the pointer has it as well
        ({1}, (0, 3, 1)),  # a delta: those behind it hold all the same
        ({2}, (0, 4, 1)),
        ({3}, (0, 4, 3)),
        ({0, 1, 2, 3}, (0,)),
    ],
)
async def test_damaged_entries_cost_the_acknowledgements_that_they_hold(
    damaged: set[int], kept: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage()
    ledger = await stage.prepare((0, 4, 3, 1))
    stage.ledgers.damaged = {(ledger, entry) for entry in damaged}
    async with stage.broker() as broker:
        assert await delivered(broker) == all_but(*kept)
        assert await delivered(broker, "audit") == all_but()
        figures = (await stats(broker))["subscriptions"]
        assert figures["billing"]["recovered_from"] == figures["billing"]["mark_delete"]
        assert figures["audit"]["recovered_from"] is None
        assert f"{len(damaged)} of 4 entries of its ledger {ledger} cannot be read" in caplog.text


async def test_a_lost_cursor_ledger_costs_what_came_after_the_last_roll_over() -> None:
    """Also when the snapshot is too large for the pointer: then the mark-delete position alone is known."""
    for inline_bytes, kept in ((1 << 16, (0, 1, 3)), (1, (0, 1))):
        stage = Stage()
        settings = {"max_cursor_ledger_entries": 2, "max_inline_cursor_bytes": inline_bytes}
        ledger = await stage.prepare((0, 1, 3, 4), **settings)  # rolls over at the third
        del stage.ledgers.ledgers[ledger]
        async with stage.broker() as broker:
            assert await delivered(broker) == all_but(*kept)
            client = FakeClient(broker)
            await client.consumer(type="shared")
            await client.received(MESSAGES - len(kept))
            await client.ack(*[message.row() for message in client.messages])
            await crash(broker)
        async with stage.broker() as broker:  # in a ledger of its own again
            assert await delivered(broker) == []
            assert (await stats(broker))["subscriptions"]["billing"]["recovered_from"] is None


async def test_a_seek_back_is_not_undone_by_damage() -> None:
    stage = Stage()
    await stage.prepare((0, 1, 2, 3))
    async with stage.broker() as broker:
        client = FakeClient(broker)
        await client.consumer(type="shared", permits=0)
        await client.ask(c.Seek, 1, ("earliest", None))
        await crash(broker)
    ledger = (await stage.pointer()).ledger_id
    stage.ledgers.damaged = {(ledger, entry) for entry in range(4)}
    async with stage.broker() as broker:
        assert await delivered(broker) == all_but()


@pytest.mark.parametrize("damage", ["all", "snapshot", "properties"])
async def test_a_damaged_pointer_refuses_its_subscription_and_says_what_helps(damage: str) -> None:
    stage = Stage()
    ledger = await stage.prepare((0, 1, 2, 3))
    record = await stage.pointer()
    if damage == "snapshot":
        record.snapshot = {"mark_delete": [0]}  # type: ignore[assignment]
    elif damage == "properties":
        record.properties = [1]  # type: ignore[assignment]
    await stage.damage_pointer(b"\x00 damaged" if damage == "all" else record.encode())
    async with stage.broker(max_ledger_entries=1) as broker:
        assert await delivered(broker, "audit") == all_but()
        with pytest.raises(
            DataDirectoryError, match=r"'billing' .*delete the subscription and create it again"
        ):
            await FakeClient(broker).consumer()
        assert list((await stats(broker))["unavailable_subscriptions"]) == ["billing"]
        # It stands somewhere: nothing is trimmed, although the other subscription needs nothing any more.
        auditor = FakeClient(broker)
        await auditor.consumer(subscription="audit", type="shared")
        topic = broker.topics[str(TOPIC)]
        await auditor.received(MESSAGES)
        await auditor.ack(*[message.row() for message in auditor.messages])
        before = len(topic.ledger.list.ledgers)
        topic.maintain()
        await topic.maintenance.trimmed()
        assert len(topic.ledger.list.ledgers) == before
        await FakeClient(broker).ask(c.DeleteSubscription, "orders", "billing")
        assert await stage.metadata.get(cursor_path(TOPIC, "billing")) is None
        assert (ledger in stage.ledgers.ledgers) == (damage == "all"), (
            "its ledger is deleted if it can be read which"
        )
        assert await delivered(broker) == all_but()
        assert not (await stats(broker))["unavailable_subscriptions"]


async def test_a_topic_with_a_damaged_pointer_can_be_deleted() -> None:
    stage = Stage()
    await stage.prepare((0,))
    await stage.damage_pointer()
    async with stage.broker() as broker:
        await FakeClient(broker).ask(c.DeleteTopic, "orders")
        assert not await stage.metadata.children("/topics/public/default/persistent")


async def test_an_error_that_may_pass_is_waited_out_while_the_others_are_served() -> None:
    stage = Stage()
    ledger = await stage.prepare((0, 1, 2))
    stage.ledgers.unopened[ledger] = BookieUnavailable("bookie b1 is away")
    async with stage.broker() as broker:
        assert await delivered(broker, "audit") == all_but()
        with pytest.raises(ServiceNotReady, match=r"'billing' .*bookie b1 is away"):
            await FakeClient(broker).consumer()
        assert list((await stats(broker))["unavailable_subscriptions"]) == ["billing"]
        del stage.ledgers.unopened[ledger]
        topic = broker.topics[str(TOPIC)]
        async with asyncio.timeout(5):
            while topic.subscriptions.recovery.unavailable:
                await asyncio.sleep(0.001)
        assert await delivered(broker) == all_but(0, 1, 2)
        assert (await stats(broker))["subscriptions"]["billing"]["recovered_from"] is None


async def test_a_subscription_that_is_waited_for_can_be_deleted_and_closing_does_not_wait() -> None:
    for delete in (True, False):
        stage = Stage()
        ledger = await stage.prepare((0, 1, 2))
        stage.ledgers.unopened[ledger] = BookieUnavailable("bookie b1 is away")
        async with stage.broker() as broker:
            await broker.topic(TOPIC, create=False)
            if delete:
                await FakeClient(broker).ask(c.DeleteSubscription, "orders", "billing")
                assert await stage.metadata.get(cursor_path(TOPIC, "billing")) is None
                assert ledger in stage.ledgers.deleted
                assert await delivered(broker) == all_but()
        assert len(asyncio.all_tasks()) == 1


async def test_a_silent_bookie_delays_its_own_cursor_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magnetar.broker.cursors.recovery.FIRST_TRY_S", 0.01)
    stage = Stage()
    ledger = await stage.prepare((0, 1, 2))
    answer = asyncio.Event()
    real = stage.ledgers.open

    async def open(ledger_id: int, *, recover: bool) -> Any:
        if ledger_id == ledger:
            await answer.wait()
        return await real(ledger_id, recover=recover)

    stage.ledgers.open = open  # type: ignore[method-assign]
    async with stage.broker() as broker:
        assert await delivered(broker, "audit") == all_but()
        with pytest.raises(ServiceNotReady, match="is being recovered"):
            await FakeClient(broker).consumer()
        answer.set()
        await settle()
        assert await delivered(broker) == all_but(0, 1, 2)


async def test_another_owner_found_while_a_cursor_is_waited_for_fences_the_topic() -> None:
    stage = Stage()
    ledger = await stage.prepare((0, 1, 2))
    stage.ledgers.unopened[ledger] = BookieUnavailable("bookie b1 is away")
    async with stage.broker() as broker:
        await broker.topic(TOPIC, create=False)
        await stage.damage_pointer((await stage.pointer()).encode())
        async with asyncio.timeout(5):
            while broker.topics:
                await asyncio.sleep(0.001)


async def test_cursors_are_recovered_side_by_side() -> None:
    stage = Stage()
    count, under_way, most = 40, 0, 0
    async with stage.broker() as broker:
        client = FakeClient(broker)
        for number in range(count):
            await client.consumer(number, f"subscription-{number}", permits=0)
        await crash(broker)
    real = stage.metadata.get

    async def get(path: str) -> Any:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await settle(5)
        under_way -= 1
        return await real(path)

    stage.metadata.get = get  # type: ignore[method-assign]
    async with stage.broker() as broker:
        topic = await broker.topic(TOPIC, create=False)
        assert len(topic.subscriptions) == count
    assert most == 16


# --- receipts --------------------------------------------------------------------------------------------------------


def cursor_of(broker: Broker) -> Cursor:
    return broker.topics[str(TOPIC)].subscriptions["billing"].cursor


@pytest.mark.parametrize("turns", [0, 1, 8])
async def test_every_receipt_is_answered_once_when_the_flush_is_cancelled(turns: int) -> None:
    """Before the flush began to run, while it writes, and with another receipt waiting behind it."""
    stage = Stage()
    await stage.prepare((0,))
    async with stage.broker() as broker:
        client = FakeClient(broker)
        await client.consumer(type="shared")
        await client.received(MESSAGES - 1)
        cursor = cursor_of(broker)
        answers: list[tuple[int, MagnetarError | None]] = []
        stage.ledgers.hold = True
        cursor.ack(*client.messages[0].id[:2], [0], [0], 1)
        cursor.changed(lambda error: answers.append((1, error)))
        await settle(turns)
        cursor.ack(*client.messages[1].id[:2], [0], [0], 1)
        cursor.changed(lambda error: answers.append((2, error)))
        assert not answers
        await cursor.close(fenced=True)
        assert sorted(number for number, _ in answers) == [1, 2]
        assert all(isinstance(error, ServiceNotReady) for _, error in answers)
        stage.ledgers.hold = False


async def test_a_receipt_that_raises_does_not_keep_the_others_from_theirs() -> None:
    stage = Stage()
    await stage.prepare((0,))
    async with stage.broker() as broker:
        client = FakeClient(broker)
        await client.consumer(type="shared")
        await client.received(MESSAGES - 1)
        cursor = cursor_of(broker)
        answers: list[MagnetarError | None] = []

        def defect(error: MagnetarError | None) -> None:
            answers.append(error)
            raise RuntimeError("a defect")

        cursor.ack(*client.messages[0].id[:2], [0], [0], 1)
        cursor.changed(defect)
        cursor.changed(answers.append)
        await settle()
        assert len(answers) == 2


async def test_closing_a_cursor_does_not_swallow_the_cancellation_of_its_caller() -> None:
    stage = Stage()
    await stage.prepare((0,))
    async with stage.broker() as broker:
        client = FakeClient(broker)
        await client.consumer(type="shared")
        await client.received(MESSAGES - 1)
        cursor = cursor_of(broker)
        stage.ledgers.hold = True
        cursor.ack(*client.messages[0].id[:2], [0], [0], 1)
        cursor.changed(lambda error: None)
        await settle()
        closing = asyncio.ensure_future(cursor.close(fenced=True))
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        assert closing.cancelled()
        stage.ledgers.hold = False

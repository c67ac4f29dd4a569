"""Rules 26, 32 and 34: what was acknowledged stays acknowledged."""

import asyncio
from typing import Any

import pytest

from magnetar.broker import Broker
from magnetar.broker.cursors import cursor as cursor_module
from magnetar.broker.cursors.pointer import NO_LEDGER, PointerRecord
from magnetar.broker.dispatch.subscription import Subscription
from magnetar.broker.log.reading import LedgerReading
from magnetar.broker.log.records import cursor_path
from magnetar.metadata.store import Versioned
from magnetar.proto import commands as c
from magnetar.proto.errors import (
    ConnectionLost,
    InvalidArgument,
    MagnetarError,
    NotEnoughBookies,
    ServiceNotReady,
    TopicNotServed,
    VersionConflict,
)
from support.broker_kit import TOPIC, FakeClient, running_broker, settle
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore


def new_metadata() -> Any:
    return MemoryMetadataStore()


def subscription(broker: Broker, name: str = "billing") -> Subscription:
    return broker.topics[str(TOPIC)].subscriptions[name]


async def pointer(metadata: Any, name: str = "billing") -> PointerRecord:
    return PointerRecord.decode((await metadata.get(cursor_path(TOPIC, name))).value, "")


async def crash(broker: Broker) -> None:
    for topic in list(broker.topics.values()):
        topic.ledger.fence(TopicNotServed("crash"))
    await broker.close()


async def publish(client: FakeClient, count: int, batch: int = 1) -> None:
    """`count` entries of one batch of `batch` messages."""
    answer = await client.producer(9)
    for number in range(count):
        client.publish_batch(
            [b"%d.%d" % (number, index) for index in range(batch)],
            first=number * batch,
            producer_id=9,
            epoch=answer["epoch"],
        )
        await client.confirmed((number + 1) * batch)


async def redelivered(broker: Broker) -> list[bytes]:
    client = FakeClient(broker)
    await client.consumer(permits=1 << 20)
    await settle()
    return client.values


@pytest.mark.parametrize("inline", [True, False])
async def test_rule_32_and_34_acknowledged_parts_of_entries_survive_a_crash_and_a_clean_stop(
    inline: bool,
) -> None:
    for stop in (crash, Broker.close):
        ledgers, metadata = FakeLedgers(), new_metadata()
        settings: dict[str, Any] = {"max_inline_cursor_bytes": 1 << 16 if inline else 1}
        async with running_broker(ledgers, metadata, **settings) as broker:
            client = FakeClient(broker)
            await publish(client, 4, batch=5)
            await client.consumer()
            await client.received(20)
            rows = [m.row() for m in client.messages]
            await client.ack(*rows[0:7], rows[8], *rows[15:20])
            await stop(broker)
        async with running_broker(ledgers, metadata, **settings) as broker:
            values = await redelivered(broker)
            assert values == [b"1.2", b"1.4"] + [b"2.%d" % n for n in range(5)]
            # The rest is acknowledged by ranges whose entries were not delivered by this broker yet, or were.
            again = FakeClient(broker)
            state = subscription(broker).cursor.state
            state.check()
            await again.consumer(2, "other")
            await again.received(20)


async def test_rule_34_a_receipt_comes_only_after_the_change_is_durable() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers) as broker:
        client = FakeClient(broker)
        await publish(client, 2)
        await client.consumer()
        await client.received(2)
        ledgers.hold = True
        first = client.ack(client.messages[0].row())
        await settle()
        second = client.ack(client.messages[1].row())
        await settle()
        assert not first.done()
        ledgers.confirm()
        await settle()
        assert first.done()
        assert not second.done()  # it missed the snapshot that was being written
        ledgers.confirm()
        await second


async def test_rule_47_receipts_that_wait_for_a_cursor_that_cannot_be_written_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cursor_module, "MAX_WAITING_RECEIPTS", 2)
    ledgers = FakeLedgers()
    async with running_broker(ledgers) as broker:
        client = FakeClient(broker)
        await publish(client, 5)
        await client.consumer()
        await client.received(5)
        ledgers.hold = True
        receipts = [client.ack(client.messages[0].row())]
        await settle()
        for message in client.messages[1:]:
            receipts.append(client.ack(message.row()))
            await settle()
        assert [receipt.done() for receipt in receipts] == [False, False, False, True, True]
        with pytest.raises(ServiceNotReady, match="2 receipts wait"):
            await receipts[4]
        ledgers.hold = False
        ledgers.confirm()
        await settle()
        await asyncio.gather(*receipts[:3])
        await client.ack(client.messages[4].row())


async def test_a_receipt_does_not_wait_for_the_deletion_of_what_the_cursor_had_before() -> None:
    """Regression (simulation seed 449): it came when the metadata store answered at last, and the topic was another's."""
    ledgers = FakeLedgers()
    async with running_broker(ledgers, max_cursor_ledger_entries=1) as broker:
        client = FakeClient(broker)
        await publish(client, 2)
        await client.consumer()
        await client.received(2)
        await client.ack(client.messages[0].row())
        deleting, gate, delete = asyncio.Event(), asyncio.Event(), ledgers.delete

        async def delete_late(ledger_id: int) -> None:
            deleting.set()
            await gate.wait()
            await delete(ledger_id)

        ledgers.delete = delete_late  # type: ignore[method-assign]
        async with asyncio.timeout(5):
            await client.ack(client.messages[1].row())
            await deleting.wait()
        gate.set()


async def test_what_could_not_be_deleted_waits_for_the_next_ledger_and_not_every_receipt_for_it() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers, max_cursor_ledger_entries=2) as broker:
        client = FakeClient(broker)
        await publish(client, 5)
        await client.consumer()
        await client.received(5)
        tries: list[int] = []

        async def refuse(ledger_id: int) -> None:
            tries.append(ledger_id)
            raise NotEnoughBookies("not now")

        for message in client.messages[:2]:  # a ledger, and it is full
            await client.ack(message.row())
        ledgers.delete = refuse  # type: ignore[method-assign]
        await client.ack(client.messages[2].row())
        await settle()
        assert len(tries) == 1
        await client.ack(client.messages[3].row())  # a delta: nothing new is to be deleted
        await settle()
        assert len(tries) == 1
        await client.ack(client.messages[4].row())
        await settle()
        assert len(tries) == 3


async def test_many_acknowledgements_become_one_delta() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers) as broker:
        client = FakeClient(broker)
        await publish(client, 50)
        await client.consumer()
        await client.received(50)
        await client.ack(client.messages[0].row())
        (cursor_ledger,) = [k for k, v in ledgers.ledgers.items() if v.properties["kind"] == "cursor"]
        before = len(ledgers.ledgers[cursor_ledger].entries)
        await asyncio.gather(*[client.ack(m.row()) for m in client.messages[1:]])
        entries = ledgers.ledgers[cursor_ledger].entries
        assert len(entries) - before <= 2
        assert len(entries[-1]) < 100  # in order: the mark-delete position says it all


async def test_acknowledgements_without_receipt_are_written_soon() -> None:
    ledgers, metadata = FakeLedgers(), new_metadata()
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await publish(client, 2)
        await client.consumer()
        await client.received(2)
        client.frame(c.Ack(0, 1), c.encode_rows(c.ACK_ROW, [client.messages[0].row()]))
        async with asyncio.timeout(5):
            while (await pointer(metadata)).ledger_id < 0:
                await asyncio.sleep(0.001)
        await crash(broker)
    async with running_broker(ledgers, metadata) as broker:
        assert await redelivered(broker) == [b"1.0"]


async def test_rule_26_rollover_writes_a_snapshot_moves_the_pointer_and_deletes_the_old_ledger() -> None:
    ledgers, metadata = FakeLedgers(), new_metadata()
    async with running_broker(ledgers, metadata, max_cursor_ledger_entries=3) as broker:
        client = FakeClient(broker)
        await publish(client, 20)
        await client.consumer(type="shared")
        await client.received(20)
        for message in client.messages[1::2]:
            await client.ack(message.row())
        await settle()
        cursor_ledgers = [k for k, v in ledgers.ledgers.items() if v.properties["kind"] == "cursor"]
        assert cursor_ledgers == [(await pointer(metadata)).ledger_id]
        assert len(ledgers.deleted) >= 2
        await crash(broker)
    async with running_broker(ledgers, metadata) as broker:
        assert await redelivered(broker) == [b"%d.0" % n for n in range(0, 20, 2)]


async def test_a_degraded_cursor_ledger_is_left_when_there_are_bookies_enough_again() -> None:
    ledgers, metadata = FakeLedgers(), new_metadata()
    async with running_broker(ledgers, metadata, ledger_change_spread_ms=0) as broker:
        client = FakeClient(broker)
        await publish(client, 4)
        await client.consumer(type="shared")
        await client.received(4)
        await client.ack(client.messages[1].row())
        first = (await pointer(metadata)).ledger_id
        await client.ack(client.messages[2].row())
        assert (await pointer(metadata)).ledger_id == first
        ledgers.writers[first].replaceable = True
        await client.ack(client.messages[3].row())
        await settle()
        assert (await pointer(metadata)).ledger_id > first
        assert first in ledgers.deleted
        await crash(broker)
    async with running_broker(ledgers, metadata) as broker:
        assert await redelivered(broker) == [b"0.0"]


async def test_rule_26_a_cursor_that_cannot_be_written_falls_back_to_metadata() -> None:
    ledgers, metadata = FakeLedgers(), new_metadata()
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await publish(client, 4)
        await client.consumer()
        await client.received(4)
        await client.ack(client.messages[0].row())
        writer = ledgers.writers[(await pointer(metadata)).ledger_id]
        writer.fail_after = 0
        ledgers.fail_create.extend([NotEnoughBookies("none")] * 2)
        await client.ack(client.messages[2].row())
        assert (await pointer(metadata)).ledger_id == -1
        await client.ack(client.messages[3].row())
        await crash(broker)
    async with running_broker(ledgers, metadata) as broker:
        assert await redelivered(broker) == [b"1.0"]


async def test_an_ack_that_cannot_be_stored_anywhere_is_answered_with_the_error() -> None:
    ledgers, metadata = FakeLedgers(), new_metadata()
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await publish(client, 1)
        await client.consumer()
        await client.received(1)
        ledgers.fail_create.append(NotEnoughBookies("none"))
        put = metadata.put

        async def failing(*_: Any, **__: Any) -> int:
            raise MagnetarError("the store is gone")

        metadata.put = failing
        with pytest.raises(MagnetarError, match="store is gone"):
            await client.ack(client.messages[0].row())
        metadata.put = put
        await client.ack(client.messages[0].row())  # nothing new, yet the change before it is not durable
        await crash(broker)
    async with running_broker(ledgers, metadata) as broker:
        assert await redelivered(broker) == []


@pytest.mark.parametrize("acks_before", [True, False])
async def test_properties_that_were_set_survive_a_crash_and_so_does_what_is_acknowledged(
    acks_before: bool,
) -> None:
    ledgers, metadata = FakeLedgers(), new_metadata()
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await publish(client, 2)
        await client.consumer(properties={"team": "red"})
        await client.received(2)
        if acks_before:
            await client.ack(client.messages[0].row())
        await subscription(broker).cursor.set_properties({"team": "blue"})
        assert (await pointer(metadata)).properties == {"team": "blue"}
        await client.ack(client.messages[0].row())
        await crash(broker)
    async with running_broker(ledgers, metadata) as broker:
        assert await redelivered(broker) == [b"1.0"]
        assert subscription(broker).cursor.properties == {"team": "blue"}


async def test_properties_set_by_a_former_owner_are_refused() -> None:
    ledgers, metadata = FakeLedgers(), new_metadata()
    async with running_broker(ledgers, metadata) as former:
        client = FakeClient(former)
        await client.consumer(properties={"team": "red"})
        cursor = subscription(former).cursor
        async with running_broker(ledgers, metadata) as broker:
            await FakeClient(broker).consumer(properties={"team": "green"})
            with pytest.raises(TopicNotServed):
                await cursor.set_properties({"team": "blue"})
            assert subscription(broker).cursor.properties == {"team": "red"}
        assert (await pointer(metadata)).properties == {"team": "red"}


async def test_rule_26_a_pointer_conflict_fences_the_topic() -> None:
    ledgers, metadata = FakeLedgers(), new_metadata()
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await publish(client, 1)
        await client.consumer()
        await client.received(1)
        stored = await metadata.get(cursor_path(TOPIC, "billing"))
        await metadata.put(cursor_path(TOPIC, "billing"), stored.value, version=stored.version)
        with pytest.raises(MagnetarError):
            await client.ack(client.messages[0].row())
        await settle()
        assert not broker.topics


async def test_rules_34_and_52_a_fenced_cursor_ledger_ends_its_owner_before_it_answers() -> None:
    ledgers, metadata = FakeLedgers(), new_metadata()
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await publish(client, 2)
        await client.consumer()
        await client.received(2)
        await client.ack(client.messages[0].row())
        before = await metadata.get(cursor_path(TOPIC, "billing"))
        cursor_ledger = (await pointer(metadata)).ledger_id
        await ledgers.open(
            cursor_ledger, recover=True
        )  # another owner, which has only read the pointer so far
        with pytest.raises(TopicNotServed):
            await client.ack(client.messages[1].row())
        await settle()
        assert not broker.topics
        assert (await metadata.get(cursor_path(TOPIC, "billing"))).version == before.version


async def test_rule_52_a_takeover_writes_each_pointer() -> None:
    """Also of a cursor that has no ledger to be fenced: its former owner meets the conflict at its next change."""
    ledgers, metadata = FakeLedgers(), new_metadata()
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await publish(client, 1)
        await client.consumer()
        await client.received(1)
        assert (await pointer(metadata)).ledger_id == NO_LEDGER
        cursor, topology = subscription(broker).cursor, broker.topics[str(TOPIC)].ledger.list
        taker = broker.topics[str(TOPIC)].ledger.cursor("billing")
        assert await taker.recover(topology)
        with pytest.raises(TopicNotServed):
            await client.ack(client.messages[0].row())
        await cursor.close()
        assert await taker.recover(topology)  # what the former owner does while it ends is not written either


async def test_rule_52_a_pointer_that_is_written_while_it_is_taken_over_is_read_again() -> None:
    ledgers, metadata = FakeLedgers(), new_metadata()
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await publish(client, 1)
        await client.consumer()
        await client.received(1)
        cursor, topology = subscription(broker).cursor, broker.topics[str(TOPIC)].ledger.list
        taker = broker.topics[str(TOPIC)].ledger.cursor("billing")
        real = metadata.get

        async def get(path: str) -> Any:
            stored = await real(path)
            metadata.get = real
            await client.ack(client.messages[0].row())  # the former owner's pointer names a ledger now
            return stored

        metadata.get = get
        with pytest.raises(VersionConflict):
            await taker.recover(topology)
        assert await taker.recover(topology)
        assert taker.state.mark_delete == cursor.state.mark_delete


async def test_acknowledgements_of_entries_that_this_broker_did_not_deliver() -> None:
    ledgers, metadata = FakeLedgers(), new_metadata()
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await publish(client, 3, batch=4)
        await client.consumer()
        await client.received(12)
        rows = [m.row() for m in client.messages]
        await crash(broker)
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await client.consumer(permits=0)
        await asyncio.gather(client.ack(*rows[0:5]), client.ack(*rows[6:12]))
        assert await redelivered_values(client) == [b"1.1"]


async def redelivered_values(client: FakeClient) -> list[bytes]:
    client.frame(c.Flow(0, 1, 1000))
    await settle()
    return client.values


async def test_refused_acknowledgements_change_nothing() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await publish(client, 1)
        await client.consumer(type="shared")
        await client.received(1)
        ledger, entry, index = client.messages[0].id
        for rows in ([(ledger, entry + 1, 0, 0)], [(ledger, entry, 1, 0)]):
            with pytest.raises(InvalidArgument):
                await client.ack(*rows)
        with pytest.raises(InvalidArgument, match="cumulative"):
            await client.ack((ledger, entry, 0, index), cumulative=True)
        await client.ack((ledger + 50, 0, 0, 0))  # a ledger that was trimmed: acknowledged long ago
        assert subscription(broker).cursor.state.mark_delete == (ledger, entry, 0)


async def test_cumulative_acknowledgement_inside_a_batch() -> None:
    ledgers, metadata = FakeLedgers(), new_metadata()
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await publish(client, 2, batch=4)
        await client.consumer()
        await client.received(8)
        await client.ack(client.messages[5].row(), cumulative=True)
        await client.ack(client.messages[2].row(), cumulative=True)  # never back
        await crash(broker)
    async with running_broker(ledgers, metadata) as broker:
        assert await redelivered(broker) == [b"1.2", b"1.3"]


async def test_unsubscribe_deletes_pointer_and_ledger() -> None:
    ledgers, metadata = FakeLedgers(), new_metadata()
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await publish(client, 1)
        await client.consumer()
        await client.received(1)
        await client.ack(client.messages[0].row())
        await client.ask(c.Unsubscribe, 1)
        await settle()
        assert await metadata.get(cursor_path(TOPIC, "billing")) is None
        assert [v.properties["kind"] for v in ledgers.ledgers.values()] == ["topic"]
        await client.consumer()
        assert (await client.received(2)) == [b"0.0", b"0.0"]


async def test_rule_34_an_ack_that_must_be_looked_up_comes_before_what_is_dispatched_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that reconnects sends its unanswered acks, then permits: the first delivery must lack what they name."""
    real = LedgerReading.read_message_count

    async def slow(topic: LedgerReading, key: tuple[int, int]) -> int:
        await settle()
        return await real(topic, key)

    monkeypatch.setattr(LedgerReading, "read_message_count", slow)
    ledgers, metadata = FakeLedgers(), MemoryMetadataStore()
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await client.producer()
        await client.consumer(type="shared")
        client.publish(b"a", b"b", b"c")
        await client.received(3)
        held = client.messages[1]
        await crash(broker)
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await client.consumer(type="shared", permits=0)
        receipt = client.ack(held.row())
        client.frame(c.Flow(0, 1, 1000))
        await receipt
        assert await client.received(2) == [b"a", b"c"]
        await settle()
        assert client.values == [b"a", b"c"]


@pytest.mark.parametrize("turns", [0, 20])
async def test_a_cancelled_flush_fails_the_receipts_that_wait_for_it(turns: int) -> None:
    """Whether it was cancelled before its first step, or while its ledger wrote."""
    ledgers = FakeLedgers()
    async with running_broker(ledgers) as broker:
        client = FakeClient(broker)
        await publish(client, 3)
        await client.consumer()
        await client.received(3)
        await client.ack(client.messages[0].row())  # makes the cursor's ledger
        ledgers.hold = True
        first = client.ack(client.messages[1].row())
        await settle(turns)
        second = client.ack(client.messages[2].row())
        await subscription(broker).close(TopicNotServed("crash"), fenced=True)
        for receipt in (first, second):
            with pytest.raises(MagnetarError):
                async with asyncio.timeout(1):
                    await receipt
        ledgers.hold = False


class LostAnswers(MemoryMetadataStore):
    """What it is told to write to a cursor is written or not (`does`), and the connection is lost before that is answered.

    Whoever reads the node back at once is not answered either.
    """

    def __init__(self, does: bool) -> None:
        super().__init__()
        self.does = does
        self.slow = False
        self.asked, self.lost = asyncio.Event(), asyncio.Event()
        self.unread = 1

    async def put(self, path: str, value: bytes, *, version: int) -> int:
        """See MetadataStore."""
        if not self.slow or "/cursors/" not in path:
            return await super().put(path, value, version=version)
        self.slow = False
        if self.does:
            await super().put(path, value, version=version)
        self.asked.set()
        await self.lost.wait()
        raise ConnectionLost("what became of it is not known")

    async def get(self, path: str) -> Versioned | None:
        """See MetadataStore."""
        if self.lost.is_set() and self.unread and "/cursors/" in path:
            self.unread -= 1
            raise ConnectionLost("still")
        return await super().get(path)


@pytest.mark.parametrize("does", [True, False])
async def test_a_subscription_goes_on_after_a_write_of_its_pointer_of_which_nobody_hears(does: bool) -> None:
    """It is no other owner's: what is written next is written, and the topic goes on."""
    metadata = LostAnswers(does)
    async with running_broker(metadata=metadata) as broker:
        client = FakeClient(broker)
        await publish(client, 2)
        await client.consumer()
        await client.received(2)
        metadata.slow = True
        metadata.lost.set()
        for message in client.messages:
            await client.ack(message.row())
        assert not metadata.unread
        client.publish_batch([b"more"], first=2, producer_id=9)
        await client.confirmed(3)


@pytest.mark.parametrize("does", [True, False])
async def test_properties_that_are_set_by_a_write_of_which_nobody_hears_are_written_again(does: bool) -> None:
    metadata = LostAnswers(does)
    async with running_broker(metadata=metadata) as broker:
        await FakeClient(broker).consumer(properties={"team": "red"})
        metadata.slow = True
        metadata.lost.set()
        await subscription(broker).cursor.set_properties({"team": "blue"})
        assert not metadata.unread
        assert (await pointer(metadata)).properties == {"team": "blue"}
        assert subscription(broker).cursor.properties == {"team": "blue"}


@pytest.mark.parametrize("does", [True, False])
async def test_a_subscription_is_deleted_while_its_pointer_is_written(does: bool) -> None:
    """It waits for what becomes of that. Its write, which nobody hears of, is no other owner's: the topic goes on."""
    metadata = LostAnswers(does)
    async with running_broker(metadata=metadata) as broker:
        client = FakeClient(broker)
        await publish(client, 1)
        await client.consumer()
        await client.received(1)
        metadata.slow = True
        receipt = client.ack(client.messages[0].row())
        await metadata.asked.wait()
        deletion = client.ask(c.DeleteSubscription, "orders", "billing", True)
        await settle()
        assert not deletion.done()
        metadata.lost.set()
        await deletion
        with pytest.raises(MagnetarError):
            await receipt
        assert await metadata.get(cursor_path(TOPIC, "billing")) is None
        client.publish_batch([b"more"], first=1, producer_id=9)
        await client.confirmed(2)

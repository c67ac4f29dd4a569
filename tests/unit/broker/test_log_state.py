"""States that follow from a topic's log: stored with the position that they describe, replayed from there."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from magnetar.broker import Broker, Topic
from magnetar.broker.cursors.pointer import NO_LEDGER, PointerRecord
from magnetar.broker.log.records import log_state_path
from magnetar.broker.topics.coalescer import GatheredEntry
from magnetar.broker.topics.log_state import StoredLogState
from magnetar.proto.entry import Entry
from magnetar.proto.errors import (
    BookieUnavailable,
    DataDirectoryError,
    MagnetarError,
    NotEnoughBookies,
    ServiceNotReady,
    TopicNotServed,
)
from support.broker_kit import TOPIC, FakeClient, running_broker, settle
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore
from support.virtual_time import in_virtual_time

PATH = log_state_path(TOPIC, "seen")


class Seen:
    """How many messages each entry has. `changes` are what was seen since the last call."""

    def __init__(self) -> None:
        self.entries: dict[str, int] = {}
        self.new: dict[str, int] = {}
        self.generation = 0
        self.replayed = 0
        self.since_ms = 0

    def _see(self, ledger_id: int, entry_id: int, messages: int) -> None:
        place = f"{ledger_id} {entry_id}"
        if place not in self.entries:
            self.entries[place] = self.new[place] = messages

    def confirmed(self, ledger_id: int, entry_id: int, context: GatheredEntry) -> None:
        self._see(ledger_id, entry_id, context.messages)

    def replay(self, ledger_id: int, entry_id: int, entry: Entry) -> None:
        self.replayed += 1
        self._see(ledger_id, entry_id, entry.message_count)

    def clear(self) -> None:
        self.entries.clear()
        self.new.clear()

    def apply(self, piece: bytes) -> Iterable[int]:
        self.entries.update(json.loads(piece))
        return (1,)

    def pieces(self) -> Iterator[bytes]:
        for place, messages in list(self.entries.items()):
            yield json.dumps({place: messages}).encode()

    def changes(self) -> Iterable[bytes]:
        new, self.new = self.new, {}
        return [json.dumps(new).encode()] if new else []

    def needed_since_ms(self) -> int:
        return self.since_ms


class Stage:
    """What outlives a broker, and what was published."""

    def __init__(self, *, every: int = 3, **settings: Any) -> None:
        self.ledgers, self.metadata = FakeLedgers(), MemoryMetadataStore()
        self.every = every
        self.settings = {
            "max_inline_cursor_bytes": 1,
            "retention_bytes": 1 << 30,
            "retention_ms": 1 << 30,
        } | settings
        self.published = 0

    @asynccontextmanager
    async def served(self, *, crashes: bool = True) -> AsyncIterator["Served"]:
        """By the next broker, which is killed in the end unless it does not `crash`."""
        async with running_broker(self.ledgers, self.metadata, **self.settings) as broker:
            topic = await broker.topic(TOPIC, create=True)
            state = Seen()
            client = FakeClient(broker)
            await client.producer(name="p")
            served = Served(self, broker, topic, client, state)
            served.stored = await topic.states.open(
                "seen", state, every_entries=self.every, interval_ms=60_000
            )
            yield served
            if crashes:
                topic.ledger.fence(TopicNotServed("crash"))

    async def pointer(self) -> PointerRecord:
        found = await self.metadata.get(PATH)
        assert found is not None
        return PointerRecord.decode(found.value, PATH)


class Served:
    stored: StoredLogState

    def __init__(self, stage: Stage, broker: Broker, topic: Topic, client: FakeClient, state: Seen) -> None:
        self.stage, self.broker, self.topic, self.client, self.state = stage, broker, topic, client, state

    async def publish(self, entries: int = 1) -> None:
        """So many entries of two messages."""
        for _ in range(entries):
            before = len(self.client.receipts)
            self.client.publish_batch([b"a", b"b"], first=2 * self.stage.published)
            self.stage.published += 1
            await self.client.until(lambda before=before: len(self.client.receipts) > before)

    async def write(self) -> None:
        """What was confirmed before is stored when this returns."""
        self.stored._begin_write()
        while self.stored._task is not None:
            await asyncio.wait([self.stored._task])

    def complete(self) -> bool:
        return list(self.state.entries.values()) == [2] * self.stage.published


async def test_what_is_behind_the_stored_position_is_replayed_and_nothing_else() -> None:
    stage = Stage()
    async with stage.served() as first:
        await first.publish(4)
        await settle()
        assert first.stored.needed_from == (0, 3, 0)
    async with stage.served() as second:
        assert second.complete()
        assert second.state.replayed == 1
        await second.publish(1)
        assert second.complete()
    async with stage.served() as third:
        assert third.complete()
        assert third.state.replayed == 2


async def test_a_state_that_is_closed_needs_no_replay_whether_it_fits_the_node_or_not() -> None:
    for inline in (1, 10_000):
        stage = Stage(max_inline_cursor_bytes=inline)
        for _ in range(2):
            async with stage.served(crashes=False) as served:
                assert served.complete()
                assert not served.state.replayed
                await served.publish(5)
        assert ((await stage.pointer()).ledger_id == NO_LEDGER) == (inline > 1)


async def test_an_empty_state_and_a_change_of_nothing_are_positions_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage(every=1)
    async with stage.served() as served:
        assert served.complete()
    async with stage.served() as served:
        await served.publish(1)
        await settle()
        served.stored.confirmed(0, 0, GatheredEntry())  # it is there already
        await settle()
    async with stage.served() as served:
        assert served.complete()
        assert not served.state.replayed
    assert "seen state" not in caplog.text


async def test_the_position_is_that_of_the_first_piece_although_the_state_goes_on_changing() -> None:
    stage = Stage(every=4)
    async with stage.served() as served:
        await served.publish(3)
        stage.ledgers.hold = True
        served.client.publish_batch([b"a", b"b"], first=6)
        stage.published += 1
        await settle()
        stage.ledgers.confirm()  # the fourth entry: a snapshot of several pieces begins
        await settle()
        for number in range(4, 6):  # entries of the log are confirmed between two pieces
            served.client.publish_batch([b"a", b"b"], first=2 * number)
            stage.published += 1
            await settle()
            stage.ledgers.confirm(1)
        await settle()
        while stage.ledgers.writers and any(writer.waiting for writer in stage.ledgers.writers.values()):
            stage.ledgers.confirm()
            await settle()
        stage.ledgers.hold = False
        assert served.complete()
        assert served.stored.needed_from == (0, 4, 0)
    async with stage.served() as heir:
        assert heir.complete()
        assert heir.state.replayed == 2


async def test_what_is_accepted_and_not_confirmed_is_in_no_state() -> None:
    stage = Stage(every=1)
    async with stage.served() as served:
        stage.ledgers.hold = True
        served.client.publish_batch([b"a"], first=0)
        await settle()
        served.topic._accepted(0, 0, served.topic.ledger.appending._pending.first.context)
        await settle()
        assert served.client.receipts
        assert not served.state.entries
        assert served.stored.needed_from == (0, 0, 0)
        stage.ledgers.hold = False


async def test_a_record_that_is_missing_costs_a_longer_replay() -> None:
    for damaged in range(3):
        stage = Stage(every=2)
        async with stage.served() as served:
            for _ in range(3):  # a snapshot of two pieces, and two changes
                await served.publish(2)
                await settle()
        ledger_id = (await stage.pointer()).ledger_id
        assert len(stage.ledgers.ledgers[ledger_id].entries) == 4
        stage.ledgers.damaged.add((ledger_id, 1 + damaged))
        async with stage.served() as heir:
            assert heir.complete()
            assert heir.state.replayed == (6, 4, 2)[damaged]


async def test_a_damaged_node_is_made_anew_from_all_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage()
    async with stage.served() as served:
        await served.publish(4)
        await settle()
    found = await stage.metadata.get(PATH)
    assert found is not None
    await stage.metadata.put(PATH, b"\xc1", version=found.version)
    async with stage.served() as heir:
        assert heir.complete()
        assert heir.state.replayed == 4
    assert "made anew from the topic's log" in caplog.text
    async with stage.served() as third:
        assert third.complete()


async def test_a_damaged_entry_of_the_log_is_left_out_and_one_that_is_away_is_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage(every=100)
    async with stage.served() as served:
        await served.publish(3)
    stage.ledgers.damaged.add((0, 1))
    stage.ledgers.unopened[0] = BookieUnavailable("away")
    async with running_broker(stage.ledgers, stage.metadata) as broker:
        del stage.ledgers.unopened[0]
        topic = await broker.topic(TOPIC, create=True)
        stage.ledgers.unopened[0] = BookieUnavailable("away")
        state = Seen()
        stored = await topic.states.open("seen", state, every_entries=100, interval_ms=60_000)
        with pytest.raises(ServiceNotReady, match="cannot be read yet, and is tried again: away"):
            stored.check()
        assert topic.retention.lowest().position == (0, 0, 0)
        del stage.ledgers.unopened[0]
        while not stored.following:
            await asyncio.sleep(0)
        stored.check()
        assert list(state.entries) == ["0 0", "0 2"]
    assert "lacks 1 entries" in caplog.text


async def test_attached_and_old_and_trimmed_ledgers_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(every=100, max_ledger_entries=1)
    async with stage.served() as served:
        await served.publish(4)
        await settle()
        rows = served.topic.ledger.list.ledgers
        assert len(rows) == 4
        rows[1].stored_id = 999  # as of a ledger that was attached there
        rows[2].last_append_ms = rows[3].last_append_ms = 2_000_000
        state = Seen()
        stored = await served.topic.states.open("other", state, every_entries=100, interval_ms=60_000)
        assert not state.entries  # it begins at the end
        await served.topic.states.drop("other")
        stored = StoredLogState("other", state, served.topic.ledger, served.topic._components, 100, 60_000)
        await stored._replay((-1, 0))
        assert list(state.entries) == [
            f"{rows[0].ledger_id} 0",
            f"{rows[2].ledger_id} 0",
            f"{rows[3].ledger_id} 0",
        ]
        assert "lacks" not in caplog.text
        state.clear()
        state.since_ms = 1_500_000
        await stored._replay((-1, 0))
        assert list(state.entries) == [f"{rows[2].ledger_id} 0", f"{rows[3].ledger_id} 0"]


async def test_the_log_is_kept_from_the_stored_position_on_and_freely_once_all_is_stored() -> None:
    stage = Stage(every=100, max_ledger_entries=1, retention_bytes=0, retention_ms=0)
    async with stage.served() as served:
        await served.publish(3)
        await FakeClient(served.broker).consumer(1, "billing", start=("latest", None))
        lowest = served.topic.retention.lowest()
        assert lowest == ((0, 0, 0), "the seen state is not stored beyond it yet")
        await served.write()
        assert served.topic.retention.lowest().position > (0, 0, 0)


async def test_a_failed_write_is_said_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stage = Stage(every=2, retry_initial_ms=1, retry_max_ms=1)
    async with stage.served() as served:
        await served.publish(2)
        await settle()
        (writer,) = [
            writer for writer in stage.ledgers.writers.values() if writer.ledger.properties["kind"] == "seen"
        ]
        writer.fail_after = 0
        stage.ledgers.fail_create.extend(NotEnoughBookies("none") for _ in range(5))
        put = stage.metadata.put
        failures = 3

        async def failing(path: str, value: bytes, *, version: int) -> int:
            nonlocal failures
            if path == PATH and failures:
                failures -= 1
                raise BookieUnavailable("no metadata either")
            return await put(path, value, version=version)

        stage.metadata.put = failing  # type: ignore[method-assign]
        await served.publish(2)
        await served.write()
        assert served.stored.needed_from[:2] == (0, 4)
        assert [record.message for record in caplog.records].count(
            f"the seen state of topic {TOPIC} cannot be written yet, and is tried again: the bookie has failed"
        ) == 1  # fmt: skip
    async with stage.served() as heir:
        assert heir.complete()
        assert not heir.state.replayed


@in_virtual_time
async def test_entries_that_are_too_few_are_stored_after_a_while() -> None:
    stage = Stage(every=100)
    async with stage.served() as served:
        await served.publish(1)
        await asyncio.sleep(59)
        assert served.stored.needed_from == (0, 0, 0)
        await asyncio.sleep(2)
        assert served.stored.needed_from == (0, 1, 0)
        stage.ledgers.log.clear()
        await asyncio.sleep(200)
        assert not stage.ledgers.log  # nothing is written while nothing comes


async def test_rule_52_a_former_owner_meets_the_new_one_at_its_next_write() -> None:
    stage = Stage(every=2)
    async with stage.served() as old:
        await old.publish(2)
        await settle()
        async with stage.served(crashes=False) as new:
            assert new.complete()
            old.stored._unwritten = 2
            with pytest.raises(MagnetarError):
                await old.stored._write()
            assert old.topic.not_served is not None
            await new.publish(1)


async def test_it_is_switched_on_and_off_and_deleted_with_its_topic() -> None:
    stage = Stage(every=1)
    async with stage.served(crashes=False) as served:
        await served.publish(3)
        await settle()
        await served.topic.states.drop("seen")
        assert await served.topic.states.stored() == []
        assert stage.ledgers.topic_ledgers() == list(stage.ledgers.ledgers)
        await served.topic.states.drop("seen")
        state = Seen()
        await served.topic.states.open("seen", state, every_entries=1, interval_ms=60_000)
        assert not state.entries
        await served.publish(1)
        await settle()
        assert len(state.entries) == 1
        await served.broker.delete_topic(TOPIC, force=True)
    assert not stage.ledgers.ledgers
    assert await stage.metadata.get(PATH) is None


@pytest.mark.parametrize("opened", [True, False], ids=["opened", "found"])
async def test_a_former_owner_that_drops_a_state_again_leaves_the_next_owners_alone(opened: bool) -> None:
    """Its first try fails, the next owner takes over, and then it tries again before it has learned of that."""
    stage = Stage(every=1)
    async with stage.served() as old:
        await old.publish(2)
        await settle()
        states = old.topic.states
        if not opened:
            await states._by_kind.pop("seen").close(fenced=True)
        get = stage.metadata.get

        async def away(path: str) -> Any:
            stage.metadata.get = get  # type: ignore[method-assign]
            raise BookieUnavailable("the store is away")

        stage.metadata.get = away  # type: ignore[method-assign]
        with pytest.raises(BookieUnavailable):
            await states.drop("seen")
        async with stage.served(crashes=False) as new:
            assert new.complete()
            await new.publish(2)
            await settle()
            ledger_id = (await stage.pointer()).ledger_id
            with pytest.raises(MagnetarError):
                await states.drop("seen")
            assert (await stage.pointer()).ledger_id == ledger_id
            assert ledger_id in stage.ledgers.ledgers
            assert old.topic.not_served is not None
            await new.publish(2)
            await settle()
            assert new.topic.not_served is None
    async with stage.served() as heir:
        assert heir.complete()


async def test_a_state_that_was_being_deleted_begins_anew_at_the_end() -> None:
    stage = Stage(every=1)
    async with stage.served() as served:
        await served.publish(3)
        await settle()
        found = await stage.pointer()
        found.deleting, found.snapshot = True, []
        stored = await stage.metadata.get(PATH)
        assert stored is not None
        await stage.metadata.put(PATH, found.encode(), version=stored.version)
    async with stage.served() as heir:
        assert not heir.state.entries
        assert heir.stored.following


async def test_a_defect_in_a_state_ends_the_topic_and_its_next_owner_makes_it_of_the_log() -> None:
    stage = Stage()
    async with stage.served() as served:
        await served.publish(1)
        served.state.new = None  # type: ignore[assignment]
        served.client.publish_batch([b"a", b"b"], first=2)
        stage.published += 1
        await served.client.until(lambda: served.topic.not_served is not None)
    async with stage.served() as heir:
        assert heir.complete()


async def test_a_piece_that_cannot_be_applied_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(every=2)
    async with stage.served() as served:
        await served.publish(4)
        await settle()

    def apply(self: Seen, piece: bytes) -> Iterable[int]:
        found = json.loads(piece or b"{}")
        if "0 2" in found:
            raise DataDirectoryError("damaged")
        self.entries.update(found)
        return (1,)

    monkeypatch.setattr(Seen, "apply", apply)
    async with stage.served() as heir:
        assert heir.complete()
        assert heir.state.replayed == 2


@pytest.mark.parametrize("every", [1, 6])
async def test_pieces_are_made_one_at_a_time_so_that_a_large_state_stops_nobody(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0

    def changes(self: Seen) -> Iterator[bytes]:
        nonlocal made
        new, self.new = self.new, {}
        for place, messages in new.items():
            made += 1
            yield json.dumps({place: messages}).encode()

    monkeypatch.setattr(Seen, "changes", changes)
    stage = Stage(every=6)
    async with stage.served() as served:
        await served.publish(every)
        await served.write()
        assert made == 1, "a snapshot makes none of them but the first"
        stage.ledgers.hold, before = True, made
        for number in range(every, every + 6):
            served.client.publish_batch([b"a", b"b"], first=2 * number)
            stage.published += 1
            await settle()
            stage.ledgers.confirm(1)
            await settle()
        assert made - before == 2, "the one that is being written, and the next one"
        while any(writer.waiting for writer in stage.ledgers.writers.values()):
            stage.ledgers.confirm()
            await settle()
        stage.ledgers.hold = False
        assert made - before == 6
    async with stage.served() as heir:
        assert heir.complete()
        assert heir.state.replayed == 0


async def test_rule_48_a_state_that_cannot_be_closed_costs_itself_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(every=100)
    async with stage.served(crashes=False) as served:
        await served.publish(2)

        def pieces(self: Seen) -> Iterator[bytes]:
            raise ValueError("a defect")

        with monkeypatch.context() as patch:
            patch.setattr(Seen, "pieces", pieces)
            await served.broker.unload(TOPIC, TopicNotServed("it moves"))
        assert "was not closed cleanly: a defect" in caplog.text
        assert served.topic.ledger.list.ledgers[-1].closed, "as everything else is"
    async with stage.served() as heir:
        assert heir.complete()

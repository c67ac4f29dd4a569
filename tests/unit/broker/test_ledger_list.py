"""The ledger list in segments: what is stored is what was committed, whatever crashes, and one more ledger writes little."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest

from magnetar.broker.log import ledger_list
from magnetar.broker.log.ledger_list import HEAD_LEDGERS, SEGMENT_LEDGERS, LedgerList
from magnetar.broker.log.records import (
    Archive,
    LedgerInfo,
    TopicRecord,
    segment_path,
    segments_path,
    topic_path,
)
from magnetar.proto.errors import DataDirectoryError, MagnetarError, VersionConflict
from support.broker_kit import TOPIC
from support.doomed import Doomed
from support.memory_metadata import MemoryMetadataStore


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few ledgers make many segments."""
    monkeypatch.setattr(ledger_list, "HEAD_LEDGERS", 3)
    monkeypatch.setattr(ledger_list, "SEGMENT_LEDGERS", 7)


def closed(number: int, entries: int = 1) -> LedgerInfo:
    return LedgerInfo(number, number, entries, entries, 10, 1, 2, True, number + 1_000_000)


async def loaded(metadata: Any) -> LedgerList:
    found = LedgerList(TOPIC, metadata)
    assert await found.load(create_ms=None)
    return found


def contents(found: LedgerList) -> tuple[list[tuple[int, str]], list[int], list[int]]:
    archived = found.archived_after(-1, 1 << 30)
    return (
        [(info.ledger_id, location) for info, location in archived],
        [info.ledger_id for info in found.ledgers],
        sorted(found.record.trimmed),
    )


async def named(metadata: Any) -> tuple[list[int], list[int]]:
    """Segments that are there, and those that the stored head names."""
    head = TopicRecord.decode((await metadata.get(topic_path(TOPIC))).value, "")
    there = [int(name) for name in await metadata.children(segments_path(TOPIC))]
    return there, sorted(segment.number for segment in head.segments)


class Walk:
    """Random changes of a list, and a model of what it must have then: plain lists."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.archived: list[tuple[int, str]] = []
        self.ledgers: list[int] = []
        self.trimmed: list[int] = []
        self.next_id = 0

    def contents(self) -> tuple[list[tuple[int, str]], list[int], list[int]]:
        return list(self.archived), list(self.ledgers), sorted(self.trimmed)

    async def step(self, found: LedgerList) -> None:
        """One commit; the model follows only when it has succeeded."""
        match self.rng.choice(["open", "open", "open", "attach", "trim", "archive", "move", "empty"]):
            case "open" | "attach" as kind:
                count = 1 if kind == "open" else self.rng.randrange(1, 20)
                if found.ledgers:
                    found.ledgers[-1].closed = True
                    found.ledgers[-1].entries = max(found.ledgers[-1].entries, 1)
                added = [closed(self.next_id + number) for number in range(count)]
                added[-1].closed = kind == "attach"
                self.next_id += count + self.rng.randrange(3)
                await found.commit(append=added, next_index=self.next_id)
                self.ledgers += [info.ledger_id for info in added]
            case "trim":
                count = self.rng.randrange(len(self.ledgers) + 1)
                await found.commit(trim=count)
                self.trimmed += [number + 1_000_000 for number in self.ledgers[:count]]
                del self.ledgers[:count]
            case "archive" if self.ledgers:
                count = self.rng.randrange(1, len(self.ledgers) + 1)
                location = self.rng.choice(["file:///a", "file:///b"])
                last = self.ledgers[count - 1]
                await found.commit(archives=[*found.record.archives, Archive(location, last)])
                self.archived += [(number, location) for number in self.ledgers[:count]]
                self.trimmed += [number + 1_000_000 for number in self.ledgers[:count]]
                del self.ledgers[:count]
            case "move" if self.archived:
                await found.commit(archives=[Archive("file:///c", self.archived[-1][0])])
                self.archived = [(number, "file:///c") for number, _ in self.archived]
            case "empty" if self.ledgers:
                found.ledgers[-1].closed, found.ledgers[-1].entries = True, 0
                if found.ledgers[-1] not in found.record.ledgers:  # sealed: those have entries
                    found.ledgers[-1].entries = 1
                    return
                await found.commit()
                self.trimmed.append(self.ledgers.pop() + 1_000_000)

    def check(self, found: LedgerList) -> None:
        assert contents(found) == self.contents()
        for at, number in enumerate(self.ledgers):
            info = found.info(number)
            assert info is found.ledgers[at] is found.stored(number + 1_000_000)
        assert len(found._stored) == len(self.ledgers)
        assert len(found._by_id) == len(self.archived) + len(self.ledgers)
        for number, location in self.archived:
            one = found.archived(number)
            assert one is not None
            assert (one.info.ledger_id, one.location) == (number, location)
            assert found.info(number) is one.info
            assert found.stored(number + 1_000_000) is None
        assert len(found.record.ledgers) <= max(ledger_list.HEAD_LEDGERS, 1)
        last = [*found.archived_ledgers, *found.ledgers][-len(found.record.ledgers) :]
        assert found.record.ledgers == last or not found.record.ledgers


@pytest.mark.parametrize("seed", range(20))
async def test_what_is_stored_is_what_was_committed(small: None, seed: int) -> None:
    metadata = MemoryMetadataStore()
    found = LedgerList(TOPIC, metadata)
    await found.load(create_ms=1)
    walk = Walk(seed)
    for _ in range(80):
        await walk.step(found)
        walk.check(found)
        if walk.rng.random() < 0.3:
            found = await loaded(metadata)
            walk.check(found)
        there, names = await named(metadata)
        assert there == names
    await found.commit(trim=len(found.ledgers))
    await found.delete()
    assert await metadata.children("/topics") == []


# --- crashes ---------------------------------------------------------------------------------------------------------


async def survives_crash(seed: int, point: int, *, takes_effect: bool) -> bool:
    """The owner dies at a write of the store. The next one has what was committed, or that and the change under way."""
    metadata = MemoryMetadataStore()
    doomed = Doomed(metadata)
    found = LedgerList(TOPIC, doomed)
    await found.load(create_ms=1)
    walk = Walk(seed)
    for _ in range(12):
        await walk.step(found)
    before = walk.contents()
    doomed.arm(point, takes_effect=takes_effect)
    step = asyncio.ensure_future(walk.step(found))
    death = asyncio.ensure_future(doomed.dead.wait())
    await asyncio.wait([step, death], return_when=asyncio.FIRST_COMPLETED)
    died = doomed.dead.is_set()
    for task in (step, death):
        task.cancel()
    await asyncio.wait([step, death])
    successor = await loaded(metadata)
    if died:
        # What the change would have made of it: the same walk without a crash.
        other = LedgerList(TOPIC, MemoryMetadataStore())
        await other.load(create_ms=1)
        after = Walk(seed)
        for _ in range(13):
            await after.step(other)
        assert contents(successor) in (before, after.contents())
    else:
        assert contents(successor) == walk.contents()
    await successor.commit()
    await successor.sweep()
    there, names = await named(metadata)
    assert there == names, "no orphan after the sweep"
    await successor.commit(append=[closed(1_000)])
    assert contents(await loaded(metadata)) == contents(successor)
    return died


async def crash_everywhere() -> int:
    points = 0
    for seed in range(60):
        for takes_effect in (False, True):
            point = 0
            while await survives_crash(seed, point, takes_effect=takes_effect):
                point += 1
            points += point
    return points


async def test_a_crash_at_every_write_of_a_change_loses_nothing(small: None) -> None:
    assert await crash_everywhere() > 150


class HeadFirst(LedgerList):
    """A planted defect: the head is stored before the segments that it names."""

    async def commit(self, **named: Any) -> None:
        metadata, delayed = self._metadata, list[tuple[str, bytes]]()

        async def create(path: str, value: bytes) -> int:
            if path.startswith(segments_path(TOPIC)):
                delayed.append((path, value))
                return 0
            return await metadata.create(path, value)

        class Reordered:
            def __getattr__(self, name: str) -> Any:
                return create if name == "create" else getattr(metadata, name)

        self._metadata = Reordered()
        try:
            await super().commit(**named)
        finally:
            self._metadata = metadata
        for path, value in delayed:
            await metadata.create(path, value)


class DeletesFirst(LedgerList):
    """A planted defect: old segments are deleted before a head is stored that does not name them."""

    async def _seal(self, head: TopicRecord) -> None:
        before = list(head.segments)
        await super()._seal(head)
        for segment in before:
            if segment not in head.segments:
                await self._delete_segment(segment.number)


@pytest.mark.parametrize("defect", [HeadFirst, DeletesFirst])
async def test_teeth_the_order_of_writes(
    small: None, monkeypatch: pytest.MonkeyPatch, defect: type[LedgerList]
) -> None:
    monkeypatch.setitem(globals(), "LedgerList", defect)
    with pytest.raises(DataDirectoryError, match="is missing, a part of the ledger list"):
        await crash_everywhere()


# --- two owners, failures ---------------------------------------------------------------------------------------------


async def test_rule_23_of_two_owners_that_seal_the_list_one_gets_its_own_stored(small: None) -> None:
    metadata = MemoryMetadataStore()
    old = LedgerList(TOPIC, metadata)
    await old.load(create_ms=1)
    await old.commit(append=[closed(number) for number in range(3)])
    new = await loaded(metadata)
    await new.commit()
    await new.commit(append=[closed(3)])
    with pytest.raises(VersionConflict):
        await old.commit(append=[closed(77)])  # its segment is written, and no head names it
    there, names = await named(metadata)
    assert len(there) == len(names) + 1
    found = await loaded(metadata)
    assert contents(found)[1] == [0, 1, 2, 3]
    await found.sweep()
    there, names = await named(metadata)
    assert there == names


async def test_a_list_that_changes_while_it_is_read_is_read_anew(small: None) -> None:
    metadata = MemoryMetadataStore()
    old = LedgerList(TOPIC, metadata)
    await old.load(create_ms=1)
    await old.commit(append=[closed(number) for number in range(5)])
    get, changes = metadata.get, 0

    async def changing(path: str) -> Any:
        nonlocal changes
        found = await get(path)
        if path == topic_path(TOPIC) and not changes:
            changes += 1
            await old.commit(
                append=[closed(number) for number in range(5, 9)]
            )  # another segment replaces the first
        return found

    metadata.get = changing  # type: ignore[method-assign]
    found = await loaded(metadata)
    assert changes == 1
    assert contents(found)[1] == list(range(9))


async def test_a_missing_segment_is_damage_and_says_so(small: None) -> None:
    metadata = MemoryMetadataStore()
    found = LedgerList(TOPIC, metadata)
    await found.load(create_ms=1)
    await found.commit(append=[closed(number) for number in range(5)])
    path = segment_path(TOPIC, found.record.segments[0].number)
    await metadata.delete(path)
    with pytest.raises(DataDirectoryError, match=f"{path} is missing"):
        await loaded(metadata)


class Busy(MemoryMetadataStore):
    """Fails once, at a write that is counted down to."""

    left = -1

    async def commit(self, operations: Any) -> None:
        self._count()
        await super().commit(operations)

    async def next_id(self, name: str, count: int = 1) -> int:
        self._count()
        return await super().next_id(name, count)

    def _count(self) -> None:
        self.left -= 1
        if self.left == -1:
            raise MagnetarError("the store is busy")


async def test_a_change_that_fails_at_any_write_can_be_tried_again(small: None) -> None:
    for failing in range(4):
        metadata = Busy()
        found = LedgerList(TOPIC, metadata)
        await found.load(create_ms=1)
        await found.commit(append=[closed(number) for number in range(6)])
        metadata.left = failing
        for more in ([closed(6), closed(7)], [closed(8), closed(9)]):
            for _ in range(2):
                with contextlib.suppress(MagnetarError):
                    await found.commit(append=more)
                    break
        assert contents(found)[1] == list(range(10))
        assert contents(await loaded(metadata))[1] == list(range(10))


# --- scale -----------------------------------------------------------------------------------------------------------


class Counting(MemoryMetadataStore):
    """Counts the bytes that are written."""

    written = 0

    async def commit(self, operations: Any) -> None:
        self.written += sum(len(getattr(one, "value", b"")) for one in operations)
        await super().commit(operations)


async def grown(count: int) -> tuple[Counting, LedgerList]:
    metadata = Counting()
    found = LedgerList(TOPIC, metadata)
    await found.load(create_ms=1)
    now_ms = 1_790_000_000_000
    for first in range(0, count, 10_000):
        await found.commit(
            append=[
                LedgerInfo(number << 20, number << 20, 50_000, 50_000, 1 << 31, now_ms, now_ms, True)
                for number in range(first, min(first + 10_000, count))
            ]
        )
    metadata.written = 0
    return metadata, found


async def bytes_of_more(metadata: Counting, found: LedgerList, more: int = 1_000) -> tuple[float, int]:
    """Average and maximum of what a commit of one more ledger writes, with all segments it makes."""
    most = 0
    start = found.ledgers[-1].ledger_id
    for number in range(1, more + 1):
        before = metadata.written
        id_ = start + (number << 20)
        await found.commit(append=[LedgerInfo(id_, id_, 50_000, 50_000, 1 << 31, 1 << 40, 1 << 40, True)])
        most = max(most, metadata.written - before)
    return metadata.written / more, most


async def test_one_more_ledger_writes_a_few_kilobytes_however_many_there_are() -> None:
    averages = []
    for count in (10, 1_000, 100_000):
        metadata, found = await grown(count)
        average, most = await bytes_of_more(metadata, found)
        averages.append(average)
        assert most < 100_000, "one segment, and a head"
        assert len(found.record.encode()) < 12_000
    assert averages[2] < averages[0] + 30 * 100_000 / SEGMENT_LEDGERS, "the table of segments"


async def test_every_node_stays_far_below_the_packet_of_the_store() -> None:
    metadata, found = await grown(20_000)
    for name in await metadata.children(segments_path(TOPIC)):
        stored = await metadata.get(f"{segments_path(TOPIC)}/{name}")
        assert stored is not None
        assert len(stored.value) < 100_000
    assert len(found.record.ledgers) <= HEAD_LEDGERS


async def test_trimming_rewrites_no_segment() -> None:
    metadata, found = await grown(5_000)
    numbers = [segment.number for segment in found.record.segments]
    for trimmed in range(10, 5_000, 490):
        metadata.written = 0
        await found.commit(trim=trimmed - (5_000 - len(found.ledgers)))
        assert metadata.written < 12_000 + 10 * len(found.record.trimmed)
        found.record.trimmed.clear()
    assert len(found.record.trimmed_ranges) == 1
    assert [segment.number for segment in found.record.segments] == numbers[-1:]
    assert len(await metadata.children(segments_path(TOPIC))) == 1


async def test_a_list_of_100_000_ledgers_is_loaded_and_looked_up_in_short_turns() -> None:
    metadata, _ = await grown(100_000)
    turns, ended = 0, False

    async def count_turns() -> None:
        nonlocal turns
        while not ended:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count_turns())
    found = await loaded(metadata)
    ended = True
    await counting
    assert turns >= 100_000 / SEGMENT_LEDGERS - 1, "a segment a turn"
    assert len(found.ledgers) == 100_000
    last = found.ledgers[-1].ledger_id
    assert found.normalise((last - 1, 0, 0)) == (last, 0, 0)
    assert found.closed_before((found.ledgers[500].ledger_id, 0, 0)) == 500


async def test_a_topic_that_is_made_again_has_nothing_of_the_one_that_was_deleted(small: None) -> None:
    found = LedgerList(TOPIC, MemoryMetadataStore())
    await found.load(create_ms=1)
    await found.commit(append=[closed(number) for number in range(9)])
    await found.commit(archives=[Archive("file:///a", 4)])
    await found.commit(trim=len(found.ledgers), deleting=True)
    await found.delete()
    assert not await found.load(create_ms=2)
    assert contents(found) == ([], [], [])


async def delete(found: LedgerList) -> None:
    """As the managed ledger does it."""
    await found.commit(deleting=True)
    while found.ledgers:
        await found.commit(trim=min(4, len(found.ledgers)))
    await found.delete()


@pytest.mark.parametrize("takes_effect", [False, True], ids=["before", "after"])
async def test_a_crash_at_every_write_of_a_deletion_leaves_what_can_be_deleted(
    small: None, takes_effect: bool
) -> None:
    died, point = True, -1
    while died:
        point += 1
        metadata = MemoryMetadataStore()
        doomed = Doomed(metadata)
        found = LedgerList(TOPIC, doomed)
        await found.load(create_ms=1)
        await found.commit(append=[closed(number) for number in range(20)])
        await found.commit(archives=[Archive("file:///a", 4)])
        doomed.arm(point, takes_effect=takes_effect)
        deleting = asyncio.ensure_future(delete(found))
        death = asyncio.ensure_future(doomed.dead.wait())
        await asyncio.wait([deleting, death], return_when=asyncio.FIRST_COMPLETED)
        died = doomed.dead.is_set()
        for task in (deleting, death):
            task.cancel()
        await asyncio.wait([deleting, death])
        if await metadata.get(topic_path(TOPIC)) is not None:
            successor = await loaded(metadata)
            assert successor.record.deleting or (point, takes_effect) == (0, False)
            await delete(successor)
        assert await metadata.children("/topics") == []
    assert point > 6

"""Chunks of a message through dispatch: whatever consumers do, each message comes whole at one of them.

Each consumer has an assembler, as a client has: it must never meet a chunk without those before it.
"""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.broker.dispatch.core.instructions import Stop
from magnetar.broker.dispatch.core.selection import shared
from magnetar.broker.settings import BrokerSettings
from magnetar.proto.batch_extensions import Chunk, entry_extensions
from magnetar.proto.chunks import Assembler
from support import dispatch_defects
from support.dispatch_kit import Delivered, DispatchWorld

Place = tuple[int, int, int]


class ChunkWorld(DispatchWorld):
    """A world whose consumers put messages together, and acknowledge those that are whole."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.assemblers: dict[str, Assembler[Place]] = {}
        self.whole: dict[bytes, list[str]] = {}  # by chunk id: who had it whole
        self.to_acknowledge: dict[str, list[Place]] = {}

    def delivered(self, delivered: Delivered) -> None:
        entry = self.topic.entry(delivered.key)
        assembler = self.assemblers.setdefault(delivered.consumer, Assembler(1000, 1 << 30, 1e9))
        found = entry_extensions(entry)
        for index in delivered.indexes:
            place = (*delivered.key, index)
            chunk = found[index].chunk if index in found else None
            if chunk is None:
                self.to_acknowledge.setdefault(delivered.consumer, []).append(place)
                continue
            added = assembler.add("p", chunk, place, b"", 0.0)
            assert not added.let_go, (
                f"{delivered.consumer} cannot use {chunk} at {place}: {added.let_go[0].why}"
            )
            assert added.message is not None
            assert not added.repeated, f"{delivered.consumer} has {chunk} already"
            if added.message.finished:
                self.whole.setdefault(chunk.chunk_id, []).append(delivered.consumer)
                self.to_acknowledge.setdefault(delivered.consumer, []).extend(added.message.places)

    def gone(self, name: str) -> None:
        self.assemblers.pop(name, None)
        self.to_acknowledge.pop(name, None)
        self.leave(name)

    def acknowledge_all(self, name: str) -> None:
        places = self.to_acknowledge.pop(name, [])
        if places:
            self.acknowledge(name, [(*place, place[2]) for place in sorted(places)])


def events_of(seed: int) -> list[tuple[Any, ...]]:
    """What happens: entries that take turns of the chunks of four messages at most, and what consumers do."""
    rng = random.Random(seed)
    counts = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
    waiting = [
        [Chunk(bytes([65 + n]) * 8, i, i == count - 1) for i in range(count)]
        for n, count in enumerate(counts)
    ]
    events: list[tuple[Any, ...]] = [("join", "a", 0), ("grant", "a", rng.randint(0, 5))]
    while any(waiting):
        entry: list[Chunk | None] = []
        for _ in range(rng.randint(1, 3)):
            queues = [queue for queue in waiting if queue]
            entry.append(rng.choice(queues).pop(0) if queues and rng.random() < 0.75 else None)
        events.append(("publish", entry, rng.random() < 0.5))
        for _ in range(rng.randint(0, 3)):
            what = rng.choice(["grant", "grant", "join", "leave", "ack", "full", "drained", "read", "evict"])
            events.append((what, rng.choice("abc"), rng.randint(1, 4)))
    return events


def play(type: str, events: list[tuple[Any, ...]]) -> ChunkWorld:
    """Does all of it, then what brings everything to an end."""
    world = ChunkWorld(BrokerSettings())
    for event in events:
        _do(world, type, *event)
    for _ in range(200):
        if not world.consumers:
            world.join("last", type)
        for name in list(world.consumers):
            world.set_writable(name, True)
            world.grant(name, 5)
            world.acknowledge_all(name)
        for read_id in list(world.reads):
            world.answer_read(read_id)
        if world.state.mark_delete[:2] >= (world.topic.open, len(world.topic.ledgers[world.topic.open])):
            break
    else:
        pytest.fail(f"it comes to no end: {world.state.mark_delete}")
    return world


def _do(world: ChunkWorld, type: str, what: str, argument: Any, number: Any) -> None:
    if what == "publish":
        chunks = [*argument]
        world.topic.publish([1] * len(chunks), cached=number, chunks=chunks)
        world.drain()
    elif what == "join" and argument not in world.consumers:
        world.join(argument, type)
    elif what == "read" and world.reads:
        world.answer_read(min(world.reads))
    elif what == "evict":
        world.topic.in_cache.clear()
    elif argument in world.consumers:
        match what:
            case "grant":
                world.grant(argument, number)
            case "leave":
                world.gone(argument)
            case "ack":
                world.acknowledge_all(argument)
            case "full" | "drained":
                world.set_writable(argument, what == "drained")


@pytest.mark.parametrize("type", ["shared", "key_shared", "exclusive", "failover"])
@settings(deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_every_message_comes_whole(type: str, seed: int) -> None:
    events = events_of(seed)
    if type in (
        "exclusive",
        "failover",
    ):  # they deliver again what other consumers hold as well: one consumer is enough
        events = [event for event in events if event[0] == "publish" or event[1] == "a"]
        events = [event for event in events if event[0] not in ("leave",)]
    world = play(type, events)
    chunks = [chunk for what, entry, _ in events if what == "publish" for chunk in entry if chunk is not None]
    published = {chunk.chunk_id for chunk in chunks if chunk.last}
    assert set(world.whole) == published


@pytest.mark.parametrize(
    ("plant", "type"),
    [
        ("chunks_go_to_anybody", "shared"),
        ("chunks_of_who_left_are_overtaken", "shared"),
        ("slot_moves_between_chunks", "key_shared"),
    ],
)
def test_it_notices(plant: str, type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch_defects.PLANTS[plant](monkeypatch)

    def search() -> None:
        for seed in range(1000):
            play(type, events_of(seed))

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        search()


@pytest.mark.parametrize("how", ["seek", "skip"])
def test_chunks_that_nobody_waits_for_any_more_stop_nobody(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MAX_WAITING", 4)
    world = ChunkWorld(BrokerSettings())
    world.join("a", "shared")
    world.grant("a", 1)
    world.topic.publish([1], cached=True, chunks=[Chunk(b"A" * 8, 0, False)])
    world.drain()
    world.join("b", "shared")
    world.grant("b", 100)
    for index in range(1, 6):  # they are for a, which has no permits
        world.topic.publish([1], cached=True, chunks=[Chunk(b"A" * 8, index, False)])
        world.drain()
    assert world.core.stop is Stop.LOOK_AHEAD
    end = (world.topic.open, len(world.topic.ledgers[world.topic.open]), 0)
    (world.seek if how == "seek" else world.skip)(end)
    for _ in range(3):
        world.topic.publish([1], cached=True, chunks=[None])
        world.drain()
    assert len(world.to_acknowledge["b"]) == 3
    world.topic.publish([1], cached=True, chunks=[Chunk(b"A" * 8, 6, False)])
    world.topic.publish([1], cached=True, chunks=[None])
    world.drain()
    assert len(world.to_acknowledge["b"]) == 4, "one entry waits, and not five"


@pytest.mark.parametrize("type", ["shared", "key_shared"])
def test_behind_a_seek_a_message_that_somebody_had_comes_whole_to_one_consumer(type: str) -> None:
    world = ChunkWorld(BrokerSettings())
    world.join("a", type)
    world.grant("a", 100)
    for index in range(4):
        world.topic.publish([1], cached=True, chunks=[Chunk(b"A" * 8, index, index == 3)])
        world.drain()
    world.join("b", type)
    world.grant("b", 100)
    for _ in range(4):  # whoever has its turn
        world.assemblers.clear()
        world.whole.clear()
        world.seek((world.topic.open, 0, 0))
        world.drain()
        assert len(world.whole[b"A" * 8]) == 1


def test_a_chunk_does_not_wait_for_another_one_of_its_entry_that_was_delivered_less_often() -> None:
    """Regression: shared looked at those alone that were delivered as often as the first of them."""
    world = ChunkWorld(BrokerSettings())
    publish = world.topic.publish
    for name, chunk_id in ("a", b"A"), ("b", b"B"):
        world.join(name, "shared")
        world.grant(name, 1)
        publish([1], cached=True, chunks=[Chunk(chunk_id * 8, 0, False)])
        world.drain()
    world.grant("a", 1)
    key = publish([1, 1], cached=True, chunks=[Chunk(b"B" * 8, 1, True), Chunk(b"A" * 8, 1, True)])
    world.drain()
    assert world.whole == {b"A" * 8: ["a"]}
    world.nack("a", [(*place, place[2]) for place in world.to_acknowledge.pop("a")])
    world.grant("a", 2)
    assert world.whole == {b"A" * 8: ["a", "a"]}
    world.grant("b", 1)
    assert world.whole[b"B" * 8] == ["b"]
    assert world.to_acknowledge["b"][-1] == (*key, 0)


def test_a_chunk_that_is_given_back_alone_goes_to_who_has_the_rest_though_others_own_its_slot() -> None:
    """Regression: the slot drained for ever, since who had the rest waited for it."""
    world = ChunkWorld(BrokerSettings())
    world.join("a", "key_shared")
    world.grant("a", 100)
    keys = [world.topic.publish([1], cached=True, chunks=[Chunk(b"B" * 8, n, False)]) for n in range(3)]
    world.drain()
    for name in "bcdefghij":
        world.join(name, "key_shared")
        world.grant(name, 100)
    keys.append(world.topic.publish([1], cached=True, chunks=[Chunk(b"B" * 8, 3, True)]))
    world.drain()
    assert world.whole == {b"B" * 8: ["a"]}
    assert world.core.draining_slots == {"a": 1}, "another one owns it"
    assembler = world.assemblers["a"] = Assembler(1000, 1 << 30, 1e9)
    for n, key in enumerate(keys[:2]):
        assembler.add("p", Chunk(b"B" * 8, n, False), (*key, 0), b"", 0.0)
    world.nack("a", [(*key, 0, 0) for key in keys[2:]], counted=False)
    assert world.whole == {b"B" * 8: ["a", "a"]}
    assert world.core.draining_slots == {"a": 1}
    world.nack("a", [(*key, 0, 0) for key in keys], counted=False)
    assert world.whole[b"B" * 8][2] != "a"

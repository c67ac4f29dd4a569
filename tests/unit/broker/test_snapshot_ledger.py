"""A stored state that is no cursor: the last sequence id of each producer, as deduplication will store it."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from magnetar.broker.cursors.snapshot_ledger import SnapshotLedger
from magnetar.broker.log.durability import Durability
from magnetar.proto.errors import (
    AlreadyExists,
    ConnectionLost,
    MagnetarError,
    NotEnoughBookies,
    VersionConflict,
)
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore


class Sequences:
    """By producer. A producer that is forgotten takes back what was stored of it."""

    def __init__(self) -> None:
        self.last: dict[str, int] = {}
        self.generation = 0

    def pieces(self) -> Iterator[bytes]:
        yield self.summary()
        for row in self.last.items():
            yield json.dumps(dict([row])).encode()

    def summary(self) -> bytes:
        return b"{}"

    def apply(self, piece: bytes) -> Iterable[int]:
        rows = json.loads(piece)
        self.last.update(rows)
        return (len(rows),)


class Stage:
    """What outlives a broker."""

    def __init__(self) -> None:
        self.ledgers, self.metadata = FakeLedgers(), MemoryMetadataStore()
        self.taken_over: list[MagnetarError] = []

    def store(self, state: Sequences) -> SnapshotLedger:
        return SnapshotLedger(
            "deduplication", "/deduplication", state, self.metadata, self.ledgers, Durability(1, 1, 1).of_ledger,
            self.taken_over.append, max_entries=4, max_inline_bytes=1000,
        )  # fmt: skip

    async def recovered(self) -> tuple[Sequences, SnapshotLedger]:
        state = Sequences()
        store = self.store(state)
        assert await store.recover(state.apply)
        return state, store


async def test_changes_behind_a_snapshot_are_read_back_and_the_next_ledger_replaces_the_last_one() -> None:
    stage, state = Stage(), Sequences()
    store = stage.store(state)
    await store.create(1)
    with pytest.raises(AlreadyExists):
        await stage.store(state).create(1)
    for number in range(6):
        state.last["p"] = number
        if store.has_room:
            await store.append(b'{"p": %d}' % number, 1)
        else:
            await store.replace()
            await store.delete_former()
    assert len(stage.ledgers.deleted) == 1
    assert (await stage.recovered())[0].last == {"p": 5}


async def test_without_a_ledger_the_pointer_has_the_state_and_when_it_is_closed_too() -> None:
    stage, state = Stage(), Sequences()
    store = stage.store(state)
    await store.create(1)
    state.last = {"p": 7, "q": 8}
    stage.ledgers.fail_create.append(NotEnoughBookies("none"))
    await store.replace()
    assert not stage.ledgers.ledgers
    assert (await stage.recovered())[0].last == state.last
    state, store = await stage.recovered()
    await store.replace()
    await store.close(changed=False, small=await store.fits_pointer())
    assert not stage.ledgers.ledgers
    assert (await stage.recovered())[0].last == state.last


async def test_a_former_owner_is_told_whatever_it_writes_next() -> None:
    stage, state = Stage(), Sequences()
    store = stage.store(state)
    await store.create(1)
    await store.replace()
    _, heir = await stage.recovered()
    for write in (store.append(b"{}", 1), store.replace()):
        with pytest.raises(MagnetarError):
            await write
    assert len(stage.taken_over) == 2
    with pytest.raises(VersionConflict):
        await store.delete()
    await heir.delete()
    assert await stage.metadata.get("/deduplication") is None


@pytest.mark.parametrize("done", [True, False])
async def test_a_write_of_the_pointer_whose_outcome_is_not_known_is_looked_for(done: bool) -> None:
    """A ledger that the pointer may name already is not deleted before that is known."""
    stage, state = Stage(), Sequences()
    store = stage.store(state)
    await store.create(1)
    state.last = {f"producer {number}": number for number in range(100)}  # more than the pointer has room for
    put = stage.metadata.put

    async def answer_lost(*given: Any, **named: Any) -> int:
        if done:
            await put(*given, **named)
        stage.metadata.get = lost  # type: ignore[method-assign]
        raise ConnectionLost("the answer is lost")

    async def lost(path: str) -> Any:
        del stage.metadata.put, stage.metadata.get
        raise ConnectionLost("and so is the next one")

    stage.metadata.put = answer_lost  # type: ignore[method-assign]
    await store.replace()  # into the pointer
    assert not stage.ledgers.deleted
    await store.delete_former()
    assert stage.ledgers.deleted == [0] * done, "the others are orphans"
    assert not stage.taken_over
    recovered, heir = await stage.recovered()
    assert recovered.last == state.last
    assert not heir.damage

"""Reads by stripe at a bookie: the same as entry by entry, from any mixture of memory and disk, by batch, within bounds."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from magnetar.bookie import Bookie, reads
from magnetar.bookie.entry_log.records import RECORD_HEADER_BYTES
from magnetar.bookie.index import Location
from magnetar.bookie.read_budget import ReadGrant
from magnetar.proto.errors import (
    EntryDamaged,
    EntryNotFound,
    InvalidArgument,
    LedgerNotFound,
    MagnetarError,
    UnknownLedgerState,
)
from magnetar.proto.ids import MAX_ENTRY_ID
from magnetar.proto.stripe import Stripe
from support.bookie_kit import KIB, add_all, entry, open_inline
from support.index_model import ModelStorage

BIG: dict[str, Any] = {
    "entry_log_bytes": 1024 * KIB,
    "read_cache_bytes": 1024 * KIB,
    "write_cache_bytes": 8192 * KIB,
}


@pytest.fixture
async def bookie(tmp_path: Path) -> AsyncIterator[Bookie]:
    bookie = await open_inline(str(tmp_path), ModelStorage(), **BIG)
    yield bookie
    await bookie.close()


class LogReads:
    """Counts reads of entry logs, and how many entries each brought."""

    def __init__(self, bookie: Bookie) -> None:
        self.runs: list[int] = []
        self._read = bookie.logs.reader.read
        bookie.logs.reader.read = self  # type: ignore[method-assign]

    async def __call__(
        self, ledger_id: int, wanted: Sequence[tuple[int, Location]], grant: ReadGrant | None = None
    ) -> list[bytes]:
        self.runs.append(len(wanted))
        return await self._read(ledger_id, wanted, grant)


async def store(bookie: Bookie, numbers: Sequence[int], size: int = 100) -> dict[int, bytes]:
    """In an entry log."""
    entries = {number: entry(1, number, b"x" * size) for number in numbers}
    assert not any(await add_all(bookie, list(entries.values())))
    await bookie.checkpoint()
    return entries


def damage(bookie: Bookie, entry_id: int) -> None:
    """Flips a bit of the entry in its log."""
    location = bookie.index.get(1, entry_id)
    assert location is not None
    path = bookie.logs.path_of(location.log_id)
    assert path is not None
    data = bytearray(Path(path).read_bytes())
    data[location.offset + RECORD_HEADER_BYTES + 45] ^= 1
    Path(path).write_bytes(bytes(data))


# --- as entry by entry -------------------------------------------------------------------------------------------------


async def one(bookie: Bookie, entry_id: int) -> bytes | type[MagnetarError]:
    """What the bookie says of an entry when it is asked for it alone."""
    try:
        return (await bookie.read(1, entry_id, entry_id))[0][0]
    except MagnetarError as error:
        return type(error)


async def mixture(bookie: Bookie, rng: random.Random) -> int:
    """Entries in logs, both halves of memory and the read cache, with holes and damage. How many ids."""
    count = rng.randint(1, 120)
    density = rng.choice([0.3, 0.67, 1.0])
    logged = [number for number in range(count) if rng.random() < density]
    for part in (logged[: len(logged) // 2], logged[len(logged) // 2 :]):
        if part:
            await store(bookie, part, rng.choice([60, 600]))
    for number in rng.sample(logged, len(logged) // 20):
        damage(bookie, number)
    later = [number for number in range(count) if rng.random() < rng.choice([0.0, 0.2])]
    again = [entry(1, number, b"written anew", lac=number) for number in later]
    if again:
        assert not any(await add_all(bookie, again, recovery=True))
    for number in rng.sample(logged, len(logged) // 4):
        await one(bookie, number)
    if rng.random() < 0.2:
        bookie.ledgers.load(1).unknown = True
    return count


@settings(max_examples=16, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_any_stripe_of_any_mixture_with_any_limit_is_as_entry_by_entry(tmp_path: Path, seed: int) -> None:
    async def play() -> None:
        rng = random.Random(seed)
        bookie = await open_inline(str(tmp_path / str(rng.random())), ModelStorage(), **BIG)
        try:
            count = await mixture(bookie, rng)
            for _ in range(15):
                cycle = rng.randint(1, 8)
                stripe = Stripe(cycle, rng.randint(1, (1 << cycle) - 1))
                ids = stripe.ids(rng.randrange(count), count + 3)
                if ids:
                    await look(bookie, stripe, ids, rng.choice([0, 1, 150, 2000]), rng.random() < 0.5)
        finally:
            await bookie.close()

    asyncio.run(play())


async def look(bookie: Bookie, stripe: Stripe, ids: Sequence[int], limit: int, cold: bool) -> None:
    """Reads a stripe in as many requests as it takes, and every entry alone."""
    told = [await one(bookie, entry_id) for entry_id in ids]
    position = 0
    while position < len(ids):
        if cold:
            bookie.read_cache.clear()
        first = told[position]
        if not isinstance(first, bytes):
            with pytest.raises(first) as raised:
                await bookie.read(1, ids[position], ids[-1], max_bytes=limit, stripe=stripe)
            assert type(raised.value) is first
            position += 1
            continue
        entries, _ = await bookie.read(1, ids[position], ids[-1], max_bytes=limit, stripe=stripe)
        assert entries
        assert entries == told[position : position + len(entries)]
        assert not limit or len(entries) == 1 or sum(map(len, entries)) <= limit
        position += len(entries)


async def test_rule_08_damage_inside_a_stripe_ends_it_and_is_told_to_who_asks_for_the_entry(
    bookie: Bookie,
) -> None:
    entries = await store(bookie, range(60))
    damage(bookie, 31)
    stripe = Stripe(3, 0b011)
    expected = [entries[number] for number in range(60) if number % 3 < 2]
    got, _ = await bookie.read(1, 0, 59, stripe=stripe)
    assert got == expected[:21]
    with pytest.raises(EntryDamaged):
        await bookie.read(1, 31, 59, stripe=stripe)
    assert (await bookie.read(1, 33, 59, stripe=stripe))[0] == expected[22:]
    # What a stripe leaves out is not looked at.
    assert len((await bookie.read(1, 2, 59, stripe=Stripe(3, 0b100)))[0]) == 20
    bookie.ledgers.load(1).unknown = True
    with pytest.raises(UnknownLedgerState):
        await bookie.read(1, 60, 90, stripe=stripe)
    await bookie.delete_ledger(1)
    with pytest.raises(LedgerNotFound):
        await bookie.read(1, 0, 59, stripe=stripe)


async def test_rule_06_a_fence_comes_with_a_stripe_and_its_denial(bookie: Bookie) -> None:
    with pytest.raises(EntryNotFound):
        await bookie.read(5, 4, 90, stripe=Stripe(3, 0b010), fence=True)
    assert bookie.ledgers.load(5).fenced
    with pytest.raises(InvalidArgument):
        await bookie.read(6, 3, 90, stripe=Stripe(3, 0b010), fence=True)
    assert not bookie.ledgers.peek(6).fenced


# --- by batch, within bounds -------------------------------------------------------------------------------------------


async def test_a_stripe_is_one_read_of_the_log_and_then_of_the_cache(bookie: Bookie) -> None:
    entries = await store(bookie, [number for number in range(300) if number % 3 < 2])
    reads = LogReads(bookie)
    for stripe in (Stripe(3, 0b011), Stripe(3, 0b001), Stripe(3, 0b010)):
        bookie.read_cache.clear()
        reads.runs.clear()
        expected = [data for number, data in entries.items() if stripe.holds(number)]
        first = 1 if stripe.residues == 2 else 0
        for _ in range(2):
            assert (await bookie.read(1, first, 299, stripe=stripe))[0] == expected
        assert reads.runs == [len(expected)]


async def test_a_stripe_is_read_ahead(bookie: Bookie) -> None:
    entries = await store(bookie, [number for number in range(600) if number % 3 < 2])
    reads = LogReads(bookie)
    stripe, position = Stripe(3, 0b001), 0
    while position < 300:
        got, _ = await bookie.read(1, position, position + 29, stripe=stripe)
        assert got == [entries[number] for number in range(position, position + 30, 3)]
        position += 30
    assert reads.runs == [100]


async def test_what_a_stripe_leaves_out_is_skipped_only_if_it_is_small(bookie: Bookie) -> None:
    small = await store(bookie, range(8), 1000)
    reads = LogReads(bookie)
    assert len((await bookie.read(1, 0, 7, stripe=Stripe(2, 0b01)))[0]) == 4
    assert reads.runs == [4]
    reads.runs.clear()
    large = {number: entry(1, number, b"y" * 20_000) for number in range(100, 106)}
    assert not any(await add_all(bookie, list(large.values())))
    await bookie.checkpoint()
    got, _ = await bookie.read(1, 100, 105, stripe=Stripe(2, 0b01))
    assert got == [large[100], large[102], large[104]]
    assert reads.runs == [1, 1, 1]
    assert small


async def test_what_is_read_for_a_stripe_is_counted_in_the_budget_with_its_gaps(
    bookie: Bookie, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store(bookie, range(60), 1000)
    budget, highest = bookie.reads.budget, 0
    right = budget.try_take

    def try_take(size: int) -> bool:
        nonlocal highest
        highest = max(highest, budget.taken + size)
        return right(size)

    monkeypatch.setattr(budget, "try_take", try_take)
    assert len((await bookie.read(1, 0, 59, stripe=Stripe(3, 0b001)))[0]) == 20
    assert highest > 57 * 1000
    assert budget.taken == 0


async def test_a_stripe_of_a_long_range_is_bounded(bookie: Bookie, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magnetar.bookie.reads._MAX_READ_ENTRIES", 50)
    entries = [entry(1, number) for number in range(300)]
    await add_all(bookie, entries)
    for stripe in (Stripe(3, 0b011), Stripe(3, 0b001)):
        got, _ = await bookie.read(1, 0, MAX_ENTRY_ID, stripe=stripe)
        assert got == [data for number, data in enumerate(entries) if stripe.holds(number)][:50]
    assert reads._MAX_GAP_BYTES < 64 * KIB

"""What a broker reports about its bundles: rates, when it is written, what it holds."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.ownership.balance.core.facts import BundleLoad
from magnetar.broker.ownership.balance.loads import (
    BundleCounters,
    LoadReporter,
    Rates,
    bundle_loads_path,
    decode_bundle_loads,
    encode_bundle_loads,
)
from magnetar.broker.ownership.balance.settings import BalanceSettings
from magnetar.metadata.store import MAX_VALUE_BYTES, Session
from magnetar.proto.errors import DataDirectoryError
from support.balance_kit import Counting
from support.memory_metadata import MemoryMetadataStore
from support.virtual_time import in_virtual_time

BUNDLE = "t/n/0x00000000_0xffffffff"
PATH = bundle_loads_path("a")


def test_counters_become_rates() -> None:
    rates = Rates()
    first = BundleCounters(BUNDLE, 3, 1_000, 5_000, 10, 50)
    assert rates.look([first], 100.0) == [BundleLoad(BUNDLE, 3, 0, 0, 0, 0)], "nobody knows since when"
    second = BundleCounters(BUNDLE, 4, 1_100, 6_000, 10, 50)
    new = BundleCounters("t/m/0x00000000_0xffffffff", 1, 20, 0, 0, 0)
    assert rates.look([second, new], 110.0) == [
        BundleLoad(BUNDLE, 4, 10.0, 100.0, 0.0, 0.0),
        BundleLoad(new.bundle, 1, 2.0, 0.0, 0.0, 0.0),
    ]
    again = BundleCounters(BUNDLE, 4, 30, 0, 0, 0)
    assert rates.look([again], 120.0) == [BundleLoad(BUNDLE, 4, 3.0, 0, 0, 0)], "it went and came back"


class Reporting(NamedTuple):
    """A reporter that runs."""

    store: MemoryMetadataStore
    source: Counting
    reporter: LoadReporter
    session: Session

    async def written(self) -> list[BundleLoad]:
        """What stands in its node."""
        node = await self.store.get(PATH)
        assert node is not None
        return decode_bundle_loads(node.value, PATH)


@contextlib.asynccontextmanager
async def reporting(**changes: Any) -> AsyncIterator[Reporting]:
    """Of broker a, with one bundle."""
    store, source = MemoryMetadataStore(), Counting()
    source.serve(BUNDLE)
    reporter = LoadReporter(store, source.counters, BalanceSettings(**changes), random.Random(1), "a")
    session = await store.open_session(10)
    task = asyncio.ensure_future(reporter.serve(session))
    await asyncio.sleep(10.5)
    try:
        yield Reporting(store, source, reporter, session)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await store.close()


@in_virtual_time
async def test_a_report_is_written_when_something_changed_by_a_tenth() -> None:
    async with reporting() as it:
        assert await it.written() == [BundleLoad(BUNDLE, 1, 0, 0, 0, 0)]
        await asyncio.sleep(100)
        assert it.reporter.written == 1
        expected = 1
        for rate, changed in (
            (100, True),
            (105, False),
            (109, False),
            (112, True),
            (111, False),
            (90, True),
            (0, True),
        ):
            it.source.count(BUNDLE, rate * 10)
            await asyncio.sleep(10)
            expected += changed
            assert it.reporter.written == expected, rate
        it.source.serve("t/m/0x00000000_0xffffffff")
        await asyncio.sleep(10)
        assert len(await it.written()) == 2
        del it.source.bundles[BUNDLE]
        await asyncio.sleep(10)
        assert len(await it.written()) == 1


@in_virtual_time
async def test_it_is_written_every_ten_seconds_at_most() -> None:
    async with reporting() as it:
        for _ in range(100):
            it.source.count(BUNDLE, random.Random(it.reporter.written).randrange(100_000))
            await asyncio.sleep(1)
        assert it.reporter.written <= 11


@in_virtual_time
async def test_it_goes_with_the_session_and_is_made_again_in_the_next_one() -> None:
    async with reporting() as it:
        it.store.expire(it.session.session_id)
        assert await it.store.get(PATH) is None
        it.source.count(BUNDLE, 10_000)
        await asyncio.sleep(30)
        assert await it.store.get(PATH) is None, "the session is lost"
        # What another session left under this name goes first.
        await it.store.create(PATH, b"former")
        again = asyncio.ensure_future(it.reporter.serve(await it.store.open_session(10)))
        await asyncio.sleep(25)
        assert await it.written() == [BundleLoad(BUNDLE, 1, 0, 0, 0, 0)]
        node = await it.store.get(PATH)
        assert node is not None
        await it.store.delete(PATH)
        it.source.count(BUNDLE, 10_000)
        await asyncio.sleep(25)
        assert len(await it.written()) == 1, "somebody deleted it"
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)


@in_virtual_time
async def test_the_busiest_bundles() -> None:
    async with reporting(max_reported_bundles=3) as it:
        for number in range(10):
            bundle = f"t/n{number}/0x00000000_0xffffffff"
            it.source.serve(bundle)
            it.source.count(bundle, 1_000 * number)
        await asyncio.sleep(10)
        assert sorted(row.bundle[:4] for row in await it.written()) == ["t/n7", "t/n8", "t/n9"]


def test_a_value_that_would_be_too_large_holds_the_first_rows() -> None:
    rows = [
        BundleLoad(f"{'t' * 250}/{'n' * 250}/{number:08x}", 1, 1.0, 1.0, 1.0, 1.0) for number in range(2_000)
    ]
    value = encode_bundle_loads(rows)
    assert len(value) <= MAX_VALUE_BYTES
    found = decode_bundle_loads(value, PATH)
    assert 0 < len(found) < 2_000
    assert found == rows[: len(found)]


@given(
    st.lists(
        st.builds(
            BundleLoad,
            bundle=st.text(max_size=20),
            topics=st.integers(0, 1 << 40),
            messages_in=st.floats(0, 1e12),
            bytes_in=st.floats(0, 1e12),
            messages_out=st.floats(0, 1e12),
            bytes_out=st.floats(0, 1e12),
        ),
        max_size=5,
    )
)
def test_what_is_written_is_read_again(rows: list[BundleLoad]) -> None:
    assert decode_bundle_loads(encode_bundle_loads(rows), PATH) == rows


@given(st.binary(max_size=40))
def test_damage_is_one_clear_error(value: bytes) -> None:
    with contextlib.suppress(DataDirectoryError):
        decode_bundle_loads(value, PATH)


def test_another_format() -> None:
    with pytest.raises(DataDirectoryError, match="/bundle-loads/a has format 2, and this release reads 1"):
        decode_bundle_loads(b"\x82\xa6format\x02\xa7bundles\x90", PATH)

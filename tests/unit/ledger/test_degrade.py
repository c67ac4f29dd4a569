"""Ledgers of fewer bookies, when fewer are left, and back to full ones."""

import asyncio
import itertools
import logging
import random

import pytest

from magnetar.ledger import (
    BookieFacts,
    LedgerClient,
    LedgerSettings,
    LedgerWriter,
    LocalTransport,
    StaticBookies,
)
from magnetar.ledger.core.degrade import DEGRADED_PROPERTY, asked_for, degraded_striping, describe
from magnetar.ledger.core.quorum import Striping
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import BookieUnavailable, NotEnoughBookies
from support.bookies import Bookies, Confirmations
from support.virtual_time import in_virtual_time


def test_every_striping_over_every_number_of_bookies() -> None:
    for size, quorum, ack in itertools.product(range(1, 7), repeat=3):
        if not ack <= quorum <= size:
            continue
        full = Striping(size, quorum, ack)
        for minimum, writable in itertools.product(range(quorum + 1), range(9)):
            smaller = degraded_striping(full, writable, minimum)
            assert (smaller is not None) == (0 < minimum <= writable < size), (size, quorum, ack, minimum)
            if smaller is not None:
                assert smaller.ensemble_size == writable
                assert minimum <= smaller.write_quorum <= quorum, "never more copies, never below the minimum"
                assert smaller.write_quorum == min(quorum, writable)
                assert min(ack, minimum) <= smaller.ack_quorum <= min(ack, smaller.write_quorum)
                if writable >= quorum:
                    assert smaller.ack_quorum == ack


def test_a_ledger_asked_for_with_fewer_copies_than_the_minimum_needs_all_of_them_only() -> None:
    smaller = degraded_striping(Striping(3, 1, 1), 2, 2)
    assert smaller is not None
    assert describe(smaller) == "2/1/1"


def test_the_property_says_what_was_asked_for() -> None:
    found = asked_for(describe(Striping(5, 3, 2)))
    assert found is not None
    assert (found.ensemble_size, found.write_quorum, found.ack_quorum) == (5, 3, 2)
    for text in ("", "3", "3/3", "3/3/x", "2/3/1", "3/3/2/1", "-3/3/2", "3333/3/2", "/", "٣/3/2"):
        assert asked_for(text) is None, text


class Cluster:
    """A client over bookies that come and go in its directory."""

    def __init__(self, **settings: object) -> None:
        self.bookies = Bookies("a", "b", "c")
        self.directory = StaticBookies(dict.fromkeys(self.bookies, ("127.0.0.1", 1)))
        settings = {"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2} | settings
        self.client = LedgerClient(
            StoredLedgers(self.bookies.metadata),
            LocalTransport(self.bookies),
            self.directory,
            LedgerSettings(**settings),  # type: ignore[arg-type]
            random.Random(1),
            self.bookies.clock,
        )

    def back(self, *names: str, zone: str = "") -> None:
        for name in names:
            self.directory.answered(name, BookieFacts.of({"zone": zone}))


def replaceable(writer: LedgerWriter) -> bool:
    """Asked anew each time, as far as mypy is concerned."""
    return writer.replaceable


async def test_degraded_and_back(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(minimum_write_quorum=2)
    full = await cluster.client.create()
    assert not full.degraded
    assert not full.replaceable
    cluster.directory.lost("b")
    with caplog.at_level(logging.INFO, "magnetar.ledger.placement.chooser"):
        writers = [await cluster.client.create(properties={"kind": "topic"}) for _ in range(3)]
    assert len(caplog.records) == 1, "said once"
    assert "2/2/2 instead of 3/3/2" in caplog.text
    for writer in writers:
        metadata = writer.metadata
        assert sorted(metadata.last_ensemble.bookies) == ["a", "c"]
        assert describe(metadata.striping) == "2/2/2"
        assert metadata.properties == {"kind": "topic", DEGRADED_PROPERTY: "3/3/2"}
        assert writer.degraded
        assert not replaceable(writer)
    confirmed = Confirmations()
    writers[0].append(b"x", confirmed)
    await confirmed.count(1)
    assert confirmed.ids == [0]
    cluster.back("b")
    assert replaceable(writers[0])
    assert cluster.client.figures()["degraded_ledgers_total"] == 3
    again = await cluster.client.create()
    assert not again.degraded
    assert describe(again.metadata.striping) == "3/3/2"
    cluster.directory.lost("a")
    cluster.directory.lost("b")
    with pytest.raises(NotEnoughBookies, match=r"1 writable bookies are known \(c\).*minimum_write_quorum=2"):
        await cluster.client.create()
    assert not replaceable(writers[0])
    await cluster.client.close()


@in_virtual_time
async def test_a_bookie_that_was_seen_to_fail_takes_no_new_ledger_though_its_session_lives() -> None:
    cluster = Cluster(minimum_write_quorum=2, suspect_bookie_s=10.0)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    full = await cluster.client.create()
    cluster.bookies["b"].fail(BookieUnavailable("connection refused"))
    confirmed = Confirmations()
    full.append(b"x", confirmed)
    while "b" not in cluster.client.health.suspects():
        await asyncio.sleep(0.001)
    assert cluster.directory.writable() == ("a", "b", "c"), "its session has not ended"
    writers = [await cluster.client.create() for _ in range(5)]
    for writer in writers:
        assert sorted(writer.metadata.last_ensemble.bookies) == ["a", "c"]
        assert not replaceable(writer), "else the next ledger is begun on the dead one"
    assert loop.time() - begun < 1.0
    await asyncio.sleep(10.0)
    assert replaceable(writers[0]), "it may be well again"
    assert not (await cluster.client.create()).degraded
    await cluster.client.close()


async def test_off_by_default() -> None:
    cluster = Cluster()
    cluster.directory.lost("b")
    with pytest.raises(NotEnoughBookies, match=r"ensemble_size=3 writable bookies, 2 are known \(a, c\)"):
        await cluster.client.create()
    await cluster.client.close()


async def test_what_a_policy_would_refuse_is_no_way_back() -> None:
    """Else a topic would leave a ledger that works for one that cannot be made."""
    cluster = Cluster(
        minimum_write_quorum=2, placement="zone", placement_strict=True, placement_minimum_zones=2
    )
    cluster.back("a", zone="x")
    cluster.back("c", zone="y")
    cluster.directory.lost("b")
    writer = await cluster.client.create()
    cluster.back("b", zone="")
    assert cluster.directory.writable() == ("a", "b", "c")
    assert not replaceable(writer)
    cluster.back("b", zone="y")
    assert not replaceable(writer), "looked at again when the bookies that are writable change"
    cluster.directory.lost("b")
    assert not replaceable(writer)
    cluster.back("b", zone="y")
    assert replaceable(writer)
    await cluster.client.close()

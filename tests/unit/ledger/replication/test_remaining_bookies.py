"""Drains that could not end are refused: the bookies that remain are given every ensemble, as a repair would do."""

from __future__ import annotations

import asyncio
import random

from magnetar.ledger import LedgerClient, LedgerSettings, LocalTransport
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.replication.cluster_watch import ClusterWatch, PlacedBookies
from magnetar.ledger.replication.operations import (
    NewLedgers,
    drain_progress,
    obstacles_to_drain,
)
from magnetar.metadata.drains import BOOKIE, mark_drained, unmark_drained
from magnetar.metadata.ledgers import StoredLedgers
from support.repair_kit import RepairCluster
from unit.ledger.test_degrade import replaceable


async def obstacles(
    cluster: RepairCluster, *bookies: str, expected: tuple[NewLedgers, ...] = ()
) -> list[str]:
    return await obstacles_to_drain(cluster.metadata, bookies, expected, cluster.settings, random.Random(1))


async def test_ledgers_that_no_other_bookies_could_hold() -> None:
    cluster = await RepairCluster.start("b1", "b2", "b3", "b4")
    ledgers = [await cluster.closed_ledger(3, ensemble_size=3, write_quorum=2) for _ in range(8)]
    assert await obstacles(cluster, "b1") == []
    refusals = "; ".join(await obstacles(cluster, "b1", "b2"))
    assert "0 of the 2 writable bookies are left to choose from" in refusals
    assert f"ledger {ledgers[0]} among them" in refusals
    await mark_drained(cluster.metadata, BOOKIE, "b1")
    assert await obstacles(cluster, "b2"), "together with what is drained already"
    await unmark_drained(cluster.metadata, BOOKIE, "b1")
    await cluster.register("b4", read_only=True)
    assert await obstacles(cluster, "b1"), "a bookie that takes no entries is no place for copies"
    await cluster.close()


async def test_groups_and_zones_count_as_they_do_for_a_repair() -> None:
    strict = LedgerSettings(placement="zone", placement_strict=True, placement_minimum_zones=2)
    cluster = await RepairCluster.start(settings=strict)
    for name, zone in (("b1", "x"), ("b2", "x"), ("b3", "y"), ("b4", "y")):
        await cluster.register(name, zone=zone, group="fast" if name < "b4" else "")
    await cluster.closed_ledger(3, ensemble_size=2, write_quorum=2)
    assert await obstacles(cluster, "b1") == []
    assert await obstacles(cluster, "b1", "b2"), "one zone would be left"
    client = await cluster.client()
    await client.create(ensemble_size=2, write_quorum=2, ack_quorum=2, bookie_group="fast")
    assert await obstacles(cluster, "b3"), "b4 is not fast"
    await cluster.close()


async def test_ledgers_that_a_policy_will_want() -> None:
    cluster = await RepairCluster.start("b1", "b2", "b3")
    wide = NewLedgers("namespace shop/live", Striping(3, 2, 2))
    assert await obstacles(cluster, "b1", expected=(wide,)) == [
        "namespace shop/live wants ledgers on 3 bookies"
    ]
    nobody = NewLedgers("namespace shop/gold", Striping(2, 2, 2), "gold")
    too_wide = NewLedgers("namespace shop/wide", Striping(5, 2, 2))
    assert await obstacles(cluster, "b1", expected=(nobody, too_wide)) == [], "that is so without the drain"
    await cluster.close()


async def test_a_writer_leaves_a_drained_bookie_when_there_is_a_better_place() -> None:
    cluster = await RepairCluster.start("b1", "b2", "b3")
    watch = ClusterWatch(cluster.metadata)
    await watch.start()
    inner = await cluster.client()
    placed = PlacedBookies(inner.components.bookies, watch)
    client = LedgerClient(
        StoredLedgers(cluster.metadata),
        LocalTransport(cluster.bookies),
        placed,
        LedgerSettings(2, 2, 2),
        random.Random(1),
        cluster.bookies.clock,
    )
    writer = await client.create()
    drained, kept = writer.metadata.last_ensemble.bookies
    other = next(name for name in ("b1", "b2", "b3") if name not in (drained, kept))
    assert not replaceable(writer)
    await mark_drained(cluster.metadata, BOOKIE, other)
    await asyncio.sleep(0)
    await watch.read()
    await mark_drained(cluster.metadata, BOOKIE, drained)
    await watch.read()
    assert placed.writable() == (kept,)
    assert not replaceable(writer), "there is no other place"
    await unmark_drained(cluster.metadata, BOOKIE, other)
    await watch.read()
    assert replaceable(writer)
    progress = await drain_progress(cluster.metadata, [drained], cluster.bookies.clock)
    assert (progress.ledgers, progress.open_ledgers) == (1, 1)
    await unmark_drained(cluster.metadata, BOOKIE, drained)
    await watch.read()
    assert not replaceable(writer)
    await writer.close()
    await client.close()
    await watch.close()
    await cluster.close()

"""Scorecard 16 and 17 in a cluster: a bookie loses its disk, or its disk is full, under load."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

import pytest
from bench.service_process import ServiceFailed

from support.cluster.processes import ClusterProcesses, Daemon, Shape
from support.cluster.replicas import Replicas, count_replicas
from support.cluster.run import load_plan, round_of
from support.cluster.schedule import schedule
from support.cluster.scorecard import BROKERS, ROUND_S, SECONDS, SEED, Recorder, Row
from support.long_form import long_form
from support.storage_small_disk import SmallDisk
from support.zookeeper import Ensemble

pytestmark = [pytest.mark.crash, pytest.mark.timeout(int(300 + 4 * SECONDS))]

REPAIRED_WITHIN_S = 120.0


async def lose_disk(cluster: ClusterProcesses, bookie: Daemon) -> str:
    """kill -9 and its data deleted; what it said when it came back empty. It runs again once the loss was declared."""
    async with bookie.down():
        data = bookie.process.data
        assert data is not None
        shutil.rmtree(data)
        with pytest.raises(ServiceFailed) as refused:
            await asyncio.to_thread(bookie.process.start)
        bookie.process.wait_ended()
        code, _, errors = await cluster.command(
            "bookie", "cookie", "--data", data, "--accept-new-disk", bookie.name, "--yes"
        )
        assert code == 0, errors
    return str(refused.value)


async def repaired(cluster: ClusterProcesses) -> Replicas:
    """Waits until every entry has all of its copies."""
    deadline = time.monotonic() + REPAIRED_WITHIN_S
    while True:
        found = await count_replicas(cluster)
        if not found.missing:
            return found
        assert time.monotonic() < deadline, f"copies are missing after {REPAIRED_WITHIN_S:g} s: {found}"
        await asyncio.sleep(0.5)


@pytest.mark.real
@long_form
async def test_row_17_a_bookie_that_lost_its_disk_is_refused_and_then_repaired(
    one_server: Ensemble, directory: Path, scorecard: Recorder
) -> None:
    """Small ledgers, so that there are many; nothing is repaired before it is asked for. The clients go on all the while."""
    settings = ("repair.lost_bookie_delay_s=600", "repair.open_ledger_grace_s=1", "repair.queue_interval_s=1")
    shape = Shape(
        brokers=BROKERS, settings=(*settings, "broker.max_ledger_entries=20", "broker.min_ledger_age_ms=1s")
    )
    async with ClusterProcesses(one_server, directory, shape) as cluster:
        async with round_of(cluster, load_plan(cluster.service_url, SEED), directory) as played:
            await asyncio.sleep(SECONDS / 2)
            victim = cluster.bookies[SEED % len(cluster.bookies)]
            refusal = await lose_disk(cluster, victim)
            assert "--accept-new-disk" in refusal
            lost = await count_replicas(cluster)
            assert lost.missing, "its disk held nothing"
            await played.load.goes_on()
            began = time.monotonic()
            code, _, errors = await cluster.command(
                "cluster", "recover", "--metadata", cluster.url, victim.name
            )
            assert code == 0, errors
            found = await repaired(cluster)
            seconds = time.monotonic() - began
        for broker in cluster.brokers:
            async with broker.down("stop"):  # closes its ledgers
                pass
        found = await repaired(cluster)
        scorecard(
            Row("17", "a bookie's disk is lost: refused, declared, repaired", played.described,
                f"{lost.missing:,} copies were missing, back after {seconds:.1f} s; {found.ledgers:,} ledgers, "
                f"{found.entries:,} entries complete; {played.judged}", "every entry back to Qw",
                played.verdict.good and not found.missing)
        )  # fmt: skip
        played.check()


@pytest.mark.real
@long_form
async def test_row_16_the_disk_of_a_bookie_is_full(
    one_server: Ensemble, directory: Path, tmp_path: Path, scorecard: Recorder
) -> None:
    """It is read-only meanwhile, and takes entries again by itself."""
    with SmallDisk.make(tmp_path, 256) as disk:
        async with (
            ClusterProcesses(one_server, directory, Shape(brokers=BROKERS), {"bookie-1": disk}) as cluster,
            round_of(cluster, load_plan(cluster.service_url, SEED), directory) as played,
        ):
            await played.play(schedule(SEED, ["full disk"], ROUND_S, 8.0))
        proofs = "; ".join(stroke.proof for stroke in played.strokes)
        in_time = all(stroke.read_only_s <= 5 and stroke.back_s <= 30 for stroke in played.strokes)
        scorecard(Row("16", "the disk of a bookie is full", played.described, f"{proofs}; {played.judged}",
                      "read-only in 5 s, back in 30 s", played.verdict.good and in_time))  # fmt: skip
        played.check()

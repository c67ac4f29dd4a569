"""Scorecard 12, clocks that jump, and a storm of everything: also pauses, slow links and disks, the loss of a leader."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cluster.clocks import needs_clocks
from support.cluster.faults import KINDS
from support.cluster.processes import ClusterProcesses, Shape
from support.cluster.run import load_plan, round_of
from support.cluster.schedule import Fault, schedule, seconds_for_all
from support.cluster.scorecard import (
    BROKERS,
    BUSY_S,
    ROUND_S,
    ROUNDS,
    SECONDS,
    SEED,
    Recorder,
    Row,
)
from support.long_form import long_form
from support.zookeeper import Ensemble

pytestmark = [pytest.mark.crash, pytest.mark.timeout(int(300 + 4 * SECONDS))]

PARTITIONS = (
    "broker isolated",
    "broker without metadata",
    "broker unheard",
    "broker deaf",
    "bookie isolated",
    "ring",
)
STORM_EVERY_S = 4.0
STALE_GOAL = "0 lost, 0 confirmed by a stale owner"


@pytest.mark.real
async def test_row_12_an_owner_that_is_paused_past_its_session_confirms_nothing(
    one_server: Ensemble, directory: Path, scorecard: Recorder
) -> None:
    """It goes on with messages in its sockets that were sent to it while it was the owner."""
    victims = [
        Fault(1.0, "pause broker past its session", number / BROKERS, 0.5) for number in range(BROKERS)
    ]
    async with (
        ClusterProcesses(one_server, directory, Shape(brokers=BROKERS)) as cluster,
        round_of(cluster, load_plan(cluster.service_url, SEED), directory) as played,
    ):
        await played.play(victims)
    moved = sum(len(played.confirmations.served_again_s(stroke.at)) for stroke in played.strokes)
    result = f"{moved} topics got a new owner; {played.judged}"
    scorecard(
        Row("12", "owner paused past its session", played.described, result, STALE_GOAL, played.verdict.good)
    )
    played.check()
    assert moved, "no owner was replaced, so nothing is proved"


@pytest.mark.real
@long_form
@pytest.mark.parametrize("kind", PARTITIONS)
async def test_row_12_a_partition_of_each_kind(
    one_server: Ensemble, directory: Path, scorecard: Recorder, kind: str
) -> None:
    shape = Shape(brokers=BROKERS, lines=True)
    async with ClusterProcesses(one_server, directory, shape) as cluster:
        for number in range(ROUNDS):
            seed = SEED + number
            async with round_of(cluster, load_plan(cluster.service_url, seed), directory) as played:
                await played.play(schedule(seed, [kind], min(ROUND_S, 20.0), 6.0))
            scorecard(Row("12", kind, played.described, played.judged, STALE_GOAL, played.verdict.good))
            played.check()


@pytest.mark.real
@long_form
@needs_clocks
async def test_clocks_jump_by_an_hour(one_server: Ensemble, directory: Path, scorecard: Recorder) -> None:
    """Nobody waits for a time that a wall clock says: no session ends, so that no topic begins another ledger.

    A session lasts so long that a busy machine ends none, and is short beside an hour.
    """
    shape = Shape(brokers=BROKERS, clocks=True, session_s=10.0)
    async with ClusterProcesses(one_server, directory, shape) as cluster:
        for number in range(ROUNDS):
            seed = SEED + number
            async with round_of(cluster, load_plan(cluster.service_url, seed), directory) as played:
                await played.play(schedule(seed, ["clock of a bookie", "clock of a broker"], ROUND_S, 4.0))
            found, strokes = played.confirmations, played.strokes
            stall = max(found.stall_s(stroke.at, stroke.until) for stroke in strokes)
            changed = found.changed_ledger(strokes[0].at)
            scorecard(
                Row("12", f"clocks jump by an hour, forward and back, seed {seed}", played.described,
                    f"stall {stall:.2f} s, {changed} topics began another ledger; {played.judged}",
                    "0 findings, stall 1 s, 0 ledgers", played.verdict.good and stall <= 1.0 and not changed)
            )  # fmt: skip
            played.check()
            assert not changed
            assert stall <= 1.0 + BUSY_S


@pytest.mark.real
@long_form
async def test_a_storm_of_everything(three_servers: Ensemble, directory: Path, scorecard: Recorder) -> None:
    """Every kind of fault but clocks, in an order that the seed decides; each of them at least once in a round."""
    shape = Shape(brokers=BROKERS, lines=True)
    kinds = sorted(
        name for name, kind in KINDS.items() if not kind.disk and not kind.clocks and kind.brokers <= BROKERS
    )
    seconds = max(ROUND_S, seconds_for_all(len(kinds), STORM_EVERY_S))
    async with ClusterProcesses(three_servers, directory, shape) as cluster:
        for number in range(ROUNDS):
            seed = SEED + number
            load = load_plan(cluster.service_url, seed, drain_s=120.0)
            async with round_of(cluster, load, directory) as played:
                await played.play(schedule(seed, kinds, seconds, STORM_EVERY_S))
            scorecard(Row("9, 12", f"a storm of {len(kinds)} kinds of faults, seed {seed}", played.described,
                          played.judged, "0 findings", played.verdict.good))  # fmt: skip
            assert {stroke.kind for stroke in played.strokes} == set(kinds)
            played.check()

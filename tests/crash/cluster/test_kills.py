"""Scorecard 9, 10, 11 and 23: daemons of a cluster are killed, hang, and are restarted one after another, under load."""

from __future__ import annotations

import asyncio
import math
import random
import time
from itertools import pairwise
from pathlib import Path

import pytest

from support.cluster.figures import quantile
from support.cluster.processes import ClusterProcesses, Shape
from support.cluster.run import load_plan, round_of
from support.cluster.schedule import Fault, schedule, seconds_for_all
from support.cluster.scorecard import (
    BROKERS,
    BUSY_S,
    RATE,
    ROUND_S,
    ROUNDS,
    SECONDS,
    SEED,
    TOPICS,
    Recorder,
    Row,
)
from support.long_form import long_form
from support.zookeeper import Ensemble

pytestmark = [pytest.mark.crash, pytest.mark.timeout(int(300 + 4 * SECONDS))]

EVERY_S = 2.0
ADD_TIMEOUT_S = 1.0


@pytest.mark.real
@pytest.mark.parametrize(
    "deduplication",
    [pytest.param(False, marks=long_form, id="plain"), pytest.param(True, id="deduplication")],
)
async def test_row_09_kill_9_of_a_random_daemon_every_two_seconds(
    one_server: Ensemble, directory: Path, scorecard: Recorder, deduplication: bool
) -> None:
    """All subscription types; nothing confirmed is lost, everything is delivered, in order, acknowledged once.

    Without deduplication messages that were sent again may be stored twice; with it none is.
    """
    async with ClusterProcesses(one_server, directory, Shape(brokers=BROKERS)) as cluster:
        for number in range(ROUNDS):
            seed = SEED + number
            plan = load_plan(cluster.service_url, seed, deduplication=deduplication)
            async with round_of(cluster, plan, directory) as played:
                await played.play(schedule(seed, ["kill bookie", "kill broker"], ROUND_S, EVERY_S))
            what = f"kill -9 every 2 s{', deduplication' if deduplication else ''}, seed {seed}"
            goal = "0 lost, 0 duplicates, order kept" if deduplication else "0 lost, order kept"
            scorecard(Row("9", what, played.described, played.judged, goal, played.verdict.good))
            played.check()


@pytest.mark.real
@long_form
@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_row_10_topics_are_served_again_after_a_broker_is_gone(
    one_server: Ensemble, directory: Path, scorecard: Recorder, how: str
) -> None:
    """The broker comes back only when every topic is served by others; a lone one comes back at once."""
    shape = Shape(brokers=BROKERS, session_s=4.0)
    rng = random.Random(SEED)
    async with ClusterProcesses(one_server, directory, shape) as cluster:
        load = load_plan(
            cluster.service_url,
            SEED,
            topics=TOPICS,
            producers=1,
            rate=max(RATE // 2, TOPICS * 2),
            subscriptions=False,
            deduplication=True,
        )
        moments: list[float] = []
        async with round_of(cluster, load, directory) as played:
            while not moments or time.monotonic() < played.began + SECONDS:
                broker = rng.choice(cluster.brokers)
                moments.append(time.monotonic())
                async with broker.down(how):
                    if BROKERS > 1:
                        await played.load.goes_on()
                await played.load.goes_on()
                await asyncio.sleep(EVERY_S)
        figures = played.confirmations
        if how == "kill":
            what, goal = "kill -9 until served again", 6.0
            waits = [seconds for moment in moments for seconds in figures.served_again_s(moment)]
        else:
            what, goal = "SIGTERM, without an owner", 1.0
            steps = pairwise([*moments, math.inf])
            waits = [seconds for step in steps for seconds in figures.handed_over_s(*step)]
        p99, highest = quantile(waits, 0.99), max(waits)
        met = p99 <= goal and (how == "stop" or highest <= 8.0)
        scorecard(
            Row("10", f"broker {what}, session 4 s",
                f"{len(moments)} of {TOPICS} topics, {len(waits)} moved; {played.verdict.counts['confirmed']:,} confirmed",
                f"p50 {quantile(waits, 0.5):.2f} p99 {p99:.2f} max {highest:.2f} s; {played.judged}",
                "p99 6 s, max 8 s" if how == "kill" else "1 s", met)
        )  # fmt: skip
        played.check()
        assert highest <= goal + BUSY_S


@pytest.mark.real
@long_form
async def test_row_11_the_loss_of_a_bookie_stalls_producers_for_a_moment(
    one_server: Ensemble, directory: Path, scorecard: Recorder
) -> None:
    shape = Shape(brokers=BROKERS, add_timeout_s=ADD_TIMEOUT_S)
    async with ClusterProcesses(one_server, directory, shape) as cluster:
        async with round_of(
            cluster, load_plan(cluster.service_url, SEED, subscriptions=False), directory
        ) as played:
            kinds = ["kill bookie", "pause bookie past its session"]
            seconds = max(SECONDS, seconds_for_all(len(kinds), 3.0))
            await played.play(schedule(SEED, kinds, seconds, 3.0))
        for kind, what, goal in (("kill", "kill -9", 1.5), ("pause", "hang", ADD_TIMEOUT_S + 1.0)):
            strokes = [stroke for stroke in played.strokes if stroke.kind.startswith(kind)]
            calls = [played.confirmations.slowest_s(stroke.at, stroke.until) for stroke in strokes]
            worst = max(calls)
            scorecard(
                Row("11", f"bookie {what}: slowest produce call", f"{len(strokes)} of them; {played.described}",
                    f"p50 {quantile(calls, 0.5):.2f} max {worst:.2f} s; {played.judged}", f"{goal:g} s", worst <= goal)
            )  # fmt: skip
            assert worst <= goal + BUSY_S
        played.check()


@long_form
@pytest.mark.real
async def test_row_23_a_rolling_restart_under_load(
    one_server: Ensemble, directory: Path, scorecard: Recorder
) -> None:
    async with ClusterProcesses(one_server, directory, Shape(brokers=BROKERS)) as cluster:
        for number in range(ROUNDS):
            async with round_of(cluster, load_plan(cluster.service_url, SEED + number), directory) as played:
                await played.play([Fault(1.0, "rolling restart", 0.0, 0.0)])
            (stroke,) = played.strokes
            stalls = {name: played.confirmations.stall_s(at, until) for name, at, until in stroke.steps}
            worst = max(stalls.values())
            scorecard(
                Row("23", "rolling restart: longest stall of a step", played.described,
                    f"{', '.join(f'{name} {stall:.2f}' for name, stall in stalls.items())} s; {played.judged}",
                    "0 lost, 1 s", worst <= 1.0)
            )  # fmt: skip
            played.check()
            assert worst <= 1.0 + BUSY_S

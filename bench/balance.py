"""The balance of bundles over brokers in virtual time: a day, and a thousand brokers.

    python -m bench balance [--quick] [--json FILE]

(1) a day of 30 brokers and 1,500 bundles whose load follows the hours of 24 time zones, with hot spots, brokers that join
    and brokers that die: how far the busiest and the idlest broker are apart, with the balancer and without; moves.
(2) 1,000 brokers, 1,000,000 topics in 20,000 and in 100,000 bundles: 10 % of the brokers die, their bundles are placed,
    others join; CPU of a round, the longest turn of the loop in it, memory.

No sockets and no store: what is measured is what `magnetar.broker.ownership.balance.core` decides, and what that costs.
"""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from rich.table import Table

from bench.arguments import console, parser_of
from bench.balance_model import DAY_S, Measured, ModelCluster
from magnetar.broker.ownership.balance.settings import BalanceSettings

_HOUR_ROUNDS = 120


class Day(NamedTuple):
    """Of a run of (1), without its first hour, in which bundles that were dealt at random are spread."""

    spread: float  # mean over the day
    worst_spread: float  # of a round
    apart: float  # share of rounds with a spread above twice the threshold
    busiest: float
    moves_per_hour: float
    most_moves_per_hour: int
    most_of_a_bundle: int
    returns: int
    splits: int
    idle_moves: int  # in the last hour, in which nothing happens


def run_day(
    *, brokers: int = 30, bundles: int = 1_500, hours: int = 24, balance: bool = True, seed: int = 1
) -> tuple[Day, ModelCluster]:
    """(1). Events: a hot spot of two hours every four hours, brokers that die, brokers that join."""
    settings = BalanceSettings(split_messages_per_s=1e9, split_bytes_per_s=1e12)
    cluster = ModelCluster(
        Random(seed), brokers=brokers, bundles=bundles, topics=bundles * 10, settings=settings, preferring=0
    )
    rng = Random(seed + 1)
    hot: list[str] = []
    for number in range(hours * _HOUR_ROUNDS):
        hour, rest = divmod(number, _HOUR_ROUNDS)
        if rest == 0:
            if hour % 4 == 1:
                hot = cluster.heat(max(brokers // 10, 1), 8.0)
            if hour % 4 == 3:
                cluster.cool(hot)
            if hour % 6 == 2:
                cluster.leave(rng.sample(sorted(cluster.brokers), max(brokers // 10, 1)))
            if hour % 6 == 4:
                cluster.join(max(brokers // 10, 1))
        cluster.step(balance=balance)
    return _day(cluster.measured, settings), cluster


def _day(measured: Measured, settings: BalanceSettings) -> Day:
    spread, moves = measured.spread[_HOUR_ROUNDS:], measured.moves[_HOUR_ROUNDS:] or [0]
    hours = [sum(moves[at : at + _HOUR_ROUNDS]) for at in range(0, len(moves), _HOUR_ROUNDS)]
    return Day(
        statistics.mean(spread),
        max(spread),
        sum(one > 2 * settings.shed_threshold for one in spread) / len(spread),
        max(measured.busiest[_HOUR_ROUNDS:]),
        statistics.mean(hours),
        max(hours),
        max(measured.moves_of.values(), default=0),
        measured.returns,
        measured.splits,
        sum(moves[-_HOUR_ROUNDS:]),
    )


class Scale(NamedTuple):
    """Of a run of (2)."""

    bundles: int
    topics: int
    placed: int  # bundles of the brokers that died
    place_cpu_s: float
    most_placed: int  # at one broker
    mean_placed: float
    spread_after_loss: float
    spread_after: float
    rounds_to_spread: int  # until the spread was below twice the threshold, new brokers included
    moves: int
    round_cpu_s: float  # mean
    most_round_cpu_s: float
    longest_turn_s: float
    snapshot_bytes: int
    round_bytes: int


def run_scale(
    *, brokers: int = 1_000, bundles: int = 100_000, topics: int = 1_000_000, rounds: int = 120
) -> Scale:
    """(2). One step without balance first; then 10 % die, half as many join, and 20 bundles become hot."""
    gc.collect()
    settings = BalanceSettings(split_messages_per_s=1e9, split_bytes_per_s=1e12)
    cluster = ModelCluster(
        Random(3), brokers=brokers, bundles=bundles, topics=topics, settings=settings, preferring=5
    )
    cluster.step()
    before = dict.fromkeys(cluster.brokers)
    lost = Random(4).sample(list(before), brokers // 10)
    placed, place_cpu_s, most = cluster.leave(lost)
    cluster.step()
    after_loss = cluster.measured.spread[-1]
    cluster.join(brokers // 20)
    cluster.heat(max(brokers // 50, 1), 10.0)
    within = 0
    for number in range(1, rounds + 1):
        cluster.step()
        if cluster.measured.spread[-1] > 2 * settings.shed_threshold:
            within = number
    snapshot_bytes, round_bytes = _memory(cluster)
    measured = cluster.measured
    return Scale(
        bundles,
        topics,
        placed,
        place_cpu_s,
        most,
        placed / (brokers - len(lost)),
        after_loss,
        measured.spread[-1],
        within,
        sum(measured.moves),
        statistics.mean(measured.round_cpu_s),
        max(measured.round_cpu_s),
        max(measured.longest_slice_s),
        snapshot_bytes,
        round_bytes,
    )


def _memory(cluster: ModelCluster) -> tuple[int, int]:
    """Bytes of what the leader reads, and what a round takes beside it at most."""
    import tracemalloc

    tracemalloc.start()
    cluster.report(everybody=True)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    snapshot = cluster.snapshot()
    with_snapshot = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    for _ in cluster.core.round(snapshot, cluster.now):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return before + with_snapshot - before, peak - with_snapshot


def _table(
    title: str, columns: Sequence[str], rows: Sequence[tuple[str, Callable[[Any], str]]], runs: Sequence[Any]
) -> Table:
    table = Table(title=title)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for name, cell in rows:
        table.add_row(name, *(cell(run) for run in runs))
    return table


_DAY_ROWS: tuple[tuple[str, Callable[[Day], str]], ...] = (
    ("busiest less idlest broker, mean of the day", lambda d: f"{d.spread:.2f}"),
    ("  most of any round", lambda d: f"{d.worst_spread:.2f}"),
    ("  rounds above 0.30", lambda d: f"{d.apart:.1%}"),
    ("busiest broker of any round (1.00: a core)", lambda d: f"{d.busiest:.2f}"),
    ("moves an hour, mean", lambda d: f"{d.moves_per_hour:.0f}"),
    ("  most in an hour", lambda d: str(d.most_moves_per_hour)),
    ("moves of any one bundle in the day, most", lambda d: str(d.most_of_a_bundle)),
    ("moves back to the owner before within an hour", lambda d: str(d.returns)),
    ("splits", lambda d: str(d.splits)),
)
_SCALE_ROWS: tuple[tuple[str, Callable[[Scale], str]], ...] = (
    ("bundles placed after the loss of 10 % of the brokers", lambda s: f"{s.placed:,}"),
    ("  CPU of all their placements", lambda s: f"{s.place_cpu_s:.2f} s"),
    ("  most at one broker; mean", lambda s: f"{s.most_placed}; {s.mean_placed:.1f}"),
    ("busiest less idlest broker after it", lambda s: f"{s.spread_after_loss:.2f}"),
    ("  at the end", lambda s: f"{s.spread_after:.2f}"),
    ("rounds until it stays below 0.30, with new brokers and hot spots", lambda s: str(s.rounds_to_spread)),
    ("moves", lambda s: f"{s.moves:,}"),
    ("CPU of a round, mean; most", lambda s: f"{s.round_cpu_s:.2f} s; {s.most_round_cpu_s:.2f} s"),
    ("longest turn of the loop in a round", lambda s: f"{s.longest_turn_s * 1000:.1f} ms"),
    ("memory of what is read", lambda s: f"{s.snapshot_bytes / 1e6:.0f} MB"),
    ("  of a round beside it", lambda s: f"{s.round_bytes / 1e6:.0f} MB"),
)


def main(arguments: Sequence[str]) -> int:
    """Prints the tables."""
    parser = parser_of("python -m bench balance", __doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller cluster, and fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go as well")
    given = parser.parse_args(arguments)
    screen = console()
    size: dict[str, int] = {"brokers": 10, "bundles": 300} if given.quick else {}
    days = [run_day(balance=balance, **size)[0] for balance in (True, False)]
    screen.print(_table("(1) a day", ["balanced", "not balanced"], _DAY_ROWS, days))
    sizes: list[dict[str, int]] = [{"bundles": 20_000}, {"bundles": 100_000}]
    if given.quick:
        sizes = [{"brokers": 100, "bundles": 10_000, "topics": 100_000, "rounds": 40}]
    scales = [run_scale(**one) for one in sizes]
    titles = [f"{scale.bundles:,} bundles" for scale in scales]
    screen.print(_table(f"(2) {scales[-1].topics:,} topics", titles, _SCALE_ROWS, scales))
    if given.json:
        found = {"day": [day._asdict() for day in days], "scale": [scale._asdict() for scale in scales]}
        given.json.write_text(json.dumps(found, indent=2))
    return 0


__all__ = ["DAY_S", "Day", "Scale", "main", "run_day", "run_scale"]

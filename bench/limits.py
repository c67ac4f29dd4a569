"""What each figure has to reach: the floor must hold, the stretch is what the prototype showed to be possible.

Rates in messages per second, times in milliseconds, memory in MB (10^6 bytes).
"""

from __future__ import annotations

from typing import NamedTuple

DISK, SOCKET, RING, COLD_READ = "of the disk", "of the socket", "x ring probe", "of a cold read"


class Goal(NamedTuple):
    """floor, stretch: 0 where nothing is asked. bytes: payload of a message, where a rate is held against a limit.

    compared: whether a ratio of two runs means anything, which it does not for a difference of two percentiles.
    """

    label: str
    unit: str
    floor: float = 0
    stretch: float = 0
    higher: bool = True
    bytes: int = 0
    limits: tuple[str, ...] = ()
    compared: bool = True


GOALS: dict[str, Goal] = {
    "a": Goal("(a) unbatched 100 B, with tail", "msg/s", 300_000, 450_000, bytes=100, limits=(DISK, SOCKET)),
    "a_tcp": Goal("(a) on one TCP bookie", "msg/s", 220_000, bytes=100, limits=(DISK, SOCKET)),
    "b": Goal(
        "(b) 1000 x 100 B, with tail, one client",
        "msg/s",
        800_000,
        1_100_000,
        bytes=100,
        limits=(DISK, SOCKET),
    ),
    "b_apart": Goal(
        "(b) producer and consumer apart", "msg/s", 1_100_000, 1_500_000, bytes=100, limits=(DISK, SOCKET)
    ),
    "c": Goal("(c) batches of 1 KB, with tail", "msg/s", 180_000, 280_000, bytes=1024, limits=(DISK, SOCKET)),
    "d_p50": Goal("(d) synchronous send, p50", "ms", higher=False),
    "d_ratio": Goal("(d) p50 over the TCP + ring probe's", "x", 2.0, 1.5, higher=False),
    "d_p99": Goal("(d) p99", "ms", 3.0, 1.5, higher=False, limits=(RING,)),
    "d_p999": Goal("(d) p99.9", "ms", higher=False, limits=(RING,)),
    "e_p50": Goal("(e) end to end at 10,000 msg/s, p50", "ms", 1.5, 0.8, higher=False, limits=(RING,)),
    "e_p99": Goal("(e) p99", "ms", 6.0, 3.0, higher=False, limits=(RING,)),
    "e_p999": Goal("(e) p99.9", "ms", higher=False, limits=(RING,)),
    "e_steady_p50": Goal("(e) while the disk did not stall, p50", "ms", 1.5, 0.8, higher=False),
    "e_steady_p99": Goal("(e) while the disk did not stall, p99", "ms", 6.0, 3.0, higher=False),
    "e_steady_p999": Goal("(e) while the disk did not stall, p99.9", "ms", higher=False),
    "e_added_p50": Goal(
        "(e) what the service adds to the bare disk then, p50", "ms", higher=False, compared=False
    ),
    "e_added_p99": Goal(
        "(e) what the service adds to the bare disk then, p99", "ms", higher=False, compared=False
    ),
    "e_added_p999": Goal(
        "(e) what the service adds to the bare disk then, p99.9", "ms", higher=False, compared=False
    ),
    "f_batched": Goal(
        "(f) cold catch-up, stored in batches",
        "msg/s",
        1_500_000,
        2_500_000,
        bytes=100,
        limits=(COLD_READ, SOCKET),
    ),
    "f_unbatched": Goal(
        "(f) cold catch-up, stored unbatched",
        "msg/s",
        700_000,
        1_200_000,
        bytes=100,
        limits=(COLD_READ, SOCKET),
    ),
    "g_batched": Goal(
        "(g) individual acks, stored in batches", "msg/s", 500_000, 800_000, bytes=100, limits=(SOCKET,)
    ),
    "g_unbatched": Goal(
        "(g) individual acks, stored unbatched", "msg/s", 200_000, 300_000, bytes=100, limits=(SOCKET,)
    ),
    "i_unbatched": Goal("(i) as (a), with keys", "msg/s", bytes=100),
    "i_unbatched_share": Goal("(i) as a share of the same without keys", "x", 0.85),
    "i_batched": Goal("(i) as (b), with keys", "msg/s", bytes=100),
    "i_batched_share": Goal("(i) as a share of the same without keys", "x", 0.85),
    "h_start": Goal("(h) start-up", "s", 1.0, 0.4, higher=False),
    "h_idle": Goal("(h) resident memory of all processes, idle", "MB", 110, 80, higher=False),
    "a_loaded": Goal("(h) the same after (a)", "MB", higher=False),
}

# Percentiles of a latency's ring probe by the figure's suffix.
_RING_PERCENTILES = {"p50": "p50", "p99": "p99", "p999": "p999"}


def verdict(name: str, value: float) -> str:
    """ "stretch", "floor", "BELOW", or "" where nothing is asked."""
    goal = GOALS[name]

    def reached(mark: float) -> bool:
        return value >= mark if goal.higher else value <= mark

    if not goal.floor:
        return ""
    if goal.stretch and reached(goal.stretch):
        return "stretch"
    return "floor" if reached(goal.floor) else "BELOW"


def ratios(name: str, value: float, probes: dict[str, float]) -> dict[str, float]:
    """The figure as a share or a multiple of each of its limits. `probes`: as `bench.report.median_probes` names them."""
    goal = GOALS[name]
    workload, _, suffix = name.partition("_")
    limit_of = {
        DISK: probes.get(f"disk {workload}", 0.0),
        SOCKET: probes.get("socket", 0.0),
        COLD_READ: probes.get("cold read", 0.0),
        RING: probes.get(f"ring {_RING_PERCENTILES.get(suffix, 'p50')}", 0.0),
    }
    amount = value * goal.bytes if goal.bytes else value
    return {limit: amount / limit_of[limit] for limit in goal.limits if limit_of[limit]}

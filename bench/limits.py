"""What each figure has to reach: the floor must hold, the stretch is what the prototype showed to be possible.

Rates in messages per second, times in milliseconds, memory in MB (10^6 bytes). The floors of (d) p50 are multiples of the
bare TCP + ring probe of the same run.
"""

from __future__ import annotations

from typing import NamedTuple


class Goal(NamedTuple):
    """`higher`: more is better. `relative_to`: name of a probe; floor and stretch are then multiples of it."""

    label: str
    unit: str
    floor: float
    stretch: float
    higher: bool = True
    relative_to: str = ""


GOALS: dict[str, Goal] = {
    "a": Goal("(a) unbatched 100 B, with tail", "msg/s", 300_000, 450_000),
    "a_tcp": Goal("(a) the same on one TCP bookie", "msg/s", 220_000, 0),
    "b": Goal("(b) batches of 1000 x 100 B, with tail, one client process", "msg/s", 800_000, 1_100_000),
    "b_apart": Goal("(b) producer and consumer in processes of their own", "msg/s", 1_100_000, 1_500_000),
    "c": Goal("(c) 1 KB in batches, with tail", "msg/s", 180_000, 280_000),
    "d_p50": Goal("(d) synchronous send, p50", "ms", 2.0, 1.5, False, "ring_p50"),
    "d_p99": Goal("(d) p99", "ms", 3.0, 1.5, False),
    "d_p999": Goal("(d) p99.9", "ms", 0, 0, False),
    "e_p50": Goal("(e) end to end at 10,000 msg/s, p50", "ms", 1.5, 0.8, False),
    "e_p99": Goal("(e) p99", "ms", 6.0, 3.0, False),
    "f_batched": Goal("(f) cold catch-up, stored in batches", "msg/s", 1_500_000, 2_500_000),
    "f_unbatched": Goal("(f) cold catch-up, stored unbatched", "msg/s", 700_000, 1_200_000),
    "g_batched": Goal("(g) individual acks, stored in batches", "msg/s", 500_000, 800_000),
    "g_unbatched": Goal("(g) individual acks, stored unbatched", "msg/s", 200_000, 300_000),
    "h_start": Goal("(h) start-up", "s", 1.0, 0.4, False),
    "h_idle": Goal("(h) resident memory, idle, all processes", "MB", 110, 80, False),
    "h_loaded": Goal("(h) resident memory after (b) and (c)", "MB", 0, 0, False),
}

# Which probe of the same run is the limit of a figure, and what one message is in its unit. "+": the lower one counts.
LIMITS: dict[str, tuple[str, float]] = {
    "a": ("echo_messages", 1),
    "a_tcp": ("echo_messages", 1),
    "b": ("disk_bytes", 100),
    "b_apart": ("disk_bytes", 100),
    "c": ("disk_bytes", 1024),
    "d_p50": ("ring_p50", 1),
    "d_p99": ("ring_p99", 1),
    "d_p999": ("ring_p999", 1),
    "e_p50": ("ring_p50", 1),
    "e_p99": ("ring_p99", 1),
    "f_batched": ("disk_read_bytes", 100),
    "f_unbatched": ("disk_read_bytes", 150),
    "g_batched": ("echo_bytes", 100),
    "g_unbatched": ("echo_messages", 1),
}


def verdict(name: str, value: float, probes: dict[str, float]) -> str:
    """ "stretch", "floor", "BELOW" or "" where nothing is asked."""
    goal = GOALS[name]
    floor, stretch = goal.floor, goal.stretch
    if goal.relative_to:
        probe = probes.get(goal.relative_to, 0.0)
        if not probe:
            return ""
        floor, stretch = floor * probe, stretch * probe
    if not floor:
        return ""

    def reached(mark: float) -> bool:
        return value >= mark if goal.higher else value <= mark

    if stretch and reached(stretch):
        return "stretch"
    return "floor" if reached(floor) else "BELOW"

"""What is asked of the ledger client, as rows of one table; the others are for comparison."""

from __future__ import annotations

from bench.rounds import Goal

GOALS: dict[str, Goal] = {
    "cpu_full": Goal("client CPU per append, 3/2/2, 1 KB, as fast as it goes", "us", 60, higher=False),
    "cpu_paced": Goal("    at 5,000 appends/s", "us", None, higher=False),
    "cpu_sparse": Goal(
        "    100 appends/s, one at a time: wake-ups and cold caches", "us", None, higher=False
    ),
    "cpu_bare": Goal(
        "        of that, bare sockets with the same bytes at the same pace", "us", None, higher=False
    ),
    "cpu_full_3/3/2": Goal("    3/3/2, as fast as it goes", "us", None, higher=False),
    "recovery_3/2/2": Goal("recovery of 10,000 unconfirmed entries of 1 KB, 3/2/2", "s", 2.0, higher=False),
    "recovery_3/3/2": Goal("    3/3/2", "s", 2.0, higher=False),
    "single_of_ring": Goal("one append at a time, 3/2/2, 1 KB: p50 over that of TCP + ring", "x", None),
}

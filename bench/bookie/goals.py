"""What is asked of the bookie, as rows of one table."""

from __future__ import annotations

from bench.rounds import Goal

GOALS: dict[str, Goal] = {
    "absorb_share": Goal("64 KB adds while the cache absorbs, of raw synced 64 KB writes", "x", 0.60),
    "sustained_share": Goal("64 KB adds over 4 x the write cache, of raw synced 64 KB writes", "x", 0.25),
    "absorb_group_share": Goal("    of raw synced writes of the journal's group size", "x", None),
    "absorb_path_share": Goal("    of TCP -> ring -> pwrite + fdatasync without a bookie", "x", None),
    "interleaved_absorb_100": Goal("10,000 ledgers over one, 100 B, while the cache absorbs", "x", 0.75),
    "interleaved_absorb_1024": Goal("10,000 ledgers over one, 1 KB, while the cache absorbs", "x", 0.75),
    "interleaved_absorb_65536": Goal("10,000 ledgers over one, 64 KB, while the cache absorbs", "x", 0.75),
    "interleaved_absorb_1048576": Goal("10,000 ledgers over one, 1 MB, while the cache absorbs", "x", 0.75),
    "interleaved_sustained_100": Goal("10,000 ledgers over one, 100 B, over 4 x the cache", "x", 0.75),
    "interleaved_sustained_1024": Goal("10,000 ledgers over one, 1 KB, over 4 x the cache", "x", 0.75),
    "interleaved_sustained_65536": Goal("10,000 ledgers over one, 64 KB, over 4 x the cache", "x", 0.75),
    "interleaved_sustained_1048576": Goal("10,000 ledgers over one, 1 MB, over 4 x the cache", "x", 0.75),
    "flush_p99": Goal("add p99 during a flush, of the quiet p99", "x", 3.0, higher=False),
    "compaction_p99": Goal("add p99 during GC and compaction, of the quiet p99", "x", 3.0, higher=False),
    "replay": Goal("replay of 1 GB of 1 KB entries, default caches", "s/GB", 20.0, higher=False),
    "replay_large": Goal("the same with a write cache that holds it", "s/GB", 20.0, higher=False),
    "memory": Goal("memory over the configured budget, sustained adds", "MB", 64.0, higher=False),
}

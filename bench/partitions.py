"""A topic of several partitions beside one that has none: rates, and CPU a message by process.

    python -m bench partitions [--partitions N] [--rounds N] [--messages N] [--json FILE]

A real service on loopback with fsync on, and a client process that produces messages of 100 bytes and tails them: unbatched
and in batches of 1,000, without keys (round robin by batch) and with keys. In each round all of them run after each other on
the same service, once on a plain topic and once on a partitioned one. The ratio is that of microseconds of CPU a message, of
all processes together: 1 is as cheap as a plain topic, less is dearer.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.arguments import OUT, console, parser_of
from bench.service_process import ServiceProcess
from bench.services import run_client, running
from magnetar.client import connect

GOAL = 0.9
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "unbatched": ("unbatched", {}),
    "unbatched, keys": ("unbatched", {"keyed": True}),
    "batched": ("batched", {"batch": 1000}),
    "batched, keys": ("batched", {"batch": 1000, "keyed": True}),
}


async def _create(url: str, topic: str, partitions: int) -> None:
    async with connect(url) as client:
        await client.admin.create_topic(topic, partitions=partitions)


def main(arguments: Sequence[str]) -> int:
    """Prints a line for each figure."""
    parser = parser_of("python -m bench partitions", __doc__)
    parser.add_argument("--partitions", type=int, default=8, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument(
        "--messages", type=int, default=300_000, metavar="N", help="unbatched; twice as many batched"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    OUT.mkdir(exist_ok=True)
    screen = console()
    directory = OUT / f"scratch-{time.time_ns()}"
    found: dict[str, dict[str, list[dict[str, Any]]]] = {
        name: {"plain": [], "partitioned": []} for name in PARTS
    }
    try:
        service = ServiceProcess(directory / "data", arguments=["--log-level", "warning"])
        with running(service) as services:
            for number in range(given.rounds):
                for name, (workload, parameters) in PARTS.items():
                    messages = given.messages * (2 if workload == "batched" else 1) // 1000 * 1000
                    for kind in ("plain", "partitioned") if number % 2 else ("partitioned", "plain"):
                        topic = f"{kind}-{number}-{name.replace(', ', '-')}"
                        if kind == "partitioned":
                            asyncio.run(_create(service.url, topic, given.partitions))
                        result = run_client(
                            services, workload, topic, messages=messages, size=100, **parameters
                        )
                        found[name][kind].append(result)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for name, kinds in found.items():
        cost = {
            kind: statistics.median(sum(one["cpu_us_per_message"].values()) for one in results)
            for kind, results in kinds.items()
        }
        rate = {kind: statistics.median(one["rate"] for one in results) for kind, results in kinds.items()}
        ratio = cost["plain"] / cost["partitioned"]
        screen.print(
            f"{name:16} plain {rate['plain']:11,.0f} msg/s {cost['plain']:6.2f} us CPU; {given.partitions} partitions "
            f"{rate['partitioned']:11,.0f} msg/s {cost['partitioned']:6.2f} us CPU; by CPU {ratio:.2f}"
            f"{'' if ratio >= GOAL else f' (below {GOAL})'}"
        )
        for kind, results in kinds.items():
            roles = {
                role: statistics.median(one["cpu_us_per_message"][role] for one in results)
                for role in results[0]["cpu_us_per_message"]
            }
            screen.print(f"  {kind}: " + ", ".join(f"{role} {us:.2f}" for role, us in roles.items()))
    path = given.json or OUT / time.strftime("bench-partitions-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(found, indent=1))
    screen.print(f"all figures: {path}")
    return 0

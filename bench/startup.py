"""What a standalone daemon costs before anybody uses it, beside another revision: CPU of the start, and resident memory.

    python -m bench startup [--base HEAD] [--rounds 10]

Both sides are taken from git and started by turns with the same interpreter and packages. Medians; memory of all processes:
idle two seconds after the start, and once HTTP was asked, which imports what it needs then.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from bench.arguments import OUT, console
from bench.compare.errors import CompareFailed
from bench.compare.revisions import Repository
from bench.service_process import ServiceProcess, cpu_time, free_port

ROOTS = ("proto", "bookie", "broker", "client")
IDLE_S = 2.0


def figures(source: Path, data: Path) -> dict[str, float]:
    """Of one start."""
    shutil.rmtree(data, ignore_errors=True)
    path = os.pathsep.join(str(source / root) for root in ROOTS)
    listens = (source / "broker/magnetar/broker/listeners/pulsar").exists()
    ports = {"pulsar": free_port() if listens else -1}
    with ServiceProcess(data, environment={"PYTHONPATH": path}, ports=ports) as service:
        pids = service.processes().values()
        cpu_s = sum(cpu_time(pid).total for pid in pids)
        time.sleep(IDLE_S)
        idle = sum(service.resident_bytes().values())
        with urllib.request.urlopen(f"http://{service.host}:{service.ports['http']}/health") as answer:
            answer.read()
        return {
            "CPU of the start, s": cpu_s,
            "until ready, s": service.ready_after_s,
            "memory idle, MB": idle / 1e6,
            "memory after HTTP, MB": sum(service.resident_bytes().values()) / 1e6,
        }


def main(arguments: Sequence[str]) -> int:
    """Prints a line for each figure."""
    parser = argparse.ArgumentParser(prog="python -m bench startup", description=__doc__)
    parser.add_argument("--base", default="HEAD", metavar="REVISION")
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args(arguments)
    scratch = OUT / f"startup-{time.time_ns()}"
    try:
        repository = Repository(Path(__file__).parent)
        sides = [repository.revision(given.base), repository.working_tree()]
        sources = [scratch / str(number) for number in range(len(sides))]
        for revision, source in zip(sides, sources, strict=True):
            repository.export(revision, ROOTS, source)
            figures(source, scratch / "data")  # writes the bytecode
        found: list[list[dict[str, float]]] = [[], []]
        for number in range(given.rounds):
            for side in (0, 1) if number % 2 else (1, 0):
                found[side].append(figures(sources[side], scratch / "data"))
    except CompareFailed as error:
        print(f"bench startup: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    screen = console()
    screen.print(f"{'':24}{sides[0].label:>24}{sides[1].label:>36}{'change':>10}")
    for name in found[0][0]:
        base, ours = (statistics.median(one[name] for one in rounds) for rounds in found)
        screen.print(f"{name:24}{base:24.2f}{ours:36.2f}{ours / base - 1:10.1%}")
    return 0

"""Instructions of the service for a message, beside another revision: little noise, whatever else the machine does.

    python -m bench instructions [--base HEAD] [--only a,b,tcp] [--messages 50000]

(a) and (b) of `python -m bench`, and (a) on a bookie of its own over TCP. Daemons run under valgrind's callgrind, their
helper processes do not; the clients are those of the working tree. Counted is what comes after a first run of the same
workload, in each daemon. What a turn of the loop takes in one go depends on the pace a little: two runs differ by 1 to 2 %.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.arguments import OUT, console
from bench.compare.errors import CompareFailed
from bench.compare.revisions import Repository
from bench.service_process import ServiceProcess, free_port
from bench.services import run_client, running
from bench.startup import ROOTS

WORKLOADS = {"a": ("unbatched", {}), "b": ("batched", {"batch": 1000}), "tcp": ("unbatched", {})}
QUIET = (
    "--log-level",
    "error",
)  # a warning, as of a journal that is slow here, would import what writes logs
_TOTAL = re.compile(r"^totals: (\d+)", re.MULTILINE)


class _Counted(ServiceProcess):
    """A daemon under callgrind, which counts nothing yet."""

    def _command_line(self) -> list[str]:
        count = ["valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no"]
        return [*count, f"--callgrind-out-file={self.data}.counts", *super()._command_line()]

    def control(self, *arguments: str) -> None:
        """Of callgrind."""
        command = ["callgrind_control", *arguments, str(self.pid)]
        subprocess.run(command, check=True, capture_output=True)

    def counted(self) -> int:
        """Instructions until now."""
        self.control("--dump")
        found = _TOTAL.search(Path(f"{self.data}.counts.1").read_text())
        assert found is not None
        return int(found[1])


def measure(source: Path, data: Path, workload: str, messages: int) -> float:
    """For a message, of all daemons together."""
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    environment = {"PYTHONPATH": os.pathsep.join(str(source / root) for root in ROOTS), "PYTHONHASHSEED": "0"}
    listens = (source / "broker/magnetar/broker/listeners/pulsar").exists()
    ports = {"pulsar": free_port() if listens else -1}

    def daemon(command: str, *arguments: str) -> _Counted:
        return _Counted(
            data / command,
            command=command,
            arguments=[*QUIET, *arguments],
            environment=environment,
            ports=ports,
        )

    def count(services: list[_Counted]) -> float:
        name, parameters = WORKLOADS[workload]
        run_client([*services], name, workload, messages=messages, size=100, **parameters)
        for service in services:
            service.control("--instr=on")
        result = run_client([*services], name, f"{workload}2", messages=messages, size=100, **parameters)
        counted: float = sum(service.counted() for service in services) / result["messages"]
        return counted

    if workload != "tcp":
        service = daemon("standalone")
        with running(service):
            return count([service])
    bookie = daemon("bookie")
    with running(bookie):
        broker = daemon("broker", "--bookies", f"127.0.0.1:{bookie.ports['bookie']}")
        with running(broker):
            return count([bookie, broker])


def main(arguments: Sequence[str]) -> int:
    """Prints a line for each workload."""
    parser = argparse.ArgumentParser(prog="python -m bench instructions", description=__doc__)
    parser.add_argument("--base", default="HEAD", metavar="REVISION")
    parser.add_argument("--only", default=",".join(WORKLOADS), metavar="a,b,tcp")
    parser.add_argument(
        "--messages", type=int, default=50_000, metavar="N", help="of (a); (b) has ten times as many"
    )
    given = parser.parse_args(arguments)
    wanted = given.only.split(",")
    if not set(wanted) <= WORKLOADS.keys() or not shutil.which("valgrind"):
        parser.error(f"valgrind has to be installed, and workloads are {', '.join(WORKLOADS)}")
    screen, scratch = console(), OUT / f"instructions-{time.time_ns()}"
    try:
        repository = Repository(Path(__file__).parent)
        sides = [repository.revision(given.base), repository.working_tree()]
        screen.print(f"{'':8}{sides[0].label:>24}{sides[1].label:>36}{'change':>10}")
        sources = [scratch / str(number) for number in range(len(sides))]
        for revision, source in zip(sides, sources, strict=True):
            repository.export(revision, ROOTS, source)
        for workload in wanted:
            messages = given.messages * (10 if workload == "b" else 1)
            base, ours = (measure(source, scratch / "data", workload, messages) for source in sources)
            screen.print(f"{workload:8}{base:24,.0f}{ours:36,.0f}{ours / base - 1:10.1%}")
    except CompareFailed as error:
        print(f"bench instructions: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0

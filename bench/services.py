"""Services under measurement: their CPU by process, their disk reads, and a page cache without their files."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.service_process import ServiceProcess, cpu_time, io_counters

IDLE_S = 0.5


class Measured:
    """One workload's cost: CPU seconds by process, and how many groups the journal wrote of which size."""

    def __init__(self, services: list[ServiceProcess]) -> None:
        self._pids = {
            f"{service.command} {role}" if len(services) > 1 else role: pid
            for service in services
            for role, pid in service.processes().items()
        }
        self._cpu = {name: cpu_time(pid).total for name, pid in self._pids.items()}
        self._io = {name: io_counters(pid) for name, pid in self._pids.items()}

    def result(self) -> dict[str, Any]:
        """Since it was made."""
        cpu = {name: cpu_time(pid).total - self._cpu[name] for name, pid in self._pids.items()}
        found: dict[str, Any] = {"cpu_s": cpu, "read_bytes": 0}
        for name, pid in self._pids.items():
            now, before = io_counters(pid), self._io[name]
            found["read_bytes"] += now.get("read_bytes", 0) - before.get("read_bytes", 0)
            if name.endswith("journal-writer"):
                # A group is one pwritev and one report to the daemon.
                groups = (now.get("syscw", 0) - before.get("syscw", 0)) / 2
                if groups >= 1:
                    found["groups"] = int(groups)
                    found["group_bytes"] = int((now["wchar"] - before["wchar"]) / groups)
        return found


def run_client(
    services: list[ServiceProcess], workload: str, topic: str, **parameters: Any
) -> dict[str, Any]:
    """One client process against the (last) service; with CPU microseconds per message by process."""
    measured = Measured(services)
    done = subprocess.run(
        client_line(services[-1].url, workload, topic, parameters),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"bench: the client of {workload} ended with {done.returncode}")
    return _with_cpu(json.loads(done.stdout.splitlines()[-1]), measured)


def run_apart(
    services: list[ServiceProcess], topic: str, *, messages: int, size: int, batch: int
) -> dict[str, Any]:
    """(b) with the tailing reader in a process of its own; from the producer's first send to the reader's last message."""
    measured = Measured(services)
    url = services[-1].url
    with subprocess.Popen(
        client_line(url, "tail_batched", topic, {"messages": messages, "batch": batch}),
        stdout=subprocess.PIPE,
        text=True,
    ) as tailing:
        assert tailing.stdout is not None
        assert tailing.stdout.readline().strip() == "ready"
        parameters = {"messages": messages, "size": size, "batch": batch}
        producing = subprocess.run(
            client_line(url, "produce_batched", topic, parameters),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        tailed = json.loads(tailing.stdout.readline())
    produced = json.loads(producing.stdout.splitlines()[-1])
    seconds = tailed["ended"] - produced["began"]
    result = {"rate": messages / seconds, "messages": produced["messages"], "seconds": seconds}
    result["cpu_s"] = produced["cpu_s"] + tailed["cpu_s"]
    return _with_cpu(result, measured)


def client_line(url: str, workload: str, topic: str, parameters: dict[str, Any]) -> list[str]:
    """The command line of a client process (bench.client)."""
    return [sys.executable, "-m", "bench.client", workload, url, topic, json.dumps(parameters)]


def _with_cpu(result: dict[str, Any], measured: Measured) -> dict[str, Any]:
    found = measured.result()
    cpu = {**found.pop("cpu_s"), "client": result.pop("cpu_s")}
    result["cpu_us_per_message"] = {
        name: round(seconds * 1e6 / max(1, result["messages"]), 3) for name, seconds in cpu.items()
    }
    return result | found


@contextlib.contextmanager
def running(*services: ServiceProcess) -> Iterator[list[ServiceProcess]]:
    """Starts them in order, stops them in the other."""
    try:
        for service in services:
            service.start()
        yield list(services)
    finally:
        for service in reversed(services):
            if service.running:
                service.stop()


def resident_megabytes(service: ServiceProcess) -> dict[str, float]:
    """Resident memory by process after a moment without work; what processes share counts in each."""
    time.sleep(IDLE_S)
    return {role: size / 1e6 for role, size in service.resident_bytes().items()}


def drop_page_cache(directory: Path) -> int:
    """Writes back and drops the pages of every file below; returns the bytes of those files."""
    total = 0
    for path in sorted(directory.rglob("*")):
        if not path.is_file():
            continue
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            total += os.fstat(fd).st_size
        finally:
            os.close(fd)
    return total

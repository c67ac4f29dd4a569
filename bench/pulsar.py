"""Pulsar's own `pulsar-perf` against Magnetar, and against a Pulsar standalone of the same distribution, fsync on.

    make bench-pulsar                            # both, one after the other; about five minutes
    make bench-pulsar ARGS='--no-pulsar --only unbatched --seconds 30'

Messages of 100 bytes. Rates are those of the receiving side, and CPU is that of all processes of the service, user and
system, over the same time: from `--warm-up` seconds after the first message on, so that Java has compiled what it runs.
Latencies are those of sends, medians over the seconds. Where the service needs much less than a core ("cores"), the rate
is that of the clients' Java or of the disk, and CPU a message is what can be compared. Java acknowledges every 100 ms, and a
Shared consumer gets no more than 50,000 messages in advance: that is a limit of 500,000/s, which Magnetar reaches.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from bench.arguments import OUT, console, parser_of
from bench.service_process import ServiceProcess, cpu_time, free_port
from pulsar_admin.distribution import Missing, distribution, standalone

NAMESPACE = "persistent/public/default"
SIZE = 100
JAVA_S = 3.0  # until a consumer has subscribed
START_S = 60.0  # at most, until the first message
FILL = 8_000_000  # messages, at most, that are sent before a workload that reads: seconds, after Java is warm
LATE = "late"  # a subscription that keeps what was sent, for the consumers that come afterwards
_EARLIEST = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}
_MEMORY = "-Xmx1500m -XX:MaxDirectMemorySize=600m"  # the histograms alone take half of that
# What its client says with `-i 1`, each second. The producer's figures are receipts and their latencies.
_RECEIVED = re.compile(r"Consume throughput received: ([\d.]+) msgs/s")
_PRODUCED = re.compile(
    r"Latency: med: ([\d.]+) ms .*? - 99pct: ([\d.]+) ms .*?Ack received rate: ([\d.]+) ack/s"
)


class Workload(NamedTuple):
    """Its name for `--only`, what it is, the rate that is asked for, and arguments for producer and consumer.

    `produces`: while it is measured; else the topic is filled before.
    """

    name: str
    label: str
    target: str
    topic: str
    produces: bool
    produce: Sequence[str]
    consume: Sequence[str]


_UNBATCHED = ["-db", "-o", "5000"]
_BATCHED = ["-o", "50000"]
_SHARED = ["-ss", LATE, "-st", "Shared"]
WORKLOADS = (
    Workload("unbatched", "unbatched, with tail", "120,000", "unbatched", True, _UNBATCHED, []),
    Workload("batched", "batched, with tail", "500,000", "batched", True, _BATCHED, []),
    Workload("catch-up", "batched, catch-up", "700,000", "batched", False, _BATCHED, ["-ss", LATE]),
    Workload("shared", "batched, catch-up, Shared", "350,000", "shared", False, _BATCHED, _SHARED),
    Workload("acks", "unbatched, catch-up, Shared", "", "acks", False, _UNBATCHED, _SHARED),
)


class Sample(NamedTuple):
    """A second of `pulsar-perf`: when it ended, messages a second, CPU of service and clients so far, latencies in ms."""

    at: float
    rate: float
    cpu_s: float
    client_s: float
    p50: float
    p99: float


def tree(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    with contextlib.suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                yield from tree(int(child))


class Perf:
    """One `pulsar-perf` that runs, and a thread that reads what it says."""

    def __init__(
        self, pulsar: Path, arguments: Sequence[str], service: Sequence[int], clients: list[int], log: Path
    ) -> None:
        """`service` and `clients`: processes of which CPU is measured; this one is added to the clients."""
        self.samples: list[Sample] = []  # of seconds in which there was a message
        self._service = service
        self._clients = clients
        self._log = log
        self._process = subprocess.Popen(
            [pulsar / "bin" / "pulsar-perf", *arguments],
            env=os.environ | {"PULSAR_EXTRA_OPTS": _MEMORY},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        clients.append(self._process.pid)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._log.open("w") as log:
            for line in self._process.stdout:
                log.write(line)
                cpu = [sum(cpu_time(pid).total for pid in pids) for pids in (self._service, self._clients)]
                if match := _RECEIVED.search(line):
                    figures = float(match[1]), *cpu, 0.0, 0.0
                elif match := _PRODUCED.search(line):
                    figures = float(match[3]), *cpu, float(match[1]), float(match[2])
                else:
                    continue
                if figures[0]:
                    self.samples.append(Sample(time.monotonic(), *figures))

    def wait(self, seconds: float) -> None:
        """Until it ends by itself, or for so many seconds from its first message on; then it is ended."""
        latest = time.monotonic() + seconds + START_S
        while self._process.poll() is None and time.monotonic() < latest:
            if self.samples:
                latest = min(latest, self.samples[0].at + seconds)
            time.sleep(0.1)
        self.stop()

    def stop(self) -> None:
        """Ends it."""
        self._process.terminate()
        self._process.wait()
        self._reader.join()

    def measured(self, warm_up_s: float) -> list[Sample]:
        """The samples after the warm-up, or the second half of them where there are few. Raises Missing."""
        found = [one for one in self.samples if one.at >= self.samples[0].at + warm_up_s]
        found = max(found, self.samples[len(self.samples) // 2 :], key=len)
        if len(found) < 3:
            raise Missing(f"pulsar-perf said too little; {self._log} has its output")
        return found


class Service(NamedTuple):
    """One that runs: its addresses, and its processes."""

    name: str
    http: str
    url: str
    pids: Sequence[int]


@contextlib.contextmanager
def magnetar(scratch: Path, ports: Mapping[str, int]) -> Iterator[Service]:
    """A standalone service with Pulsar's port."""
    arguments = ["--log-level", "warning"]
    with ServiceProcess(scratch / "data", arguments=arguments, ports=ports) as service:
        host, found = service.host, service.ports
        yield Service(
            "Magnetar",
            f"http://{host}:{found['http']}",
            f"pulsar://{host}:{found['pulsar']}",
            list(tree(service.pid)),
        )


@contextlib.contextmanager
def real(pulsar: Path) -> Iterator[Service]:
    """Pulsar; its standalone.conf has fsync off."""
    with standalone(pulsar, journalSyncData="true") as (http, url):
        yield Service("Pulsar", http, url, [pid for pid in tree(os.getpid()) if pid != os.getpid()])


def _put(url: str, body: Any = None) -> None:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="PUT")
    urllib.request.urlopen(request, timeout=60).close()


def run(
    service: Service, workload: Workload, pulsar: Path, seconds: int, warm_up_s: float, scratch: Path
) -> dict[str, float]:
    """One workload's figures."""
    topic = f"persistent://public/default/{workload.topic}"
    clients: list[int] = []
    log = scratch / f"{service.name}-{workload.name}"
    common = ["-u", service.url, "-i", "1", topic]
    consume = ["consume", *workload.consume, "-sp", "Earliest", *common]
    produce = ["produce", *workload.produce, "-r", "2000000", "-s", str(SIZE), *common]
    if not workload.produces:
        filling = Perf(
            pulsar, [*produce, "-m", str(FILL)], service.pids, clients, log.with_suffix(".fill.log")
        )
        filling.wait(2 * seconds)
    consumer = timed = Perf(pulsar, consume, service.pids, clients, log.with_suffix(".consume.log"))
    if workload.produces:
        time.sleep(JAVA_S)
        timed = Perf(pulsar, produce, service.pids, clients, log.with_suffix(".produce.log"))
    timed.wait(seconds)
    consumer.stop()
    received = consumer.measured(warm_up_s)
    if workload.produces:
        received = [one for one in received if one.at <= timed.samples[-1].at]
    else:
        received = received[:-1]  # in the last second there was nothing left
    first, end = received[0], received[-1]
    messages = sum(one.rate * (one.at - before.at) for before, one in pairwise(received))
    figures = {
        "rate": messages / (end.at - first.at),
        "cpu_us_per_message": (end.cpu_s - first.cpu_s) * 1e6 / messages,
        "client_us_per_message": (end.client_s - first.client_s) * 1e6 / messages,
        "cores": (end.cpu_s - first.cpu_s) / (end.at - first.at),
        "messages": messages,
    }
    if timed is not consumer:
        sent = timed.measured(warm_up_s)
        figures["p50_ms"] = statistics.median(one.p50 for one in sent)
        figures["p99_ms"] = statistics.median(one.p99 for one in sent)
    return figures


def main(arguments: Sequence[str]) -> int:
    """Prints one table for all services."""
    parser = parser_of("make bench-pulsar", __doc__)
    parser.add_argument("folder", type=Path, help="where Pulsar's distribution is, or is downloaded to")
    parser.add_argument("--no-pulsar", action="store_true", help="Magnetar alone")
    parser.add_argument("--only", default=",".join(one.name for one in WORKLOADS), metavar="NAME,...")
    parser.add_argument("--seconds", type=int, default=20, help="of each workload (default: 20)")
    parser.add_argument("--warm-up", type=float, default=6.0, metavar="SECONDS", help="of those (default: 6)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    wanted = [one for one in WORKLOADS if one.name in given.only.split(",")]
    try:
        pulsar = distribution(given.folder)
    except Missing as error:
        print(f"bench pulsar: {error}", file=sys.stderr)
        return 0
    OUT.mkdir(exist_ok=True)
    scratch = OUT / f"scratch-{time.time_ns()}"
    scratch.mkdir()
    screen = console()
    found: dict[str, dict[str, dict[str, float]]] = {}  # by service, workload, figure
    services = [magnetar(scratch, {"pulsar": free_port()})]
    if not given.no_pulsar:
        services.append(real(pulsar))
    for one_service in services:
        with one_service as service:
            topics = f"{service.http}/admin/v2/{NAMESPACE}"
            for topic in dict.fromkeys(one.topic for one in wanted):
                _put(f"{topics}/{topic}")
                _put(f"{topics}/{topic}/subscription/{LATE}", _EARLIEST)
            rows = found[service.name] = {}
            for one in wanted:
                try:
                    row = run(service, one, pulsar, given.seconds, given.warm_up, scratch)
                except Missing as error:
                    screen.print(f"{service.name}: {one.label}: {error}")
                    continue
                rows[one.name] = row
                cost = row["cpu_us_per_message"]
                screen.print(
                    f"{service.name}: {one.label}: {row['rate']:,.0f}/s, {cost:.2f} us of CPU a message"
                )
    screen.print(_table(wanted, found))
    path = given.json or OUT / time.strftime("pulsar-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(found, indent=1))
    screen.print(f"all figures: {path}")
    shutil.rmtree(scratch / "data", ignore_errors=True)
    return 0


def _table(workloads: Sequence[Workload], found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table:
    table = Table("workload", "service")
    for name in ("received/s", "target", "p50 ms", "p99 ms", "CPU us/message", "of the clients", "cores"):
        table.add_column(name, justify="right")
    for workload in workloads:
        for service, rows in found.items():
            row = rows.get(workload.name)
            if row is None:
                continue
            target = workload.target if service == "Magnetar" else ""
            names = ("p50_ms", "p99_ms", "cpu_us_per_message", "client_us_per_message", "cores")
            figures = [f"{row[name]:.2f}" if name in row else "" for name in names]
            table.add_row(workload.label, service, f"{row['rate']:,.0f}", target, *figures)
    return table

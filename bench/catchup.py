"""What a tail waits beside readers that are far behind, and beside consumers that are stuck: a real service, fsync on.

    python -m bench catchup [--megabytes N] [--readers N] [--seconds S] [--json FILE]

A topic of N MB of messages of 1,000 bytes. A producer sends 5,000 a second to it, unbatched, and a reader follows the tail:
(1) alone;
(2) beside readers from the start of the topic, until they have arrived or for S seconds;
(3) beside subscriptions whose consumers are stuck: one kind takes nothing, one acknowledges nothing, and one has stopped to
    read its socket (its process is stopped).

For each: how long after it was sent a message was there, MB delivered to the readers, MB that were read from the bookies
for that, CPU of the daemon, its resident memory in the end, and what is in its caches. Readers run in processes of a low
priority: what is measured is the service, not which client gets the core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import struct
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop
from rich.table import Table

from bench.arguments import OUT, console, parser_of
from bench.percentiles import percentiles
from bench.service_process import ServiceProcess, cpu_time
from magnetar.client import connect

TOPIC = "behind"
SIZE = 1_000
RATE = 5_000
PROCESSES = 2
_STAMP = struct.Struct(">d")
_FIGURES = ("bytes_out_total", "ledger_read_bytes_total", "entry_read_bytes_total",
            "tail_cache_bytes", "read_ahead_bytes", "shared_read_bytes")  # fmt: skip


# --- processes of readers --------------------------------------------------------------------------------------------


async def _read(url: str, readers: int, messages: int) -> None:
    """Readers from the start, in this process."""

    async def one() -> None:
        async with client.create_reader(TOPIC, start="earliest") as reader:
            seen = 0
            async for batch in reader.batches():
                seen += len(batch)
                if seen >= messages:
                    return

    async with connect(url) as client:
        await asyncio.gather(*(one() for _ in range(readers)))


async def _stick(url: str, kind: str, consumers: int) -> None:
    """Consumers that are stuck; each has a subscription of its own."""
    async with connect(url) as client, AsyncExitStack() as stack:
        for number in range(consumers):
            subscribing = client.subscribe(TOPIC, f"{kind}-{number}", type="shared", start="latest")
            consumer = await stack.enter_async_context(subscribing)
            if kind == "unacknowledged":
                stack.push_async_callback(_wait, asyncio.ensure_future(_take(consumer)))
        print("ready", flush=True)
        await asyncio.Event().wait()


async def _take(consumer: Any) -> None:
    async for _ in consumer.batches():
        pass


async def _wait(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def _child(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench", "catchup", *arguments,
        stdout=asyncio.subprocess.PIPE, preexec_fn=lambda: os.nice(15),
    )  # fmt: skip


# --- the tail --------------------------------------------------------------------------------------------------------


class _Tail:
    """A producer at a steady rate and a reader at the tail, in this process."""

    def __init__(self, service: ServiceProcess) -> None:
        self._service = service
        self.rows: dict[str, dict[str, Any]] = {}

    async def beside(self, name: str, others: asyncio.Future[Any], most_s: float) -> None:
        """Until the others are done, and no longer than that."""
        url, pid = self._service.url, self._service.pid
        before, cpu = await self._figures(), cpu_time(pid).total
        times: list[float] = []
        async with (
            connect(url) as client,
            client.create_producer(TOPIC, batching=False) as producer,
            client.create_reader(TOPIC, start="latest") as reader,
        ):

            async def tail() -> None:
                async for message in reader:
                    times.append(time.perf_counter() - _STAMP.unpack_from(message.value or b"")[0])  # noqa: PERF401

            tailing = asyncio.ensure_future(tail())
            pad = bytes(SIZE - _STAMP.size)
            began, sent = time.perf_counter(), 0
            while not others.done() and time.perf_counter() - began < most_s:
                due = int((time.perf_counter() - began) * RATE) + 1
                for _ in range(due - sent):
                    receipt = producer.send_nowait(_STAMP.pack(time.perf_counter()) + pad)
                sent = due
                await asyncio.sleep(0.001)
            took = time.perf_counter() - began
            await receipt
            async with asyncio.timeout(60):
                while len(times) < sent:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            after = await self._figures()
            await _wait(tailing)
        rising = {key: after[key] - before[key] for key in _FIGURES if key.endswith("_total")}
        latency = percentiles(times[len(times) // 10 :])
        self.rows[name] = {
            "seconds": took, "messages": sent, "latency_ms": latency._asdict(), **rising,
            **{key: after[key] for key in _FIGURES if not key.endswith("_total")},
            "daemon_cpu_s": cpu_time(pid).total - cpu,
            "resident_bytes": self._service.resident_bytes()["daemon"],
        }  # fmt: skip

    async def _figures(self) -> dict[str, float]:
        url = f"http://127.0.0.1:{self._service.ports['http']}/metrics"

        def read() -> str:
            with urllib.request.urlopen(url, timeout=30) as answer:
                text: str = answer.read().decode()
                return text

        lines = (await asyncio.to_thread(read)).splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {key: float(values.get(f"magnetar_broker_{key}", 0)) for key in _FIGURES}


async def _fill(url: str, messages: int) -> None:
    values = [os.urandom(SIZE)] * 500
    async with connect(url) as client, client.create_producer(TOPIC) as producer:
        for _ in range(0, messages, len(values)):
            await producer.send_many(values)


async def _run(service: ServiceProcess, given: argparse.Namespace) -> dict[str, Any]:
    messages = given.megabytes * 1_000_000 // SIZE
    await _fill(service.url, messages)
    tail = _Tail(service)
    await tail.beside("alone", asyncio.ensure_future(asyncio.sleep(given.seconds)), given.seconds)
    each = given.readers // PROCESSES
    arguments = ["--child", "read", "--url", service.url, "--readers", str(each), "--count", str(messages)]
    children = list(await asyncio.gather(*(_child(*arguments) for _ in range(PROCESSES))))
    reading = asyncio.gather(*(child.wait() for child in children))
    await tail.beside(f"{each * PROCESSES} readers from the start", reading, 10 * given.seconds)
    for child in children:
        if child.returncode is None:
            child.kill()
    await reading
    children = []
    for kind in ("idle", "unacknowledged", "stopped"):
        arguments = ["--child", kind, "--url", service.url, "--readers", str(given.readers)]
        children.append(await _child(*arguments))
        assert children[-1].stdout is not None
        await children[-1].stdout.readline()
    children[-1].send_signal(signal.SIGSTOP)
    await tail.beside(
        f"3 x {given.readers} stuck consumers",
        asyncio.ensure_future(asyncio.sleep(given.seconds)),
        given.seconds,
    )
    for child in children:
        child.kill()
        await child.wait()
    return tail.rows


def main(arguments: Sequence[str]) -> int:
    """Prints a table."""
    parser = parser_of("python -m bench catchup", __doc__)
    parser.add_argument(
        "--megabytes", type=int, default=1_000, metavar="N", help="of the topic (default: 1000)"
    )
    parser.add_argument("--readers", type=int, default=20, metavar="N")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--child", choices=("read", "idle", "unacknowledged", "stopped"), help=argparse.SUPPRESS
    )
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child == "read":
        uvloop.run(_read(given.url, given.readers, given.count))
        return 0
    if given.child:
        uvloop.run(_stick(given.url, given.child, given.readers))
        return 0
    OUT.mkdir(exist_ok=True)
    scratch = OUT / f"catchup-{time.time_ns()}"
    try:
        with ServiceProcess(scratch, arguments=["--log-level", "warning"]) as service:
            rows = uvloop.run(_run(service, given))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    table = Table(title=f"{given.megabytes} MB; {RATE:,} messages of {SIZE:,} bytes a second at the tail")
    for name in ("", "seconds", "p50 ms", "p99 ms", "max ms", "MB out", "MB for readers behind", "MB from bookies",
                 "CPU s", "resident MB", "tail cache", "read ahead", "shared"):  # fmt: skip
        table.add_column(name, justify="right" if name else "left")
    for name, row in rows.items():
        latency = row["latency_ms"]
        table.add_row(
            name, f"{row['seconds']:.1f}", f"{latency['p50']:.1f}", f"{latency['p99']:.1f}", f"{latency['maximum']:.0f}",
            *(f"{row[key] / 1e6:,.0f}" for key in ("bytes_out_total", "entry_read_bytes_total", "ledger_read_bytes_total")),
            f"{row['daemon_cpu_s']:.1f}", f"{row['resident_bytes'] / 1e6:.0f}",
            *(f"{row[key] / 1e6:.1f}" for key in _FIGURES[3:]),
        )  # fmt: skip
    console().print(table)
    path = given.json or OUT / time.strftime("catchup-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(rows, indent=1))
    return 0

"""What an archived topic costs to read through the broker, and what that costs others: a real service, real Parquet files.

    python -m bench archive [--megabytes N] [--json FILE]      (needs pyarrow and PySpark, not Java)

(1) catch-up: a reader of a process of its own, from the start of a topic of 1,000-byte messages that producers batched: from
    the bookies, from the archive as fast as it goes, and from the archive with the default bound of bytes per second.
(2) meanwhile: synchronous sends of 100 bytes to another topic, one after another, by this process; also with nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from bench.arguments import OUT, console, parser_of
from bench.percentiles import Percentiles, percentiles
from bench.service_process import ServiceProcess, cpu_time
from magnetar.client import connect
from magnetar.proto.commands import ArchiveLedgers

TOPIC = "archived"
FULL = f"persistent://public/default/{TOPIC}"
SIZE = 1_000
ALONE_S = 5.0


def main(arguments: Sequence[str]) -> int:
    """Prints a table and writes the figures."""
    parser = parser_of("python -m bench archive", __doc__)
    parser.add_argument("--megabytes", type=int, default=300, metavar="N", help="of messages (default: 300)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    OUT.mkdir(exist_ok=True)
    scratch = OUT / f"archive-{time.time_ns()}"
    try:
        rows = asyncio.run(_run(scratch, given.megabytes * 1_000_000 // SIZE))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    table = Table(
        title=f"{given.megabytes} MB of messages of {SIZE} bytes; sends of 100 bytes to another topic meanwhile"
    )
    for name in ("", "catch-up MB/s", "CPU s: daemon", "reader", "sends/s", "p50 ms", "p99 ms", "max ms"):
        table.add_column(name, justify="left" if not name else "right")
    for name, row in rows.items():
        rate, latency = row["mb_per_s"], row["send_ms"]
        table.add_row(
            name, f"{rate:,.0f}" if rate else "", f"{row['cpu_s']['daemon']:.1f}",
            f"{row['cpu_s'].get('archive-reader', 0.0):.1f}", f"{row['sends_per_s']:,.0f}", f"{latency.p50:.2f}",
            f"{latency.p99:.2f}", f"{latency.maximum:.1f}",
        )  # fmt: skip
    console().print(table)
    path = given.json or OUT / time.strftime("archive-%Y%m%d-%H%M%S.json")
    path.write_text(
        json.dumps(
            {name: row | {"send_ms": row["send_ms"]._asdict()} for name, row in rows.items()}, indent=1
        )
    )
    return 0


async def _run(scratch: Path, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    service = _service(scratch, bounded=False)
    service.start(timeout_s=60)
    try:
        await _produce(service.url, count)
        found["nothing else"] = await _beside(service, None, ALONE_S)
        found["from the bookies"] = await _beside(service, count)
        archived = await _archive(service.url, scratch / "archive")
        found["from the archive, no bound"] = await _beside(service, archived)
    finally:
        service.stop()
    service = _service(scratch, bounded=True)
    service.start(timeout_s=60)
    try:
        found["from the archive, default"] = await _beside(service, archived)
    finally:
        service.stop()
    return found


def _service(scratch: Path, *, bounded: bool) -> ServiceProcess:
    settings = ["broker.max_ledger_entries=20", "broker.min_ledger_age_ms=0", "broker.max_lease_ms=1"]
    if not bounded:
        settings.append("broker.archive_read_bytes_per_s=0")
    return ServiceProcess(
        scratch / "data", arguments=[word for setting in settings for word in ("--set", setting)]
    )


async def _produce(url: str, count: int) -> None:
    # Half of it compresses away, as of text.
    values = [os.urandom(SIZE // 2) + bytes(SIZE - SIZE // 2) for _ in range(1_000)]
    async with connect(url) as client, client.create_producer(TOPIC) as producer:
        for _ in range(0, count, len(values)):
            await producer.send_many(values)


async def _beside(service: ServiceProcess, messages: int | None, seconds: float = 0.0) -> dict[str, Any]:
    """Sends as long as a reader has not read so many messages; without a reader for so long."""
    url = service.url
    before = _cpu_s(service)
    reading: asyncio.subprocess.Process | None = None
    if messages is not None:
        reading = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "magnetar.cli.main", "perf", "tail", TOPIC, "--start", "earliest",
            "--messages", str(messages), "--json", "--url", url,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
    latencies: list[float] = []
    async with connect(url) as client, client.create_producer("other", batching=False) as producer:
        began = time.perf_counter()
        done = asyncio.ensure_future(asyncio.sleep(seconds) if reading is None else reading.wait())
        while not done.done():
            start = time.perf_counter()
            await producer.send(bytes(100))
            latencies.append(time.perf_counter() - start)
        took = time.perf_counter() - began
    rate = 0.0
    if reading is not None and messages is not None:
        assert reading.stdout is not None
        figures = json.loads((await reading.stdout.read()).splitlines()[-1])
        rate = messages * SIZE / figures["seconds"] / 1e6
    latency: Percentiles = percentiles(latencies)
    cpu = {role: seconds - before.get(role, 0.0) for role, seconds in _cpu_s(service).items()}
    return {"mb_per_s": rate, "sends_per_s": len(latencies) / took, "send_ms": latency, "cpu_s": cpu}


def _cpu_s(service: ServiceProcess) -> dict[str, float]:
    return {role: cpu_time(pid).total for role, pid in service.processes().items()}


async def _archive(url: str, path: Path) -> int:
    """All closed ledgers leave the bookies, as by the job, whose tasks run here; returns how many messages they have."""
    from magnetar.spark.archive_files import ArchiveFolder
    from magnetar.spark.jobs.archive import manifest_of, write_piece
    from magnetar.spark.jobs.topics import read_options
    from magnetar.spark.leases import plan_of_topic
    from magnetar.spark.plan import Range, slices

    folder = ArchiveFolder(str(path))
    options = read_options(url, [FULL], lease_s="600", partition_bytes=str(256 << 20))
    async with connect(url) as client:
        plan = await plan_of_topic(client, FULL, options.lease_s)
        closed = [ledger for ledger in plan.ledgers if ledger.closed and ledger.entries]
        for ledger in closed:
            pieces = slices(FULL, -1, [ledger], Range(), options.partition_bytes, plan.bookies)
            files = [
                await asyncio.to_thread(write_piece, piece, plan.lease, options, str(path))
                for piece in pieces
            ]
            folder.write_manifest(manifest_of(FULL, ledger, tuple(files)))
        rows = [[ledger.position_id, ledger.stored_id, ledger.entries, ledger.messages] for ledger in closed]
        command = ArchiveLedgers(0, FULL, folder.location, plan.lease)
        answer = await client.request(command, topic=FULL, payload=msgspec.msgpack.encode(rows))
        assert answer["archived"] == len(closed), answer
    return sum(ledger.messages for ledger in closed)

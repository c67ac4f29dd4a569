"""A message of 1 GB: how fast it goes through a service, and the peak memory of each process on its way.

    python -m bench chunks [--megabytes N] [--whole] [--json FILE]

A real service on loopback with fsync on. One process sends what a generator makes, by `send_stream`; another one reads it at
the same time, piece by piece; then a third one, whose message waits at the service. `--whole` measures a fourth, which gets
the value as bytes. Peaks are what the kernel says of a process (ru_maxrss, VmHWM), interpreter and libraries included.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.arguments import OUT, console, parser_of
from bench.service_process import ServiceProcess
from bench.services import running
from magnetar.client import connect

GOAL_BYTES = 300_000_000  # of a client process
MEGABYTE = 1_000_000
TOPIC = "large"


def main(arguments: Sequence[str]) -> int:
    """Prints a line for each process."""
    if arguments[:1] in (["send"], ["read"]):
        return _client(*arguments)
    parser = parser_of("python -m bench chunks", __doc__)
    parser.add_argument("--megabytes", type=int, default=1000, metavar="N")
    parser.add_argument("--whole", action="store_true", help="one more reader, which gets the value as bytes")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    OUT.mkdir(exist_ok=True)
    screen = console()
    directory = OUT / f"scratch-{time.time_ns()}"
    found: dict[str, dict[str, Any]] = {}
    try:
        with running(ServiceProcess(directory / "data", arguments=["--log-level", "warning"])) as (service,):
            following = _start("read", service.url, "stream")
            sending = _start("send", service.url, str(given.megabytes))
            found["sends a stream"] = _result(sending)
            found["reads it meanwhile"] = _result(following)
            found["reads it afterwards"] = _result(_start("read", service.url, "stream"))
            if given.whole:
                found["reads it whole"] = _result(_start("read", service.url, "whole"))
            peaks = {str(role): _peak_of(pid) for role, pid in service.processes().items()}
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for name, row in found.items():
        over = (
            ""
            if row["peak_bytes"] <= GOAL_BYTES or "whole" in name
            else f" (above {GOAL_BYTES / MEGABYTE:.0f})"
        )
        screen.print(
            f"{name:20} {given.megabytes / row['seconds']:6.0f} MB/s, {row['cpu_s'] / given.megabytes * 1000:5.1f} ms of "
            f"CPU a MB, peak {row['peak_bytes'] / MEGABYTE:5.0f} MB, {row['base_bytes'] / MEGABYTE:.0f} when it began{over}"
        )
    for name, peak in peaks.items():
        screen.print(f"{name:20} peak {peak / MEGABYTE:5.0f} MB")
    digests = {row["digest"] for row in found.values()}
    screen.print("all read what was sent" if len(digests) == 1 else f"what was read differs: {digests}")
    path = given.json or OUT / time.strftime("bench-chunks-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps({"clients": found, "peaks": peaks}, indent=1))
    screen.print(f"all figures: {path}")
    return 0


def _start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bench", "chunks", *arguments], stdout=subprocess.PIPE, text=True
    )


def _result(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"bench: a client ended with {process.returncode}")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def _peak_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


# --- a client process ------------------------------------------------------------------------------------------------


def _client(what: str, url: str, argument: str) -> int:
    began, cpu = time.monotonic(), time.process_time()
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    digest, waited = asyncio.run(_send(url, int(argument)) if what == "send" else _read(url, argument))
    print(
        json.dumps(
            {
                "seconds": time.monotonic() - began - waited,
                "cpu_s": time.process_time() - cpu,
                "base_bytes": base,
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "digest": digest,
            }
        )
    )
    return 0


async def _send(url: str, megabytes: int) -> tuple[str, float]:
    digest = hashlib.blake2b()

    def pieces() -> Iterator[bytes]:
        for number in range(megabytes):
            piece = number.to_bytes(8) * (MEGABYTE // 8)
            digest.update(piece)
            yield piece

    async with connect(url) as client, client.create_producer(TOPIC, chunking=True) as producer:
        await producer.send_stream(pieces())
    return digest.hexdigest(), 0.0


async def _read(url: str, how: str) -> tuple[str, float]:
    digest, began = hashlib.blake2b(), time.monotonic()

    async def pieces(reader: Any) -> AsyncIterator[bytes]:
        message = await reader.receive(timeout=600)
        async for piece in reader.stream(message):
            yield piece

    waited = 0.0
    async with (
        connect(url) as client,
        client.create_reader(TOPIC, start="earliest", stream_chunks=how == "stream") as reader,
    ):
        async for piece in pieces(reader):
            waited = waited or time.monotonic() - began
            digest.update(piece)
    return digest.hexdigest(), waited if how == "stream" else 0.0

"""One client process: `python -m bench.ledger.client WORKLOAD ADDRESSES PARAMETERS`; its last line is the result as JSON.

ADDRESSES are those of the bookies as a JSON list of host:port. Metadata is in memory: what a ledger costs there is one
write each for create and close.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

from bench.percentiles import percentiles
from magnetar.ledger import LedgerClient, LedgerSettings, LedgerWriter, StaticBookies, TcpTransport
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import MagnetarError
from magnetar.proto.ledger_entry import decode_ledger_entry_header
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.connection import ConnectionOptions
from support.memory_metadata import MemoryMetadataStore

PACE_S = 0.002
READ_BYTES = 1 << 20


class Party:
    """A ledger client with its connections."""

    def __init__(
        self, addresses: list[str], quorums: list[int], metadata: MemoryMetadataStore, **given: Any
    ) -> None:
        bookies = StaticBookies(addresses)
        ensemble_size, write_quorum, ack_quorum = quorums
        settings = LedgerSettings(ensemble_size, write_quorum, ack_quorum, add_timeout_s=20.0, **given)
        self._transport = TcpTransport(bookies, settings, ConnectionOptions("bench"))
        self.ledgers = LedgerClient(
            StoredLedgers(metadata), self._transport, bookies, settings, random.Random(1), SystemClock()
        )

    async def __aenter__(self) -> LedgerClient:
        return self.ledgers

    async def __aexit__(self, *_: object) -> None:
        await self.ledgers.close()
        await self._transport.close()


async def open_metadata(first_ledger: int) -> MemoryMetadataStore:
    """Whose next ledger has this id: bookies must not be given an id twice."""
    metadata = MemoryMetadataStore()
    await StoredLedgers(metadata).new_ids(first_ledger)
    return metadata


class Load:
    """Appends entries of `size` bytes to a ledger, and notes how long each waited for its confirmation."""

    def __init__(self, writer: LedgerWriter, size: int) -> None:
        self.writer = writer
        self.payload = os.urandom(size)
        self.outstanding = 0
        self.left = 0
        self.sent_at: list[float] = []
        self.latencies: list[float] = []
        self._window = 0
        self._filling = False
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()

    async def full(self, count: int, window: int) -> None:
        """As fast as it goes with so many outstanding."""
        self._done = self._loop.create_future()
        self.left, self._window = count, window
        self._fill()
        await self._done

    async def paced(self, count: int, rate: float) -> None:
        """Whatever became of those before; latencies are from when each was due."""
        self._done = self._loop.create_future()
        self._window, self.left = 0, count
        began, position = time.perf_counter(), 0
        while position < count:
            now = time.perf_counter()
            while position < count and began + position / rate <= now:
                self._append(began + position / rate)
                position += 1
            # Often entries are due together, as a broker's are; sparse ones wake nobody in between.
            await asyncio.sleep(max(PACE_S, began + position / rate - time.perf_counter()))
        await self._done

    def _append(self, now: float) -> None:
        self.sent_at.append(now)
        self.outstanding += 1
        self.left -= 1
        self.writer.append(self.payload, self._confirmed)

    def _fill(self) -> None:
        self._filling = False
        now = time.perf_counter()
        while self.left and self.outstanding < self._window:
            self._append(now)

    def _confirmed(self, entry_id: int, _entry: bytes, error: MagnetarError | None) -> None:
        if error is not None:
            if not self._done.done():
                self._done.set_exception(error)
            return
        self.outstanding -= 1
        self.latencies.append(time.perf_counter() - self.sent_at[entry_id])
        if self.left:
            if self._window and not self._filling:
                self._filling = True
                self._loop.call_soon(self._fill)
        elif not self.outstanding:
            self._done.set_result(None)


async def appends(addresses: list[str], **given: Any) -> dict[str, Any]:
    """count appends of size bytes after a tenth for the warm-up; mode full (window), paced or sparse (rate) or single."""
    metadata = await open_metadata(given["first_ledger"])
    async with Party(addresses, given["quorums"], metadata) as client:
        load = Load(await client.create(), given["size"])
        window = 1 if given["mode"] == "single" else given["window"]
        await load.full(max(1, given["count"] // 10), window)
        load.latencies.clear()
        cpu, began = time.process_time(), time.perf_counter()
        if given["mode"] in ("paced", "sparse"):
            await load.paced(given["count"], given["rate"])
        else:
            await load.full(given["count"], window)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        found = percentiles(load.latencies)
        await load.writer.close()
    return {
        "appends": given["count"],
        "seconds": seconds,
        "appends_per_s": given["count"] / seconds,
        "bytes_per_s": given["count"] * given["size"] / seconds,
        "p50_ms": found.p50,
        "p99_ms": found.p99,
        "maximum_ms": found.maximum,
        "cpu_s": cpu_s,
    }


async def recovery(addresses: list[str], **given: Any) -> dict[str, Any]:
    """Recovers a ledger whose writer died with count entries stored and not one of them known to be confirmed."""
    metadata = await open_metadata(given["first_ledger"])
    async with Party(addresses, given["quorums"], metadata, explicit_lac_interval_s=0) as client:
        load = Load(await client.create(), given["size"])
        # All of them in one turn of the loop: every entry says that nothing is confirmed.
        await load.full(given["count"], given["count"])
        ledger_id = load.writer.ledger_id
    async with Party(addresses, given["quorums"], metadata) as successor:
        cpu, began = time.process_time(), time.perf_counter()
        reader = await successor.open(ledger_id, recover=True)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        last = given["count"] - 1
        if reader.last_add_confirmed != last:
            raise SystemExit(f"bench: recovery found entry {reader.last_add_confirmed} to be the last")
        header = decode_ledger_entry_header((await reader.read(last, last))[0])
        if header.last_add_confirmed != -1:
            raise SystemExit(f"bench: {header} says that entries were confirmed")
    return {
        "seconds": seconds,
        "entries": given["count"],
        "entries_per_s": given["count"] / seconds,
        "cpu_s": cpu_s,
    }


async def reads(addresses: list[str], **given: Any) -> dict[str, Any]:
    """Reads a closed ledger from its first to its last entry, 1 MB at a time, one request after another."""
    metadata = await open_metadata(given["first_ledger"])
    async with Party(addresses, given["quorums"], metadata) as client:
        load = Load(await client.create(), given["size"])
        await load.full(given["count"], given["window"])
        await load.writer.close()
        reader = await client.open(load.writer.ledger_id, recover=False)
        cpu, began = time.process_time(), time.perf_counter()
        position, requests = 0, 0
        while position < given["count"]:
            position += len(await reader.read(position, given["count"] - 1, max_bytes=READ_BYTES))
            requests += 1
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    return {
        "seconds": seconds,
        "entries_per_s": given["count"] / seconds,
        "bytes_per_s": given["count"] * given["size"] / seconds,
        "requests": requests,
        "entries": given["count"],
        "cpu_s": cpu_s,
    }


async def tail(addresses: list[str], **given: Any) -> dict[str, Any]:
    """Another client follows a ledger that is appended to at rate: from when an entry was due until that client has it.

    Both are in this process. An entry tells that the one before it is confirmed; the last one waits to be told (rule 19).
    """
    metadata = await open_metadata(given["first_ledger"])
    async with (
        Party(addresses, given["quorums"], metadata) as client,
        Party(addresses, given["quorums"], metadata) as other,
    ):
        load = Load(await client.create(), given["size"])
        await load.full(100, 100)
        cpu, began = time.process_time(), time.perf_counter()
        reader = await other.open(load.writer.ledger_id, recover=False)
        appending = asyncio.create_task(load.paced(given["count"], given["rate"]))
        latencies: list[float] = []
        position, calls = 0, 0
        async with reader.follow(0) as following:
            while position < 100 + given["count"]:
                entries = await following.next(30.0)
                now = time.perf_counter()
                calls += 1
                for entry in entries:
                    if decode_ledger_entry_header(entry).entry_id != position:
                        raise SystemExit(f"bench: a tail gave an entry that is not {position}")
                    latencies.append(now - load.sent_at[position])
                    position += 1
                if not entries:
                    raise SystemExit("bench: a tail gave nothing for 30 s")
        await appending
        found = percentiles(latencies[100:-1])
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    return {
        "entries": given["count"],
        "seconds": seconds,
        "calls": calls,
        "p50_ms": found.p50,
        "p99_ms": found.p99,
        "maximum_ms": found.maximum,
        "cpu_s": cpu_s,
    }


WORKLOADS: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
    "appends": appends,
    "recovery": recovery,
    "reads": reads,
    "tail": tail,
}


async def run() -> dict[str, Any]:
    """The workload of the command line, once."""
    name, addresses, parameters = sys.argv[1:4]
    return await WORKLOADS[name](json.loads(addresses), **json.loads(parameters))


if __name__ == "__main__":
    print(json.dumps(uvloop.run(run())), flush=True)

"""One client process: `python -m bench.bookie.client WORKLOAD HOST PORT PARAMETERS`; its last line is the result as JSON.

CPU seconds are those between the first and the last byte, without making the entries.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.bookie.wire import Chunk, RawClient, make_adds
from magnetar.proto.commands import DeleteLedger, ReadEntries
from magnetar.proto.frames import encode_frame

READ_BYTES = 1 << 20
FILL_ENTRY, FILL_LEDGERS = 64 << 10, 100


def adds(host: str, port: int, **given: Any) -> dict[str, Any]:
    """count adds of size bytes to ledgers ledgers as fast as window_bytes and window_adds allow."""
    chunks = make_adds(
        given["count"], given["size"], ledgers=given["ledgers"], first_ledger=given["first_ledger"]
    )
    client = RawClient(host, port)
    began = time.process_time()
    at = time.perf_counter()
    seconds = client.add_all(chunks, window_bytes=given["window_bytes"], window_adds=given["window_adds"])
    client.close()
    return {
        "seconds": seconds,
        "adds": given["count"],
        "adds_per_s": given["count"] / seconds,
        "bytes_per_s": given["count"] * given["size"] / seconds,
        "began": at,
        "ended": at + seconds,
        "cpu_s": time.process_time() - began,
    }


def paced(host: str, port: int, **given: Any) -> dict[str, Any]:
    """rounds times: fill_bytes in entries of 64 KB at once, a pause of settle_s, then paced adds for seconds.

    With delete_after: then deletes so many of the 100 ledgers that were filled, and goes on with paced adds for after_s.
    """
    client = RawClient(host, port)
    samples: list[tuple[float, float]] = []
    deleted: list[float] = []
    began = time.process_time()
    size, rate = given["size"], given["rate"]
    for number in range(given["rounds"]):
        ledger = 1 + 1000 * number
        fill = given["fill_bytes"] // FILL_ENTRY
        if fill:
            chunks = make_adds(fill, FILL_ENTRY, ledgers=FILL_LEDGERS, first_ledger=ledger + 1)
            client.add_all(chunks, window_bytes=8 << 20, window_adds=4096)
        before = _one_by_one(ledger, 0, int(given["seconds"] * rate), size)
        after = _one_by_one(ledger, len(before), int(given.get("after_s", 0) * rate), size)
        time.sleep(given["settle_s"])
        samples += client.add_paced(before, rate)
        if after:
            frames = [
                encode_frame(DeleteLedger(1 + place, ledger + 1 + place).encode())
                for place in range(given["delete"])
            ]
            deleted.append(time.perf_counter())
            client.request_all(frames, depth=16)
            samples += client.add_paced(after, rate)
    client.close()
    return {"samples": samples, "deleted": deleted, "cpu_s": time.process_time() - began}


def _one_by_one(ledger: int, first_entry: int, count: int, size: int) -> list[Chunk]:
    return [
        chunk
        for entry in range(first_entry, first_entry + count)
        for chunk in make_adds(1, size, ledgers=1, first_ledger=ledger, first_entry=entry)
    ]


def reads(host: str, port: int, **given: Any) -> dict[str, Any]:
    """Reads what `adds` with the same size and ledgers wrote: in order (sequential) or count entries at random."""
    ledgers, entries, first = given["ledgers"], given["entries"], given["first_ledger"]
    frames: list[bytes] = []
    step = max(1, min(1000, READ_BYTES // given["size"]))
    if given["sequential"]:
        wanted = [
            (first + ledger, start, min(start + step, entries) - 1)
            for ledger in range(ledgers)
            for start in range(0, entries, step)
        ]
    else:
        rng = random.Random(given["seed"])
        wanted = [
            (first + rng.randrange(ledgers), entry, entry)
            for entry in (rng.randrange(entries) for _ in range(given["count"]))
        ]
    for number, (ledger, start, last) in enumerate(wanted, 1):
        # No limit in bytes: every request brings what it names.
        frames.append(encode_frame(ReadEntries(number, ledger, start, last, 0).encode()))
    count = sum(last - start + 1 for _, start, last in wanted)
    client = RawClient(host, port)
    began = time.process_time()
    seconds, size, latencies = client.request_all(frames, depth=given["depth"])
    client.close()
    expected = count * (given["size"] + 40)
    if size != expected:
        raise SystemExit(f"bench: reads brought {size:,} bytes instead of {expected:,}")
    latencies.sort()
    return {
        "seconds": seconds,
        "entries_per_s": count / seconds,
        "bytes_per_s": count * given["size"] / seconds,
        "entries": count,
        "p50_ms": latencies[len(latencies) // 2] * 1e3,
        "p99_ms": latencies[len(latencies) * 99 // 100] * 1e3,
        "cpu_s": time.process_time() - began,
    }


WORKLOADS: dict[str, Callable[..., dict[str, Any]]] = {"adds": adds, "paced": paced, "reads": reads}


def main() -> None:
    """Runs the workload once."""
    name, host, port, parameters = sys.argv[1:5]
    gc.disable()  # chunks are many and live to the end
    print(json.dumps(WORKLOADS[name](host, int(port), **json.loads(parameters))), flush=True)


if __name__ == "__main__":
    main()

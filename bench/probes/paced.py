"""The bare disk at the pace of workload (e): what its messages wait for when nothing stands between them and a file.

`python -m bench.probes.paced PATH always` prints "ready", writes into the zero-filled file at PATH until standard input
ends, and prints what it saw as JSON; `windows` instead of `always` writes in every other window of bench.stalls only.

Every TICK_S as many bytes are due as (e) sends in that time. They are written, padded as a journal group is, and synced.
What falls due during a sync is the next group, as in a journal, so that a stall counts for every tick that it delays.
"""

from __future__ import annotations

import json
import math
import os
import select
import sys
import time

from bench.stalls import WINDOW_S, probing

ALIGNMENT = 4096
# Between two groups of the journal under (e), and what a message of 100 B is in the journal, as measured there; the report
# shows the rate and the size of both.
TICK_S = 0.0013
TICK_BYTES = 13 * 190


def main() -> None:
    """Writes until standard input ends."""
    path, windowed = sys.argv[1], sys.argv[2] == "windows"
    descriptor = os.open(path, os.O_RDWR)
    file_bytes = os.fstat(descriptor).st_size
    data = os.urandom(file_bytes // 8)
    samples: list[tuple[float, float]] = []
    groups = written = position = taken = 0
    print("ready", flush=True)
    began = time.perf_counter()
    while True:
        now = time.perf_counter()
        if windowed and not probing(now):
            began, taken = (math.floor(now / WINDOW_S) + 1) * WINDOW_S, 0
        due = int((now - began) / TICK_S) + 1 if now >= began else 0
        if due > taken:
            size = min(len(data), -(-(due - taken) * TICK_BYTES // ALIGNMENT) * ALIGNMENT)
            if position + size > file_bytes:
                position = 0
            os.pwrite(descriptor, memoryview(data)[:size], position)
            os.fdatasync(descriptor)
            now = time.perf_counter()
            samples += [(began + tick * TICK_S, now - began - tick * TICK_S) for tick in range(taken, due)]
            position, written, groups, taken = position + size, written + size, groups + 1, due
        if select.select([0], [], [], max(0.0, began + taken * TICK_S - time.perf_counter()))[0]:
            break
    print(json.dumps({"samples": samples, "groups": groups, "bytes": written}))


if __name__ == "__main__":
    main()

"""One client process: `python -m bench.client WORKLOAD URL TOPIC PARAMETERS`; the last line that it prints is the result.

PARAMETERS are JSON. CPU seconds are those of this process, without start-up.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any

import uvloop

from bench.workloads import backlog, latency, produce_tail, subscriptions

WORKLOADS = {
    "unbatched": produce_tail.unbatched,
    "batched": produce_tail.batched,
    "produce_batched": produce_tail.produce_batched,
    "tail_batched": produce_tail.tail_batched,
    "synchronous": latency.synchronous,
    "end_to_end": latency.end_to_end,
    "fill": backlog.fill,
    "catch_up": backlog.catch_up,
    "acknowledge": backlog.acknowledge,
    **subscriptions.WORKLOADS,
}


def main() -> None:
    """Runs the workload once."""
    name, url, topic, parameters = sys.argv[1:5]
    # What docs/client.md advises for clients that count microseconds: what is imported needs no collecting.
    gc.freeze()
    began = time.process_time()
    result: dict[str, Any] = uvloop.run(WORKLOADS[name](url, topic, **json.loads(parameters)))  # type: ignore[operator]
    result["cpu_s"] = time.process_time() - began
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

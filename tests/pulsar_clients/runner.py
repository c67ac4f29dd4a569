"""Runs scenarios with the `pulsar-client` of its own environment, and prints a line of JSON for each.

It is a process of its own, since an older version needs another environment, and since the library ends the process on some
errors. A line: `scenario`, and one of `seen`, `unsupported` (what the client does not have) and `failed`.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pulsar

import pulsar_clients.scenarios  # noqa: F401 - registers them
from pulsar_clients.program import SCENARIOS, Program, Unsupported, comparable, refuse_unsupported

_AT_ONCE = 12  # scenarios; they mostly wait
_LIMIT_S = 150.0  # of one scenario


def run(name: str, program: Program) -> dict[str, Any]:
    """What came of one."""
    began = time.monotonic()
    try:
        try:
            found = {"seen": comparable(SCENARIOS[name](program))}
        except Exception as error:
            refuse_unsupported(error)
            raise
    except Unsupported as error:
        found = {"unsupported": str(error)}
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)
        place = next((one for one in reversed(at) if "scenarios" in one.filename), at[-1])
        found = {"failed": f"{type(error).__name__}: {str(error)[:500]} at {place.name}: {place.line}"}
    return {"scenario": name, **found, "took_s": round(time.monotonic() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--client", choices=["blocking", "asyncio"], required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--http", required=True)
    parser.add_argument("--run", required=True, help="tells this run from others on the same service")
    parser.add_argument("--log", type=Path, required=True, help="of the library")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    work: queue.SimpleQueue[str] = queue.SimpleQueue()
    names = given.names or list(SCENARIOS)
    for name in names:
        work.put(name)
    client: Callable[..., Any] = pulsar.Client
    if given.client == "asyncio":
        from pulsar_clients.asyncio_client import AsyncioClient

        client = AsyncioClient
    lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    results = os.fdopen(os.dup(1), "w")
    os.dup2(
        os.open(given.log, os.O_CREAT | os.O_APPEND | os.O_WRONLY), 1
    )  # the library writes to standard output

    def worker() -> None:
        while True:
            try:
                name = work.get_nowait()
            except queue.Empty:
                return
            program = Program(name, given.run, given.url, given.http, client)
            within = threading.Thread(target=lambda: lines.put(run(name, program)), daemon=True)  # noqa: B023
            within.start()
            within.join(_LIMIT_S)
            if within.is_alive():
                stack = traceback.extract_stack(sys._current_frames()[within.ident or 0])
                at = next((one for one in reversed(stack) if "scenarios" in one.filename), stack[-1])
                lines.put({"scenario": name, "failed": f"it does not end, at {at.name}: {at.line}"})
            else:
                program.close()

    for _ in range(_AT_ONCE):
        threading.Thread(target=worker, daemon=True).start()
    for _ in names:
        results.write(json.dumps(lines.get()) + "\n")
        results.flush()
    os._exit(0)  # threads of the library may wait for ever


if __name__ == "__main__":
    main()

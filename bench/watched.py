"""A daemon that writes down the long turns of its event loop: `python -m bench.watched standalone ...`.

A look at the clock is due every millisecond: how late it is says how long the turn before it was, and the CPU of the thread
since the last one what the turn itself took of that, whoever else uses the machine. `gc_ms` of it were the garbage
collector's. A thread notes where the loop is during a
turn that takes long already. Lines of JSON in the file that TURNS names:

    {"end_s": of the monotonic clock, "wall_ms": 31.2, "cpu_ms": 28.9, "gc_ms": 0.0, "where": "encode (shapes.py:40) < ..."}
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from types import FrameType

from magnetar.cli.main import main
from magnetar.runtime import lifecycle

TURNS = "MAGNETAR_BENCH_TURNS"
EVERY_S = 0.001
LONG_S = 0.005
_FRAMES = 8


class Watch:
    """Of the loop of the main thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, path: str) -> None:
        self._loop = loop
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - for as long as the process
        self._at_s, self._cpu_s = time.monotonic(), time.thread_time()
        self._gc_s, self._gc_began_s = 0.0, 0.0
        self._where = ""
        gc.callbacks.append(self._collects)
        loop.call_soon(self._look)
        threading.Thread(target=self._sample, args=(threading.get_ident(),), daemon=True).start()

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_began_s = time.thread_time()
        else:
            self._gc_s += time.thread_time() - self._gc_began_s

    def _look(self) -> None:
        now, cpu = time.monotonic(), time.thread_time()
        wall_s, cpu_s = now - self._at_s - EVERY_S, cpu - self._cpu_s
        if wall_s > LONG_S:
            took = {"wall_ms": wall_s * 1e3, "cpu_ms": cpu_s * 1e3, "gc_ms": self._gc_s * 1e3}
            self._file.write(json.dumps({"end_s": now, **took, "where": self._where}) + "\n")
        self._at_s, self._cpu_s, self._where = time.monotonic(), time.thread_time(), ""
        self._gc_s = 0.0
        self._loop.call_later(EVERY_S, self._look)

    def _sample(self, thread: int) -> None:
        while True:
            time.sleep(LONG_S)
            if time.monotonic() - self._at_s > 2 * LONG_S:
                self._where = _stack(sys._current_frames().get(thread)) or self._where


def _stack(frame: FrameType | None) -> str:
    shown: list[str] = []
    while frame is not None and len(shown) < _FRAMES:
        code = frame.f_code
        shown.append(f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})")
        frame = frame.f_back
    return " < ".join(shown)


def _watched_loop() -> asyncio.AbstractEventLoop:
    loop = _new_event_loop()
    Watch(loop, os.environ[TURNS])
    return loop


_new_event_loop = lifecycle.new_event_loop
if __name__ == "__main__":
    lifecycle.new_event_loop = _watched_loop
    main()

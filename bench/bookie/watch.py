"""A bookie watched from outside while it is measured: when it flushed or compacted, and the memory of its processes."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from pathlib import Path
from types import TracebackType

from bench.service_process import ServiceProcess

INTERVAL_S = 0.005
MEMORY_EVERY = 10  # samples
LOG_NAME = re.compile(r"entrylog-[0-9a-f]{8}\.log")
_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


class Watch:
    """Samples every 5 ms, in a thread of the benchmark.

    A flush lasts from the first growth of an entry log to the replacing of the mark. A compaction lasts while a file
    stands among the entry logs that is not named as one.
    """

    def __init__(self, service: ServiceProcess) -> None:
        assert service.data is not None
        self._ledgers = Path(service.data) / "bookie" / "ledgers"
        self._mark = Path(service.data) / "bookie" / "mark"
        self._service = service
        # (began, ended) by time.perf_counter(), which is the same clock in every process.
        self.flushes: list[tuple[float, float]] = []
        self.compactions: list[tuple[float, float]] = []
        # Highest sum over the processes: shared memory counted once (proportional set size) and in each.
        self.highest_pss = self.highest_resident = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        pids = list(self._service.processes().values())
        (logs, others), mark = self._logs(), self._mark_inode()
        flushing = compacting = 0.0
        number = 0
        while not self._stopped.wait(INTERVAL_S):
            now = time.perf_counter()
            before, before_others = logs, others
            logs, others = self._logs()
            # A log that appears whole was compacted; the current one is appended to by a flush.
            if any(
                size > before[name] if name in before else not before_others for name, size in logs.items()
            ):
                flushing = flushing or now - INTERVAL_S
            if (inode := self._mark_inode()) != mark:
                mark = inode
                if flushing:
                    self.flushes.append((flushing, now))
                flushing = 0.0
            if others and not compacting:
                compacting = now - INTERVAL_S
            elif compacting and not others:
                self.compactions.append((compacting, now))
                compacting = 0.0
            if number % MEMORY_EVERY == 0:
                self._look_at_memory(pids)
            number += 1

    def _logs(self) -> tuple[dict[str, int], int]:
        """Size of each entry log, and how many are on their way to be one."""
        logs: dict[str, int] = {}
        others = 0
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._ledgers):
                if LOG_NAME.fullmatch(entry.name):
                    logs[entry.name] = entry.stat().st_size
                else:
                    others += entry.name.startswith("entrylog-")
        return logs, others

    def _mark_inode(self) -> int:
        try:
            return self._mark.stat().st_ino
        except OSError:
            return 0

    def _look_at_memory(self, pids: list[int]) -> None:
        shared = resident = 0
        for pid in pids:
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
                if match := _PSS.search(text):
                    shared += int(match[1]) * 1024
                resident += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        self.highest_pss = max(self.highest_pss, shared)
        self.highest_resident = max(self.highest_resident, resident)


def within(moment: float, windows: list[tuple[float, float]], margin_s: float = 0.0) -> bool:
    """True if `moment` lies in one of the windows, made wider by `margin_s` at either end."""
    return any(began - margin_s <= moment <= ended + margin_s for began, ended in windows)

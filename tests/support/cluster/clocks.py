"""Wall clocks that jump: a daemon under test has one of its own, by libfaketime (Debian, Ubuntu: apt-get install faketime).

    process = WithOwnClock(data, file, command="bookie", ...)
    await process.jump(3600)              # returns by how much the daemon is ahead, as it says in the Date of an HTTP answer

The library reads the offset from the file again when it has read it more than a second ago. The monotonic clocks stay true,
as after `date --set`. The daemon's helper processes, which get none of its environment, keep the machine's clock.
"""

from __future__ import annotations

import asyncio
import email.utils
import os
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from bench.service_process import ServiceProcess

_LIBRARY = "faketime/libfaketimeMT.so.1"
_FOLDERS = (*Path("/usr/lib").glob("*-linux-gnu*"), Path("/usr/lib64"), Path("/usr/local/lib"))
# What the library makes for each process, and leaves behind when that is killed.
_LEFT_BEHIND = ("/dev/shm/faketime_shm_{}", "/dev/shm/sem.faketime_sem_{}")
_POLL_S = 0.05
_SEEN_WITHIN_S = 60.0
_EXACT_S = 60.0


def clock_library() -> Path | None:
    """None: it is not installed."""
    return next((path for folder in _FOLDERS if (path := folder / _LIBRARY).exists()), None)


needs_clocks = pytest.mark.skipif(
    clock_library() is None,
    reason="clocks jump by libfaketime, which is not installed: apt-get install faketime",
)


class WithOwnClock(ServiceProcess):
    """A daemon whose wall clock can jump. `file` holds by how much it is ahead."""

    def __init__(self, data: str | os.PathLike[str], file: Path, **options: Any) -> None:
        library = clock_library()
        assert library is not None, "libfaketime is not installed"
        self._file = file
        self._write(0)
        environment = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }
        super().__init__(data, environment=environment, **options)

    async def jump(self, offset_s: int) -> float:
        """From now on the clock is ahead of the machine's by `offset_s`; by how much the daemon says. TimeoutError."""
        self._write(offset_s)
        async with asyncio.timeout(_SEEN_WITHIN_S):
            while abs((said := await self.ahead()) - offset_s) > _EXACT_S:
                await asyncio.sleep(_POLL_S)
        return said

    async def ahead(self) -> float:
        """By how many seconds, as the daemon says."""
        return await asyncio.to_thread(self._said)

    def _write(self, offset_s: int) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.write_text(f"{offset_s:+d}\n")
        fresh.rename(self._file)

    def _said(self) -> float:
        url = f"http://{self.host}:{self.ports['http']}/health/live"
        with urllib.request.urlopen(url, timeout=_SEEN_WITHIN_S) as answer:
            return email.utils.parsedate_to_datetime(answer.headers["Date"]).timestamp() - time.time()

    def wait_ended(self, *, timeout_s: float = 20.0) -> None:
        """See ServiceProcess."""
        super().wait_ended(timeout_s=timeout_s)
        for path in _LEFT_BEHIND:
            Path(path.format(self.pid)).unlink(missing_ok=True)

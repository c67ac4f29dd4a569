"""The clients of `support.cluster.workload` as the harness sees them: a child process, its progress, its history."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from support.cluster.history import AnyEvent, read_history
from support.cluster.workload import LoadPlan

_PATH = os.pathsep.join([str(Path(__file__).parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
START_S = 60.0
END_S = 60.0  # beyond what draining may take


class LoadFailed(Exception):
    """The clients ended, or did not do what was asked of them in time."""


class LoadProcess:
    """`async with LoadProcess(plan, path) as load`: it sends and receives until `finish`."""

    def __init__(self, plan: LoadPlan, directory: Path) -> None:
        self.plan = plan
        self._directory = directory
        self._history = directory / f"history-{plan.seed}"
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self.progress: dict[str, Any] = {}  # the newest line

    async def __aenter__(self) -> LoadProcess:
        with open(self._directory / f"load-{self.plan.seed}.log", "wb") as errors:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "support.cluster.workload",
                msgspec.json.encode(self.plan).decode(), str(self._history),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors,
                env=os.environ | {"PYTHONPATH": _PATH},
            )  # fmt: skip
        self._reading = asyncio.create_task(self._read())
        try:
            await self.until("the clients are ready", lambda line: bool(line), START_S)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        assert self._reading is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self.progress = json.loads(line)
            self._news.set()
        self._news.set()

    async def until(self, what: str, condition: Callable[[dict[str, Any]], bool], seconds: float) -> None:
        """Waits for a line of progress. LoadFailed with `what` when none comes, or the process has ended."""
        assert self._process is not None
        assert self._reading is not None
        try:
            async with asyncio.timeout(seconds):
                while not condition(self.progress):
                    if self._reading.done():
                        await self._process.wait()
                        errors = (self._directory / f"load-{self.plan.seed}.log").read_text()
                        raise LoadFailed(f"the clients ended with {self._process.returncode}: {errors}")
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise LoadFailed(f"waited {seconds:g} s in vain until {what}: {self.progress}") from None

    async def goes_on(self, seconds: float = 60.0) -> None:
        """Until every topic has confirmed a message that was sent after now."""
        now = time.monotonic()
        await self.until("every topic confirms messages", lambda line: line["served"] > now, seconds)

    async def finish(self) -> list[AnyEvent]:
        """Stops, drains, reads again. LoadFailed with what is missing if it did not drain."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(b"stop\n")
        await self.until("everything is drained", lambda line: "drained" in line, self.plan.drain_s + END_S)
        return list(read_history([self._history]))

    @property
    def drained(self) -> bool:
        """After `finish`."""
        return bool(self.progress.get("drained"))

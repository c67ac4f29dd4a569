"""A connection handler that records its calls, and can wait for the next."""

import asyncio
from collections.abc import Callable

from magnetar.proto.errors import MagnetarError
from magnetar.proto.frames import Run
from magnetar.runtime.connection import Connection


class RecordingHandler:
    """`answer` is called with each list of runs, to serve requests."""

    def __init__(self, answer: Callable[[Connection, list[Run]], None] | None = None) -> None:
        self.connection: Connection | None = None
        self.frames: list[tuple[bytes, bytes]] = []
        self.run_lengths: list[int] = []
        self.error: MagnetarError | None = None
        self.closes = 0
        self.resumes = 0
        self._answer = answer
        self._changed = asyncio.Event()

    def connection_ready(self, connection: Connection) -> None:
        self.connection = connection
        self._changed.set()

    def runs_received(self, runs: list[Run]) -> None:
        for header, payloads in runs:
            self.run_lengths.append(len(payloads))
            self.frames += [(header, payload) for payload in payloads]
        self._changed.set()
        if self._answer is not None:
            assert self.connection is not None
            self._answer(self.connection, runs)

    def connection_closed(self, error: MagnetarError | None) -> None:
        self.error = error
        self.closes += 1
        self._changed.set()

    def writing_resumed(self) -> None:
        self.resumes += 1
        self._changed.set()

    async def until(self, condition: Callable[[], bool], timeout: float = 10.0) -> None:
        """Waits until `condition` holds after some callback."""
        async with asyncio.timeout(timeout):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

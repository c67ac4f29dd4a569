"""Archived ledgers for a broker: a helper process for each archive reads the files and makes entries of them.

    (none) --first read--> STARTED --archive_reader_idle_ms without a read, or `close`--> (none)
    STARTED --no answer within archive_read_timeout_ms: killed--> (none); --it ended by itself--> (none)

Decoding Parquet holds the GIL, and a file system may let its caller wait for ever: neither happens in the broker's process.
A helper has one request in flight; other reads of the same archive wait in the order of their calls, and all of them fail
together with one that times out or ends the helper: dispatch tries each again after a pause of its own. Other archives have
helpers of their own, MAX_HELPERS at once. A caller that is cancelled leaves at once; what is under way for it is read to its
end, what is not is never asked for.

All helpers together give at most `archive_read_bytes_per_s`: after each answer as much time must pass as it is worth.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from magnetar.proto.errors import ArchiveUnavailable, EntryDamaged, MagnetarError, StorageFailed
from magnetar.runtime.processes import HelperProcess, spawn_helper
from magnetar.runtime.tasks import TaskSet

from . import process
from .process import LENGTH

if TYPE_CHECKING:
    from magnetar.broker import BrokerSettings
    from magnetar.broker.log.records import ArchivedLedger

_log = logging.getLogger(__name__)

MAX_HELPERS = 4
_BUFFER_BYTES = 4 << 20
_ERRORS: dict[str, type[MagnetarError]] = {"damaged": EntryDamaged, "unavailable": ArchiveUnavailable}


class ArchiveProcesses:
    """`magnetar.broker.log.reading.ArchiveReader` over Parquet files. `close` in the end."""

    def __init__(self, settings: BrokerSettings, library_paths: Sequence[str] | None = None) -> None:
        """`library_paths`: where the helpers find pyarrow and magnetar; as this process does, if not given."""
        self._settings = settings
        self._paths = list(sys.path if library_paths is None else library_paths)
        self._helpers: dict[str, _ReaderProcess] = {}  # by location, in the order of their last use
        self._pace = _Pace(settings.archive_read_bytes_per_s)
        self._sweep: asyncio.TimerHandle | None = None
        self._ending = TaskSet("end of a reader of archives")
        self._closed = False
        self._read_count = 0
        self._read_bytes = 0
        self._failures = 0

    def figures(self) -> dict[str, int]:
        return {
            "archive_reads_total": self._read_count,
            "archive_read_bytes_total": self._read_bytes,
            "archive_read_failures_total": self._failures,
            "archive_reader_processes": sum(helper.running for helper in self._helpers.values()),
        }

    async def read(
        self, topic: str, archived: ArchivedLedger, first: int, last: int, *, max_bytes: int
    ) -> list[bytes]:
        if self._closed:
            raise ArchiveUnavailable("the broker is stopping")
        info, location = archived
        row = [
            info.ledger_id, info.stored_id, info.first_index, info.entries, info.messages, info.size, info.first_append_ms,
            info.last_append_ms,
        ]  # fmt: skip
        request = msgspec.msgpack.encode([topic, location, row, first, last, max_bytes])
        helper = self._helper(location)
        if self._sweep is None:
            loop = asyncio.get_running_loop()
            self._sweep = loop.call_later(self._settings.archive_reader_idle_ms / 1000, self._end_idle)
        try:
            entries = await helper.read(request)
        except MagnetarError:
            self._failures += 1
            raise
        self._read_count += 1
        self._read_bytes += sum(map(len, entries))
        return entries

    def _helper(self, location: str) -> _ReaderProcess:
        """That of the location, or a new one; with as many as there may be the one that has least to do."""
        helper = self._helpers.pop(location, None)
        if helper is None:
            if len(self._helpers) >= MAX_HELPERS:
                idle = next((other for other, one in self._helpers.items() if not one.waiting), None)
                if idle is None:
                    return min(self._helpers.values(), key=lambda one: one.waiting)
                self._end(idle)
            helper = _ReaderProcess(self._settings, self._paths, self._pace)
        self._helpers[location] = helper
        return helper

    def _end(self, location: str) -> None:
        self._ending.begin(self._helpers.pop(location).end())

    def _end_idle(self) -> None:
        self._sweep = None
        now = asyncio.get_running_loop().time()
        idle_s = self._settings.archive_reader_idle_ms / 1000
        for location, helper in list(self._helpers.items()):
            if not helper.waiting and helper.used_at + idle_s <= now:
                self._end(location)
        if self._helpers and not self._closed:
            self._sweep = asyncio.get_running_loop().call_later(idle_s / 2, self._end_idle)

    async def close(self) -> None:
        """Ends all helpers; whoever waits gets an error."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for location in list(self._helpers):
            self._end(location)
        await self._ending.wait()


class _ReaderProcess:
    """One process, started when it is needed."""

    def __init__(self, settings: BrokerSettings, paths: Sequence[str], pace: _Pace) -> None:
        self._settings = settings
        self._paths = paths
        self._pace = pace
        self._turn = asyncio.Lock()
        self._exchanges = TaskSet("read of an archive")  # one at most
        self._process: HelperProcess | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._failures = 0
        self._failure = ""
        self.waiting = 0
        self.used_at = 0.0

    @property
    def running(self) -> bool:
        """Whether the process was started and not ended."""
        return self._process is not None

    async def read(self, request: bytes) -> list[bytes]:
        """Raises ArchiveUnavailable, EntryDamaged."""
        failures = self._failures
        self.waiting += 1
        try:
            async with self._turn:
                await self._exchanges.wait()  # for one that goes on to its end although its caller left
                if self._failures != failures:  # meanwhile: this one would only wait as long again
                    raise ArchiveUnavailable(self._failure)
                await self._pace.turn()
                return await self._exchanges.run(self._exchange(request))
        finally:
            self.waiting -= 1
            self.used_at = asyncio.get_running_loop().time()

    async def _exchange(self, request: bytes) -> list[bytes]:
        timeout_ms = self._settings.archive_read_timeout_ms
        try:
            reader, writer = self._streams or await self._start()
            async with asyncio.timeout(timeout_ms / 1000):
                writer.write(LENGTH.pack(len(request)) + request)
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                answer = await reader.readexactly(size)
        except TimeoutError:
            raise await self._failed(
                f"the reader of archives did not answer within {timeout_ms} ms (archive_read_timeout_ms) and was ended; is "
                "the archive's file system hung?"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._failed("the reader of archives ended while it read") from None
        except StorageFailed as error:
            raise await self._failed(error.message) from None
        begin = LENGTH.size + LENGTH.unpack_from(answer)[0]
        kind, text, sizes = msgspec.msgpack.decode(answer[LENGTH.size : begin])
        if kind:
            raise _ERRORS[kind](text)
        entries: list[bytes] = []
        for size in sizes:
            entries.append(answer[begin : begin + size])
            begin += size
        self._pace.charge(len(answer))
        return entries

    async def _start(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = spawn_helper(
                    process.__file__,
                    [str(theirs.fileno()), json.dumps(self._paths)],
                    [theirs.fileno()],
                    # All of it: object stores find their credentials there.
                    os.environ,
                )
            except BaseException:
                ours.close()
                raise
        self._streams = await asyncio.open_connection(sock=ours, limit=_BUFFER_BYTES)
        return self._streams

    async def _failed(self, text: str) -> ArchiveUnavailable:
        code = await self._kill()
        if code is not None and code not in (0, -9):
            text = f"{text} (exit code {code})"
        self._failures += 1
        self._failure = text
        _log.warning("%s", text)
        return ArchiveUnavailable(text)

    async def _kill(self) -> int | None:
        """Returns the exit code if it had ended by itself."""
        process, self._process = self._process, None
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()
            with contextlib.suppress(OSError):
                await streams[1].wait_closed()
        if process is None:
            return None
        process.kill()
        code = await process.wait()
        process.close()
        return code

    async def end(self) -> None:
        """The process has ended when this returns; who waits for it got an error."""
        self._failures += 1
        self._failure = "the reader of archives is being stopped"
        if self._process is not None:
            self._process.kill()
        async with self._turn:
            await self._exchanges.wait()
            await self._kill()


class _Pace:
    """Bytes per second over all who share it; 0: no bound."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    async def turn(self) -> None:
        """Waits until what was charged is paid for."""
        delay = self._free_at - asyncio.get_running_loop().time()
        if delay > 0:
            await asyncio.sleep(delay)

    def charge(self, size: int) -> None:
        """Who comes next waits the longer."""
        if self._bytes_per_s:
            now = asyncio.get_running_loop().time()
            self._free_at = max(now, self._free_at) + size / self._bytes_per_s

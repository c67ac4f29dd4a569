"""A disk fills up under a real bookie (rule 12, scorecard 16): read-only, and back by itself, with nothing lost.

On a file system of 64 MB of the test's own; where none can be made the test is skipped, and the simulated disk with a
capacity stands for it (`test_every_disk_call.py`, ENOSPC at every call).
The long form fills it 50 times.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from magnetar.ledger.directory import StaticBookies
from magnetar.ledger.settings import LedgerSettings
from magnetar.ledger.tcp_transport import TcpTransport
from magnetar.proto.errors import BookieReadOnly, LedgerFenced, MagnetarError
from magnetar.runtime.connection import ConnectionOptions
from support.bookie_kit import KIB, MIB, entry
from support.long_form import times
from support.storage_small_disk import SmallDisk

PATH = os.pathsep.join([str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
TIMES = times(1, 50)
READ_ONLY_WITHIN_S = 5.0
BACK_WITHIN_S = 30.0
BOOKIE = "small"
pytestmark = [pytest.mark.crash, pytest.mark.timeout(120 * TIMES), pytest.mark.real]


class Refused(Exception):
    """The bookie did not start."""


class Client:
    """Adds to one ledger after another, and remembers what was acknowledged."""

    def __init__(self, transport: TcpTransport) -> None:
        self.transport = transport
        self.acknowledged: dict[tuple[int, int], bytes] = {}
        self.codes: list[int] = []

    async def add(self, ledger_id: int, entry_id: int, size: int = 8 * KIB) -> int:
        """The code of the answer."""
        data = entry(ledger_id, entry_id, random.Random(f"{ledger_id} {entry_id}").randbytes(size))
        answered: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.transport.add(
            BOOKIE, data, ledger_id, entry_id, recovery=False, done=lambda *row: answered.set_result(row[-1])
        )
        code = await answered
        self.codes.append(code)
        if not code:
            self.acknowledged[ledger_id, entry_id] = data
        return code

    async def check(self) -> None:
        """Everything acknowledged is there."""
        for (ledger_id, entry_id), data in [*self.acknowledged.items()]:
            found = await self.transport.read(BOOKIE, ledger_id, entry_id, entry_id)
            assert found.entries == [data]

    async def read_only(self) -> bool:
        """What the bookie says of itself."""
        return bool((await self.transport.info(BOOKIE))["read_only"])


def settings(disk: SmallDisk, **changes: Any) -> str:
    """Sizes that leave most of 64 MB free; the times are the defaults."""
    values: dict[str, Any] = {
        "data_directory": f"{disk.path}/bookie",
        "journal_file_bytes": 2 * MIB,
        "journal_spare_bytes": 4 * MIB,
        "journal_ring_bytes": 2 * MIB,
        "write_cache_bytes": 2 * MIB,
        "read_cache_bytes": MIB,
        "entry_log_bytes": 4 * MIB,
        "max_entry_bytes": 64 * KIB,
        "checkpoint_interval_s": 1.0,
        "disk_minimum_free_bytes": 12 * MIB,
        "disk_recovery_bytes": 2 * MIB,
        "disk_read_only_ratio": 1.0,
        "disk_warn_ratio": 0.9,
    }
    return json.dumps(values | changes)


@asynccontextmanager
async def bookie(disk: SmallDisk, **changes: Any) -> AsyncIterator[tuple[asyncio.subprocess.Process, Client]]:
    """A bookie on the small disk and a client of it; stopped in order at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *disk.inside, sys.executable, "-m", "support.storage_child", settings(disk, **changes),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONPATH": PATH},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        line = await process.stdout.readline()
        if not line.startswith(b"ready"):
            raise Refused((await process.stderr.read()).decode())
        transport = TcpTransport(
            StaticBookies({BOOKIE: ("127.0.0.1", int(line.split()[1]))}),
            LedgerSettings(add_timeout_s=20.0),
            ConnectionOptions("client"),
        )
        try:
            yield process, Client(transport)
        finally:
            await transport.close()
    finally:
        if process.returncode is None:
            process.terminate()
        _, errors = await process.communicate()
    assert process.returncode in (0, 3, 4, -signal.SIGKILL), errors


async def has_reserve(disk: SmallDisk) -> bool:
    """Whether the bookie has put space aside."""
    return os.path.exists(disk.outside("bookie/reserve"))


async def within(seconds: float, condition: Callable[[], Any]) -> float:
    """Waits until it holds; how long it took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.05)
    return loop.time() - began


async def test_rule_12_a_disk_that_fills_up_turns_the_bookie_read_only_and_back(tmp_path: Path) -> None:
    """Somebody else's file takes the space; reads and fences go on, adds are refused by name."""
    with SmallDisk.make(tmp_path, 64) as disk:
        async with bookie(disk) as (_, client):
            for turn in range(TIMES):
                first = turn * 1000
                for number in range(first, first + 100):
                    assert await client.add(1, number) == 0
                disk.fill(leave_bytes=4 * MIB)
                waited = await within(READ_ONLY_WITHIN_S, client.read_only)
                assert await client.add(1, first + 100) == BookieReadOnly.code
                await client.check()
                await client.transport.read_last_confirmed(BOOKIE, 500 + turn, fence=True)
                assert await client.add(500 + turn, 0) == LedgerFenced.code
                disk.free()

                async def added(ledger_id: int = 1000 + turn) -> bool:
                    return await client.add(ledger_id, 0) == 0

                back = await within(BACK_WITHIN_S, added)
                print(f"{disk.kind}: read-only after {waited:.1f} s, writable after {back:.1f} s")
                assert await client.add(500 + turn, 0) == LedgerFenced.code
            await client.check()


async def test_rule_12_a_disk_that_is_full_at_once_under_load_loses_nothing(tmp_path: Path) -> None:
    """Not a byte is left, while adds, flushes and journals go on: read-only or a clean end, then all of it is there."""
    for turn in range(TIMES):
        directory = tmp_path / str(turn)
        directory.mkdir()
        acknowledged: dict[tuple[int, int], bytes] = {}
        with SmallDisk.make(directory, 64) as disk:
            async with bookie(disk, disk_minimum_free_bytes=0) as (process, client):
                client.acknowledged = acknowledged
                stop = asyncio.Event()

                async def load(ledger_id: int, client: Client = client, stop: asyncio.Event = stop) -> None:
                    number = 0
                    while not stop.is_set() and await client.add(ledger_id, number) == 0:
                        number += 1

                tasks = [asyncio.create_task(load(turn * 10 + n)) for n in range(4)]
                while len(client.codes) < 400:
                    await asyncio.sleep(0.01)
                disk.fill(leave_bytes=0)
                # What is in the journal's hands waits for space; what comes later is refused.
                with contextlib.suppress(MagnetarError):  # it has ended
                    await within(READ_ONLY_WITHIN_S, client.read_only)
                stopped = process.returncode is not None
                if not stopped:
                    assert await client.add(turn * 10 + 9, 0) == BookieReadOnly.code
                    await client.check()
                    disk.free()

                    async def added(client: Client = client, ledger_id: int = turn * 10 + 9) -> bool:
                        return await client.add(ledger_id, 0) == 0

                    await within(BACK_WITHIN_S, added)
                stop.set()
                await asyncio.wait(tasks, timeout=BACK_WITHIN_S)
                assert all(task.done() for task in tasks), "adds that waited for space are never answered"
                if not stopped:
                    await client.check()
                print(
                    f"{disk.kind}: {len(client.acknowledged)} entries, {'ended' if stopped else 'read-only'}"
                )
            disk.free()
            async with bookie(disk) as (_, client):
                client.acknowledged = acknowledged
                await client.check()
                assert await client.add(turn * 10 + 8, 0) == 0


@pytest.mark.parametrize("entries", [100, 1500])
async def test_rule_39_a_bookie_that_was_killed_starts_without_a_free_byte_and_serves(
    tmp_path: Path, entries: int
) -> None:
    """Killed with journals full of entries: 1 MB, or 12 MB, which neither the reserve nor the write cache holds; twice."""
    with SmallDisk.make(tmp_path, 64) as disk:
        async with bookie(disk, checkpoint_interval_s=100.0, write_cache_bytes=32 * MIB) as (process, client):
            await within(READ_ONLY_WITHIN_S, lambda: has_reserve(disk))
            for number in range(entries):
                assert await client.add(1, number) == 0
            await client.transport.read_last_confirmed(BOOKIE, 500, fence=True)
            acknowledged = client.acknowledged
            process.kill()
            await process.wait()
        disk.fill(leave_bytes=0)
        for killed in (True, False):
            async with bookie(disk) as (process, client):
                disk.fill(leave_bytes=0)
                client.acknowledged = acknowledged
                await client.check()
                assert await client.add(500, 0) == LedgerFenced.code
                await client.transport.read_last_confirmed(BOOKIE, 1, fence=True)
                assert await client.add(1, entries) == LedgerFenced.code
                await client.transport.delete_ledger(BOOKIE, 2)
                assert await client.add(3, 0) == BookieReadOnly.code
                if killed:
                    process.kill()
                    await process.wait()
                    continue
                disk.free()

                async def added(client: Client = client) -> bool:
                    return await client.add(3, 0) == 0

                await within(BACK_WITHIN_S, added)
        async with bookie(disk) as (_, client):
            client.acknowledged = acknowledged
            await client.check()
            assert await client.add(500, 0) == LedgerFenced.code
            assert await client.add(1, entries) == LedgerFenced.code

"""kill -9 of the daemon, of its journal writer, and of both, with and without losing what was not synced.

"shadow": the journal writer keeps what it has not synced in its own memory, so that killing it loses that, as a power
failure would; kill -9 alone proves nothing about fdatasync.
"""

import asyncio
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from magnetar.bookie import Bookie
from support.bookie_child import payload
from support.bookie_kit import entry, open_real

TESTS = Path(__file__).parents[2]
pytestmark = [pytest.mark.crash, pytest.mark.timeout(120)]


async def run_and_kill(
    directory: Path, mode: str, victim: str, first: int, acks: int
) -> list[tuple[int, int]]:
    """Lets a child add until it has said `acks` times that an entry is durable; kills it; returns all that it said."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "support.bookie_child", str(directory), mode, str(first),
        stdout=asyncio.subprocess.PIPE, cwd=TESTS, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    line = await process.stdout.readline()
    assert line.startswith(b"writer"), (line, await process.stderr.read() if process.stderr else b"")
    writer = int(line.split()[1])
    acked: list[tuple[int, int]] = []
    while True:
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            break
        _, ledger_id, number = line.split()
        acked.append((int(ledger_id), int(number)))
        if len(acked) == acks:
            if victim in ("writer", "both"):
                os.kill(writer, signal.SIGKILL)
            if victim in ("daemon", "both"):
                process.kill()
    _, errors = await process.communicate()
    if victim == "writer":
        assert process.returncode == 3
        assert b"journal writer process ended with -9" in errors
    return acked


async def expect(bookie: Bookie, acked: list[tuple[int, int]]) -> None:
    for ledger_id, number in acked:
        entries, _ = await bookie.read(ledger_id, number, number)
        assert entries == [entry(ledger_id, number, payload(ledger_id, number))]


@pytest.mark.parametrize("mode", ["sync", "shadow"])
@pytest.mark.parametrize("victim", ["daemon", "writer", "both"])
async def test_nothing_acknowledged_is_lost(tmp_path: Path, victim: str, mode: str) -> None:
    rng = random.Random(f"{victim} {mode}")
    acked: list[tuple[int, int]] = []
    for _ in range(2):
        first = max((number for _, number in acked), default=-1) + 1000
        acked += await run_and_kill(tmp_path, mode, victim, first, rng.randrange(1, 400))
    bookie = await open_real(str(tmp_path))
    await expect(bookie, acked)
    await bookie.close()


async def test_rule_12b_a_writer_that_outlives_its_daemon_holds_the_directory_and_ends(
    tmp_path: Path,
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "support.bookie_child", str(tmp_path), "sync", "0",
        stdout=asyncio.subprocess.PIPE, cwd=TESTS,
    )  # fmt: skip
    assert process.stdout is not None
    writer = int((await process.stdout.readline()).split()[1])
    os.kill(writer, signal.SIGSTOP)  # a writer that is held up by its disk
    process.kill()
    await process.wait()
    opening = asyncio.ensure_future(open_real(str(tmp_path)))
    await asyncio.wait([opening], timeout=0.3)
    assert not opening.done()
    os.kill(writer, signal.SIGCONT)
    await (await opening).close()

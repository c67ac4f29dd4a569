"""kill -9 of a real bookie while it flushes, rolls, deletes logs and compacts, all at once and all the time.

"lossy": the journal writers keep what they have not synced in memory, so that killing them loses it as a power failure
would. What was acknowledged is counted against what the next process serves; the long form kills it 50 times.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from magnetar.bookie import Bookie
from magnetar.proto.errors import LedgerFenced, LedgerNotFound
from support.bookie_kit import add, entry
from support.long_form import times
from support.storage_load_child import DeletedLedgers, open_loaded_bookie, payload

TESTS = Path(__file__).parents[1]
KILLS = times(1, 50)
pytestmark = [pytest.mark.crash, pytest.mark.timeout(60 + 20 * KILLS), pytest.mark.real]


@dataclass
class Said:
    """What all the children said."""

    acked: dict[tuple[int, int], None] = field(default_factory=dict)
    fenced: dict[int, None] = field(default_factory=dict)
    deleted: dict[int, None] = field(default_factory=dict)
    collected: Counter[str] = field(default_factory=Counter)

    def hear(self, words: list[bytes]) -> None:
        """One line."""
        numbers = [int(word) for word in words[1:]]
        if words[0] == b"acked":
            self.acked[numbers[0], numbers[1]] = None
        elif words[0] == b"collected":
            self.collected["logs"], self.collected["compacted"] = numbers
        else:
            {b"fenced": self.fenced, b"deleted": self.deleted}[words[0]][numbers[0]] = None


async def run_and_kill(directory: Path, mode: str, victim: str, generation: int, acks: int) -> Said:
    """Lets a child work until it has acknowledged `acks` entries, and kills it, its journal writers, or both."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "support.storage_load_child", str(directory), mode, str(generation),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=TESTS,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    first = (await process.stdout.readline()).split()
    assert first[:1] == [b"writers"], await process.stderr.read()
    said = Said()
    killed = False
    while (line := await process.stdout.readline()).endswith(b"\n"):
        said.hear(line.split())
        if len(said.acked) >= acks and not killed:
            killed = True
            if victim != "daemon":
                for writer in first[1:]:
                    os.kill(int(writer), signal.SIGKILL)
            if victim != "writers":
                process.kill()
    _, errors = await process.communicate()
    assert killed, process.returncode
    if victim == "writers":
        assert process.returncode == 3
        # Whichever comes first: the news of its death, or a write to its socket.
        assert re.search(rb"journal writer process (ended with -9|has ended: Broken pipe)", errors), errors
    return said


async def check(bookie: Bookie, said: Said) -> Counter[str]:
    """Everything acknowledged is there, unless its ledger was to be deleted; then it is right, or deleted as a whole.

    Garbage is collected meanwhile, so a ledger may be there at first and deleted then, but not the other way round.
    """
    found: Counter[str] = Counter()
    deleted: set[int] = set()
    for ledger_id, number in said.acked:
        try:
            entries, _ = await bookie.read(ledger_id, number, number)
        except LedgerNotFound:
            assert ledger_id in said.deleted, f"ledger {ledger_id} is lost"
            deleted.add(ledger_id)
            found["deleted"] += 1
            continue
        assert entries == [entry(ledger_id, number, payload(ledger_id, number))]
        assert ledger_id not in deleted, f"ledger {ledger_id} is deleted in part"
        found["there"] += 1
    for ledger_id, number in said.acked:
        if ledger_id in deleted:
            with pytest.raises(LedgerNotFound):
                await bookie.read(ledger_id, number, number)
    for ledger_id in said.fenced:
        assert await add(bookie, entry(ledger_id, 9999)) == LedgerFenced.code
    return found


@pytest.mark.parametrize(
    ("victim", "mode"),
    [("daemon", "sync"), ("daemon", "lossy"), ("both", "lossy"), ("writers", "lossy")],
)
async def test_kill_9_while_flushing_and_compacting_loses_nothing(
    tmp_path: Path, victim: str, mode: str
) -> None:
    rng = random.Random(f"{victim} {mode}")
    everything = Said()
    found: Counter[str] = Counter()
    collected: Counter[str] = Counter()
    kills = 0
    # A kill may come before the first collection: it goes on until one was met.
    while kills < KILLS or not (collected["logs"] or collected["compacted"]):
        said = await run_and_kill(tmp_path, mode, victim, kills * 1000, rng.randrange(1200, 3000))
        kills += 1
        everything.acked |= said.acked
        everything.fenced |= said.fenced
        everything.deleted |= said.deleted
        collected += said.collected
        bookie = await open_loaded_bookie(str(tmp_path), "sync", DeletedLedgers([*everything.deleted]))
        try:
            found = await check(bookie, everything)
            await bookie.collector.collect()
            await check(bookie, everything)
            assert not bookie.damage.ledgers()
        finally:
            await bookie.close()
    print(f"{victim}/{mode}: {kills} kills, {dict(found)}, while running: {dict(collected)}")


async def test_rule_12b_a_writer_that_outlives_its_daemon_holds_the_directory_and_ends(
    tmp_path: Path,
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "support.storage_load_child", str(tmp_path), "sync", "0",
        stdout=asyncio.subprocess.PIPE, cwd=TESTS,
    )  # fmt: skip
    assert process.stdout is not None
    writer = int((await process.stdout.readline()).split()[1])
    os.kill(writer, signal.SIGSTOP)  # a writer that is held up by its disk
    process.kill()
    await process.communicate()
    opening = asyncio.ensure_future(open_loaded_bookie(str(tmp_path), "sync", DeletedLedgers()))
    await asyncio.wait([opening], timeout=0.3)
    assert not opening.done()
    os.kill(writer, signal.SIGCONT)
    await (await opening).close()

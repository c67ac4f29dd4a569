"""Scorecard 11: real bookies are lost under a ledger writer at 5,000 entries/s: kill -9 and restart, SIGSTOP and SIGCONT.

Of each loss is measured the writer's longest time without a confirmation, the longest that an entry waited for its own,
and when the loss was noticed (the add timeout, for one that hangs) and the bookie replaced; and apart from that the longest
stall while the bookie starts and goes into the next ledger, which here takes processor and disk from those that work.
Afterwards a second client recovers the last ledger, which its writer left open, and finds

* every acknowledged entry byte for byte, in the order of its entry ids, in closed ledgers;
* each of them on as many bookies of its write set as the ack quorum asks for;
* and no task and no process is left.

`make test` runs a kill and two hangs, and bounds stalls so generously that a busy machine passes. `make crash` runs 4 kills
and 2 hangs in each test, and prints the figures; with LONG=5 20 kills and 10 hangs.
Goals: kill, 99 of 100 stalls at most 1 s; hang, at most the add timeout and 1 s.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from bench.service_process import Role

from magnetar.ledger import (
    BookieInfoReader,
    LedgerClient,
    LedgerMetadata,
    LedgerReader,
    LedgerSettings,
    StaticBookies,
    TcpTransport,
)
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import LedgerNotFound
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.connection import ConnectionOptions
from support.bookie_fleet import BookieFleet
from support.ledger_load import LedgerLoad, LoadedLedger, payload_of
from support.long_form import times
from support.memory_metadata import MemoryMetadataStore

pytestmark = pytest.mark.real


LOSSES = times(0, 4)
SEED = int(os.environ.get("MAGNETAR_SEED", "1"))
RATE = 5000
ENTRY_BYTES = 512
SPARES = 1
ADD_TIMEOUT_S = 1.0
BACKOFF_S = 0.1
LIMITS_S = {"kill": 1.0, "hang": ADD_TIMEOUT_S + 1.0}
BUSY_S = 10.0  # what a machine that is busy with other things may add to a stall
READ_STEP = 512
ROLES: tuple[Role, ...] = ("daemon", "journal-writer")


class Party:
    """A ledger client with a transport, a directory and a survey of its own."""

    def __init__(
        self, fleet: BookieFleet, metadata: MemoryMetadataStore, quorums: tuple[int, int, int]
    ) -> None:
        settings = LedgerSettings(
            *quorums, add_timeout_s=ADD_TIMEOUT_S, reconnect_backoff_s=BACKOFF_S, bookie_info_interval_s=1.0
        )
        rng = random.Random(SEED)
        self.bookies: StaticBookies = fleet.directory()
        self.transport = TcpTransport(self.bookies, settings, ConnectionOptions("loss test"))
        self.info_reader = BookieInfoReader(self.bookies, self.transport, settings, rng)
        self.client = LedgerClient(
            StoredLedgers(metadata), self.transport, self.bookies, settings, rng, SystemClock()
        )

    async def __aenter__(self) -> Party:
        await self.info_reader.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.info_reader.close()
        await self.client.close()
        await self.transport.close()


class Loss(NamedTuple):
    """One event; seconds. The first three are from the event on."""

    kind: str
    noticed_s: float  # until the bookie was no longer taken for writable
    replaced_s: float  # until the ledger went on without it, in metadata or as another ledger
    confirmed_s: float  # until entries were confirmed after that
    stall_s: float  # longest time without a confirmation
    slowest_s: float  # longest time that one entry waited
    return_s: float  # longest time without a confirmation while it came back


def quantiles(values: Sequence[float]) -> str:
    """p50, p99 (of less than a hundred: the highest) and the highest."""
    found = sorted(values)
    last = len(found) - 1
    return (
        f"p50 {found[last // 2]:.3f} p99 {found[min(last, len(found) * 99 // 100)]:.3f} max {found[-1]:.3f}"
    )


def describe(kind: str, losses: Sequence[Loss]) -> str:
    """A line for people."""
    return (
        f"{len(losses)} x {kind}: stall {quantiles([loss.stall_s for loss in losses])} s; "
        f"slowest entry {quantiles([loss.slowest_s for loss in losses])} s; noticed after "
        f"{quantiles([loss.noticed_s for loss in losses])} s, replaced {quantiles([loss.replaced_s for loss in losses])} s; "
        f"on its return {quantiles([loss.return_s for loss in losses])} s"
    )


def report(quorums: tuple[int, int, int], load: LedgerLoad, losses: Sequence[Loss], seconds: float) -> None:
    """Prints the figures: before the checks, which take a while."""
    changes = ensemble_changes(load)
    print(
        f"\n{'/'.join(map(str, quorums))}: {load.acknowledged:,} entries acknowledged in {seconds:.1f} s, "
        f"{len(load.ledgers)} ledgers; {changes} ensemble changes, {load.failovers} ledgers failed"
    )
    for ledger in load.ledgers:
        if ledger.error is not None:
            print(f"    ledger {ledger.writer.ledger_id} failed: {ledger.error.message}")
    for kind in dict.fromkeys(loss.kind for loss in losses):
        print(f"    {describe(kind, [loss for loss in losses if loss.kind == kind])}")
    for loss in losses:
        if loss.stall_s > LIMITS_S[loss.kind] / 2 or loss.return_s > 0.5:
            print(f"    slow: {' '.join(f'{name}={value}' for name, value in loss._asdict().items())}")


def ensemble_changes(load: LedgerLoad) -> int:
    """In all ledgers."""
    return sum(len(ledger.writer.metadata.ensembles) - 1 for ledger in load.ledgers)


async def until(what: str, condition: object) -> None:
    """Waits for what must come."""
    assert callable(condition)
    try:
        async with asyncio.timeout(40):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"waited in vain: {what}") from None


async def lose(kind: str, fleet: BookieFleet, party: Party, load: LedgerLoad, rng: random.Random) -> Loss:
    """One event, from a random moment on until the bookie is back and may be chosen again."""
    await asyncio.sleep(rng.uniform(0.1, 0.4))
    load.take()
    struck = load.current
    bookies = struck.writer.metadata.last_ensemble.bookies
    victim, role = rng.choice(bookies), rng.choice(ROLES)
    began, noticed = load.loop.time(), asyncio.create_task(unwritable(party, victim))
    if kind == "kill":
        await fleet.kill(victim, role)
    else:
        fleet.hang(victim, role)
    await until(
        f"bookie {victim} is replaced after a {kind} of its {role}",
        lambda: load.current is not struck or victim not in struck.writer.metadata.last_ensemble.bookies,
    )
    replaced_s = load.loop.time() - began
    before = load.acknowledged
    await until("an entry is confirmed without it", lambda: load.acknowledged > before)
    confirmed_s = load.loop.time() - began
    await until("entries are confirmed without it", lambda: load.acknowledged > before + RATE // 20)
    await asyncio.sleep(rng.uniform(0.0, 0.4))
    stall_s, slowest_s = load.take()
    if kind == "kill":
        await fleet.start(victim)
    else:
        fleet.resume()
    try:
        await until(f"bookie {victim} is back", lambda: len(party.bookies.writable()) == len(fleet.processes))
    except AssertionError as error:
        raise AssertionError(f"{error}: {party.info_reader.problems()}") from None
    # It may be chosen at once, and takes adds at once: no backoff outlives its return.
    failovers = load.failovers
    await load.roll()
    before = load.acknowledged
    await until("the load goes on", lambda: load.acknowledged > before + RATE // 10)
    assert load.failovers == failovers, "the ledger after a return failed"
    return Loss(kind, await noticed - began, replaced_s, confirmed_s, stall_s, slowest_s, load.take()[0])


async def unwritable(party: Party, bookie: str) -> float:
    """The time when placement passes the bookie by."""
    await until(f"the loss of {bookie} is noticed", lambda: bookie not in party.bookies.writable())
    return asyncio.get_running_loop().time()


async def check_ledger(party: Party, fleet: BookieFleet, ledger: LoadedLedger, ack_quorum: int) -> int:
    """Reads the ledger as its next owner would; returns how many entries it has."""
    ledger_id = ledger.writer.ledger_id
    reader = await party.client.open(ledger_id, recover=True)
    assert reader.closed
    last = reader.last_add_confirmed
    assert last + 1 >= ledger.acknowledged, f"ledger {ledger_id} lost acknowledged entries"
    # What was never confirmed may be there as well, if it is what was sent.
    limit = asyncio.Semaphore(4)
    await asyncio.gather(
        *(check_bytes(reader, ledger, first, limit) for first in range(0, last + 1, READ_STEP))
    )
    await check_copies(party, fleet, reader.metadata, ledger_id, ack_quorum)
    return last + 1


async def check_bytes(
    reader: LedgerReader, ledger: LoadedLedger, first: int, limit: asyncio.Semaphore
) -> None:
    """One step's worth of entries."""
    async with limit:
        entries = await reader.read(first, min(first + READ_STEP - 1, reader.last_add_confirmed))
    for entry_id, entry in enumerate(entries, first):
        expected = payload_of(ledger.numbers[entry_id], ENTRY_BYTES)
        assert entry[LEDGER_ENTRY_HEADER_BYTES:] == expected, f"entry {entry_id} is not what was appended"


async def check_copies(
    party: Party, fleet: BookieFleet, metadata: LedgerMetadata, ledger_id: int, ack_quorum: int
) -> None:
    """Every entry is on enough bookies of its write set."""
    stored: dict[str, bytearray] = {}
    for bookie in fleet.processes:
        has = stored[bookie] = bytearray(metadata.last_entry + 1)
        following = 0
        if bookie in {name for ensemble in metadata.ensembles for name in ensemble.bookies}:
            while following >= 0 and following <= metadata.last_entry:
                try:
                    page = await party.transport.list_entries(bookie, ledger_id, first=following)
                except LedgerNotFound:  # lost before anything of this ledger was durable there
                    break
                for first, last in page.ranges:
                    last = min(last, metadata.last_entry)
                    has[first : last + 1] = b"\x01" * (last + 1 - first)
                following = page.following
    write_sets = metadata.striping.write_sets
    for entry_id in range(metadata.last_entry + 1):
        bookies = metadata.ensemble_of(entry_id).bookies
        write_set = write_sets[entry_id % len(write_sets)]
        copies = sum(stored[bookies[position]][entry_id] for position in write_set)
        assert copies >= ack_quorum, f"entry {entry_id} of ledger {ledger_id} has {copies} copies"


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.timeout(120 + 30 * LOSSES)
@pytest.mark.parametrize(
    ("quorums", "events"),
    [
        pytest.param((3, 2, 2), ["kill", "hang"], id="3-2-2"),
        pytest.param((3, 3, 2), ["hang"], id="3-3-2"),
    ],
)
async def test_scorecard_11_losing_a_bookie_loses_nothing_acknowledged(
    tmp_path: Path, quorums: tuple[int, int, int], events: list[str]
) -> None:
    rng = random.Random(f"{SEED} {quorums}")
    if LOSSES:
        events = ["kill"] * LOSSES + ["hang"] * (LOSSES // 2)
        rng.shuffle(events)
    tasks = asyncio.all_tasks()
    losses: list[Loss] = []
    metadata = MemoryMetadataStore()
    async with BookieFleet(tmp_path, quorums[0] + SPARES) as fleet:
        async with Party(fleet, metadata, quorums) as party:
            load = LedgerLoad(party.client, rate=RATE, size=ENTRY_BYTES)
            began = time.monotonic()
            await load.start()
            for kind in events:
                losses.append(await lose(kind, fleet, party, load, rng))
            seconds = time.monotonic() - began
            await load.stop()
        report(quorums, load, losses, seconds)
        # The writer is gone without closing its ledger, as if its process had died.
        assert not load.ledgers[-1].writer.metadata.closed
        async with Party(fleet, metadata, quorums) as successor:
            found = [await check_ledger(successor, fleet, ledger, quorums[2]) for ledger in load.ledgers]
    await metadata.close()
    print(f"    {sum(found):,} entries found")
    assert load.acknowledged == sum(ledger.acknowledged for ledger in load.ledgers) > RATE * len(events) / 4
    assert ensemble_changes(load) + load.failovers >= len(events)
    for loss in losses:
        assert loss.stall_s <= LIMITS_S[loss.kind] + BUSY_S, loss
        assert loss.return_s <= BUSY_S, loss
    await until("no task is left", lambda: asyncio.all_tasks() <= tasks)

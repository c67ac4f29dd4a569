"""A workload for `storage_check`, what is verified after it, and one function for each way to disturb it.

crash_and_verify(seed, call, power=True)              power loss in place of disk call `call`
crash_and_verify(seed, call, power=False, again=7)    kill -9, then a crash at the 7th call of the recovery
fail_and_verify(seed, call, errno.EIO, power=True)    that call fails instead
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable
from dataclasses import replace
from typing import NamedTuple

from magnetar.bookie import BookieSettings
from magnetar.bookie.offline.index_rebuild import RebuildReport
from magnetar.proto.errors import MagnetarError, StorageFailed
from support.storage_check import KIB, SETTINGS, WIDE, Machine, Script, Session


async def workload(session: Session) -> None:
    """Adds to several ledgers, a fence, explicit LACs, re-adds, reads, rolls, recycling and checkpoints among them."""
    rng = session.rng
    number = 0
    for turn in range(6):
        adds = [session.add_soon(ledger_id, number + n) for n in range(2) for ledger_id in (1, 2, 3)]
        checkpoint = asyncio.ensure_future(session.checkpoint()) if turn % 2 else None
        extra = [
            asyncio.ensure_future(session.write_last_confirmed(1, number)),
            asyncio.ensure_future(session.write_last_confirmed(1, number)),
        ]
        if turn == 1:
            extra.append(asyncio.ensure_future(session.fence(50)))  # never written here
        if turn == 3:
            extra += [asyncio.ensure_future(session.fence(3)) for _ in range(2)]
        await asyncio.gather(*adds, *extra)
        # As a recovery does: new bytes under old ids.
        again = [
            session.add_soon(ledger_id, rng.randrange(number + 1), recovery=True) for ledger_id in (1, 3)
        ]
        for ledger_id in (1, 2):
            await tolerant(session.check_entry((ledger_id, rng.randrange(number + 1))))
        # Reads ahead, into entries that were just written anew.
        for ledger_id in (1, 3):
            await tolerant(session.check_range(ledger_id, 0, number))
        await asyncio.gather(*again)
        if checkpoint is not None:
            await checkpoint
        number += 2
        await tolerant(session.check_range(1, 0, number))


async def wide_workload(session: Session) -> None:
    """The same over several directories, with deletions and garbage collection beside adds, flushes and reads.

    Ledger 4 is deleted by name, 5 and 6 in metadata; what is left of 1 and 2 is compacted. The rounds run while adds and
    checkpoints go on.
    """
    rng = session.rng
    number = 0
    for turn in range(5):
        ledgers = (1, 2, 3, 4, 5, 6) if turn < 2 else (1, 2, 3)
        adds = [
            session.add_soon(ledger_id, number, size=rng.choice((50, 900, 2400))) for ledger_id in ledgers
        ]
        beside = [asyncio.ensure_future(session.write_last_confirmed(1, number))]
        if turn == 1:
            adds += [session.add_soon(4, n, size=1200) for n in (7, 8)]
            beside.append(asyncio.ensure_future(session.fence(50)))
            beside.append(asyncio.ensure_future(session.fence(5)))
        if turn == 2:
            session.delete_in_metadata(5)
            session.delete_in_metadata(6)
            beside.append(asyncio.ensure_future(session.delete(4)))
            beside.append(asyncio.ensure_future(session.collect_garbage()))
            beside.append(asyncio.ensure_future(new_ledgers(session)))
        session.machine.existing.unreachable = turn == 3
        if turn == 3:
            beside.append(asyncio.ensure_future(session.fence(3)))
            beside.append(asyncio.ensure_future(session.collect_garbage()))
        if turn == 4:
            beside.append(asyncio.ensure_future(session.checkpoint()))
            beside.append(asyncio.ensure_future(session.collect_garbage()))
        await asyncio.gather(*adds)
        again = session.add_soon(1, rng.randrange(number + 1), recovery=True, size=rng.choice((50, 900)))
        stale = session.add_soon(rng.choice((4, 5, 6)), number, size=50) if turn > 1 else again
        if turn % 2:
            await session.checkpoint()
        for ledger_id in (1, 2, 5):
            await tolerant(session.check_range(ledger_id, 0, number))
        await asyncio.gather(again, stale, *beside)
        number += 1
    await session.checkpoint()
    await session.collect_garbage()
    for ledger_id in (1, 2, 3):
        await tolerant(session.check_range(ledger_id, 0, number))


async def compaction_beside_a_flush(session: Session) -> None:
    """A log that a flush has closed and the index does not know yet, mostly of a ledger that is being deleted."""
    number = session.rng.choice((1, 1, 3))
    await session.add_soon(30, 100, size=50)
    await session.checkpoint()  # garbage collection sees what the index lists
    adds = [session.add_soon(30, n, size=1200) for n in range(number)]
    adds += [session.add_soon(32, n, size=session.rng.choice((300, 900))) for n in range(24)]
    await asyncio.gather(*adds)
    flush = asyncio.ensure_future(session.checkpoint())
    for _ in range(session.rng.randrange(12)):
        await asyncio.sleep(0)
    await session.delete(30)
    await session.collect_garbage()
    await flush
    await session.check_range(32, 0, 23)


async def adds_beside_a_compaction(session: Session) -> None:
    """Entries are added again, and flushed, between the copy of their log and the deletion of it."""
    for number in range(8):  # each flush fills a log, mostly with the one that is deleted then
        await asyncio.gather(session.add_soon(30, number, size=1200), session.add_soon(32, number, size=300))
        await session.checkpoint()
    await session.delete(30)
    round_ = asyncio.ensure_future(session.collect_garbage())
    while not round_.done():
        number = session.rng.randrange(8)
        await session.add_soon(32, number, recovery=True, size=session.rng.choice((50, 500)))
        await session.checkpoint()
        await asyncio.sleep(session.rng.choice((0.0, 0.01, 0.1)))
    await session.check_promises()


async def one_busy_journal(session: Session) -> None:
    """One journal is files ahead of the other, which fills files of its own while a checkpoint is under way."""
    for number in range(0, 40, 10):
        await asyncio.gather(*(session.add_soon(1, number + n, size=2400) for n in range(9)))
        flush = asyncio.ensure_future(session.checkpoint())
        for _ in range(session.rng.randrange(12)):
            await asyncio.sleep(0)
        await asyncio.gather(*(session.add_soon(2, number // 2 + n, size=2400) for n in range(5)))
        await flush
    await session.check_promises()


async def new_ledgers(session: Session) -> None:
    """One after another while a round of garbage collection runs."""
    for ledger_id in range(20, 26):
        await session.add_soon(ledger_id, 0, size=50)


async def tolerant(reading: Awaitable[None]) -> None:
    """A bookie that has failed refuses reads, too."""
    try:
        await reading
    except StorageFailed:
        return


async def verify(session: Session) -> None:
    """Every promise, and that the bookie still works."""
    await session.check_promises()
    await session.promote()
    number = 100 * session.machine.starts
    codes = [await session.add_soon(9, number + n, size=500) for n in range(2)]
    if codes != [0, 0]:
        session.machine.broken(f"a healthy bookie answers adds with {codes}")
    await session.checkpoint()
    await session.collect_garbage()
    await session.check_promises()


class Case(NamedTuple):
    """A workload and the bookie that it runs on."""

    script: Script
    settings: BookieSettings = SETTINGS


NARROW = Case(workload)
WIDE_CASE = Case(wide_workload, WIDE)
UNEVEN = Case(one_busy_journal, WIDE)
RACE = Case(
    compaction_beside_a_flush, replace(WIDE, write_cache_bytes=256 * KIB, checkpoint_interval_s=100.0)
)
# Slow enough for a few flushes while one log is copied.
ADDS_BESIDE = Case(adds_beside_a_compaction, replace(RACE.settings, compaction_bytes_per_s=20 * KIB))


def count_calls(seed: int, case: Case = NARROW) -> int:
    """Changing calls of an undisturbed run, its stop included."""
    with Machine(seed, case.settings) as machine:
        machine.start(case.script, close=True)
        return machine.disk.calls


def crash_and_verify(
    seed: int,
    call: int,
    *,
    power: bool,
    again: int | None = None,
    power_again: bool = True,
    case: Case = NARROW,
) -> int:
    """A crash at a call of the workload, another one at call `again` of the recovery; returns the recovery's calls.

    The last start is after a power loss, so that whatever the start before it served must have been durable.
    """
    with Machine(seed, case.settings) as machine:
        machine.crash_at(call)
        machine.start(case.script, close=True)
        if power:
            machine.lose_power()
        if again is not None:
            machine.crash_at(again)
        before = machine.disk.calls
        machine.must_start(verify)
        calls = machine.disk.calls - before
        if again is not None and power_again:
            machine.lose_power()
        for _ in range(1 if again is None else 2):
            machine.must_start(verify)
            machine.lose_power()
        machine.must_start(verify)
        return calls


def rebuild_and_verify(seed: int, call: int, *, power: bool, case: Case = NARROW) -> RebuildReport | None:
    """A crash, and the index lost with it: what it said comes back from entry logs and journals.

    None if the first start had not come so far that there was an index to lose.
    """
    with Machine(seed, case.settings) as machine:
        machine.crash_at(call)
        machine.start(case.script, close=True)
        if power:
            machine.lose_power()
        machine.older_copies = True
        if machine.index.instance is None:
            return None
        report = machine.rebuild_index()
        if report.incomplete or report.unknown_ledgers:
            machine.broken(f"nothing was damaged, and the rebuild does not know what was lost: {report}")
        machine.must_start(verify)
        machine.lose_power()
        machine.must_start(verify)
        return report


def outlive(case: Case = NARROW) -> Case:
    """The workload, and then time for a bookie that turned read-only to come back."""

    async def script(session: Session) -> None:
        await case.script(session)
        if session.bookie.failure is None:
            await asyncio.sleep(3.0)
        if session.bookie.failure is None:
            code = await session.add_soon(8, 0)
            if code and session.bookie.failure is None:
                session.machine.broken(f"after the fault an add is answered {code}")

    return Case(script, case.settings)


def fail_and_verify(seed: int, call: int, error: int, *, power: bool, case: Case = NARROW) -> str:
    """One call fails; the bookie stops cleanly or goes on, and the next start has everything. Says which.

    It goes on after a failed sync, or an EIO, only where a ledger directory was given up for another.
    """
    with Machine(seed, case.settings) as machine:
        machine.fail_at(call, error)
        try:
            machine.start(outlive(case).script, close=True)
            outcome = "stopped" if machine.failure else "went on"
        except MagnetarError:
            outcome = "refused"
        if machine.faulted is None:
            machine.broken("the fault did not fire")
        assert machine.faulted is not None
        kind, path = machine.faulted
        spare = any(path.startswith(directory) for directory in case.settings.ledger_directories)
        if outcome == "went on" and (error == errno.EIO or kind.startswith("sync")) and not spare:
            machine.broken(f"the bookie goes on after {errno.errorcode[error]} at {machine.faulted}")
        machine.faulted = None
        if power:
            machine.lose_power()
        machine.must_start(verify)
        machine.lose_power()
        machine.must_start(verify)
        return outcome

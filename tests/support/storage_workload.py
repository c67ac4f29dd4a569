"""A workload for `storage_check`, what is verified after it, and one function for each way to disturb it.

crash_and_verify(seed, call, power=True)              power loss in place of disk call `call`
crash_and_verify(seed, call, power=False, again=7)    kill -9, then a crash at the 7th call of the recovery
fail_and_verify(seed, call, errno.EIO, power=True)    that call fails instead
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable

from magnetar.proto.errors import MagnetarError, StorageFailed
from support.storage_check import Machine, Script, Session


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
    await session.check_promises()


def count_calls(seed: int, script: Script = workload) -> int:
    """Changing calls of an undisturbed run, its stop included."""
    with Machine(seed) as machine:
        machine.start(script, close=True)
        return machine.disk.calls


def crash_and_verify(
    seed: int, call: int, *, power: bool, again: int | None = None, power_again: bool = True
) -> int:
    """A crash at a call of the workload, another one at call `again` of the recovery; returns the recovery's calls.

    The last start is after a power loss, so that whatever the start before it served must have been durable.
    """
    with Machine(seed) as machine:
        machine.crash_at(call)
        machine.start(workload, close=True)
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


async def outlive(session: Session) -> None:
    """The workload, and then time for a bookie that turned read-only to come back."""
    await workload(session)
    if session.bookie.failure is None:
        await asyncio.sleep(3.0)
    if session.bookie.failure is None:
        code = await session.add_soon(8, 0)
        if code and session.bookie.failure is None:
            session.machine.broken(f"after the fault has passed an add is answered {code}")


def fail_and_verify(seed: int, call: int, error: int, *, power: bool) -> str:
    """One call fails; the bookie stops cleanly or goes on, and the next start has everything. Says which."""
    with Machine(seed) as machine:
        machine.fail_at(call, error)
        try:
            machine.start(outlive, close=True)
            outcome = "stopped" if machine.failure else "went on"
        except MagnetarError:
            outcome = "refused"
        if machine.faulted is None:
            machine.broken("the fault did not fire")
        assert machine.faulted is not None
        kind = machine.faulted[0]
        if outcome == "went on" and (error == errno.EIO or kind.startswith("sync")):
            machine.broken(f"the bookie goes on after {errno.errorcode[error]} at {machine.faulted}")
        machine.faulted = None
        if power:
            machine.lose_power()
        machine.must_start(verify)
        machine.lose_power()
        machine.must_start(verify)
        return outcome

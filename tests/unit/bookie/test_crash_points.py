"""The bookie is crashed at every call that changes the disk, and power is lost with it: nothing acknowledged is lost.

The workload adds, fences, checkpoints, rolls journals and closes, so that the crash falls into each of these. A second
crash then falls into the recovery from the first.
"""

import asyncio
import random

import pytest

from magnetar.bookie import Bookie, open_bookie
from magnetar.bookie.index import ModelStorage
from magnetar.proto.errors import DataDirectoryError, EntryNotFound, LedgerFenced, LedgerNotFound
from support.bookie_kit import KIB, add, entry, model_components, small_settings
from support.sim import SimDisk, SimLoop

DIRECTORY = "/data/bookie"
SETTINGS = small_settings(DIRECTORY, journal_file_bytes=64 * KIB, entry_log_bytes=16 * KIB)
LEDGERS = 2
ENTRIES = 12


class Promises:
    """What the bookie has answered."""

    def __init__(self) -> None:
        self.stored: dict[tuple[int, int], bytes] = {}
        self.fenced: dict[int, None] = {}
        self.confirmed: dict[int, int] = {}
        self.finished = False


async def open_simulated(disk: SimDisk, loop: SimLoop, process: object, storage: ModelStorage) -> Bookie:
    return await open_bookie(SETTINGS, model_components(storage, disk.mount(process)))  # type: ignore[arg-type]


async def workload(
    disk: SimDisk, loop: SimLoop, process: object, storage: ModelStorage, kept: Promises
) -> None:
    bookie = await open_simulated(disk, loop, process, storage)
    checkpoints: list[asyncio.Task[None]] = []
    for number in range(ENTRIES):
        for ledger_id in range(LEDGERS):
            data = entry(ledger_id, number, b"%d" % number * 3000)

            def done(ledger: int, at: int, code: int, data: bytes = data) -> None:
                if code == 0:
                    kept.stored[(ledger, at)] = data

            bookie.add(data, recovery=False, done=done)
        if number % 5 == 3:
            # Adds go on while it runs.
            checkpoints.append(asyncio.get_running_loop().create_task(bookie.checkpoint()))
            # `gather` raises what they raise, if it comes to that.
            checkpoints[-1].add_done_callback(lambda task: task.cancelled() or task.exception())
        if number == 6:
            await bookie.fence(77)
            kept.fenced[77] = None
            await bookie.write_last_confirmed(0, 6)
            kept.confirmed[0] = 6
        await asyncio.sleep(0.001)
    await asyncio.gather(*checkpoints)
    await bookie.fence(0)
    kept.fenced[0] = None
    await bookie.close()
    kept.finished = True


async def check(disk: SimDisk, loop: SimLoop, storage: ModelStorage, kept: Promises) -> None:
    bookie = await open_simulated(disk, loop, None, storage)
    for (ledger_id, number), data in kept.stored.items():
        entries, _ = await bookie.read(ledger_id, number, number)
        assert entries == [data]
    for ledger_id in kept.fenced:
        assert await add(bookie, entry(ledger_id, 999)) == LedgerFenced.code
    for ledger_id, confirmed in kept.confirmed.items():
        assert (await bookie.read_last_confirmed(ledger_id))[0] >= confirmed
    for ledger_id in range(LEDGERS):
        # What was not acknowledged is there as it was written, or not at all.
        try:
            entries, _ = await bookie.read(ledger_id, 0, 999, max_bytes=1 << 30)
        except (EntryNotFound, LedgerNotFound):
            continue
        assert entries == [entry(ledger_id, n, b"%d" % n * 3000) for n in range(len(entries))]
    assert await add(bookie, entry(500, 0)) == 0
    await bookie.close()


def crash_at(point: int | None, seed: int, second_point: int | None = None) -> tuple[Promises, int]:
    """Runs the workload, crashes it at its `point`-th disk call, recovers, and checks. Returns the calls it made."""
    loop = SimLoop(seed)
    disk = SimDisk(random.Random(seed))
    disk.mount().make_directory("/data")
    storage, kept = ModelStorage(), Promises()
    calls = disk.calls
    try:
        process = loop.start_process("bookie")
        if point is not None:
            disk.at_call(point, process.kill)
        process.spawn(workload(disk, loop, process, storage, kept))

        async def ended() -> None:
            while process.alive and not kept.finished:
                await asyncio.sleep(0.01)

        loop.run(ended())
        calls = disk.calls - calls
        disk.lose_power()
        if second_point is not None:
            again = loop.start_process("again")
            disk.at_call(second_point, again.kill)
            opened = again.spawn(open_simulated(disk, loop, again, storage))

            async def opened_or_dead() -> None:
                while again.alive and not opened.done():
                    await asyncio.sleep(0.01)

            loop.run(opened_or_dead())
            if again.alive:
                again.kill()
            disk.lose_power()
        loop.run(check(disk, loop, storage, kept))
    finally:
        loop.close()
    return kept, calls


def test_the_workload_keeps_its_promises_without_a_crash_and_reaches_everything() -> None:
    kept, calls = crash_at(None, 0)
    assert kept.finished
    assert len(kept.stored) == LEDGERS * ENTRIES
    assert calls > 100


@pytest.mark.sim
@pytest.mark.parametrize("part", range(4))
def test_a_crash_at_every_disk_call_loses_nothing_acknowledged(part: int) -> None:
    _, calls = crash_at(None, 0)
    stored = []
    for point in range(1 + part, calls, 4):
        try:
            kept, _ = crash_at(point, seed=point)
        except (AssertionError, DataDirectoryError) as error:
            raise AssertionError(f"crash at disk call {point}") from error
        stored.append(len(kept.stored))
    assert min(stored) == 0
    assert max(stored) == LEDGERS * ENTRIES


@pytest.mark.sim
def test_a_crash_in_the_recovery_from_a_crash(sim_seed: int) -> None:
    rng = random.Random(sim_seed)
    for _ in range(5):
        first, second = rng.randrange(20, 120), rng.randrange(1, 25)
        crash_at(first, seed=sim_seed, second_point=second)

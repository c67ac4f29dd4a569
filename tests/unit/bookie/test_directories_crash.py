"""Directories come and go while the bookie crashes at every call that changes a disk (rules 5, 9, 12a).

Each start has other journal and ledger directories; power is lost with the crash. Whatever was acknowledged is there
afterwards, under the last start's settings or, where that one was refused a directory, under the crashed one's.
"""

import asyncio
import random
from typing import Any

import pytest

from magnetar.bookie import Bookie, open_bookie
from magnetar.proto.errors import DataDirectoryError
from support.bookie_kit import add, add_all, crash, entry, model_components, small_settings
from support.index_model import ModelStorage
from support.sim import SimDisk, SimLoop

LEDGERS = 3
# (journal directories, ledger directories, entries of each ledger); the last start has yet another set.
STARTS = (("a", "a"), ("ab", "ab"), ("b", "ab"), ("bc", "bac"))


def settings(journals: str, ledgers: str) -> Any:
    return small_settings(
        "/data/bookie",
        journal_directories=tuple(f"/disk-{name}/journal" for name in journals),
        ledger_directories=tuple(f"/disk-{name}/ledgers" for name in ledgers),
        checkpoint_interval_s=1000.0,
    )


class Run:
    def __init__(self, seed: int) -> None:
        self.loop = SimLoop(seed)
        self.disk = SimDisk(random.Random(seed))
        for path in ("/data", "/disk-a", "/disk-b", "/disk-c"):
            self.disk.mount().make_directory(path)
        self.storage = ModelStorage()
        self.stored: dict[tuple[int, int], bytes] = {}
        self.finished = False

    async def open(self, journals: str, ledgers: str, process: object = None) -> Bookie:
        files = self.disk.mount(process) if process is not None else self.disk.mount()  # type: ignore[arg-type]
        return await open_bookie(settings(journals, ledgers), model_components(self.storage, files))

    async def workload(self, process: object) -> None:
        number = 0
        for turn, (journals, ledgers) in enumerate(STARTS):
            bookie = await self.open(journals, ledgers, process)
            for _ in range(3):
                for ledger in range(LEDGERS):
                    data = entry(ledger, number, b"%d" % number * 2000)

                    def done(at: int, entry_id: int, code: int, data: bytes = data) -> None:
                        if code == 0:
                            self.stored[(at, entry_id)] = data

                    bookie.add(data, recovery=False, done=done)
                number += 1
                await asyncio.sleep(0.01)
            if turn % 2:
                await bookie.checkpoint()
                assert await add(bookie, entry(9, turn)) == 0
                crash(bookie)
            else:
                await bookie.close()
        self.finished = True

    async def check(self) -> None:
        bookie: Bookie | None = None
        refusals = []
        for journals, ledgers in (*reversed(STARTS), ("c", "abc")):
            try:
                bookie = await self.open(journals, ledgers)
                break
            except DataDirectoryError as error:  # a directory that holds entries was left out
                if "no longer names" not in str(error):
                    raise
                refusals.append(error)
        assert bookie is not None, refusals
        for (ledger, number), data in self.stored.items():
            assert (await bookie.read(ledger, number, number))[0] == [data]
        assert not any(await add_all(bookie, [entry(500 + n, 0) for n in range(LEDGERS)]))
        await bookie.close()
        bookie = await self.open("c", "cba")
        for (ledger, number), data in self.stored.items():
            assert (await bookie.read(ledger, number, number))[0] == [data]
        await bookie.close()


def crash_at(point: int | None, seed: int) -> tuple[Run, int]:
    run = Run(seed)
    calls = run.disk.calls
    try:
        process = run.loop.start_process("bookie")
        if point is not None:
            run.disk.at_call(calls + point, process.kill)
        task = process.spawn(run.workload(process))

        async def ended() -> None:
            while process.alive and not task.done():
                await asyncio.sleep(0.01)
            if process.alive:
                task.result()

        run.loop.run(ended())
        calls = run.disk.calls - calls
        process.kill()
        run.disk.lose_power()
        run.loop.run(run.check())
    finally:
        run.loop.close()
    return run, calls


def test_directories_come_and_go() -> None:
    run, calls = crash_at(None, 0)
    assert run.finished
    assert len(run.stored) == LEDGERS * 3 * len(STARTS)
    assert calls > 200


@pytest.mark.sim
@pytest.mark.parametrize("part", range(4))
def test_rule_12a_a_crash_at_every_disk_call_while_directories_change(part: int) -> None:
    _, calls = crash_at(None, 0)
    for point in range(1 + part, calls, 4):
        try:
            crash_at(point, seed=point)
        except (AssertionError, DataDirectoryError) as error:
            raise AssertionError(f"crash at disk call {point}") from error

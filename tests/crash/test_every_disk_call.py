"""A crash, or a fault, at every single disk call of a bookie; again at the calls of the recovery (scorecard 7 and 15).

The long form runs 2 seeds of each workload instead of 1 (LONG=10: 20), and crashes at every call of each recovery. A
failure names its seed and calls: `crash_and_verify(seed, call, power=..., again=..., case=...)` replays it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
from collections import Counter
from typing import Any

import pytest

from magnetar.bookie.device import ProcessDiskWorker
from magnetar.bookie.device.disk_process import ANSWER
from magnetar.bookie.status import bookie_figures
from magnetar.proto.errors import DiskFull, StorageFailed
from support.long_form import LONG, times
from support.storage_check import WIDE, Machine, Session
from support.storage_workload import (
    ADDS_BESIDE,
    NARROW,
    RACE,
    UNEVEN,
    WIDE_CASE,
    Case,
    count_calls,
    crash_and_verify,
    fail_and_verify,
    outlive,
    rebuild_and_verify,
    tolerant,
    verify,
    workload,
)

SEEDS = times(1, 2)
TIMEOUT_S = 3600 if LONG else 120
# Crashes in each recovery, and the calls that it makes.
SAMPLES = 1
RECOVERY_CALLS = 60


def chosen(calls: int, step: int) -> range:
    """All calls in the long form, every `step`-th in the short one: `make test` has half a minute for this file."""
    return range(0, calls, 1 if LONG else step)


CASES = [
    pytest.param(seed, case, id=f"{name}-{seed}")
    for name, case in (("narrow", NARROW), ("wide", WIDE_CASE))
    for seed in range(SEEDS)
]


def test_the_workload_does_what_it_is_for() -> None:
    """Otherwise crashing it proves little: every kind of call, rolls, recycling, several checkpoints, refused adds."""
    with Machine(0) as machine:
        seen: list[str] = []
        record = machine.disk.trace.record

        def spy(kind: str, *fields: object) -> None:
            seen.append(f"{kind} {fields[0] if fields else ''}")
            record(kind, *fields)

        machine.disk.trace.record = spy  # type: ignore[method-assign]
        checkpoints = 0

        async def count(session: Session) -> None:
            nonlocal checkpoints
            await workload(session)
            checkpoints = session.bookie.checkpointer.finished

        machine.start(count, close=True)
        promises = machine.promises
        kinds = {line.split()[0] for line in seen}
        assert {"mkdir", "open", "write", "sync", "sync_directory", "rename", "delete"} <= kinds
        assert len({line for line in seen if line.startswith("write") and "/journal-" in line}) > 4
        assert (
            len({line for line in seen if line.startswith("rename") and "/journal-" in line}) > 1
        )  # recycled
        assert len([path for path in machine.disk.files() if "entrylog" in path]) > 3
        assert checkpoints > 4
        assert len(promises.acknowledged) > 25
        assert {3, 50} == {*promises.fenced}
        assert max(len(versions) for versions in promises.versions.values()) > 1
        assert promises.versions.keys() - promises.acknowledged.keys()  # adds that the fence refused


def test_the_wide_workload_does_what_it_is_for() -> None:
    """Several directories of each kind, logs deleted as a whole, logs compacted, ledgers deleted both ways."""
    totals: Counter[str] = Counter()
    for seed in range(3):
        with Machine(seed, WIDE) as machine:

            async def count(session: Session) -> None:
                await WIDE_CASE.script(session)
                totals.update(bookie_figures(session.bookie))

            written: Counter[str] = Counter()
            real = machine.disk.call

            def spy(
                kind: str, path: str, detail: object = "", real: Any = real, written: Counter[str] = written
            ) -> None:
                if kind == "write":
                    written[os.path.dirname(path)] += 1
                real(kind, path, detail)

            machine.disk.call = spy  # type: ignore[method-assign]
            machine.start(count, close=True)
            assert min(written[path] for path in WIDE.journal_directories + WIDE.ledger_directories) > 5
            assert {4, 5, 6} == {*machine.promises.deleted}
    assert totals["gc_deleted_logs"] > 1
    assert totals["compaction_logs"] > 1
    assert totals["gc_reclaimed_bytes"] > 10_000


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(("seed", "case"), CASES)
def test_a_crash_at_every_disk_call_loses_nothing(seed: int, case: Case) -> None:
    """With the page cache (kill -9) and without it (power loss); they take turns in the short form."""
    for call in chosen(count_calls(seed, case), 3):
        for power in (False, True) if LONG else (call // 3 % 2 > 0,):
            crash_and_verify(seed, call, power=power, case=case)


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(("seed", "case"), CASES)
def test_a_second_crash_at_the_disk_calls_of_the_recovery_loses_nothing(seed: int, case: Case) -> None:
    """Names and pages that only the page cache has are what the second one takes away."""
    rng = random.Random(seed)
    for call in chosen(count_calls(seed, case), 11):
        power = rng.random() < 0.5
        if LONG:
            again = [*range(crash_and_verify(seed, call, power=power, case=case))]
        else:
            again = rng.sample(range(RECOVERY_CALLS), SAMPLES)
        for second in again:
            crash_and_verify(seed, call, power=power, again=second, power_again=rng.random() < 0.7, case=case)


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize(("seed", "case"), CASES)
def test_a_fault_at_every_disk_call_stops_cleanly_or_passes(seed: int, case: Case, error: int) -> None:
    """EIO, and any failed sync, stops the bookie without a further acknowledgement, or costs one ledger directory of
    several. A full disk may pass.
    """
    outcomes = [
        fail_and_verify(seed, call, error, power=(call // 3 + seed) % 3 > 0, case=case)
        for call in chosen(count_calls(seed, outlive(case)), 7)
    ]
    assert outcomes.count("stopped") > 7
    assert outcomes.count("refused") > 2
    assert ("went on" in outcomes) == (error == errno.ENOSPC or case is WIDE_CASE)


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(("seed", "case"), CASES)
def test_an_index_lost_at_every_disk_call_is_made_anew(seed: int, case: Case) -> None:
    """Fences, explicit LACs and deletions come back from state records; nothing is denied, and nothing taken for lost."""
    reports = [
        rebuild_and_verify(seed, call, power=call % 2 > 0, case=case)
        for call in chosen(count_calls(seed, case), 11)
    ]
    assert sum(report is not None and report.states > 0 for report in reports) > 5


@pytest.mark.parametrize("case", [RACE, ADDS_BESIDE], ids=["flush", "adds"])
@pytest.mark.parametrize("seed", range(10))
def test_rule_11_a_compaction_waits_out_a_flush_in_progress(seed: int, case: Case) -> None:
    """And an entry that was added again meanwhile keeps its newer place."""
    crash_and_verify(seed, 10_000, power=True, case=case)


@pytest.mark.timeout(TIMEOUT_S)
def test_a_crash_at_every_disk_call_of_adds_beside_a_compaction_loses_nothing() -> None:
    for seed in range(SEEDS):
        for call in chosen(count_calls(seed, ADDS_BESIDE), 9):
            crash_and_verify(seed, call, power=call % 2 > 0, case=ADDS_BESIDE)


@pytest.mark.timeout(TIMEOUT_S)
def test_rule_03_a_crash_at_every_disk_call_beside_a_busy_journal_loses_nothing() -> None:
    for seed in range(SEEDS):
        for call in chosen(count_calls(seed, UNEVEN), 11):
            crash_and_verify(seed, call, power=call % 2 > 0, case=UNEVEN)


@pytest.mark.parametrize("power", [False, True])
def test_rule_12a_a_start_settles_the_names_that_it_sees(power: bool) -> None:
    """Killed between mkdir and the sync of the directory, and between the mark's rename and its sync.

    The next start saw the names in the page cache, acknowledged entries below them (or recycled journals that the old
    mark needed), and a power loss took the names away.
    """
    crash_and_verify(0, 1, power=False)
    for again in range(12):
        crash_and_verify(2, 169, power=False, again=again, power_again=power)


def test_the_same_last_confirmed_twice_is_answered_when_it_is_durable() -> None:
    """The second writer was told at once, because the first one's value was in memory."""

    async def twice(session: Session) -> None:
        first = asyncio.ensure_future(session.bookie.write_last_confirmed(1, 5))
        second = asyncio.ensure_future(session.bookie.write_last_confirmed(1, 5))
        device = session.bookie.journals.all[0].device
        before = device.durable_offset
        await second
        assert device.durable_offset > before
        await first
        end = device.end_offset
        await session.bookie.write_last_confirmed(1, 5)
        assert device.end_offset == end  # durable already: no record

    with Machine(0) as machine:
        assert machine.start(twice, close=True)


def test_rule_04_a_checkpoint_that_failed_stops_the_bookie_whoever_asked_for_it() -> None:
    """It was left to the caller; the periodic checkpoint then tried the failed sync again."""

    async def ask(session: Session) -> None:
        assert await session.add_soon(1, 0) == 0
        waiting = session.add_soon(1, 1)
        session.machine.disk.fail("sync", "entrylog")
        await session.checkpoint()
        assert session.bookie.failure is not None
        assert session.machine.failure is session.bookie.failure
        await tolerant(session.check_entry((1, 0)))
        assert await waiting in (0, session.bookie.failure.code)
        assert await session.add_soon(1, 2) == session.bookie.failure.code

    with Machine(0) as machine:
        machine.start(ask)
        machine.lose_power()
        machine.must_start(verify)


def test_read_ahead_does_not_keep_the_old_copy_of_an_entry_added_again() -> None:
    """It read past an entry whose newer copy still waited in the write cache, and served the old one after the flush."""

    async def read_ahead(session: Session) -> None:
        for number in range(4):
            assert await session.add_soon(1, number, size=500) == 0
        await session.checkpoint()
        assert await session.add_soon(1, 2, recovery=True, size=500) == 0
        await session.check_range(1, 0, 1)
        await session.checkpoint()
        await session.check_range(1, 0, 3)

    with Machine(0) as machine:
        assert machine.start(read_ahead)


def test_rule_12_a_full_disk_leaves_no_parts_of_journal_files_behind() -> None:
    """Each attempt, one a second, left another one: the space that came back went there."""

    async def wait(session: Session) -> None:
        await asyncio.sleep(5.0)
        assert len(session.bookie.journals.all[0]._spares) == 2
        assert await session.add_soon(1, 0) == 0

    with Machine(0) as machine:
        machine.disk.fail("write", "journal-0000000000000002", errno.ENOSPC)
        machine.disk.fail("write", "journal-0000000000000003", errno.ENOSPC)
        assert machine.start(wait)
        assert [path[-6:] for path in machine.disk.files() if "/journal-" in path] == [
            *("01.log", "04.log", "05.log")
        ]


def test_rule_12_an_entry_log_begins_with_its_header_also_after_a_full_disk() -> None:
    async def flush(session: Session) -> None:
        assert await session.add_soon(1, 0) == 0
        await asyncio.sleep(3.0)
        assert session.bookie.cache.size == 0
        assert await session.bookie.logs.reader.header_fault(1) == ""
        await session.check_entry((1, 0))

    with Machine(0) as machine:
        machine.disk.fail("write", "entrylog-00000001", errno.ENOSPC)
        assert machine.start(flush)
        assert machine.disk.trace.faults["write_ENOSPC"] == 1


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("case", [RACE, ADDS_BESIDE], ids=["flush", "adds"])
def test_a_fault_beside_a_compaction_stops_cleanly_or_passes(case: Case, error: int) -> None:
    """A failing call of a flush, of adds or of the compaction, while the others go on; every sixth in the short form."""
    for seed in range(1, 1 + SEEDS):
        for call in chosen(count_calls(seed, outlive(case)), 8):
            fail_and_verify(seed, call, error, power=call // 8 % 4 > 0, case=case)


@pytest.mark.parametrize("call", [154, 172, 192, 193])
def test_rule_12a_a_new_log_that_found_no_space_at_first_gets_a_durable_name(call: int) -> None:
    """Its directory was synced before it was made, and not again; the log went with a power loss."""
    assert fail_and_verify(1, call, errno.ENOSPC, power=call != 192, case=RACE) == "went on"


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_what_a_flush_put_into_a_directory_that_a_compaction_gives_up_is_written_elsewhere(
    error: int,
) -> None:
    """The flush synced only what was still in use, and took the rest for durable."""
    assert fail_and_verify(1, 311, error, power=True, case=ADDS_BESIDE) == "went on"


def test_rule_12a_a_start_settles_the_cookies_of_directories_before_it_names_them() -> None:
    """The cookie of DATA said that a directory has one, which only the page cache had."""
    crash_and_verify(2, 37, power=False, again=18, case=ADDS_BESIDE)


async def test_rule_04_a_sync_that_failed_for_want_of_space_is_not_tried_again() -> None:
    """The disk worker called it a full disk, after which a flush is done again."""
    ours, theirs = socket.socketpair()
    worker = ProcessDiskWorker()
    worker._loop, worker._socket = asyncio.get_running_loop(), ours
    try:
        asked = asyncio.ensure_future(worker.sync("/data/ledgers/entrylog-00000001.log"))
        await asyncio.sleep(0)
        theirs.send(ANSWER.pack(1, errno.ENOSPC))
        worker._readable()
        with pytest.raises(StorageFailed) as caught:
            await asked
        assert not isinstance(caught.value, DiskFull)
    finally:
        ours.close()
        theirs.close()

"""The scrub takes nothing that a crash leaves for damage: torn tails, copies of a compaction, garbage, what has no place.

And the other way round: with the index as it is and a bit of a log flipped, the same scrub finds it.
"""

from __future__ import annotations

import random

import pytest

from support.storage_check import Machine, Session
from support.storage_workload import NARROW, WIDE_CASE, Case, count_calls, verify

SAMPLES = 40


async def scrub(session: Session) -> None:
    bookie = session.bookie
    for again in (False, True):
        await bookie.scrubber.verify_everything()
        if bookie.damage.ledgers() or bookie.damage.files():
            session.machine.broken(
                f"the scrub takes {bookie.damage.ledgers()} {bookie.damage.files()} for damaged"
            )
        if not again:
            await verify(session)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [NARROW, WIDE_CASE], ids=["narrow", "wide"])
def test_no_crash_leaves_what_the_scrub_takes_for_damage(case: Case) -> None:
    calls = count_calls(1, case)
    for call in sorted(random.Random(1).sample(range(calls), min(calls, SAMPLES))):
        with Machine(1, case.settings) as machine:
            machine.crash_at(call)
            machine.start(case.script, close=True)
            if call % 3:
                machine.lose_power()
            machine.must_start(scrub)
            machine.lose_power()
            machine.must_start(scrub)


def test_the_same_scrub_finds_a_flipped_bit() -> None:
    found = 0
    for seed in range(3):
        with Machine(seed, NARROW.settings) as machine:
            machine.start(NARROW.script, close=True)
            place = sorted(machine.index.locations.items())[seed]
            path = next(path for path in machine.disk.files() if f"{place[1].log_id:08x}.log" in path)
            inode = machine.disk.names.file(path)
            assert inode is not None
            inode.flip(place[1].offset + 40, 3)

            async def look(session: Session, key: tuple[int, int] = place[0]) -> None:
                nonlocal found
                await session.bookie.scrubber.verify_everything()
                found += session.bookie.damage.covers(*key)

            machine.must_start(look)
    assert found == 3

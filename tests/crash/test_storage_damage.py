"""Bits flip on a bookie's disk: each is detected, no wrong byte is served, damage is never "no such entry" (rule 8).

One bit in each 4 KiB page of every file, after a crash that left journals, entry logs and index; the long form flips
eight in each page. The journal's last group would look like a torn tail, but for the record behind it that says so once
nothing was written for a moment.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from magnetar.bookie.entry_log import log_reader
from magnetar.bookie.index import Location
from magnetar.bookie.journal import recovery
from magnetar.bookie.journal.recovery import GapVerdict
from magnetar.bookie.offline.index_rebuild import rebuild
from magnetar.bookie.offline.stopped import StoppedBookie
from magnetar.proto.errors import (
    DataDirectoryError,
    EntryDamaged,
    EntryNotFound,
    MagnetarError,
    StorageFailed,
)
from magnetar.runtime.files import OsFiles
from support.bookie_kit import add, entry, open_real, small_settings
from support.long_form import LONG, times
from support.storage_check import SETTINGS, Broken, Machine, Session
from support.storage_workload import workload

FLIPS = times(1, 8)
PAGE_BYTES = 4096
# RocksDB writes them and never reads them.
NOT_READ = ("LOG", "LOCK")


async def leave_everything_behind(session: Session) -> None:
    """Checkpointed entries, then several journal files of acknowledged ones, and a moment of quiet."""
    await workload(session)
    await session.checkpoint()
    for number in range(20, 26):
        for ledger_id in (1, 2):
            assert await session.add_soon(ledger_id, number, size=1500) == 0
    await session.fence(60)
    await session.write_last_confirmed(2, 30)
    assert await session.add_soon(7, 0, size=100) == 0
    await asyncio.sleep(1.0)  # the journal says that its last group is durable


@pytest.fixture(scope="module")
def damaged_machine() -> Iterator[Machine]:
    """A machine whose bookie was killed; to be copied."""
    roomy = replace(SETTINGS, write_cache_bytes=256 * 1024, checkpoint_interval_s=100.0)
    with Machine(1, roomy) as machine:
        machine.start(leave_everything_behind)
        yield machine


def pages(machine: Machine) -> list[tuple[str, int]]:
    """(path, first byte) of every page of every file."""
    found: list[tuple[str, int]] = []
    for path in machine.disk.files():
        inode = machine.disk.names.file(path)
        assert inode is not None
        found += [(path, start) for start in range(0, inode.size, PAGE_BYTES)]
    return found


def flip_every_page(damaged_machine: Machine) -> Counter[str]:
    """What the starts after each flip came to. Raises Broken."""
    rng = random.Random(5)
    outcomes: Counter[str] = Counter()
    for path, start in pages(damaged_machine) * FLIPS:
        with damaged_machine.copy() as machine:
            inode = machine.disk.names.file(path)
            assert inode is not None
            offset = rng.randrange(start, min(start + PAGE_BYTES, inode.size))
            machine.history.append(f"bit of byte {offset} of {path} flipped")
            inode.flip(offset, rng.randrange(8))
            machine.damaged = []
            kind = path.rsplit("/", 1)[1].split("-")[0]
            try:
                machine.start(Session.check_promises)
                outcomes[f"{kind} {'damaged' if machine.damaged else 'fine'}"] += 1
            except DataDirectoryError:
                outcomes[f"{kind} refused"] += 1
    print(dict(outcomes))
    return outcomes


@pytest.mark.timeout(600)
def test_a_bit_in_every_page_is_detected_or_does_not_matter(damaged_machine: Machine) -> None:
    outcomes = flip_every_page(damaged_machine)
    assert outcomes["entrylog damaged"] > 5
    assert outcomes["journal refused"] > 2
    assert outcomes["entrylog refused"] == outcomes["journal damaged"] == 0
    assert outcomes["mark refused"] == FLIPS
    # The cookie, and its copies in the directories.
    assert outcomes["cookie refused"] == 3 * FLIPS


def test_each_page_of_the_last_group_is_detected(damaged_machine: Machine) -> None:
    """Damage at the very end of the journal was cut as a torn tail, and what had been acknowledged with it."""
    refused = 0
    for path, start in pages(damaged_machine):
        if "/journal-" not in path:
            continue
        for offset in range(start, start + PAGE_BYTES, 64 if LONG else 256):
            with damaged_machine.copy() as machine:
                inode = machine.disk.names.file(path)
                assert inode is not None
                if offset >= inode.size or inode.read(offset, 64) == bytes(64):
                    continue
                inode.flip(offset, offset // 64 % 8)
                machine.history.append(f"bit of byte {offset} of {path} flipped")
                machine.damaged = []
                try:
                    machine.start(Session.check_promises)
                except DataDirectoryError:
                    refused += 1
    assert refused > (20 if LONG else 5)


@pytest.mark.parametrize("verdict", [GapVerdict.TORN_TAIL, GapVerdict.DAMAGE_BELOW_MARK])
def test_teeth_damage_taken_for_something_else_is_found(
    damaged_machine: Machine, monkeypatch: pytest.MonkeyPatch, verdict: GapVerdict
) -> None:
    """Rule 5 the other way round: the journal is cut at damage, or the damage is skipped."""
    real = recovery.judge

    def judge(gap: Any, **known: Any) -> GapVerdict:
        found = real(gap, **known)
        return verdict if found is GapVerdict.DAMAGE else found

    monkeypatch.setattr(recovery, "judge", judge)
    with pytest.raises(Broken, match="is said not to exist"):
        flip_every_page(damaged_machine)


def test_teeth_entry_logs_without_verification_are_found(
    damaged_machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unverified(data: bytes, at: int, log_id: int, ledger_id: int, entry_id: int, length: int) -> bytes:
        return data[at + 32 : at + 32 + length]

    monkeypatch.setattr(log_reader, "record_entry", unverified)
    with pytest.raises(Broken, match="wrong bytes"):
        flip_every_page(damaged_machine)


def test_a_wrong_location_in_the_index_is_damage(damaged_machine: Machine) -> None:
    """What no checksum of the index's own would find."""
    rng = random.Random(6)
    damaged = 0
    for key in sorted(damaged_machine.index.locations):
        with damaged_machine.copy() as machine:
            fields = list(machine.index.locations[key])
            fields[rng.randrange(3)] ^= 1 << rng.randrange(20)
            machine.index.locations[key] = Location(*fields)
            machine.history.append(f"location of {key} is {fields}")
            machine.damaged = []
            machine.start(Session.check_promises)
            # An entry that the journal has as well was put in its place again.
            assert machine.damaged in ([key], [])
            damaged += bool(machine.damaged)
    assert damaged > 5


def test_an_unreadable_sector_is_damage_and_stops_nothing(damaged_machine: Machine) -> None:
    """EIO on each read of an entry log: EntryDamaged, and the bookie goes on."""
    hit = 0
    for skip in range(0, 60, 2):
        with damaged_machine.copy() as machine:
            machine.damaged = []
            machine.disk.fail("read", "entrylog", skip=skip)
            assert machine.start(Session.check_promises)
            assert machine.failure is None
            hit += bool(machine.damaged)
    assert hit > 20


def test_an_unreadable_journal_refuses_to_start_and_is_not_taken_for_its_end(
    damaged_machine: Machine,
) -> None:
    refused = 0
    for skip in range(12):
        with damaged_machine.copy() as machine:
            machine.disk.fail("read", "/journal-", skip=skip)
            try:
                machine.start(Session.check_promises)
            except StorageFailed:
                refused += 1
            machine.must_start(Session.check_promises)
    assert refused > 5


async def real_bookie(directory: Path) -> list[bytes]:
    """A closed bookie on the real disk; returns its entries."""
    bookie = await open_real(str(directory))
    entries = [entry(1, number, b"x" * 200) for number in range(60)]
    for number, data in enumerate(entries, 1):
        assert await add(bookie, data) == 0
        if number % 20 == 0:
            await bookie.checkpoint()  # a table of the index each
    await bookie.close()
    return entries


@pytest.mark.real
@pytest.mark.parametrize("what", ["all of it", "its files"])
async def test_rule_09_a_lost_index_refuses_to_start(tmp_path: Path, what: str) -> None:
    """RocksDB made a new one, and every acknowledged entry was said not to exist."""
    entries = await real_bookie(tmp_path / "bookie")
    index = tmp_path / "bookie" / "index"
    index.rename(tmp_path / "aside")
    if what == "its files":
        index.mkdir()
    with pytest.raises(DataDirectoryError, match=r"index .* is missing"):
        await open_real(str(tmp_path / "bookie"))
    if index.exists():
        index.rmdir()
    (tmp_path / "aside").rename(index)
    bookie = await open_real(str(tmp_path / "bookie"))
    assert (await bookie.read(1, 0, 99))[0] == entries
    await bookie.close()


@pytest.mark.real
async def test_a_bit_in_every_page_of_the_real_index(tmp_path: Path) -> None:
    """RocksDB's checksums or the guard find it when it is opened, or when it is read; never as an absent entry.

    In tables, MANIFEST, options and whatever else is in there. What is refused or damaged is made anew from the entry logs.
    """
    rng = random.Random(3)
    entries = await real_bookie(tmp_path / "bookie")
    kept = tmp_path / "kept"
    (tmp_path / "bookie").rename(kept)
    outcomes: Counter[str] = Counter()
    for source in sorted(path for path in (kept / "index").iterdir() if path.name not in NOT_READ):
        for start in range(0, source.stat().st_size, PAGE_BYTES):
            shutil.copytree(kept, tmp_path / "bookie")
            path = tmp_path / "bookie" / "index" / source.name
            data = bytearray(path.read_bytes())
            data[rng.randrange(start, min(start + PAGE_BYTES, len(data)))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            outcome = await judge(tmp_path / "bookie", entries)
            outcomes[f"{re.sub('[-0-9]', '', source.name)} {outcome}"] += 1
            assert outcome not in ("lost", "wrong"), f"{outcome} after a flip in {source.name}"
            if outcome != "fine":
                await rebuild_offline(tmp_path / "bookie")
                assert await judge(tmp_path / "bookie", entries) == "fine"
            shutil.rmtree(tmp_path / "bookie")
    print(dict(outcomes))
    assert any(outcome.startswith("MANIFEST") and not outcome.endswith("fine") for outcome in outcomes)
    assert any(".sst" in outcome and not outcome.endswith("fine") for outcome in outcomes)


async def rebuild_offline(directory: Path) -> None:
    """`magnetar bookie index rebuild`."""
    bookie = await StoppedBookie.open(small_settings(str(directory)), OsFiles())
    try:
        report = await rebuild(bookie)
        assert not report.incomplete
    finally:
        bookie.close()


async def judge(directory: Path, entries: list[bytes]) -> str:
    """What a bookie over a damaged index makes of it."""
    try:
        bookie = await open_real(str(directory))
    except MagnetarError:
        return "refused"
    outcome = "fine"
    try:
        for number, data in enumerate(entries):
            try:
                if (await bookie.read(1, number, number))[0] != [data]:
                    outcome = "wrong"
            except EntryNotFound:
                outcome = "lost"
            except (EntryDamaged, StorageFailed):
                outcome = "damaged" if outcome == "fine" else outcome
    finally:
        await bookie.close()
    return outcome

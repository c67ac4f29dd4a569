"""A whole bookie for tests: small files, entries to add, and either everything in the loop or the real processes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from magnetar.bookie import Bookie, BookieComponents, BookieSettings, open_bookie, os_components
from magnetar.proto.ledger_entry import encode_ledger_entry
from magnetar.runtime.files import Files, OsFiles
from support.index_model import ModelLocationIndex, ModelStorage
from support.inline_devices import inline_components

KIB = 1024
MIB = 1024 * KIB


def small_settings(data_directory: str, **changes: Any) -> BookieSettings:
    """Every size small, so that a few entries fill, roll and flush things."""
    values: dict[str, Any] = {
        "data_directory": data_directory,
        "journal_file_bytes": 64 * KIB,
        "journal_spare_bytes": 256 * KIB,
        "journal_ring_bytes": 2 * MIB,
        "write_cache_bytes": 512 * KIB,
        "read_cache_bytes": 64 * KIB,
        "entry_log_bytes": 64 * KIB,
        "max_entry_bytes": 32 * KIB,
        # However full the disk of this machine is: neither read-only nor a collection of garbage before its time.
        "disk_read_only_ratio": 1.0,
        "disk_warn_ratio": 1.0,
        "disk_minimum_free_bytes": 0,
        "disk_recovery_bytes": 16 * KIB,
        "lock_timeout_s": 10.0,
    }
    return BookieSettings(**(values | changes))


def entry(ledger_id: int, entry_id: int, payload: bytes = b"", *, lac: int | None = None) -> bytes:
    """A ledger entry; its last add confirmed is the entry before it."""
    payload = payload or b"payload of %d:%d" % (ledger_id, entry_id)
    confirmed = entry_id - 1 if lac is None else lac
    return encode_ledger_entry(ledger_id, entry_id, confirmed, (entry_id + 1) * len(payload), payload)


def model_components(storage: ModelStorage, files: Files | None = None, seed: int = 1) -> BookieComponents:
    """Everything in the loop; the index is a model over `storage`, which outlives the bookie."""
    return inline_components(
        files if files is not None else OsFiles(),
        random.Random(seed),
        lambda path: ModelLocationIndex(storage),
    )


async def open_inline(
    directory: str, storage: ModelStorage, files: Files | None = None, **changes: Any
) -> Bookie:
    """A bookie that works in the loop."""
    return await open_bookie(small_settings(directory, **changes), model_components(storage, files))


async def open_real(directory: str, **changes: Any) -> Bookie:
    """A bookie with its processes and RocksDB."""
    components = os_components(random.Random(1))
    return await open_bookie(small_settings(directory, **changes), components)


def crash(bookie: Bookie) -> None:
    """Leaves an inline bookie as kill -9 would: nothing more is written, the lock is free."""
    for task in bookie._tasks:
        task.cancel()
    if bookie.checkpointer._running is not None:
        bookie.checkpointer._running.cancel()
    for journal in bookie.journals.all:
        if journal._preparing is not None:
            journal._preparing.cancel()
        for timer in (journal._idle, journal._deferred_timer):
            if timer is not None:
                timer.cancel()
    bookie.release()
    bookie.lock.release()


async def add(bookie: Bookie, data: bytes, *, recovery: bool = False) -> int:
    """Adds one entry and returns the code it was answered with."""
    answered: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    bookie.add(data, recovery=recovery, done=lambda ledger, number, code: answered.set_result(code))
    return await answered


async def add_all(bookie: Bookie, entries: list[bytes], *, recovery: bool = False) -> list[int]:
    """Adds entries together and returns their codes in order of their answers."""
    codes: list[int] = []
    all_answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(ledger_id: int, entry_id: int, code: int) -> None:
        codes.append(code)
        if len(codes) == len(entries):
            all_answered.set_result(None)

    for data in entries:
        bookie.add(data, recovery=recovery, done=done)
    await all_answered
    return codes


async def until(condition: Callable[[], bool]) -> None:
    """Gives the loop turns until something holds; the test's timeout bounds it."""
    while not condition():
        await asyncio.sleep(0.001)

"""Deferred adds: accepted from memory, durable with a later sync, and never said to be durable before."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from magnetar.bookie import Bookie, BookieSettings, open_bookie
from magnetar.bookie.journal.journal import Journal
from magnetar.bookie.server import BookieServer
from magnetar.proto.commands import (
    ADD_ACCEPTED,
    ADD_DONE_ROW,
    AddDone,
    AddEntry,
    ForceLedger,
    decode_command,
    decode_rows,
)
from magnetar.proto.errors import EntryNotFound, InvalidSetting, LedgerFenced, MagnetarError, StorageFailed
from magnetar.proto.frames import Run, encode_frames
from magnetar.runtime.connection import Connection, ConnectionOptions, open_connection
from support.bookie_kit import (
    KIB,
    add,
    entry,
    model_components,
    open_inline,
    open_real,
    small_settings,
    until,
)
from support.index_model import ModelStorage
from support.sim import SimDisk, SimLoop

NEVER_S = 3600.0  # nothing is synced by time


class Answers:
    """Deferred adds of one bookie, and what was answered: (entry id, code), in order."""

    def __init__(self, bookie: Bookie, ledger_id: int = 1) -> None:
        self.bookie = bookie
        self.ledger_id = ledger_id
        self.heard: list[tuple[int, int]] = []

    def add(self, *numbers: int, payload: bytes = b"") -> None:
        for number in numbers:
            data = entry(self.ledger_id, number, payload)
            self.bookie.add(data, recovery=False, done=self._done, deferred=True)

    def _done(self, ledger_id: int, number: int, code: int) -> None:
        assert ledger_id == self.ledger_id
        self.heard.append((number, code))

    @property
    def accepted(self) -> list[int]:
        return [number for number, code in self.heard if code == ADD_ACCEPTED]

    @property
    def durable(self) -> list[int]:
        return [number for number, code in self.heard if code == 0]


def syncs(bookie: Bookie, journal: int = 0) -> int:
    return bookie.journals.all[journal].device.sync_seconds.count


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest_asyncio.fixture
async def bookie(tmp_path: Path) -> AsyncIterator[Bookie]:
    bookie = await open_inline(
        str(tmp_path / "bookie"),
        ModelStorage(),
        journal_deferred_sync_s=NEVER_S,
        journal_file_bytes=1024 * KIB,  # none is begun while syncs are counted
    )
    await add(bookie, entry(9, 0))  # BEGIN is durable as well
    yield bookie
    await bookie.close()


async def test_a_deferred_add_is_accepted_and_brings_no_sync(bookie: Bookie) -> None:
    before, adds = syncs(bookie), Answers(bookie)
    adds.add(0, 1)
    assert adds.heard == [], "never from inside"
    await turns()
    assert adds.heard == [(0, ADD_ACCEPTED), (1, ADD_ACCEPTED)]
    assert (await bookie.read(1, 0, 1))[0] == [entry(1, 0), entry(1, 1)]
    assert syncs(bookie) == before
    journal = bookie.journals.all[0]
    durable = journal.durable_position().offset
    assert durable == journal.device.requested_offset < journal.device.end_offset, (
        "nothing is on its way: no disk hangs"
    )
    assert bookie.journals.stalled()[0] == 0


async def test_a_synced_record_of_the_same_journal_covers_it(bookie: Bookie) -> None:
    adds, before = Answers(bookie), syncs(bookie)
    adds.add(0, 1)
    assert await add(bookie, entry(2, 0)) == 0
    assert adds.durable == [0, 1], "in the order of the journal"
    assert syncs(bookie) == before + 1
    adds.add(2)
    await bookie.fence(1)  # its record comes behind the add's: what is fenced durably holds the add durably
    assert adds.durable == [0, 1, 2]


async def test_forces_share_a_sync_and_answer_when_it_is_done(bookie: Bookie) -> None:
    first, second, before = Answers(bookie), Answers(bookie, 2), syncs(bookie)
    first.add(0, 1)
    second.add(0)
    forces = [asyncio.ensure_future(bookie.force(ledger_id)) for ledger_id in (1, 2, 1, 1)]
    await asyncio.gather(*forces)
    assert (first.durable, second.durable) == ([0, 1], [0])
    assert syncs(bookie) == before + 1
    await bookie.force(1)  # everything is durable: there is nothing to wait for
    await bookie.force(77)  # nor of a ledger that was never seen
    assert syncs(bookie) == before + 1


async def test_several_journals_a_force_syncs_that_of_the_ledger(tmp_path: Path) -> None:
    directories = (str(tmp_path / "j0"), str(tmp_path / "j1"))
    bookie = await open_inline(
        str(tmp_path / "bookie"),
        ModelStorage(),
        journal_directories=directories,
        journal_deferred_sync_s=NEVER_S,
    )
    await add(bookie, entry(2, 0))
    await add(bookie, entry(3, 0))
    even, odd = Answers(bookie, 4), Answers(bookie, 5)
    even.add(0)
    odd.add(0)
    before = [syncs(bookie, 0), syncs(bookie, 1)]
    await bookie.force(5)
    assert (even.durable, odd.durable) == ([], [0])
    assert [syncs(bookie, 0), syncs(bookie, 1)] == [before[0], before[1] + 1]
    await bookie.close()
    assert even.durable == [0], "a stop makes durable what it has"


async def test_an_idle_ledger_is_synced_in_time(tmp_path: Path) -> None:
    bookie = await open_inline(str(tmp_path / "bookie"), ModelStorage(), journal_deferred_sync_s=0.05)
    await add(bookie, entry(9, 0))
    adds = Answers(bookie)
    adds.add(0, 1, 2)
    await turns()
    assert (adds.accepted, adds.durable) == ([0, 1, 2], [])
    await until(lambda: adds.durable == [0, 1, 2])
    adds.add(3)  # and again
    await until(lambda: 3 in adds.durable)
    await bookie.close()


async def test_a_quarter_of_the_ring_is_synced_at_once(tmp_path: Path) -> None:
    bookie = await open_inline(
        str(tmp_path / "bookie"),
        ModelStorage(),
        journal_deferred_sync_s=NEVER_S,
        write_cache_bytes=4096 * KIB,
    )
    await add(bookie, entry(9, 0))
    adds = Answers(bookie)
    quarter = bookie.settings.journal_ring_bytes // 4
    payload = bytes(30 * KIB)
    count = quarter // len(payload) + 1
    adds.add(*range(count - 1), payload=payload)
    await turns()
    assert adds.durable == []
    adds.add(count - 1, payload=payload)
    await until(lambda: len(adds.durable) == count)
    await bookie.close()


async def test_the_ring_is_full_of_deferred_adds_and_a_large_one_comes(tmp_path: Path) -> None:
    """Nothing else would sync what fills it: the add would wait for the interval."""
    bookie = await open_inline(
        str(tmp_path / "bookie"),
        ModelStorage(),
        journal_deferred_sync_s=NEVER_S,
        journal_ring_bytes=2048 * KIB,
        max_entry_bytes=1000 * KIB,
        write_cache_bytes=32 * 1024 * KIB,
    )
    await add(bookie, entry(9, 0))
    journal = bookie.journals.all[0]
    journal._deferred_limit = 1 << 30  # as with entries of any size, one below the limit
    adds = Answers(bookie)
    adds.add(0, 1, payload=bytes(900 * KIB))
    await turns()
    assert adds.durable == []
    assert await add(bookie, entry(2, 0, bytes(900 * KIB))) == 0
    await until(lambda: adds.durable == [0, 1])
    adds.add(2, 3, 4, payload=bytes(900 * KIB))  # the third finds no room, and waits for the ring
    await bookie.force(1)
    assert adds.durable == [0, 1, 2, 3, 4]
    await bookie.close()


async def test_a_force_holds_for_adds_that_wait_for_room(bookie: Bookie) -> None:
    adds, other = Answers(bookie), Answers(bookie, 2)
    payload = bytes(30 * KIB)
    count = bookie.settings.write_cache_bytes // 2 // len(payload) + 1
    adds.add(*range(count), payload=payload)
    other.add(0, payload=payload)
    assert not bookie.accepting
    assert count - 1 not in adds.accepted
    bookie.request_force(1)
    await until(lambda: len(adds.durable) == count)  # with the room that the checkpoint makes
    await until(lambda: bookie.accepting)
    assert all(not waiting.deferred for waiting in bookie.adds._waiting)


async def test_rule_01_the_mark_does_not_pass_what_is_deferred(bookie: Bookie) -> None:
    adds = Answers(bookie)
    adds.add(0, 1)
    await turns()
    await bookie.checkpoint()
    journal = bookie.journals.all[0]
    (position,) = bookie.checkpointer.mark.values()
    assert position.offset <= journal.durable_position().offset < journal.device.end_offset
    assert adds.durable == [], "in an entry log is not in the journal: the answer waits for that"
    assert (await bookie.read(1, 0, 1))[0] == [entry(1, 0), entry(1, 1)]


async def test_rule_07_a_fenced_ledger_takes_none(bookie: Bookie) -> None:
    adds = Answers(bookie)
    await bookie.fence(1)
    adds.add(0)
    await turns()
    assert adds.heard == [(0, LedgerFenced.code)]


async def test_what_is_deferred_and_idle_does_not_look_like_a_hung_disk(bookie: Bookie) -> None:
    adds, journal = Answers(bookie), bookie.journals.all[0]
    adds.add(0)
    await turns()
    now = journal._now
    journal._now = lambda: now() + 100  # later
    assert bookie.journals.stalled()[0] == 0
    answered: list[int] = []
    bookie.add(entry(2, 0), recovery=False, done=lambda ledger, number, code: answered.append(code))
    assert bookie.journals.stalled()[0] < 1, "the disk was asked just now"
    await until(lambda: answered == [0])


async def test_a_setting_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="journal_deferred_sync_s"):
        BookieSettings(data_directory=str(tmp_path), journal_deferred_sync_s=0)


@pytest.mark.real
async def test_the_writer_process_syncs_deferred_adds_too(tmp_path: Path) -> None:
    bookie = await open_real(str(tmp_path / "bookie"), journal_deferred_sync_s=NEVER_S)
    await add(bookie, entry(9, 0))
    adds, before = Answers(bookie), syncs(bookie)
    adds.add(0, 1, 2)
    await until(lambda: adds.accepted == [0, 1, 2])
    await asyncio.sleep(0.02)  # time for a sync that must not come
    assert (adds.durable, syncs(bookie)) == ([], before)
    await bookie.force(1)
    assert adds.durable == [0, 1, 2]
    adds.add(3)
    assert await add(bookie, entry(2, 0)) == 0
    assert adds.durable == [0, 1, 2, 3]
    adds.add(4)
    await bookie.close()
    assert adds.durable[-1] == 4


# --- failures --------------------------------------------------------------------------------------------------------


def simulate(main: Any) -> None:
    """`main(disk, loop, storage)` on a simulated disk."""
    loop, disk = SimLoop(1), SimDisk(random.Random(1))
    disk.mount().make_directory("/data")
    try:
        loop.run(main(disk, loop, ModelStorage()))
    finally:
        loop.close()


SETTINGS = small_settings("/data/bookie", journal_deferred_sync_s=NEVER_S)


@pytest.mark.sim
def test_power_loss_takes_what_was_accepted_and_keeps_what_was_forced() -> None:
    async def main(disk: SimDisk, loop: SimLoop, storage: ModelStorage) -> None:
        disk.early_writeback = 0.0
        process = loop.start_process("bookie")

        async def life() -> None:
            bookie = await open_bookie(SETTINGS, model_components(storage, disk.mount(process)))
            adds = Answers(bookie)
            adds.add(0, 1)
            await bookie.force(1)
            adds.add(2, 3)
            await turns()
            assert adds.accepted == [0, 1, 2, 3]

        await asyncio.wait([process.spawn(life())])
        process.kill()
        disk.lose_power()
        bookie = await open_bookie(SETTINGS, model_components(storage, disk.mount()))
        assert (await bookie.read(1, 0, 3))[0] == [entry(1, 0), entry(1, 1)]
        with pytest.raises(EntryNotFound):
            await bookie.read(1, 2, 2)
        await bookie.force(1)  # answers for what this life accepted: nothing
        await bookie.close()

    simulate(main)


@pytest.mark.sim
def test_rule_04_a_force_after_a_failed_sync_fails() -> None:
    async def main(disk: SimDisk, loop: SimLoop, storage: ModelStorage) -> None:
        bookie = await open_bookie(SETTINGS, model_components(storage, disk.mount()))
        await add(bookie, entry(9, 0))
        failures: list[MagnetarError] = []
        bookie.on_failure = failures.append
        adds = Answers(bookie)
        adds.add(0, 1)
        await turns()
        disk.fail("sync", "journal", errno.EIO)
        for _ in range(2):
            with pytest.raises(StorageFailed):
                await bookie.force(1)
        assert adds.heard[2:] == [(0, StorageFailed.code), (1, StorageFailed.code)]
        adds.add(2)
        bookie.request_force(1)
        await turns()
        assert adds.heard[4:] == [(2, StorageFailed.code)], "not accepted either"
        assert len(failures) == 1
        await bookie.close()

    simulate(main)


# --- the wire --------------------------------------------------------------------------------------------------------

DEFERRED = AddEntry(0, deferred=True).encode()


class Client:
    """Rows of AddDone as they come: (accepted, entry id, code)."""

    def __init__(self) -> None:
        self.rows: list[tuple[bool, int, int]] = []
        self.connection: Connection

    def connection_ready(self, connection: Connection) -> None:
        self.connection = connection

    def runs_received(self, runs: list[Run]) -> None:
        for header, payloads in runs:
            command = decode_command(header)
            assert isinstance(command, AddDone)
            for payload in payloads:
                rows = decode_rows(ADD_DONE_ROW, payload)
                self.rows += [(command.accepted, number, code) for _, number, code in rows]

    def connection_closed(self, error: MagnetarError | None) -> None:
        pass

    def writing_resumed(self) -> None:
        pass


async def test_over_tcp_each_entry_has_two_rows_and_a_force_needs_no_answer(bookie: Bookie) -> None:
    server = await BookieServer.start(bookie, "127.0.0.1", 0, ConnectionOptions("bookie"))
    client = Client()
    options = ConnectionOptions("client")
    connection = await open_connection(*server.addresses[0], client, options)
    connection.send_encoded(encode_frames(DEFERRED, [entry(1, 0), entry(1, 1)]))
    await until(lambda: len(client.rows) == 2)
    assert client.rows == [(True, 0, 0), (True, 1, 0)]
    # The force is behind the add in the same read, and holds for it.
    connection.send_encoded(encode_frames(DEFERRED, [entry(1, 2)]))
    connection.send(ForceLedger(0, 1).encode())
    await until(lambda: len(client.rows) == 6)
    assert [row for row in client.rows if not row[0]] == [(False, 0, 0), (False, 1, 0), (False, 2, 0)]
    connection.send_encoded(encode_frames(DEFERRED, [entry(1, 3)]))
    await connection.request(ForceLedger(0, 1), timeout=5)
    assert client.rows[-1] == (False, 3, 0), "the rows are there before the answer"
    damaged = entry(1, 4)[:-1] + b"?"
    connection.send_encoded(encode_frames(DEFERRED, [damaged]))
    await until(lambda: len(client.rows) == 9)
    assert client.rows[-1][:2] == (False, 4)
    connection.close()
    await server.close(1)


async def test_planted_a_force_that_does_not_wait_is_noticed(
    bookie: Bookie, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above look at the order of answer and sync: this one shows that they would see it."""
    monkeypatch.setattr(Journal, "force", lambda self, ledger_id, done: done(ledger_id, -1, 0))
    adds = Answers(bookie)
    adds.add(0)
    await bookie.force(1)
    assert adds.durable == []

"""Recoveries over bookies that refuse re-adds: too much to do (a small write cache, a slow disk), or gone."""

import asyncio
import itertools
from typing import Any

import pytest

from magnetar.ledger import LedgerSettings, LedgerWriter, recover
from magnetar.ledger.core.recovery import RecoveryCore
from magnetar.proto.errors import NotEnoughBookies, StorageFailed, TooManyRequests
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from support.bookies import Bookies, Confirmations, FakeBookie
from support.virtual_time import in_virtual_time

SETTINGS = LedgerSettings(explicit_lac_interval_s=0)
HASTY = LedgerSettings(explicit_lac_interval_s=0, add_timeout_s=0.1)


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses, and the core's invariants after every few events (they look at the whole window)."""
    monkeypatch.setattr(recover, "RETRY_PAUSE_S", 0.004)
    right, events = RecoveryCore.handle, itertools.count()

    def handle(self: RecoveryCore, event: Any) -> Any:
        try:
            return right(self, event)
        finally:
            if not next(events) % 17:
                self.check()

    monkeypatch.setattr(RecoveryCore, "handle", handle)


class SmallBookie(FakeBookie):
    """Takes `room` adds of a recovery between two flushes, which happen every few milliseconds."""

    room = 32
    taken = 0
    refused = 0

    def __init__(self, name: str, code: int = TooManyRequests.code) -> None:
        super().__init__(name)
        self.code = code

    def add(self, entry: bytes, *, recovery: bool, done: Any, deferred: bool = False) -> None:
        if recovery and self.taken >= self.room:
            self.refused += 1
            ledger_id = int.from_bytes(entry[:8], "big")
            entry_id = int.from_bytes(entry[8:16], "big")
            asyncio.get_running_loop().call_soon(done, ledger_id, entry_id, self.code)
            return
        if recovery:
            if not self.taken:
                asyncio.get_running_loop().call_later(0.001, self._flush)
            self.taken += 1
        super().add(entry, recovery=recovery, done=done)

    def _flush(self) -> None:
        self.taken = 0


async def filled(bookies: Bookies, shape: tuple[int, int, int], count: int) -> LedgerWriter:
    e, qw, qa = shape
    writer = await bookies.client(SETTINGS).create(ensemble_size=e, write_quorum=qw, ack_quorum=qa)
    confirmed = Confirmations()
    for number in range(count):
        writer.append(b"%d" % number, confirmed)
    await confirmed.count(count)
    writer.detach()
    return writer


@pytest.mark.parametrize("shape", [(3, 3, 3), (3, 3, 2), (3, 2, 2), (1, 1, 1)])
@pytest.mark.parametrize("small", [("b1",), ("b1", "b2", "b3")])
async def test_a_small_write_cache_slows_a_recovery_down_and_no_more(
    shape: tuple[int, int, int], small: tuple[str, ...]
) -> None:
    bookies = Bookies("b1", "b2", "b3")
    for name in small:
        bookies[name] = SmallBookie(name)
    writer = await filled(bookies, shape, 300)
    before = len(asyncio.all_tasks())
    reader = await asyncio.wait_for(bookies.client(SETTINGS).open(writer.ledger_id, recover=True), 20)
    assert reader.last_add_confirmed == 299
    assert len(reader.metadata.ensembles) == 1 or shape[0] == 1, "nobody to replace it"
    entries = await reader.read(0, 299)
    assert [int(entry[LEDGER_ENTRY_HEADER_BYTES:]) for entry in entries] == list(range(300))
    assert len(asyncio.all_tasks()) == before
    for bookie in bookies.values():
        if isinstance(bookie, SmallBookie) and bookie.name in writer.metadata.last_ensemble.bookies:
            assert bookie.refused, "it was put to the test"


async def test_a_busy_bookie_is_replaced_in_a_recovery_if_there_is_another_one() -> None:
    bookies = Bookies("b1", "b2", "b3")
    writer = await filled(bookies, (3, 3, 3), 50)
    bookies["b4"] = FakeBookie("b4")
    busy = SmallBookie("b2")
    busy.room, busy.entries, busy.fenced = 0, bookies["b2"].entries, bookies["b2"].fenced
    bookies["b2"] = busy
    reader = await asyncio.wait_for(bookies.client(SETTINGS).open(writer.ledger_id, recover=True), 5)
    assert reader.last_add_confirmed == 49
    assert "b2" not in reader.metadata.last_ensemble.bookies
    assert all((writer.ledger_id, number) in bookies["b4"].entries for number in range(50))


@in_virtual_time
async def test_a_bookie_that_stays_busy_ends_the_recovery_with_one_clear_error() -> None:
    bookies = Bookies("b1", "b2", "b3")
    for name in bookies:
        bookies[name] = SmallBookie(name)
    writer = await filled(bookies, (3, 3, 3), 50)
    small = bookies["b3"]
    assert isinstance(small, SmallBookie)
    small.room = 0
    loop = asyncio.get_running_loop()
    client = bookies.client(HASTY)
    for _ in range(2):  # whoever tries again meets the same, not a recovery that never ends
        began, refused = loop.time(), small.refused
        with pytest.raises(
            NotEnoughBookies, match=r"entry 0 on 3 bookies: .*b3 \(TooManyRequests\)"
        ) as raised:
            await asyncio.wait_for(client.open(writer.ledger_id, recover=True), 5)
        assert 0.38 < loop.time() - began < 2, "four add timeouts"
        assert "write_cache_bytes" in raised.value.message
        assert small.refused - refused < 50 * 150, "with pauses"
    small.room = 32
    reader = await asyncio.wait_for(client.open(writer.ledger_id, recover=True), 5)
    assert reader.last_add_confirmed == 49
    await client.close()


async def test_a_bookie_that_is_gone_is_looked_at_once_and_not_with_every_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at = 0
    right = RecoveryCore._unreachable_quorum

    def look(self: RecoveryCore, reason: str, first: int) -> NotEnoughBookies | None:
        nonlocal looked_at
        looked_at += self._next_add - first
        return right(self, reason, first)

    monkeypatch.setattr(RecoveryCore, "_unreachable_quorum", look)
    bookies = Bookies("b1", "b2", "b3")
    writer = await filled(bookies, (3, 3, 2), 2000)
    lost = SmallBookie("b2", StorageFailed.code)
    lost.room, lost.entries, lost.fenced = 0, bookies["b2"].entries, bookies["b2"].fenced
    bookies["b2"] = lost
    reader = await asyncio.wait_for(bookies.client(SETTINGS).open(writer.ledger_id, recover=True), 20)
    assert reader.last_add_confirmed == 1999
    assert lost.refused
    assert looked_at < 2 * 2000

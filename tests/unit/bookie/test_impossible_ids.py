"""Ids that no ledger and no entry can have: refused at each door, harmless where they got in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from magnetar.bookie import Bookie
from magnetar.bookie.index import LedgerRecord
from magnetar.bookie.index.rocks import RocksLocationIndex
from magnetar.bookie.server.server import InProcessBookie
from magnetar.ledger.local_transport import LocalTransport
from magnetar.proto.errors import InvalidArgument, LedgerNotFound
from magnetar.proto.ids import MAX_ENTRY_ID, MAX_LEDGER_ID
from magnetar.proto.ledger_entry import encode_ledger_entry
from support.bookie_kit import add, crash, entry, open_inline
from support.index_model import ModelStorage

FAR_LEDGER = 1 << 62


@pytest.fixture
def storage() -> ModelStorage:
    return ModelStorage()


@pytest.fixture
async def bookie(tmp_path: Path, storage: ModelStorage) -> AsyncIterator[Bookie]:
    opened = await open_inline(str(tmp_path / "b"), storage)
    yield opened
    await opened.close()


# (ledger, entry, last add confirmed)
IMPOSSIBLE = [
    encode_ledger_entry(*ids, 1, b"x")
    for ids in (
        (1, 1 << 63, 0),
        (1, MAX_ENTRY_ID + 1, 0),
        (1, 2**64 - 1, 0),
        (1, 2**64 - 2, 0),
        (2**64 - 1, 0, -1),
        (MAX_LEDGER_ID + 1, 0, -1),
        (1, 0, MAX_ENTRY_ID + 1),
    )
]


@pytest.mark.parametrize("recovery", [False, True])
async def test_rule_47_an_add_with_impossible_ids_is_refused(bookie: Bookie, recovery: bool) -> None:
    for data in IMPOSSIBLE:
        assert await add(bookie, data, recovery=recovery) == InvalidArgument.code
    assert await add(bookie, encode_ledger_entry(1, MAX_ENTRY_ID, 0, 1, b"x"), recovery=recovery) == 0
    await bookie.checkpoint()
    assert bookie.failure is None
    assert bookie.ledgers.next_ledger_id == 2


REQUESTS: list[Callable[[Bookie], Awaitable[object]]] = [
    lambda bookie: bookie.read(1, MAX_ENTRY_ID + 1, MAX_ENTRY_ID + 1),
    lambda bookie: bookie.read(MAX_LEDGER_ID + 1, 0, 0, fence=True),
    lambda bookie: bookie.read_last_confirmed(MAX_LEDGER_ID + 1, fence=True),
    lambda bookie: bookie.wait_last_confirmed(1, MAX_ENTRY_ID + 1),
    lambda bookie: bookie.list_entries(1, MAX_ENTRY_ID + 1),
    lambda bookie: bookie.fence(2**64 - 1),
    lambda bookie: bookie.fence(-1),
    lambda bookie: bookie.force(2**64),
    lambda bookie: bookie.write_last_confirmed(1, MAX_ENTRY_ID + 1),
    lambda bookie: bookie.delete_ledger(MAX_LEDGER_ID + 1),
]


async def test_rule_47_no_request_takes_impossible_ids(bookie: Bookie) -> None:
    for request in REQUESTS:
        with pytest.raises(InvalidArgument, match="outside the ids"):
            await request(bookie)
    with pytest.raises(InvalidArgument):
        bookie.list_ledgers(2**64)
    assert bookie.ledgers.next_ledger_id == 0


async def test_rule_47_bookies_of_the_own_process_refuse_the_same(bookie: Bookie) -> None:
    transport = LocalTransport({"a": InProcessBookie(bookie)})
    with pytest.raises(InvalidArgument):
        await transport.delete_ledger("a", 2**64 - 1)
    with pytest.raises(InvalidArgument):
        await transport.read_last_confirmed("a", MAX_LEDGER_ID + 1, fence=True)


async def test_rule_47_an_implausible_id_says_nothing_about_which_ids_were_used(
    tmp_path: Path, storage: ModelStorage
) -> None:
    bookie = await open_inline(str(tmp_path / "b"), storage)
    assert await add(bookie, entry(7, 0)) == 0
    assert await add(bookie, entry(FAR_LEDGER, 0)) == 0
    await bookie.fence(FAR_LEDGER + 1)
    await bookie.delete_ledger(FAR_LEDGER + 2)
    assert bookie.ledgers.next_ledger_id == 8
    crash(bookie)
    bookie = await open_inline(str(tmp_path / "b"), storage)  # from the journal
    assert bookie.ledgers.next_ledger_id == bookie.cookie.next_ledger_id == 8
    await bookie.close()
    bookie = await open_inline(str(tmp_path / "b"), storage)  # from the index
    assert bookie.ledgers.next_ledger_id == bookie.cookie.next_ledger_id == 8
    assert (await bookie.read(FAR_LEDGER, 0, 0))[0] == [entry(FAR_LEDGER, 0)]
    assert await add(bookie, entry(12, 0)) == 0
    assert bookie.ledgers.next_ledger_id == 13
    await bookie.close()


def test_the_index_knows_its_highest_ledger_below_an_id(tmp_path: Path) -> None:
    index = RocksLocationIndex(str(tmp_path / "index"))
    assert index.last_ledger(2**64) == -1
    index.put_ledgers([(one, LedgerRecord(last_entry=0)) for one in (3, 9, FAR_LEDGER)])
    found = [index.last_ledger(below) for below in (3, 4, 9, 1 << 40, FAR_LEDGER + 1, 2**64 + 5)]
    assert found == [-1, 3, 3, 9, FAR_LEDGER, FAR_LEDGER]
    index.close()


async def test_rule_47_a_replay_reports_an_impossible_record_and_goes_on(
    tmp_path: Path, storage: ModelStorage, caplog: pytest.LogCaptureFixture
) -> None:
    bookie = await open_inline(str(tmp_path / "b"), storage)
    assert await add(bookie, entry(1, 0)) == 0
    journal = bookie.journals.of(1)
    for data in IMPOSSIBLE:
        journal.add(data, lambda *_: None, 1, 0)
    journal.fence(2**64 - 1, lambda *_: None)
    journal.delete(MAX_LEDGER_ID + 1, 5, lambda *_: None)
    assert await add(bookie, entry(1, 1)) == 0
    crash(bookie)
    bookie = await open_inline(str(tmp_path / "b"), storage)
    assert caplog.text.count("is left out: ledger") == len(IMPOSSIBLE) + 2
    assert (await bookie.read(1, 0, 1))[0] == [entry(1, 0), entry(1, 1)]
    assert bookie.ledgers.next_ledger_id == 2
    with pytest.raises(LedgerNotFound):
        await bookie.read_last_confirmed(2)
    await bookie.close()

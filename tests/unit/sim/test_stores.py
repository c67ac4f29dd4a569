"""Simulated stores: a write that fails may have been stored, and a session whose close is lost ends by its silence."""

import asyncio
import random

import pytest

from magnetar.bookie.index import LedgerRecord
from magnetar.proto.errors import MagnetarError, StorageFailed
from sim.ledgers.metadata import MetadataService, ServiceClient
from sim.scenarios.standalone import EagerIndex, SyncedKeyValue
from support.index_model import ModelLocationIndex, ModelStorage
from support.memory_metadata import ModelKeyValue
from support.sim import ProcessKilled, SimDisk, SimLoop


@pytest.mark.parametrize("fault", ["error", "crash"])
def test_embedded_write_that_failed_may_have_been_stored(fault: str) -> None:
    """As with a file: a crash in the middle of the sync, or a sync that fails, does not say what is on the disk."""
    found = set()
    for seed in range(20):
        storage, disk = ModelKeyValue(), SimDisk(random.Random(seed))
        files = disk.mount()
        store = SyncedKeyValue(storage.open(), files)
        store.write_synced({b"k": b"old"})
        if fault == "error":
            disk.fail("sync", "metadata")
        else:
            disk.at_call(disk.calls, files.die)
        with pytest.raises(StorageFailed if fault == "error" else ProcessKilled):
            store.write_synced({b"k": b"new"})
        found.add(storage.open().get(b"k"))
    assert found == {b"old", b"new"}


def test_session_whose_close_is_lost_ends_by_its_silence() -> None:
    loop = SimLoop(0)
    service = MetadataService(loop)
    process = loop.start_process("client")

    async def client() -> ServiceClient:
        view = service.view()
        session = await view.open_session(2.0)
        await view.create("/node", b"", session=session)
        service.chances.lost_request = 1.0
        with pytest.raises(MagnetarError):
            await session.close()
        service.chances.lost_request = 0.0
        assert await view.get("/node") is not None
        await asyncio.sleep(4.0)
        assert await view.get("/node") is None
        return view

    loop.run(process.spawn(client()))  # type: ignore[arg-type]
    loop.close()


@pytest.mark.parametrize("fault", ["error", "crash"])
def test_flush_of_the_index_that_failed_may_have_been_stored(fault: str) -> None:
    found: set[bool] = set()

    async def flush(index: EagerIndex) -> None:
        await index.flush_ledgers()
        index.put_ledgers([(1, LedgerRecord(fenced=True))])
        if fault == "error":
            disk.fail("sync", "index")
            with pytest.raises(StorageFailed):
                await index.flush_ledgers()
        else:
            disk.at_call(disk.calls, process.kill)
            await index.flush_ledgers()

    async def main() -> None:
        await asyncio.wait(
            [process.spawn(flush(EagerIndex(storage, loop.rng, disk.mount(process))))], timeout=1
        )
        found.add(ModelLocationIndex(storage).get_ledger(1) is not None)

    for seed in range(20):
        loop, storage, disk = SimLoop(seed), ModelStorage(), SimDisk(random.Random(seed))
        process = loop.start_process("bookie")
        loop.run(main())
        loop.close()
    assert found == {True, False}

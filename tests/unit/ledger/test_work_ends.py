"""Rule 46 in the ledger client, repair and bookie: what runs for long goes on after an error that nobody foresaw."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from magnetar.bookie.scrub.repair_queue import MetadataRepairQueue
from magnetar.ledger import LedgerSettings, RegisteredBookies
from magnetar.ledger.records import LedgerRecords
from magnetar.ledger.replication.cluster_watch import ClusterWatch
from magnetar.proto.errors import BookieUnavailable, FinalError, MagnetarError, StorageFailed
from support.bookies import Bookies
from support.repair_kit import RepairCluster
from support.virtual_time import in_virtual_time

ERRORS: list[Callable[[], Exception]] = [
    lambda: StorageFailed("a server answers nonsense"),  # not retryable
    lambda: KeyError("a defect"),
]
EACH_ERROR = pytest.mark.parametrize("make", ERRORS, ids=["not retryable", "a defect"])


class Fails:
    """In the place of a method: raises the error this often, then does what the method does."""

    def __init__(self, real: Callable[..., Any], make: Callable[[], Exception], times: int = 2) -> None:
        self._real, self._make, self.times = real, make, times

    async def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.times:
            self.times -= 1
            raise self._make()
        return await self._real(*arguments, **named)


@EACH_ERROR
def test_rule_46_repair_goes_on_after_an_error_of_the_store(make: Callable[[], Exception]) -> None:
    @in_virtual_time
    async def run() -> None:
        cluster = await RepairCluster.start("b1", "b2", "b3", "b4")
        ledger = await cluster.closed_ledger(5, ensemble_size=3, write_quorum=3)
        store: Any = cluster.metadata
        repair = await cluster.autorecovery(start=False)
        store.open_session = Fails(store.open_session, make)
        await repair.start()
        await asyncio.sleep(0.5)
        assert "answers nonsense" in repair.trouble or "a defect" in repair.trouble
        await asyncio.sleep(10)
        assert repair.has_session
        assert repair.figures()["repair_restarts_total"] == 2
        assert repair.trouble == ""
        await cluster.lose((await cluster.record(ledger)).ensembles[0].bookies[0])
        await cluster.until(lambda: cluster.replicated(ledger))
        await cluster.close()

    run()


@EACH_ERROR
def test_rule_46_the_bookies_under_repair_are_followed_after_an_error(make: Callable[[], Exception]) -> None:
    @in_virtual_time
    async def run() -> None:
        cluster = await RepairCluster.start("b1")
        watch = ClusterWatch(cluster.metadata)
        await watch.start()
        store: Any = cluster.metadata
        store.children = Fails(store.children, make)
        await cluster.register("b2")
        await asyncio.sleep(10)
        assert list(watch.view.registered) == ["b1", "b2"]
        await watch.close()
        await cluster.close()

    run()


@EACH_ERROR
def test_rule_46_the_directory_of_bookies_is_followed_after_an_error(make: Callable[[], Exception]) -> None:
    @in_virtual_time
    async def run() -> None:
        cluster = await RepairCluster.start("b1")
        directory = await RegisteredBookies.open(cluster.metadata)
        store: Any = cluster.metadata
        store.children = Fails(store.children, make)
        await cluster.register("b2")
        await asyncio.sleep(10)
        assert directory.writable() == ("b1", "b2")
        await directory.close()
        await cluster.close()

    run()


@EACH_ERROR
def test_rule_46_the_repair_queue_is_written_after_an_error(make: Callable[[], Exception]) -> None:
    @in_virtual_time
    async def run() -> None:
        cluster = await RepairCluster.start()
        store: Any = cluster.metadata
        store.create = Fails(store.create, make)
        queue = MetadataRepairQueue(store)
        queue.start("b1")
        queue.damaged(7, 1, 2, "bits")
        await asyncio.sleep(20)
        assert queue.pending == 0
        assert len(await store.children("/damaged/b1")) == 1
        await queue.close()
        await cluster.close()

    run()


def test_rule_46_a_defect_in_the_work_of_a_writer_fails_its_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    @in_virtual_time
    async def run() -> None:
        bookies = Bookies("b1", "b2", "b3", "b4")
        client = bookies.client(LedgerSettings(explicit_lac_interval_s=0))
        writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=3)

        async def broken(*_: Any) -> None:
            raise KeyError("a defect")

        monkeypatch.setattr(LedgerRecords, "write", broken)
        lost = writer.metadata.last_ensemble.bookies[0]
        bookies[lost].fail(BookieUnavailable("it is lost"))
        answers: list[MagnetarError | None] = []
        writer.append(b"entry", lambda _id, _entry, error: answers.append(error))
        await asyncio.sleep(100)
        (error,) = answers
        assert isinstance(error, FinalError)
        assert "a defect" in str(error)
        with pytest.raises(FinalError, match="a defect"):
            async with asyncio.timeout(100):
                await writer.close()
        await client.close()

    run()

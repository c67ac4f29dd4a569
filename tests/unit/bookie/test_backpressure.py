"""A write cache that is full: adds wait, nobody is taken for hung, reads and fences go on, memory stays bounded."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from magnetar.bookie import Bookie
from magnetar.bookie.server import BookieServer
from magnetar.bookie.server.server import InProcessBookie
from magnetar.ledger import LedgerClient, LedgerSettings, LocalTransport, StaticBookies, TcpTransport
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import RequestTimeout, StorageFailed, TooManyRequests
from magnetar.proto.ledger_entry import encode_ledger_entry
from magnetar.runtime.connection import ConnectionOptions
from support.bookie_kit import KIB, entry, open_inline, until
from support.bookies import Confirmations, StillClock
from support.index_model import ModelStorage
from support.memory_metadata import MemoryMetadataStore

ADD_TIMEOUT_S = 0.4
SETTINGS = LedgerSettings(
    ensemble_size=1, write_quorum=1, ack_quorum=1, add_timeout_s=ADD_TIMEOUT_S, read_timeout_s=0.5
)
PAYLOAD = b"x" * 8000


class SlowDisk:
    """Holds every flush until it is released."""

    def __init__(self, bookie: Bookie) -> None:
        self.go = asyncio.Event()
        self._sync = bookie.logs.sync
        bookie.logs.sync = self.sync  # type: ignore[method-assign]

    async def sync(self) -> list[int]:
        await self.go.wait()
        return await self._sync()


class Service:
    """A bookie behind TCP, and ledger clients of it."""

    def __init__(self, bookie: Bookie, server: BookieServer) -> None:
        self.bookie = bookie
        self.server = server
        self.disk = SlowDisk(bookie)
        self.directory = StaticBookies({"b": server.addresses[0]})
        self.transport = TcpTransport(self.directory, SETTINGS, ConnectionOptions("test"))
        self.local = LocalTransport({"b": InProcessBookie(bookie)})
        self.metadata = MemoryMetadataStore()

    def client(self, transport: TcpTransport | LocalTransport) -> LedgerClient:
        rng = random.Random(1)
        return LedgerClient(
            StoredLedgers(self.metadata), transport, self.directory, SETTINGS, rng, StillClock()
        )


@pytest.fixture
async def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    monkeypatch.setattr("magnetar.bookie.server.connection.NOTICE_INTERVAL_S", 0.05)
    # However slow the machine is: only silence ends the wait.
    monkeypatch.setattr("magnetar.ledger.core.outstanding_adds.MAX_ADD_TIMEOUTS", 1000)
    bookie = await open_inline(
        # Room for what one read of a connection brings.
        str(tmp_path),
        ModelStorage(),
        add_backpressure_timeout_s=3.0,
        write_cache_bytes=4096 * KIB,
    )
    server = await BookieServer.start(bookie, "127.0.0.1", 0, ConnectionOptions("bookie"))
    service = Service(bookie, server)
    yield service
    service.disk.go.set()
    await service.transport.close()
    await service.local.close()
    await server.close(1.0)
    await bookie.close()


@pytest.mark.parametrize("way", ["tcp", "local"])
async def test_rule_21_a_slow_disk_makes_writers_wait_and_rolls_no_ledger(service: Service, way: str) -> None:
    bookie = service.bookie
    client = service.client(service.transport if way == "tcp" else service.local)
    writer = await client.create()
    confirmed = Confirmations()
    began = asyncio.get_running_loop().time()
    count = 2 * bookie.settings.write_cache_bytes // len(PAYLOAD)
    for _ in range(count):
        writer.append(PAYLOAD, confirmed)
    await until(lambda: not bookie.accepting)
    before = len(confirmed.heard)
    assert before < count
    # Far longer than a silent bookie would be given.
    while asyncio.get_running_loop().time() < began + 3 * ADD_TIMEOUT_S:
        await asyncio.sleep(0.01)
        assert bookie.cache.size <= bookie.settings.write_cache_bytes
        assert bookie.adds._waiting_bytes <= bookie.settings.write_cache_bytes // 4 + len(PAYLOAD)
    assert writer.metadata.last_ensemble.first_entry == 0
    service.disk.go.set()
    await confirmed.count(count)
    assert [error for _, _, error in confirmed.heard if error is not None] == []
    assert len(writer.metadata.ensembles) == 1
    await writer.close()
    await client.close()


async def test_rule_06_fences_and_reads_do_not_wait_behind_adds_without_room(service: Service) -> None:
    client = service.client(service.transport)
    writer = await client.create()
    confirmed = Confirmations()
    for _ in range(1000):
        writer.append(PAYLOAD, confirmed)
    await until(lambda: not service.bookie.accepting)
    assert (await service.transport.read("b", writer.ledger_id, 0, 5)).entries
    await service.transport.read_last_confirmed("b", 99, fence=True)
    assert (await service.transport.info("b"))["load"]["waiting_adds"] > 0
    assert not service.bookie.accepting
    service.disk.go.set()
    await confirmed.count(1000)
    await client.close()


@pytest.mark.parametrize("way", ["tcp", "local"])
async def test_rule_21_a_journal_that_hangs_is_a_hung_bookie_however_full_its_cache_is(
    service: Service, way: str
) -> None:
    bookie = service.bookie
    transport = (
        service.transport
        if way == "tcp"
        else LocalTransport({"b": InProcessBookie(bookie)}, add_timeout_s=ADD_TIMEOUT_S)
    )
    # Something is on its way to the disk, and does not get there.
    bookie.journals.stalled = lambda: (1.0, "journal")  # type: ignore[method-assign]
    codes: list[int] = []
    loop = asyncio.get_running_loop()
    began = loop.time()
    for number in range(1000):
        data = encode_ledger_entry(1, number, -1, len(PAYLOAD), PAYLOAD)
        transport.add(
            "b", data, 1, number, recovery=False, done=lambda bookie, ledger, entry, code: codes.append(code)
        )
    await until(lambda: len(codes) == 1000)
    assert RequestTimeout.code in codes
    assert loop.time() - began < 2 * ADD_TIMEOUT_S
    await transport.close()


async def test_a_cache_that_stays_full_ends_in_too_many_requests(tmp_path: Path) -> None:
    bookie = await open_inline(str(tmp_path), ModelStorage(), add_backpressure_timeout_s=0.1)
    disk = SlowDisk(bookie)
    codes: list[int] = []
    local = LocalTransport({"b": InProcessBookie(bookie)}, add_timeout_s=0.1)
    for number in range(200):
        data = entry(1, number, PAYLOAD)
        local.add(
            "b", data, 1, number, recovery=False, done=lambda bookie, ledger, entry, code: codes.append(code)
        )
    await until(lambda: len(codes) == 200)
    assert {0, TooManyRequests.code, RequestTimeout.code} == set(codes), (
        "its own queue, and what was held before it"
    )
    disk.go.set()
    await local.close()
    await bookie.close()


async def test_a_stop_does_not_wait_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("magnetar.bookie.engine._LET_GO_S", 0.05)
    storage = ModelStorage()
    bookie = await open_inline(str(tmp_path), storage, close_timeout_s=0.1)
    SlowDisk(bookie)
    codes: list[int] = []
    data = entry(1, 0, PAYLOAD)
    bookie.add(data, recovery=False, done=lambda ledger, number, code: codes.append(code))
    await until(lambda: codes == [0])
    await asyncio.wait_for(bookie.close(), 2.0)
    assert "hangs" in caplog.text
    bookie = await open_inline(str(tmp_path), storage, write_cache_bytes=2048 * KIB)
    assert bookie.replayed_records > 0
    assert (await bookie.read(1, 0, 0))[0] == [data]
    await bookie.close()


@pytest.mark.asyncio(loop_factories=["uvloop"])  # a simulation ends at the first callback that fails
@pytest.mark.parametrize("part", ["disk_space.check", "load.sample", "collector._answer", "checkpointer.run"])
async def test_a_background_task_that_ends_stops_the_bookie(tmp_path: Path, part: str) -> None:
    bookie = await open_inline(
        str(tmp_path),
        ModelStorage(),
        disk_check_interval_s=0.01,
        checkpoint_interval_s=0.01,
        gc_interval_s=0.01,
    )
    failures: list[Exception] = []
    bookie.on_failure = failures.append
    name, method = part.split(".")

    def broken(*arguments: object, **named: object) -> None:
        raise KeyError("our own bug")

    setattr(getattr(bookie, name), method, broken)
    await until(lambda: bool(failures))
    assert isinstance(failures[0], StorageFailed)
    assert "our own bug" in str(failures[0])
    codes: list[int] = []
    bookie.add(entry(1, 0), recovery=False, done=lambda ledger, number, code: codes.append(code))
    await until(lambda: codes == [StorageFailed.code])
    await bookie.close()

"""A disk that is full under a real service: whoever sends learns which bookie refuses and why, and nothing piles up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from magnetar.bookie.settings import BookieSettings
from magnetar.broker import BrokerSettings
from magnetar.broker.ownership.balance import BalanceSettings
from magnetar.cli.wiring.service import Service, system_components
from magnetar.cli.wiring.settings import DaemonSettings, ServiceSettings
from magnetar.client import SendTimeout, connect
from magnetar.ledger import LedgerSettings
from magnetar.ledger.replication.settings import RepairSettings
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.runtime.files import OsFiles
from support.service import held_port

pytestmark = pytest.mark.real


MIB = 1024 * 1024


class Disk:
    """Says how much space there is, to all of the service."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free_bytes = 10_000 * MIB
        monkeypatch.setattr(OsFiles, "free_bytes", lambda files, path: (self.free_bytes, 20_000 * MIB))


class Site:
    """A standalone service in this loop, reached over real sockets."""

    def __init__(self, data: Path) -> None:
        port = held_port(self)
        self.url = f"magnetar://127.0.0.1:{port}"
        self.service = Service(
            ServiceSettings(
                DaemonSettings(data=str(data), port=port, bookie_port=held_port(self), drain_s=1.0),
                BookieSettings(
                    data_directory=str(data / "bookie"),
                    disk_check_interval_s=0.05,
                    journal_file_bytes=4 * MIB,
                    write_cache_bytes=4 * MIB,
                    journal_ring_bytes=4 * MIB,
                    entry_log_bytes=4 * MIB,
                    max_entry_bytes=MIB,
                ),
                BrokerSettings(
                    service_url=self.url,
                    pulsar_port=0,
                    retry_initial_ms=10,
                    retry_max_ms=100,
                    max_entry_bytes=MIB // 2,
                ),
                LedgerSettings(ensemble_size=1, write_quorum=1, ack_quorum=1, bookie_info_interval_s=0.1),
                RepairSettings(),
                BalanceSettings(),
            ),
            system_components(),
        )

    async def ledgers(self) -> list[int]:
        """All that the metadata have."""
        assert self.service.broker is not None
        found: list[int] = []
        async for page in StoredLedgers(self.service.broker.metadata).pages():
            found += page
        return found


async def test_a_full_disk_is_named_in_the_error_of_a_send_and_costs_no_ledgers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    disk = Disk(monkeypatch)
    site = Site(tmp_path / "data")
    await site.service.start_standalone()
    bookie = site.service.bookie
    assert bookie is not None
    try:
        async with connect(site.url) as client:
            producer = await client.create_producer("orders", send_timeout=60.0)
            await producer.send(b"0")
            before = await site.ledgers()
            disk.free_bytes = 100 * MIB
            while not bookie.read_only:
                await asyncio.sleep(0.01)
            impatient = await client.create_producer("orders", send_timeout=1.0)
            with pytest.raises(SendTimeout) as refused:
                await impatient.send(b"1")
            text = str(refused.value)
            assert f"bookie {bookie.cookie.bookie_id} takes no entries: read-only: no space in " in text
            assert "whether it was stored is not known; the broker cannot store messages for now" in text
            # Some ten attempts were made meanwhile.
            assert len(await site.ledgers()) <= len(before) + 1
            disk.free_bytes = 10_000 * MIB
            await producer.send(b"2")
            consumer = await client.subscribe("orders", "all", start="earliest")
            values = [(await consumer.receive()).value for _ in range(3)]
            assert values == [b"0", b"1", b"2"], (
                "what the broker had taken is stored, as the error says it may be"
            )
    finally:
        await site.service.close()

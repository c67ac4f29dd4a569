"""/health/live and /health/ready: each condition broken, and mended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from magnetar.bookie.status import bookie_problems
from magnetar.cli.wiring.health import HttpPages, Started, bookie_reasons, broker_reasons
from magnetar.cli.wiring.lazy_imports import LazyHttp
from magnetar.cli.wiring.settings import ServiceSettings, SettingSources, service_settings
from magnetar.metadata import registration
from magnetar.metadata.registration import Registration
from magnetar.proto.errors import StorageFailed
from magnetar.runtime.lifecycle import Daemon
from magnetar.runtime.metrics import Metrics
from support.bookie_kit import add, add_all, entry, open_real, until
from support.memory_metadata import MemoryMetadataStore


async def ask(http: LazyHttp, page: str) -> tuple[int, dict[str, Any]]:
    url = f"http://127.0.0.1:{http.address[1]}/{page}"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        text = await response.text()
        return response.status, json.loads(text) if text.startswith("{") else {}


async def test_a_daemon_answers_from_before_its_start_to_the_end_of_its_stop() -> None:
    exits: list[int] = []
    daemon = Daemon("broker", exit_now=exits.append)
    started, stopped, stopping = asyncio.Event(), asyncio.Event(), asyncio.Event()
    reasons: Mapping[str, str] = {}
    bound: list[LazyHttp] = []

    async def stop() -> None:
        stopping.set()
        await stopped.wait()

    async def start(daemon: Daemon) -> None:
        pages = HttpPages(daemon)
        bound.append(LazyHttp.bind("127.0.0.1", 0, pages))
        daemon.on_stop("http", bound[0].close)
        daemon.on_stop("broker", stop)
        await started.wait()
        pages.started = Started({}, Metrics, reasons=lambda: reasons)

    run = asyncio.create_task(daemon.run(start))
    await until(lambda: bool(bound))
    http = bound[0]
    status, body = await ask(http, "health/ready")
    assert (status, list(body["reasons"])) == (503, ["starting"])
    assert (await ask(http, "health/live"))[0] == 200, "who replays must not be restarted for it"
    assert (await ask(http, "metrics"))[0] == 503
    started.set()
    await until(lambda: daemon.ready)
    assert (await ask(http, "health/ready"))[0] == 200
    assert (await ask(http, "metrics"))[0] == 200
    reasons = {"bookies": "2 bookies take entries"}
    status, body = await ask(http, "health/ready")
    assert (status, body["reasons"]) == (503, reasons)
    assert (await ask(http, "health/live"))[0] == 200
    reasons = {}
    daemon.stop()
    await stopping.wait()
    status, body = await ask(http, "health/ready")
    assert (status, list(body["reasons"])) == (503, ["stopping"])
    assert (await ask(http, "health/live"))[0] == 200, "who hands over must not be killed for it"
    daemon.fail(StorageFailed("the disk is gone"))
    assert exits == [70]
    status, body = await ask(http, "health/live")
    assert (status, body["reasons"]) == (503, {"failed": "StorageFailed: the disk is gone"})
    stopped.set()
    assert await run == 0


@pytest.mark.real
async def test_a_bookie_is_ready_while_it_is_registered_and_its_journal_syncs(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(registration, "POLL_S", 0.01)
    store = MemoryMetadataStore()
    registered = Registration(store, "/bookies/b1", lambda: b"", 1.0, name="bookie b1")
    bookie = await open_real(str(tmp_path), journal_stall_s=0.2)
    try:
        assert list(bookie_reasons(bookie, registered.standing)) == ["unregistered"]
        await registered.start()
        assert not bookie_reasons(bookie, registered.standing)
        for session in list(store._sessions):
            store.expire(session)
        assert not registered.standing
        await until(lambda: registered.standing)
        assert await add(bookie, entry(1, 0)) == 0
        pid: int = bookie.journals.all[0].device.writer_pid  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGSTOP)
        try:
            waiting = asyncio.create_task(add_all(bookie, [entry(1, number) for number in range(1, 10)]))
            await until(lambda: "journal_stalled" in bookie_reasons(bookie))
        finally:
            os.kill(pid, signal.SIGCONT)
        assert await waiting == [0] * 9
        assert not bookie_reasons(bookie)
    finally:
        await registered.close()
        await bookie.close()
    assert not registered.standing


@pytest.mark.real
async def test_a_read_only_bookie_is_ready_and_says_so(tmp_path: Path) -> None:
    bookie = await open_real(str(tmp_path))
    try:
        bookie.convert_to_read_only("its disk makes noises")
        assert not bookie_reasons(bookie)
        assert bookie_problems(bookie)["read_only"] == "its disk makes noises"
    finally:
        await bookie.close()


def settings(**sections: dict[str, str]) -> ServiceSettings:
    return service_settings(SettingSources(flags=sections), "broker")


def test_a_broker_is_ready_with_a_session_a_place_and_enough_bookies() -> None:
    three = settings(broker={"ensemble_size": "3", "write_quorum": "3", "ack_quorum": "2"})
    assert broker_reasons(three, 3) == {}
    assert broker_reasons(three, 2) == {
        "bookies": "2 bookies take entries, and broker.ensemble_size=3 needs 3"
    }
    assert list(broker_reasons(three, 3, session=False)) == ["session"]
    for state in ("draining", "stopping"):
        assert list(broker_reasons(three, 3, state=state)) == [state]
    assert list(broker_reasons(three, 0, session=False, state="draining")) == [
        "session",
        "draining",
        "bookies",
    ]
    smaller = settings(
        broker={"ensemble_size": "3", "write_quorum": "3", "ack_quorum": "2"},
        ledger={"minimum_write_quorum": "2"},
    )
    assert broker_reasons(smaller, 2) == {}
    assert list(broker_reasons(smaller, 1)) == ["bookies"]
    of_the_broker = settings(
        broker={"ensemble_size": "3", "write_quorum": "3", "ack_quorum": "2", "minimum_write_quorum": "1"}
    )
    assert broker_reasons(of_the_broker, 1) == {}
    assert list(broker_reasons(of_the_broker, 0)) == ["bookies"]
